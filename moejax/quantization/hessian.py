"""Hessian of a layer's calibration inputs."""

import functools

import jax
import jax.numpy as jnp

MAX_RAISES = 8  # of the damping, each tenfold; the last one drowns any Hessian


def damped(hessian: jax.Array, damping: jax.Array | float) -> jax.Array:
    """Damps float32[K, K]: H + damping mean(diag H) I (GPTQ, section 3.3, step 3)."""
    added = damping * jnp.mean(jnp.diagonal(hessian))
    return hessian + added * jnp.eye(hessian.shape[0], dtype=hessian.dtype)


def inverse_factor(hessian: jax.Array, damping: float) -> tuple[jax.Array, jax.Array]:
    """Factors U^T U = (H + damping mean(diag H) I)^-1, U upper triangular (Algorithm 1).

    H read backwards is L L^T, so H = R R^T with R upper triangular, and U = R^-1. Where it fails in
    float32 the damping grows tenfold, up to MAX_RAISES times.

    Args:
      hessian: float32[K, K], without zeros on its diagonal.

    Returns:
      U float32[K, K], and the damping used, float32[]: NaN if none sufficed, and U is invalid.
    """

    def factor(share: jax.Array) -> jax.Array:
        return jnp.linalg.cholesky(damped(hessian, share)[::-1, ::-1], symmetrize_input=False)

    def failed(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        raises, _, lower = state
        return (raises < MAX_RAISES) & ~jnp.all(jnp.isfinite(lower))

    def raise_damping(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        raises, share, _ = state
        return raises + 1, share * 10, factor(share * 10)

    first = jnp.float32(damping)
    _, share, lower = jax.lax.while_loop(
        failed, raise_damping, (jnp.int32(0), first, factor(first))
    )
    identity = jnp.eye(hessian.shape[0], dtype=jnp.float32)
    upper = jax.scipy.linalg.solve_triangular(lower[::-1, ::-1], identity, lower=False)
    finite = jnp.all(jnp.isfinite(hessian)) & jnp.all(jnp.isfinite(upper))
    return upper, jnp.where(finite, share, jnp.nan)


@functools.partial(jax.jit, donate_argnums=0)
def add_outer_products(total: jax.Array, x: jax.Array) -> jax.Array:
    """Adds x x^T of rows [n, K] to `total`, float32[K, K], which is donated."""
    x = x.astype(jnp.float32)
    return total + jnp.einsum("nk,nj->kj", x, x, precision="highest")


def mean_hessian(total: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """Scales sums of x x^T, float32[..., K, K], by 2 / n; zero if n, int32[...], is 0."""
    count = jnp.maximum(num_tokens, 1).astype(jnp.float32)
    return total * (2 / count)[..., None, None]
