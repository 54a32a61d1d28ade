"""Grids: the quantized values a matrix may take, and the groups of its rows.

A grid of bit planes has several widths whose codes are prefixes of one code. Scales and zeros are
then those of the widest width; the others follow by `layout.prefix_constants`, so that in units of
the widest step, with u = w / s + z - c its distance from the centre c = (2^b - 1) / 2, width B has
the value step_B (h - (2^B - 1) / 2) at the prefix h of B bits.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout

# Weight of the widest width by the widths. Of (2, 4) with .8 GPTQ and MiLo lose 4.2 and 2.1 % of
# log-perplexity at 4 bits on the study model, where 1 % was allowed; with .95 GPTQ is better at 4
# bits on the demo, 3.042 for 3.051, and worse at 2, 3.620 for 3.451 (INT2 4.387), and HQQ is within
# .009 and .03. Of (2, 3) .8 is worse at 3 bits by GPTQ, 3.098 for 3.082. At 8 bits .9
# leaves the codes to the narrower ones: relative errors of 8 bits on the demo's experts by HQQ, at
# .9, .99 and 1: .0070, .0054, .0051 of (2, 8), .0081, .0053, .0051 of (4, 8) and .0071, .0052,
# .0051 of (2, 4, 8); by least squares .9 gives .0211, .0083 and .0126. The narrower widths lose 7.6
# % from .9 to .99 at 4 bits of (4, 8), elsewhere at most 4.7 % (CPU, 2026-11-25;
# scripts/studies/planes).
PLANE_WEIGHTS = {(2, 3): 0.9, (2, 4): 0.95, (2, 8): 0.99, (4, 8): 0.99, (2, 4, 8): 0.99}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Static choices of a quantizer, of a checked `Scheme`.

    `layout.num_groups` checks that `group_size` is at most K, once K is known; K itself means one
    group a row.
    """

    bits: int
    group_size: int
    zero_kind: str
    # Widths of bit planes whose codes are chosen jointly, rising, the last one `bits`; (): one.
    planes: tuple[int, ...] = ()
    # Share of the squared error that is the widest width's; the others divide the rest evenly.
    # None: that of `PLANE_WEIGHTS`.
    plane_weight: float | None = None

    @property
    def max_code(self) -> int:
        """Largest code, 2^bits - 1."""
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        """Zero point of symmetric grids, 2^(bits - 1)."""
        return 2 ** (self.bits - 1)

    @functools.cached_property
    def widths(self) -> tuple["_Width", ...]:
        """Widths that an error counts, the widest first; one without planes."""
        if not self.planes:
            return (_Width(0, 1.0, self.max_code / 2, 1.0),)
        own = layout.prefix_constants(self.bits).scale_factor
        others = self.planes[-2::-1]
        weight = PLANE_WEIGHTS[self.planes] if self.plane_weight is None else self.plane_weight
        shares = [weight, *[(1 - weight) / len(others)] * len(others)]
        return tuple(
            _Width(
                self.bits - bits,
                layout.prefix_constants(bits).scale_factor / own,
                (2**bits - 1) / 2,
                share,
            )
            for bits, share in zip((self.bits, *others), shares, strict=True)
        )

    def round(self, steps: jax.Array, *narrower: jax.Array) -> jax.Array:
        """Chooses the code of each step w / s + z, as float32; every quantizer does by it.

        With planes it minimises the sum over the widths of their share times their squared error:
        below each prefix of the second widest width the nearest code is the best one, so that one
        candidate a prefix is compared.

        Args:
          steps: float32[...].
          narrower: steps of the other `widths`, where they approximate other weights.
        """
        if not self.planes:
            return jnp.clip(jnp.round(steps), 0, self.max_code)
        wanted = (steps, *(narrower or [steps] * (len(self.widths) - 1)))
        second = self.widths[1]
        size = 2**second.shift
        best, least = jnp.zeros_like(steps), jnp.full_like(steps, jnp.inf)
        for prefix in range(2 ** (self.bits - second.shift)):
            first = prefix * size
            code = jnp.clip(jnp.round(steps), first, first + size - 1)
            error = jnp.zeros_like(steps)
            for width, target in zip(self.widths, wanted, strict=True):
                error = error + width.share * jnp.square(target - width.steps(code))
            better = error < least
            best, least = jnp.where(better, code, best), jnp.where(better, error, least)
        return best


