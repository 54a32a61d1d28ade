"""Residual norm in plain jnp; never optimised."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_dequant_matmul.reference import combine


class PairTerms(NamedTuple):
    """Terms of what experts add to x; their sum is `grouped_dequant_matmul.combine`."""

    products: jax.Array  # [P, N, A, D], P parts; anything where a pair did not run
    tier: jax.Array  # int32[N, A], negative where a pair did not run
    weight: jax.Array  # float32[N, A]

    def total(self, dtype: jnp.dtype) -> jax.Array:
        """Sums the terms: [N, D]."""
        return combine(self.products, self.tier >= 0, self.weight, dtype)


def residual_norm_reference(
    x: jax.Array,
    delta: jax.Array | PairTerms | None,
    scales: jax.Array,
    layer: jax.Array,
    eps: float,
    zero_centred: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes `api.residual_norm` in plain JAX."""
    if isinstance(delta, PairTerms):
        delta = delta.total(x.dtype)
    y = x if delta is None else x + delta
    wide = y.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + eps)
    scale = scales[layer][None]
    if zero_centred:
        return y, (normed * (1.0 + scale.astype(jnp.float32))).astype(y.dtype)
    return y, normed.astype(y.dtype) * scale
