"""Public call of the residual norm, and its operation."""

import jax
import jax.numpy as jnp

from pallas_kernels.op import Implementation, Operation, check_operands, not_half
from pallas_kernels.residual_norm import triton
from pallas_kernels.residual_norm.reference import residual_norm_reference

# A choice is for x [N, D]; delta and the scales are of its dtype.
OPERATION = Operation(
    "residual_norm",
    kernels=(Implementation("triton", triton.refusal, triton.residual_norm_triton),),
    reference=residual_norm_reference,
    abstract=lambda x, *_, **__: (x,),
    shared_refusals=lambda x: not_half(("x is", x.dtype)),
)


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
    """Computes y = x + delta, and y / rms(y) * scale (Zhang and Sennrich 2019, eq. 4).

    The sum is rounded to the dtype of x; statistics and division are float32; their result is
    rounded before the scale multiplies it, the order in which Hugging Face rounds.

    Args:
      x: [N, D] in bfloat16 or float16 (the reference takes float32 too).
      scales: [L, D] in `x.dtype`, whole: it is indexed inside the kernel, nothing is copied.
      zero_centred: scales are added to one, and rounding comes last (Qwen3-Next); static.

    Returns:
      y and its norm, both [N, D] in `x.dtype`; y is x itself without a delta.
    """
    operands = {"x": (x, "x[N, D]"), "delta": (delta, "x[N, D]"), "scales": (scales, "x[L, D]")}
    check_operands("residual_norm", operands)
    return OPERATION(
        x, delta, scales, jnp.asarray(layer, jnp.int32), eps=eps, zero_centred=zero_centred,
        implementation=implementation, interpret=interpret,
    )  # fmt: skip
