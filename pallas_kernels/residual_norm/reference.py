"""Residual norm in plain jnp; never optimised."""

import jax
import jax.numpy as jnp


def residual_norm_reference(
    x: jax.Array,
    delta: jax.Array | None,
    scales: jax.Array,
    layer: jax.Array,
    eps: float,
    zero_centred: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes `api.residual_norm` in plain JAX."""
    y = x if delta is None else x + delta
    wide = y.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + eps)
    scale = scales[layer][None]
    if zero_centred:
        return y, (normed * (1.0 + scale.astype(jnp.float32))).astype(y.dtype)
    return y, normed.astype(y.dtype) * scale
