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
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)  # by code


def code_values(codes: Any) -> jax.Array:
    """Looks up the values float32[...] of codes uint8[...]."""
    return jnp.asarray(VALUES)[codes.astype(jnp.int32)]


def scale_values(exponents: Any) -> jax.Array:
    """Computes the scales float32[...] of exponents uint8[...]."""
    return jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << np.uint32(23), jnp.float32)


def pair_bits(codes: jax.Array, dtype: Any) -> jax.Array:
    """Makes two floats of `dtype` of two codes by arithmetic on integers: uint32[...].

    A magnitude of 2 or more is a float's exponent and mantissa less 126 (bfloat16) or 14 (float16)
    of exponent; 0 and 1, which E2M1 stores without a leading one, are 0 and 0.5.

    Args:
      codes: uint32[...], a code in the low four bits of each half.
      dtype: bfloat16 or float16.
    """
    shift, half = (9, 0x3800) if dtype == jnp.float16 else (6, 0x3F00)  # `half`: bits of 0.5
    magnitudes = codes & jnp.uint32(0x00070007)
    is_normal = ((magnitudes + jnp.uint32(0x00060006)) >> jnp.uint32(3)) & jnp.uint32(0x00010001)
    is_half = magnitudes & (is_normal ^ jnp.uint32(0x00010001))
    bits = magnitudes << jnp.uint32(shift)
    bits = bits + is_normal * jnp.uint32(half) + is_half * jnp.uint32(half - (1 << shift))
    return bits | ((codes & jnp.uint32(0x00080008)) << jnp.uint32(12))
