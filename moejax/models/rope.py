"""Rotary position embedding, of pairs that are halves or neighbours, and YaRN."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.config import ModelConfig
from moejax.models.parts import Yarn

Angles = tuple[jax.Array, jax.Array]  # cosines and sines, float32[B, T, R / 2]


def rotary_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """theta^(-2i/C) as float32[C / 2], each operation rounded as transformers rounds it.

    On the host, because at position p an angle is off by p times what its frequency is off, and in
    a compiled program XLA's power gives a third of the frequencies another value: by one float32
    step where C is a power of two, by up to 17 at C = 96. One step moved logits of a tiny Mixtral
    by 1.2e-4 of their norm within 2,500 positions (jax 0.10.2 against torch 2.13, CPU).

    Args:
      head_dim: C, even.
      theta: base of the frequencies.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    power = np.power(float(theta), exponent.astype(np.float64)).astype(np.float32)
    return np.float32(1) / power


def yarn_frequencies(head_dim: int, theta: float, yarn: Yarn) -> np.ndarray:
    """`rotary_frequencies` for longer contexts (Peng et al., arXiv:2309.00071, section 3.2).

    Slow pairs, which turn less than `beta_slow` times in the original context, are interpolated;
    fast ones, which turn more than `beta_fast` times, are kept; between them a ramp.

    Args:
      head_dim: C, even.
      theta: base of the frequencies.
      yarn: of the model.
    """

    def pair_that_turns(times: float) -> float:
        wavelength = yarn.original_positions / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), head_dim - 1)
    width = np.float32(high - low if high != low else 0.001)
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    kept = np.float32(1) - np.clip((pairs - np.float32(low)) / width, 0, 1)
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    power = np.power(float(theta), exponent.astype(np.float64)).astype(np.float32)
    slow = np.float32(1) / (np.float32(yarn.factor) * power)
    return slow * (np.float32(1) - kept) + np.float32(1) / power * kept


def model_angles(config: ModelConfig, positions: jax.Array) -> Angles:
    """Cosine and sine of a model's rotations, [B, T, rotary_dim / 2], with YaRN's factor."""
    width, yarn = config.rotary_dim, config.yarn
    if yarn is None:
        return rotary_angles(positions, width, config.rope_theta)
    angle = _angle(positions, yarn_frequencies(width, config.rope_theta, yarn))
    return jnp.cos(angle) * yarn.rotation_scale, jnp.sin(angle) * yarn.rotation_scale


def rotary_angles(positions: jax.Array, head_dim: int, theta: float) -> Angles:
    """Cosine and sine of position * theta^(-2i/C) (Su et al. 2021, eq. 15).

    Args:
      positions: int32[B, T].
      head_dim: C, even.
      theta: base of the frequencies.

    Returns:
      Two float32[B, T, C / 2].
    """
    angle = _angle(positions, rotary_frequencies(head_dim, theta))
    return jnp.cos(angle), jnp.sin(angle)


def _angle(positions: jax.Array, frequency: np.ndarray) -> jax.Array:
    return positions.astype(jnp.float32)[..., None] * frequency[None, None, :]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Turns each pair (x_i, x_{i + R/2}) of every head by its position's angle.

    Of a head wider than R the first R numbers are rotated. Pairs of neighbours (x_2i, x_2i+1) come
    out as halves: a permutation that queries and keys share, which scores do not see.

    Args:
      x: [B, T, H, C].
      cos: float32[B, T, R / 2].
      sin: float32[B, T, R / 2].
      interleaved: pairs are neighbours.

    Returns:
      [B, T, H, C] in `x.dtype`; the products are float32.
    """
    width = 2 * cos.shape[-1]
    turning = x[..., :width].astype(jnp.float32)
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = jnp.split(turning, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return turned if width == x.shape[-1] else jnp.concatenate([turned, x[..., width:]], axis=-1)
