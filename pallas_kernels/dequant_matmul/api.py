"""Public call of the dequantizing product, and its operation."""

import jax
import jax.numpy as jnp

from pallas_kernels.dequant_matmul import mosaic, triton
from pallas_kernels.dequant_matmul.reference import dequant_matmul_reference
from pallas_kernels.dequant_matmul.tiles import Tiles
from pallas_kernels.op import Implementation, Operation, not_half
from pallas_kernels.packed import LowRank, PackedMatrices

# A choice is for x [M, K], the matrices and their low-rank terms.
OPERATION = Operation(
    "dequant_matmul",
    kernels=(
        Implementation("mosaic", mosaic.refusal, mosaic.dequant_matmul_mosaic),
        Implementation("triton", triton.refusal, triton.dequant_matmul_triton),
    ),
    reference=dequant_matmul_reference,
    abstract=lambda x, weights, slot, low_rank, **_: (x, weights, low_rank),
    shared_refusals=lambda x, *_: not_half(("x is", x.dtype)),
)


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
    """Computes x W^T, W = (q - zero) scale + U V, one of a stack (MiLo section 3.3).

    Products of x and codes are summed in float32 group by group, and scaled there: only x, as
    given, and the result are rounded.

    Args:
      x: [M, K] in bfloat16 or float16 (the reference takes float32 too).
      slot: int or int32[] in 0..S - 1, the matrix. The kernel indexes the stack without a copy.
      out_dtype: None for `x.dtype`.

    Returns:
      [M, N] in `out_dtype`.
    """
    weights.check()
    for terms in low_rank:
        terms.check(weights)
    if x.ndim != 2 or x.shape[1] != weights.num_inputs:
        raise ValueError(f"x is {x.shape}, expected [M, {weights.num_inputs}]")
    return OPERATION(
        x, weights, jnp.asarray(slot, jnp.int32), low_rank,
        out_dtype=jnp.dtype(out_dtype or x.dtype), implementation=implementation, tiles=tiles,
        interpret=interpret,
    )  # fmt: skip
