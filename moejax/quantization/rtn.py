"""Round to nearest (RTN): the grid of a group spans its range."""

import functools

import jax
import jax.numpy as jnp

from moejax.quantization.grid import Codes, Grid, nearest_codes, split_groups

# A narrower group is stored as its middle, which a float zero holds at scale 1 (as HQQ's).
MIN_RANGE = 1e-4


@functools.partial(jax.jit, static_argnames="grid")
def rtn(weights: jax.Array, grid: Grid) -> Codes:
    """Rounds each weight to the nearest level of its group.

    Float zero:   s = (max - min) / (2^b - 1), z = -min / s.
    Integer zero: the same over the range widened to hold 0, z rounded (so that 0 <= z < 2^b).
    Symmetric:    s = 2 max|w| / (2^b - 1), z = 2^(b - 1) (MiLo eq. 13).

    Groups of one value are exact up to float32 rounding; groups of zeros stay 0.

    Args:
      weights: float32[..., N, K], finite.
    """
    scales, zeros = range_grid(split_groups(weights, grid.group_size), grid)
    return nearest_codes(weights, scales, zeros, grid)


def range_grid(groups: jax.Array, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """Scales and zeros float32[..., G] of `rtn` for groups float32[..., G, group_size]."""
    low, high = jnp.min(groups, axis=-1), jnp.max(groups, axis=-1)
    if grid.zero_kind == "symmetric":
        largest = jnp.maximum(jnp.abs(low), jnp.abs(high))
        scales = jnp.where(largest > 0, largest * (2 / grid.max_code), 1.0)
        return scales, jnp.full_like(scales, grid.middle)
    if grid.zero_kind == "integer":
        low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
        scales = jnp.where(high > low, (high - low) / grid.max_code, 1.0)
        return scales, jnp.round(-low / scales)
    width = high - low
    is_wide = width > MIN_RANGE
    scales = jnp.where(is_wide, width / grid.max_code, 1.0)
    # The smallest value in place of the middle would cost weights around 0 more than zeros do.
    return scales, -jnp.where(is_wide, low, low + width * 0.5) / scales
