"""Rotary position embedding, in the half-split form of Hugging Face checkpoints."""

import jax
import jax.numpy as jnp


def rotary_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of position * theta^(-2i/C) (Su et al. 2021, eq. 15).

    Args:
      positions: int32[B, T].
      head_dim: C, even.
      theta: base of the frequencies.

    Returns:
      Two float32[B, T, C / 2].
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequency = 1.0 / (jnp.float32(theta) ** exponent)
    angle = positions.astype(jnp.float32)[..., None] * frequency[None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns each pair (x_i, x_{i + C/2}) of every head by its position's angle.

    Args:
      x: [B, T, H, C].
      cos: float32[B, T, C / 2].
      sin: float32[B, T, C / 2].

    Returns:
      [B, T, H, C] in `x.dtype`; the products are float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
