"""MXFP4 (OCP Microscaling Formats 1.0, section 5.3): E2M1 codes, an E8M0 scale for 32 of them.

A code is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives. A scale is the exponent e of 2^(e - 127). Here e = 0 counts as 0, as the number that it
stands for, 2^-127, is none of float32's normal ones; e = 255, NaN there, is infinite.

Words of codes are those of `layout` with the bits of each moved (`arrange`): so three of four pairs
of codes become bfloat16 by a rotation and a mask (`small_pairs`), the fourth by two.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BITS, GROUP_SIZE = 4, 32
LARGEST = 208  # exponent of the largest scale of every kernel, 2^81 (`mosaic_decode.fragments`)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)  # by code
# By position in a half: after rotations to the left by these counts, bits of these masks are those
# of two small bfloat16. No bit is taken twice, and no other counts and masks need fewer steps.
SIGNS, REST = 0x80008000, 0x01C001C0
PIECES = (
    ((0, SIGNS | REST),), ((6, SIGNS | REST),), ((10, SIGNS | REST),),
    ((4, 0x81808180), (12, 0x00400040)),
)  # fmt: skip


def code_values(codes: Any) -> jax.Array:
    """Looks up the values float32[...] of codes uint8[...]."""
    return jnp.asarray(VALUES)[codes.astype(jnp.int32)]


def scale_values(exponents: Any) -> jax.Array:
    """Computes the scales float32[...] of exponents uint8[...]."""
    return jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << np.uint32(23), jnp.float32)


def arrange(words: Any) -> Any:
    """Moves the bits of packed codes, uint32[...] of `layout`, to where MXFP4 stores them."""
    found = words & np.uint32(0)
    for position, pieces in enumerate(PIECES):
        codes = words >> np.uint32(BITS * position)
        floats = small_floats(codes, jnp.bfloat16)
        for count, mask in pieces:
            found = found | _rotated(floats & np.uint32(mask), 32 - count)
    return found


def packed(words: Any) -> Any:
    """Undoes `arrange`."""
    found = words & np.uint32(0)
    for position in range(len(PIECES)):
        floats = small_pairs(words, position, jnp.bfloat16)
        codes = (floats >> np.uint32(12)) & np.uint32(0x00080008)
        codes = codes | ((floats >> np.uint32(6)) & np.uint32(0x00070007))
        found = found | (codes << np.uint32(BITS * position))
    return found


def small_floats(codes: Any, dtype: Any) -> Any:
    """Makes two floats of the codes in the lowest bits of both halves, as `small_pairs` does."""
    shift = 9 if dtype == jnp.float16 else 6
    signs = (codes & np.uint32(0x00080008)) << np.uint32(12)
    return signs | ((codes & np.uint32(0x00070007)) << np.uint32(shift))


def small_pairs(words: Any, position: int | jax.Array, dtype: Any) -> Any:
    """Makes two floats of `dtype` of two codes, 2^-14 (float16) or 2^-126 times them: uint32[...].

    A code's exponent and mantissa are the lowest bits of a float's exponent and the highest of its
    mantissa. 0.5, which E2M1 stores without a leading one, becomes a subnormal float.

    Args:
      words: uint32[...], as stored (`arrange`).
      position: int32[] in 0..3, of the two codes (`layout`).
      dtype: bfloat16 or float16.
    """
    floats = words & np.uint32(0)
    for count, mask in _pieces(position):
        floats = floats | (_rotated(words, count) & mask)
    if dtype != jnp.float16:
        return floats
    return (floats & np.uint32(SIGNS)) | ((floats & np.uint32(REST)) << np.uint32(3))


def _pieces(position: int | jax.Array) -> list[tuple[Any, Any]]:
    """Rotations and masks of a position."""
    if isinstance(position, int):
        return [(count, np.uint32(mask)) for count, mask in PIECES[position]]

    def at_position(*values: int) -> jax.Array:
        [*others, found] = map(jnp.uint32, values)
        for i, value in enumerate(others):
            found = jnp.where(position == i, value, found)
        return found

    [*ones, (first, (count, mask))] = PIECES  # the last position alone has two
    firsts = [*(of_one for (of_one,) in ones), first]
    counts, masks = (at_position(*parts) for parts in zip(*firsts, strict=True))
    return [(counts, masks), (count, at_position(*(0 for _ in ones), mask))]


def _rotated(words: Any, count: Any) -> Any:
    """Rotates uint32[...] to the left."""
    if isinstance(count, int):
        count %= 32
        return (words << np.uint32(count)) | (words >> np.uint32(32 - count)) if count else words
    return (words << count) | ((words >> 1) >> (jnp.uint32(31) - count))
