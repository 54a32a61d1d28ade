"""Low-rank factors in few bits, symmetric around 0 (MiLo section 3.2.5)."""

import functools

import jax
import jax.numpy as jnp

from moejax.quantization.grid import Codes, Grid
from moejax.quantization.least_squares import least_squares
from moejax.quantization.rtn import rtn
from moejax.weights.qtensor import FACTOR_GROUP_SIZE
from pallas_kernels.layout import num_groups


def factor_grid(bits: int, length: int) -> Grid:
    """Grid of factor rows of a length."""
    return Grid(bits=bits, group_size=min(FACTOR_GROUP_SIZE, length), zero_kind="symmetric")


@functools.partial(jax.jit, static_argnames=("bits", "fitted"))
def quantize_factor(x: jax.Array, bits: int, *, fitted: bool = False) -> Codes:
    """Computes round((2^b - 1) x / (2 s)) + 2^(b - 1), clipped to b bits (MiLo eq. 13).

    The printed equation reaches 2^b at x = s; the clipping is what makes it b bits.

    Args:
      x: float32[..., R, X]: V, or U transposed; groups lie along X. Groups of zeros stay zeros.
      bits: 3, 4 or 8 (2 works too).
      fitted: s by least squares, of either sign, in place of max|x| of the group.
    """
    grid = factor_grid(bits, x.shape[-1])
    return least_squares(x, grid, signed=True) if fitted else rtn(x, grid)


def zero_factor(shape: tuple[int, ...], bits: int) -> Codes:
    """Codes of a factor [..., R, X] of zeros, as `quantize_factor` finds them."""
    grid = factor_grid(bits, shape[-1])
    groups = (*shape[:-1], num_groups(shape[-1], grid.group_size))
    return Codes(
        jnp.full(shape, grid.middle, jnp.uint8),
        jnp.ones(groups, jnp.float32),
        jnp.full(groups, grid.middle, jnp.float32),
    )
