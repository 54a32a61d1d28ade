"""MXFP4 (OCP Microscaling Formats 1.0, section 5.3): E2M1 codes, an E8M0 scale for 32 of them.

A code is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives. A scale is the exponent e of 2^(e - 127). Here e = 0 counts as 0, as the number that it
stands for, 2^-127, is none of float32's normal ones; e = 255, NaN there, is infinite.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BITS, GROUP_SIZE = 4, 32
LARGEST = 208  # exponent of the largest scale of every kernel, 2^81 (`mosaic_decode.fragments`)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)  # by code


def code_values(codes: Any) -> jax.Array:
    """Looks up the values float32[...] of codes uint8[...]."""
    return jnp.asarray(VALUES)[codes.astype(jnp.int32)]


def scale_values(exponents: Any) -> jax.Array:
    """Computes the scales float32[...] of exponents uint8[...]."""
    return jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << np.uint32(23), jnp.float32)


def small_pairs(words: jax.Array, position: int | jax.Array, dtype: Any) -> jax.Array:
    """Makes two floats of `dtype` of two codes, 2^-14 (float16) or 2^-126 times them: uint32[...].

    A code's exponent and mantissa are the lowest bits of a float's exponent and the highest of its
    mantissa. 0.5, which E2M1 stores without a leading one, becomes a subnormal float.

    Args:
      words: uint32[...], codes of four bits in both halves.
      position: int32[] in 0..3, of the two codes.
      dtype: bfloat16 or float16.
    """
    if not isinstance(position, int):
        words, position = words >> (position * BITS).astype(jnp.uint32), 0
    shift = 9 if dtype == jnp.float16 else 6

    def moved(count: int) -> jax.Array:
        count -= BITS * position
        return words << np.uint32(count) if count >= 0 else words >> np.uint32(-count)

    signs = moved(12) & np.uint32(0x80008000)
    return signs | (moved(shift) & np.uint32(0x00070007 << shift))
