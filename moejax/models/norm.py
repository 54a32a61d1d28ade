"""Root-mean-square normalisation, and rounding between layers."""

import functools

import jax
import jax.numpy as jnp

from moejax.weights import linear as ops
from moejax.weights.linear import Index
from pallas_kernels import residual_norm


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, *, zero_centred: bool = False
) -> jax.Array:
    """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019, eq. 4).

    The statistics and the division are float32; the result is cast to `x.dtype` before the
    weight multiplies it, the order in which Hugging Face rounds.

    Args:
      x: [..., D], any float dtype.
      weight: [D], the dtype of `x`.
      zero_centred: times 1 + weight, and rounded last (Qwen3-Next).

    Returns:
      [..., D] in `x.dtype`.
    """
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if zero_centred:
        wide = x32 * inverse_rms * (1.0 + jnp.broadcast_to(weight.astype(jnp.float32), x.shape))
        return wide.astype(x.dtype)
    normed = (x32 * inverse_rms).astype(x.dtype)
    return normed * jnp.broadcast_to(weight, normed.shape)


def stacked_norm(
    x: jax.Array,
    scales: jax.Array,
    layer: Index,
    eps: float,
    kernels: ops.Kernels,
    *,
    zero_centred: bool = False,
) -> jax.Array:
    """Normalises by one layer's scale, by the kernel unless it refuses.

    XLA sums the squares in an order that depends on what else it puts into the same kernel, and so
    on the rest of the program: a bfloat16 now and then rounds the other way. The kernel's order is
    fixed, so fetched experts give a resident model's results to the bit.

    Args:
      x: [..., D].
      scales: [L, D] of all layers, the dtype of `x`.
      kernels: the permitted implementations; a reference means XLA here.
    """
    flat = x.reshape(-1, x.shape[-1])
    asked_for_none = kernels.implementation == ops.REFERENCE or kernels.target is None
    if asked_for_none or residual_norm.OPERATION.refusal("triton", flat, target=kernels.target):
        return rms_norm(x, scales[layer], eps, zero_centred=zero_centred)
    _, normed = norm_of_sum(
        flat, None, scales, jnp.int32(layer), eps=eps, zero_centred=zero_centred
    )
    return normed.reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("eps", "zero_centred"))
def norm_of_sum(
    x: jax.Array,
    delta: jax.Array | None,
    scales: jax.Array,
    layer: jax.Array,
    *,
    eps: float,
    zero_centred: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes x + delta and its norm by the kernel, [N, D]; jitted for all layers."""
    return residual_norm.residual_norm(
        x, delta, scales, layer=layer, eps=eps, zero_centred=zero_centred, implementation="triton"
    )


def rounded(x: jax.Array) -> jax.Array:
    """Rounds to the dtype of `x`; XLA may not skip it, as it may between sum and product.

    Between passes of a loop XLA rounds in any case: with this, unrolled layers and loops of one or
    several layers per pass agree to the bit.
    """
    kind = jnp.finfo(x.dtype)
    if kind.bits == 32:
        return x
    wide = jax.lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)
    return wide.astype(x.dtype)