class _Width(NamedTuple):
    """One width of a grid of bit planes, in units of the widest width's step."""

    shift: int  # bits of the code that it lacks
    step: float
    center: float  # (2^B - 1) / 2
    share: float  # of the joint error

    def steps(self, codes: jax.Array) -> jax.Array:
        """Value w / s + z that the prefixes of codes stand for, as float32, in the widest's steps.

        For the widest width these are the codes.
        """
        if not self.shift:
            return codes
        scale = 2.0**self.shift
        widest = (2 * self.center + 1) * scale / 2 - 0.5
        return (jnp.floor(codes / scale) - self.center) * self.step + widest


class Codes(NamedTuple):
    """Quantized matrices: w = (codes - zeros) scales, group by group, in the widest width.

    `zeros` is whole numbers 0..2^bits - 1 if the grid's zero is "integer", and 2^(bits - 1)
    everywhere if it is "symmetric".
    """

    codes: jax.Array  # uint8[..., N, K]
    scales: jax.Array  # float32[..., N, G]
    zeros: jax.Array  # float32[..., N, G]


def split_groups(x: jax.Array, group_size: int) -> jax.Array:
    """Splits [..., K] into [..., G, group_size]; pads a short last group with its last value.

    Padding changes no minimum and no maximum; sums exclude it by `group_members`. Raises ValueError
    where the group size is longer than the row.
    """
    num_inputs = x.shape[-1]
    num_groups = layout.num_groups(num_inputs, group_size)
    missing = num_groups * group_size - num_inputs
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], mode="edge")
    return x.reshape(*x.shape[:-1], num_groups, group_size)


def merge_groups(x: jax.Array, num_inputs: int) -> jax.Array:
    """Merges [..., G, group_size] to [..., num_inputs], the reverse of `split_groups`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])[..., :num_inputs]


def group_members(num_inputs: int, group_size: int, ndim: int) -> tuple[jax.Array, jax.Array]:
    """Mask and number of the unpadded values of `split_groups`, with `ndim` axes as its result.

    Returns:
      float32[..., G, group_size], or [..., 1, 1] if all groups are full; and float32[..., G, 1].
    """
    num_groups = layout.num_groups(num_inputs, group_size)
    places = np.arange(num_groups * group_size).reshape(num_groups, group_size)
    mask = (places < num_inputs).astype(np.float32)
    counts = mask.sum(axis=-1, keepdims=True)
    if mask.all():
        mask = mask[:1, :1]
    lead = (1,) * (ndim - 2)
    return jnp.asarray(mask.reshape(*lead, *mask.shape)), jnp.asarray(counts.reshape(*lead, -1, 1))


def nearest_codes(weights: jax.Array, scales: jax.Array, zeros: jax.Array, grid: Grid) -> Codes:
    """Finds the nearest codes of the weights: clip(round(w / s + z), 0, 2^b - 1).

    Args:
      weights: float32[..., N, K].
      scales: float32[..., N, G], none of them 0; negative ones are allowed.
      zeros: float32[..., N, G].
    """
    groups = split_groups(weights, grid.group_size)
    codes = grid.round(groups / scales[..., None] + zeros[..., None]).astype(jnp.uint8)
    return Codes(merge_groups(codes, weights.shape[-1]), scales, zeros)


def dequantize(codes: Codes, grid: Grid, width: _Width | None = None) -> jax.Array:
    """Dequantizes codes to float32[..., N, K] (MiLo eq. 3), in one of `grid.widths`; the widest."""
    groups = split_groups(codes.codes, grid.group_size).astype(jnp.float32)
    if width is not None:
        groups = width.steps(groups)
    values = (groups - codes.zeros[..., None]) * codes.scales[..., None]
    return merge_groups(values, codes.codes.shape[-1])
