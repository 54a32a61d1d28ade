"""Statistics of a matrix before it is quantized."""

import jax
import jax.numpy as jnp


def excess_kurtosis(weights: jax.Array) -> jax.Array:
    """Excess kurtosis E[(x - mean)^4] / var^2 - 3 of matrices [..., N, K]: 0 for a Gaussian.

    MiLo 3.1.1 prints the formula without the 3, but its Table 2 is negative for flat weights. A
    constant matrix has 0.
    """
    x = weights.astype(jnp.float32)
    x = x - jnp.mean(x, axis=(-2, -1), keepdims=True)
    # By the largest element, so that fourth powers neither overflow nor vanish.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1.0)
    second = jnp.mean(x**2, axis=(-2, -1))
    fourth = jnp.mean(x**4, axis=(-2, -1))
    return jnp.where(second > 0, fourth / jnp.where(second > 0, second, 1.0) ** 2 - 3.0, 0.0)
