"""HQQ solve in plain jnp and float32, formula by formula; never optimised."""

import jax
import jax.numpy as jnp

from pallas_kernels.hqq_solve.settings import BETA, MAX_INVERSE_SCALE, MAX_STEPS, MIN_RANGE, NORM


def hqq_solve_reference(
    weights: jax.Array,
    low_rank: tuple[jax.Array, jax.Array] | None,
    steps: jax.Array,
    *,
    bits: int,
    group_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes `api.hqq_solve` in plain JAX, of one matrix [N, K] or more."""
    w = weights.astype(jnp.float32)
    if low_rank is not None:
        u, v = low_rank
        w = w - jnp.einsum("...nr,...rk->...nk", u, v, precision=jax.lax.Precision.HIGHEST)
    lead, num_rows = w.shape[:-2], w.shape[-2]
    groups = w.reshape(*lead, num_rows, -1, group_size)
    top = 2**bits - 1
    low = jnp.min(groups, axis=-1, keepdims=True)
    width = jnp.max(groups, axis=-1, keepdims=True) - low
    inverse = jnp.where(width > MIN_RANGE, top / jnp.maximum(width, MIN_RANGE), 1.0)
    inverse = jnp.minimum(inverse, MAX_INVERSE_SCALE)
    zeros = -low * inverse
    errors = []
    for i in range(MAX_STEPS):
        codes = jnp.clip(jnp.round(groups * inverse + zeros), 0, top)
        error = groups - (codes - zeros) / inverse
        size = jnp.abs(error)
        power = jnp.where(size > 0, size, 1.0) ** (NORM - 1)
        kept = jnp.sign(error) * jnp.maximum(size - power / BETA, 0.0)
        moved = jnp.mean(codes - (groups - kept) * inverse, axis=-1, keepdims=True)
        taken = (i < steps).reshape(*lead, 1, 1, 1)
        zeros = jnp.where(taken, moved, zeros)
        errors.append(jnp.where(i < steps, jnp.mean(size, axis=(-3, -2, -1)), 0.0))
    codes = jnp.clip(jnp.round(groups * inverse + zeros), 0, top).astype(jnp.uint8)
    return (
        codes.reshape(weights.shape),
        1 / inverse[..., 0],
        zeros[..., 0],
        jnp.stack(errors, axis=-1),
    )
