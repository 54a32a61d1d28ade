"""Elements of packed matrices looked up one by one in a Triton program.

They serve the short last block of a row, and low-rank factors whose columns are the outputs of
another matrix.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout, mxfp4
from pallas_kernels.packed import PLAIN_BITS, PackedMatrices, stored_planes

Int = int | jax.Array


def quotient(a: Any, b: Any) -> Any:
    """Computes a // b of nonnegative ints; Triton may not compile `//`, which corrects signs."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return jax.lax.div(a, np.int32(b) if isinstance(b, int) else b)


def remainder(a: Any, b: Any) -> Any:
    """Computes a % b of nonnegative ints."""
    if isinstance(b, int) and b == 1:
        return 0
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    return jax.lax.rem(a, np.int32(b) if isinstance(b, int) else b)


def power_above(size: int) -> int:
    """Smallest power of two that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()


def iota(count: int) -> jax.Array:
    """int32[count], 0, 1, ...; Triton wants a power of two."""
    return jax.lax.broadcasted_iota(jnp.int32, (count,), 0)


def element_codes(weights: PackedMatrices, slot: Int, rows: jax.Array, k: jax.Array) -> jax.Array:
    """Codes uint32 at rows and k, int32 of two shapes that broadcast."""
    length = layout.padded_length(weights.num_inputs)
    full, rest = divmod(length, layout.BLOCK)
    block, within = quotient(k, layout.BLOCK), remainder(k, layout.BLOCK)
    half = remainder(k, 2) * 16
    codes = None
    for plane, stored, place_of in stored_planes(weights, slot):
        words = layout.BLOCK * plane.width // layout.WORD_BITS
        position, place = quotient(within, 2 * words), remainder(within, 2 * words)
        if rest:
            short = rest * plane.width // 16  # codes of a position in the short block
            whole = block < full
            position = jnp.where(whole, position, quotient(within, short))
            place = jnp.where(whole, place, remainder(within, short))
        word = stored[place_of, rows, plane.first_word + block * words + quotient(place, 2)]
        if weights.is_mxfp4:
            word = mxfp4.packed(word)
        shift = (half + position * plane.width).astype(jnp.uint32)
        part = (word >> shift) & jnp.uint32((1 << plane.width) - 1)
        codes = (
            part << jnp.uint32(plane.shift)
            if codes is None
            else codes | (part << jnp.uint32(plane.shift))
        )
    assert codes is not None
    return codes


def element_values(weights: PackedMatrices, slot: Int, rows: jax.Array, k: jax.Array) -> jax.Array:
    """Elements float32 at rows and k of matrices without refinements, see `element_codes`."""
    if weights.bits == PLAIN_BITS:
        return weights.words[slot, rows, k].astype(jnp.float32)
    assert weights.scales is not None
    values = element_codes(weights, slot, rows, k).astype(jnp.float32)
    group = quotient(k, weights.group_size)
    scale = weights.scales[slot, rows, group].astype(jnp.float32)
    if weights.zeros is None:
        return (values - float(2 ** (weights.bits - 1))) * scale
    return (values - weights.zeros[slot, rows, group].astype(jnp.float32)) * scale


def block_values(weights: PackedMatrices, slot: Int, rows: jax.Array, block: Int) -> jax.Array:
    """Elements float32[R, BLOCK] of a whole block at rows int32[R]; every word is loaded once.

    Groups are of `BLOCK` codes or of a part of that.
    """
    first, size = block * layout.BLOCK, layout.BLOCK
    if weights.bits == PLAIN_BITS:
        return weights.words[slot, rows[:, None], (first + iota(size))[None]].astype(jnp.float32)
    assert weights.scales is not None
    codes: Any = jnp.uint32(0)
    for plane, stored, place_of in stored_planes(weights, slot):
        count = size * plane.width // layout.WORD_BITS
        at = plane.first_word + block * count + iota(count)
        words = stored[place_of, rows[:, None], at[None]][:, None, :, None]
        shifts = iota(2)[None] * 16 + iota(16 // plane.width)[:, None] * plane.width
        parts = words >> shifts[None, :, None].astype(jnp.uint32) & jnp.uint32(2**plane.width - 1)
        codes = codes | (parts.reshape(-1, size) << jnp.uint32(plane.shift))
    groups = quotient(first, weights.group_size) + iota(size // weights.group_size)

    def of_groups(values: jax.Array) -> jax.Array:
        of = values[slot, rows[:, None], groups[None]].astype(jnp.float32)[:, :, None]
        return jnp.broadcast_to(of, (*of.shape[:2], weights.group_size)).reshape(-1, size)

    middle = 2.0 ** (weights.bits - 1) if weights.zeros is None else of_groups(weights.zeros)
    return (codes.astype(jnp.float32) - middle) * of_groups(weights.scales)
