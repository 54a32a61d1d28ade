"""The public call: which implementation runs, and why one is refused."""

import jax
import jax.numpy as jnp

from pallas_kernels.residual_norm import triton
from pallas_kernels.residual_norm.reference import residual_norm_reference
from pallas_kernels.target import SIMULATED, Choice, Target, current_target

Operand = jax.Array | jax.ShapeDtypeStruct
IMPLEMENTATIONS = ("triton", "reference")  # in order of preference; the reference refuses nothing


def refusal(implementation: str, x: Operand, target: Target | None = None) -> str | None:
    """Why an implementation cannot serve operands of these shapes on a target, or None.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      x: [N, D]; what is added and the scales are of its dtype.
      target: None for the default device.
    """
    if implementation == "reference":
        return None
    reasons = []
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        reasons.append(f"x is {x.dtype}, not bfloat16 or float16")
    if found := triton.refusal(x, target or current_target()):
        reasons.append(found)
    return "; ".join(reasons) or None


def choose(x: Operand, target: Target | None = None) -> Choice:
    """The kernel, or the reference and why the kernel refuses."""
    reason = refusal("triton", x, target)
    return Choice("triton", {}) if reason is None else Choice("reference", {"triton": reason})


def residual_norm(
    x: jax.Array,
    delta: jax.Array | None,
    scales: jax.Array,
    *,
    layer: int | jax.Array,
    eps: float,
    zero_centred: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """y = x + delta, and y / rms(y) * scale (Zhang and Sennrich 2019, eq. 4).

    The sum is rounded to the dtype of x; statistics and division are float32; their result is
    rounded before the scale multiplies it, the order in which Hugging Face rounds.

    Args:
      x: [N, D] in bfloat16 or float16 (the reference takes float32 too).
      delta: like x; None for nothing.
      scales: [L, D] in `x.dtype`, whole: it is indexed inside the kernel, nothing is copied.
      layer: int or int32[] in 0..L - 1; an array lets all layers share a trace.
      eps: added to the mean square; static.
      zero_centred: scales are added to one, and rounding comes last (Qwen3-Next); static.
      implementation: "triton" or "reference"; None for `choose`'s.
      interpret: runs the kernel on the CPU, for tests.

    Returns:
      y and what is normed, both [N, D] in `x.dtype`; y is x itself where there is no delta.

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    _check(x, delta, scales)
    chosen = implementation or choose(x).implementation
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {chosen!r} is none of {', '.join(IMPLEMENTATIONS)}")
    index = jnp.asarray(layer, jnp.int32)
    if chosen == "reference":
        return residual_norm_reference(x, delta, scales, index, eps, zero_centred)
    target = SIMULATED if interpret else current_target()
    if reason := refusal(chosen, x, target):
        raise ValueError(f"residual_norm by {chosen} refuses: {reason}")
    return triton.residual_norm_triton(
        x, delta, scales, index, eps=eps, zero_centred=zero_centred, interpret=interpret
    )


def _check(x: jax.Array, delta: jax.Array | None, scales: jax.Array) -> None:
    if x.ndim != 2 or not x.size:
        raise ValueError(f"x is {x.shape}, not [N, D] of some rows")
    reasons = []
    if delta is not None and (delta.shape, delta.dtype) != (x.shape, x.dtype):
        reasons.append(f"delta {delta.dtype}{delta.shape} and x {x.dtype}{x.shape} differ")
    if scales.ndim != 2 or (scales.shape[1], scales.dtype) != (x.shape[1], x.dtype):
        reasons.append(f"scales are {scales.dtype}{scales.shape}, not {x.dtype}[L, {x.shape[1]}]")
    if reasons:
        raise ValueError("residual_norm: " + "; ".join(reasons))
