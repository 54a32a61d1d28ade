"""The public call: which implementation runs, and why others refuse."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.dequant_matmul import mosaic, triton
from pallas_kernels.dequant_matmul.reference import dequant_matmul_reference
from pallas_kernels.dequant_matmul.tiles import Tiles
from pallas_kernels.packed import LowRank, PackedMatrices
from pallas_kernels.target import SIMULATED, Choice, Target, current_target

Operand = jax.Array | jax.ShapeDtypeStruct
ACTIVATIONS = (jnp.bfloat16, jnp.float16)

# In order of preference. The reference serves every platform and is the last.
REFUSALS: dict[str, Callable[..., str | None]] = {
    "mosaic": mosaic.refusal,
    "triton": triton.refusal,
}
IMPLEMENTATIONS = (*REFUSALS, "reference")


def refusal(
    implementation: str,
    x: Operand,
    weights: PackedMatrices,
    low_rank: tuple[LowRank, ...] = (),
    target: Target | None = None,
) -> str | None:
    """Why an implementation cannot serve operands of these shapes on a target, or None.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      x: [M, K].
      weights: arrays or their shapes.
      low_rank: as in `dequant_matmul`.
      target: None for the default device.
    """
    if implementation == "reference":
        return None
    reasons = []
    if x.dtype not in ACTIVATIONS:
        reasons.append(f"x is {x.dtype}, not bfloat16 or float16")
    found = REFUSALS[implementation](x, weights, low_rank, target or current_target())
    if found:
        reasons.append(found)
    return "; ".join(reasons) or None


def choose(
    x: Operand,
    weights: PackedMatrices,
    low_rank: tuple[LowRank, ...] = (),
    target: Target | None = None,
) -> Choice:
    """The first implementation in the order of preference that does not refuse."""
    refusals: dict[str, str] = {}
    for name in IMPLEMENTATIONS:
        reason = refusal(name, x, weights, low_rank, target)
        if reason is None:
            return Choice(name, refusals)
        refusals[name] = reason
    raise AssertionError("the reference refuses nothing")


def dequant_matmul(
    x: jax.Array,
    weights: PackedMatrices,
    *,
    slot: int | jax.Array = 0,
    low_rank: tuple[LowRank, ...] = (),
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x W^T with W = (q - zero) scale + U V, one of a stack of packed matrices (MiLo section 3.3).

    Products of x and codes are summed in float32 group by group, and scaled there: what is rounded
    is x, as given, and the result.

    Args:
      x: [M, K] in bfloat16 or float16 (the reference takes float32 too).
      weights: S matrices [N, K].
      slot: int or int32[] in 0..S - 1; which matrix. It is indexed inside the kernel, nothing of
        the stack is copied.
      low_rank: terms of the matrices, any number of row ranges.
      out_dtype: None for `x.dtype`.
      implementation: "mosaic", "triton" or "reference"; None for `choose`'s.
      tiles: None for the measured or the heuristic ones; only with a kernel.
      interpret: runs the kernel on the CPU, for tests.

    Returns:
      [M, N] in `out_dtype`.

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    weights.check()
    for terms in low_rank:
        terms.check(weights)
    if x.ndim != 2 or x.shape[1] != weights.num_inputs:
        raise ValueError(f"x is {x.shape}, expected [M, {weights.num_inputs}]")
    chosen = implementation or choose(x, weights, low_rank).implementation
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {chosen!r} is none of {', '.join(IMPLEMENTATIONS)}")
    dtype = jnp.dtype(out_dtype or x.dtype)
    index = jnp.asarray(slot, jnp.int32)
    if chosen == "reference":
        return dequant_matmul_reference(x, weights, index, low_rank, dtype)
    target = SIMULATED if interpret else current_target()
    if reason := refusal(chosen, x, weights, low_rank, target):
        raise ValueError(f"dequant_matmul by {chosen} refuses: {reason}")
    run = {"mosaic": mosaic.dequant_matmul_mosaic, "triton": triton.dequant_matmul_triton}[chosen]
    return run(x, weights, index, low_rank, dtype, tiles, target, interpret)
