"""Root-mean-square normalisation, and rounding between layers."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019, eq. 4).

    The statistics and the division are float32; the result is cast to `x.dtype` before the
    weight multiplies it, the order in which Hugging Face rounds.

    Args:
      x: [..., D], any float dtype.
      weight: [D], the dtype of `x`.
      eps: added to the mean square.

    Returns:
      [..., D] in `x.dtype`.
    """
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    normed = (x32 * inverse_rms).astype(x.dtype)
    return normed * jnp.broadcast_to(weight, normed.shape)


def rounded(x: jax.Array) -> jax.Array:
    """To its dtype, which XLA does not leave out, as it may where a product follows a sum.

    Between passes of a loop it rounds in any case: so unrolled layers, one layer a pass and several
    give the same to the bit.
    """
    kind = jnp.finfo(x.dtype)
    if kind.bits == 32:
        return x
    wide = jax.lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)
    return wide.astype(x.dtype)
