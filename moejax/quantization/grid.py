"""Grids: the quantized values a matrix may take, and the groups of its rows."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.weights.qtensor import ZERO_KINDS
from pallas_kernels import layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Static choices of a quantizer; ValueError where one is not allowed.

    `layout.num_groups` checks that `group_size` is at most K, once K is known; K itself means one
    group a row.
    """

    bits: int
    group_size: int
    zero_kind: str

    def __post_init__(self) -> None:
        if self.bits not in layout.BITS:
            raise ValueError(f"bits {self.bits} is none of {', '.join(map(str, layout.BITS))}")
        if self.group_size < 1:
            raise ValueError(f"group_size {self.group_size} is not positive")
        if self.zero_kind not in ZERO_KINDS:
            raise ValueError(f"zero_kind {self.zero_kind!r} is none of {', '.join(ZERO_KINDS)}")

    @property
    def max_code(self) -> int:
        """Largest code, 2^bits - 1."""
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        """Zero point of symmetric grids, 2^(bits - 1)."""
        return 2 ** (self.bits - 1)

    def round(self, steps: jax.Array) -> jax.Array:
        """Chooses the code of each step w / s + z, as float32; every quantizer does by it."""
        return jnp.clip(jnp.round(steps), 0, self.max_code)


class Codes(NamedTuple):
    """Quantized matrices: w = (codes - zeros) scales, group by group.

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


def dequantize(codes: Codes, grid: Grid) -> jax.Array:
    """Dequantizes codes to float32[..., N, K] (MiLo eq. 3)."""
    groups = split_groups(codes.codes, grid.group_size).astype(jnp.float32)
    values = (groups - codes.zeros[..., None]) * codes.scales[..., None]
    return merge_groups(values, codes.codes.shape[-1])


def relative_error(weights: jax.Array, approximation: jax.Array) -> jax.Array:
    """Relative error |W - W'|_F / |W|_F of matrices [..., N, K]: float32[...], 0 if both are 0."""
    lost = jnp.sum(jnp.square(weights - approximation), axis=(-2, -1))
    whole = jnp.sum(jnp.square(weights), axis=(-2, -1))
    return jnp.where(lost > 0, jnp.sqrt(lost / jnp.where(whole > 0, whole, 1.0)), 0.0)
