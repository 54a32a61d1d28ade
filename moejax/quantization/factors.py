"""Low-rank factors in few bits, symmetric around 0 (MiLo section 3.2.5)."""

import functools

import jax
import jax.numpy as jnp

from moejax.quantization.grid import Codes, Grid, nearest_codes, split_groups
from moejax.quantization.least_squares import LeastSquaresSettings, least_squares
from moejax.quantization.rtn import rtn

SCALES = ("range", "signed", "fitted")
MAX_GAIN_LOST = 0.5  # share of a compensator's gain; beyond it INT3 factors have surged
FITTED = LeastSquaresSettings(signed=True)


def factor_grid(bits: int, length: int, group_size: int = 64) -> Grid:
    """Grid of factor rows of a length; shorter ones are one group."""
    return Grid(bits=bits, group_size=min(group_size, length), zero_kind="symmetric")


@functools.partial(jax.jit, static_argnames=("bits", "group_size", "scale"))
def quantize_factor(x: jax.Array, bits: int, group_size: int = 64, scale: str = "range") -> Codes:
    """Computes round((2^b - 1) x / (2 s)) + 2^(b - 1), clipped to b bits (MiLo eq. 13).

    The printed equation reaches 2^b at x = s; the clipping is what makes it b bits.

    Args:
      x: float32[..., R, X]: V, or U transposed; groups lie along X. Groups of zeros stay zeros.
      bits: 3, 4 or 8 (2 works too).
      group_size: of X; a shorter X is one group.
      scale: "range": s = max|x| of the group. "signed": the level that only one side has, the
        farthest from 0, lies on the group's largest element, so that the scale takes a sign.
        "fitted": least squares over scales of both signs.

    Raises:
      ValueError: an unknown kind of scale.
    """
    grid = factor_grid(bits, x.shape[-1], group_size)
    if scale == "range":
        return rtn(x, grid)
    if scale == "fitted":
        return least_squares(x, grid, FITTED)
    if scale != "signed":
        raise ValueError(f"scale {scale!r} is none of {', '.join(SCALES)}")
    groups = split_groups(x, grid.group_size)
    low, high = jnp.min(groups, axis=-1), jnp.max(groups, axis=-1)
    largest = jnp.where(high > -low, high, low)
    scales = jnp.where(largest == 0, 1.0, largest / -grid.middle)
    return nearest_codes(x, scales, jnp.full_like(scales, grid.middle), grid)


def gain_lost(plain: jax.Array, free: jax.Array, rounded: jax.Array) -> jax.Array:
    """Share of a compensator's gain that is lost by rounding its factors.

    MiLo section 4.2 saw INT3 factors raise the error of single matrices by much; those whose share
    is over `MAX_GAIN_LOST` are better kept in INT8.

    Args:
      plain: float32[...], error of each matrix quantized without a compensator.
      free: float32[...], error with the factors as they were found.
      rounded: float32[...], error with the factors in few bits; all three of one kind.

    Returns:
      float32[...], at least 0; 0 where there was nothing to lose and nothing was lost, infinite
      where something was lost without a gain.
    """
    lost, gain = jnp.maximum(rounded - free, 0.0), jnp.maximum(plain - free, 0.0)
    share = lost / jnp.where(gain > 0, gain, 1.0)
    return jnp.where(gain > 0, share, jnp.where(lost > 0, jnp.inf, 0.0))
