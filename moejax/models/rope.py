"""Rotary position embedding, of pairs that are halves or neighbours, and its scaled kinds."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.config import ModelConfig, RopeScaling

Angles = tuple[jax.Array, jax.Array]  # cosines and sines, float32[B, T, R / 2]


def _scaled_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, *, is_long: bool = False
) -> np.ndarray:
    """Rotation frequencies theta^(-2i/C), float32[C / 2], scaled, rounded as transformers rounds.

    On the host, because at position p an angle is off by p times what its frequency is off, and in
    a compiled program XLA's power gives a third of the frequencies another value: by one float32
    step where C is a power of two, by up to 17 at C = 96. One step moved logits of a tiny Mixtral
    by 1.2e-4 of their norm within 2,500 positions (jax 0.10.2 against torch 2.13, CPU).
    "dynamic" gives the unscaled frequencies of a sequence within the trained positions.

    Args:
      is_long: the sequence exceeds the original positions; matters to "longrope" alone.
    """
    plain = np.float32(1) / _powers(head_dim, theta)
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return plain / np.float32(scaling.factor)
    if scaling.kind == "yarn":
        return _yarn(head_dim, theta, scaling)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    factors = np.asarray(scaling.long_factors if is_long else scaling.short_factors, np.float32)
    return np.float32(1) / (factors * _powers(head_dim, theta))


def _powers(head_dim: int, theta: float) -> np.ndarray:
    """Powers theta^(2i/C), float32[C / 2]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(float(theta), exponent.astype(np.float64)).astype(np.float32)


def _yarn(head_dim: int, theta: float, yarn: RopeScaling) -> np.ndarray:
    """Frequencies of YaRN, by parts (Peng et al., arXiv:2309.00071, section 3.2).

    Slow pairs, which turn less than `beta_slow` times in the original context, are interpolated;
    fast ones, which turn more than `beta_fast` times, are kept; between them a ramp.
    """

    def pair_that_turns(times: float) -> float:
        wavelength = yarn.original_positions / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = np.float32(high - low if high != low else 0.001)
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    kept = np.float32(1) - np.clip((pairs - np.float32(low)) / width, 0, 1)
    power = _powers(head_dim, theta)
    slow = np.float32(1) / (np.float32(yarn.factor) * power)
    return slow * (np.float32(1) - kept) + np.float32(1) / power * kept


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Frequencies of Llama 3.1: slows waves longer than L / low, keeps those under L / high."""
    assert scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    length, factor = scaling.original_positions, np.float32(scaling.factor)
    waves = np.float32(2 * math.pi) / plain
    share = (np.float32(length) / waves - np.float32(low)) / np.float32(high - low)
    between = (np.float32(1) - share) * plain / factor + share * plain
    slowed = np.where(waves > length / low, plain / factor, between)
    return np.where(waves < length / high, plain, slowed).astype(np.float32)


def model_angles(
    config: ModelConfig, positions: jax.Array, lengths: jax.Array | None = None
) -> Angles:
    """Cosine and sine of a model's rotations, [B, T, rotary_dim / 2] (Su et al. 2021, eq. 15).

    "dynamic" and "longrope" turn a token by the length that its sequence has when the token is
    seen: a prompt's tokens by the whole prompt's, however it is cut into chunks, and each later
    one by its own position. Keys stay in the cache as they were turned. This is what transformers
    does with one sequence in a fresh model; in a batch it takes the longest row's length for all.

    Args:
      lengths: int32[B], tokens of each whole sequence, including earlier and later chunks; None
        where the last position is the last token.
    """
    width, theta, scaling = config.rotary_dim, config.rope_theta, config.rope_scaling
    short = _scaled_frequencies(width, theta, scaling)[None, None]
    frequency: np.ndarray | jax.Array = short
    if scaling is not None and scaling.depends_on_length:
        lengths = jnp.max(positions, axis=1) + 1 if lengths is None else lengths
        frequency = _by_length(jnp.asarray(short), width, theta, scaling, lengths)
    angle = positions.astype(jnp.float32)[..., None] * frequency
    if scaling is None:
        return jnp.cos(angle), jnp.sin(angle)
    return jnp.cos(angle) * scaling.rotation_scale, jnp.sin(angle) * scaling.rotation_scale


def _by_length(
    short: jax.Array, width: int, theta: float, scaling: RopeScaling, lengths: jax.Array
) -> jax.Array:
    """Frequencies float32[B, 1, R / 2] by sequence length.

    "dynamic" multiplies the base by s^(R / (R - 2)) with s = factor length / original - factor + 1;
    here frequency i is multiplied by s^(-2i / (R - 2)), in which the power of the base stays exact.
    """
    original = scaling.original_positions
    if scaling.kind == "longrope":
        long = jnp.asarray(_scaled_frequencies(width, theta, scaling, is_long=True))[None, None]
        return jnp.where(lengths[:, None, None] > original, long, short)
    longer = jnp.maximum(lengths - original, 0).astype(jnp.float32)
    stretch = jnp.log1p(longer * np.float32(scaling.factor / original))
    exponent = np.arange(0, width, 2) / (width - 2)
    return short * jnp.exp(-stretch[:, None, None] * exponent.astype(np.float32)[None, None])


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Rotates each pair (x_i, x_{i + R/2}) of every head by its position's angle.

    In a head wider than R, the first R numbers are rotated. Pairs of neighbours (x_2i, x_2i+1) come
    out as halves: a permutation that queries and keys share, which scores do not see.

    Args:
      x: [B, T, H, C].
      cos: float32[B, T, R / 2].
      sin: float32[B, T, R / 2].

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
