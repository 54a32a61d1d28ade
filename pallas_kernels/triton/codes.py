"""Unpacks blocks of packed codes in the registers of a Triton program.

Two codes lie side by side in a word once a shift and a mask have taken one position of it, and an
`or` makes floating point numbers of both: 0x4300 + q is the bfloat16 128 + q, 0x5400 + 16 q the
float16 64 + q; of two codes of MXFP4 `mxfp4.small_pairs` and one multiplication make their values.
Nothing moves between threads.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import layout, mxfp4
from pallas_kernels.packed import PLAIN_BITS, PackedMatrices, stored_planes
from pallas_kernels.triton.elements import Int

Ref = Any
MAX_WORDS = 32  # of a row, held at a time
# Bits of 2^126 and 2^14, by which `mxfp4.small_pairs` are too small.
FULL = {"bfloat16": 0x7E80, "float16": 0x7400}


def position_codes(weights: PackedMatrices) -> int:
    """Consecutive k at one position of a block's words; with two planes, at two positions."""
    return layout.BLOCK * weights.widths[0] // 16 * len(weights.widths)


class PackedCodes:
    """Codes of one packed matrix, taken in steps of `step` consecutive k.

    A step is cut into pieces, each of consecutive k of one quantization group; a product takes a
    piece at a time. `offset` is added to each code.
    """

    def __init__(
        self, weights: PackedMatrices, slot: Int, step: int, dtype: Any, *, interpret: bool
    ) -> None:
        self.weights, self.slot, self.step, self.dtype = weights, slot, step, dtype
        self.interpret = interpret
        # Where a code lies in its half, the exponent that is set above it, and what that adds. With
        # 1024 for short codes as well, sums in float32 lost four bits more.
        self.place, self.magic, self.offset = 0, 0x4300, 128
        self.two_values = weights.bits == 8 and dtype != jnp.float16
        if self.two_values:
            self.offset = 256  # bfloat16 has 7 bits of mantissa, see `values`
        elif dtype == jnp.float16:
            self.place, self.magic, self.offset = (0, 0x6400, 1024)
            if weights.bits < 8:
                self.place, self.magic, self.offset = (4, 0x5400, 64)
        if weights.is_mxfp4:
            self.place, self.magic, self.offset, self.two_values = 0, 0, 0, False
        self.by_row = weights.num_groups == 1
        self.planes = [] if weights.bits == PLAIN_BITS else stored_planes(weights, slot)

    def words(self, tiles: Sequence[jax.Array], block: Int) -> list[list[list[jax.Array]]]:
        """Words [tile][plane][chunk] uint32[rows, words] of a block; int32[rows] per tile."""
        found = []
        for rows in tiles:
            planes = []
            for plane, stored, slot in self.planes:
                count = layout.BLOCK * plane.width // layout.WORD_BITS
                first = plane.first_word + block * count
                width = self._chunk(count)
                planes.append([
                    _load_2d(stored, slot, rows, first + begin, width)
                    for begin in range(0, count, width)
                ])  # fmt: skip
            found.append(planes)
        return found

    def _chunk(self, count: int) -> int:
        """Words loaded together: their codes of a position lie in one group."""
        if self.weights.widths == (2, 1):
            return 8
        codes = 2 * count
        if not self.by_row:
            codes = math.gcd(codes, self.weights.group_size)
        return min(codes // 2, MAX_WORDS)

    def pieces(self) -> list[tuple[int, int, int]]:
        """Pieces (first k in the step, codes, id) of one product with x, by k."""
        widths = self.weights.widths
        if len(widths) == 2:  # a piece is some words of one position of the two-bit plane
            size = 2 * self._chunk(layout.BLOCK * widths[0] // layout.WORD_BITS)
            return [(k, size, k // size) for k in range(0, self.step, size)]
        count = layout.BLOCK * widths[0] // layout.WORD_BITS
        width = 2 * self._chunk(count)
        return [(k, width, i) for i, k in enumerate(range(0, self.step, width))]

    def _pairs(self, planes: list[list[jax.Array]], piece: int, first_position: Int) -> jax.Array:
        """Pairs uint32[rows, words]: two codes per word, `place` bits up in its halves."""
        bits = self.weights.bits
        if len(planes) == 2:
            high, low = planes
            position, chunk = divmod(piece, len(high))
            nibble, odd = divmod(position, 2)
            word = _nibbles(self.weights.widths[1], high[chunk], low[0], odd, chunk)
            return _field(word, first_position + nibble, 4, self.place)
        chunks = planes[0]
        at = first_position + piece // len(chunks)
        return _field(chunks[piece % len(chunks)], at, bits, self.place)

    def values(
        self, planes: list[list[jax.Array]], piece: int, first_position: Int
    ) -> list[jax.Array]:
        """Unpacks offset + q of one piece, as terms [rows, k] in x's dtype.

        Args:
          first_position: int32[] in the block, where the step begins.
        """
        if self.weights.is_mxfp4:
            [chunks] = planes
            at, chunk = divmod(piece, len(chunks))
            small = mxfp4.small_pairs(chunks[chunk], first_position + at, self.dtype)
            return [self._floats(full_pairs(small, self.dtype, interpret=self.interpret))]
        codes = self._pairs(planes, piece, first_position)
        magic = _u32(self.magic * 0x10001)
        if not self.two_values:
            return [self._floats(codes | magic)]
        # 128 + the low 7 bits; and 128 (1 + bit 7), which is the exponent's last bit.
        low, high = codes & _u32(0x007F007F), codes & _u32(0x00800080)
        return [self._floats(low | magic), self._floats(high | magic)]

    def _floats(self, pairs: jax.Array) -> jax.Array:
        halves = (pairs.astype(jnp.uint16), (pairs >> _u32(16)).astype(jnp.uint16))
        even, odd = (jax.lax.bitcast_convert_type(half, self.dtype) for half in halves)
        return jnp.stack([even, odd], axis=-1).reshape(pairs.shape[0], 2 * pairs.shape[1])


def full_pairs(small: jax.Array, dtype: Any, *, interpret: bool) -> jax.Array:
    """Multiplies `mxfp4.small_pairs` by what they are too small by: uint32[...] of two floats."""
    is_half = dtype == jnp.float16
    if not interpret:  # one instruction; it keeps subnormal operands
        factor, kind = FULL[jnp.dtype(dtype).name] * 0x10001, "f16x2" if is_half else "bf16x2"
        [full] = pltriton.elementwise_inline_asm(
            f"{{ .reg .b32 f, z; mov.b32 f, {factor}; mov.b32 z, 0x80008000; "
            f"fma.rn.{kind} $0, $1, f, z; }}",
            args=[small], constraints="=r,r", pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(small.shape, jnp.int32)],
        )  # fmt: skip
        return jax.lax.bitcast_convert_type(full, jnp.uint32)
    # A CPU takes bfloat16's subnormals for 0, and not float16's.
    signs, magnitudes = small & np.uint32(0x80008000), small & np.uint32(0x7FFF7FFF)
    halves = small if is_half else signs | (magnitudes << np.uint32(3))
    floats = jax.lax.bitcast_convert_type(halves, jnp.float16).astype(jnp.float32)
    return jax.lax.bitcast_convert_type((floats * np.float32(2**14)).astype(dtype), jnp.uint32)


def _u32(value: int) -> jax.Array:
    return jnp.uint32(value)


def _nibbles(width: int, high: jax.Array, low: jax.Array, odd: int, chunk: int) -> jax.Array:
    """Merges words of the two-bit plane with those of a plane of `width` 1 or 2 to nibbles.

    Even positions of the two-bit plane make one word, odd ones another. A word of one bit serves
    two words of two bits, a chunk apart: even bits the first, odd bits the second.
    """
    if width == 2:
        if odd:
            return (high & _u32(0xCCCCCCCC)) | ((low >> _u32(2)) & _u32(0x33333333))
        return ((high & _u32(0x33333333)) << _u32(2)) | (low & _u32(0x33333333))
    two = (high & _u32(0x33333333)) << _u32(1) if not odd else (high >> _u32(1)) & _u32(0x66666666)
    return two | ((low >> _u32(2 * odd + chunk)) & _u32(0x11111111))


def _field(word: jax.Array, position: Int, width: int, place: int) -> jax.Array:
    """Bits, `width` of them, at a position of both halves, moved to bit `place`."""
    mask = ((1 << width) - 1) * 0x10001
    if isinstance(position, int):
        shift = position * width - place
        moved = word >> _u32(shift) if shift >= 0 else word << _u32(-shift)
        return moved & _u32(mask << place)
    return ((word >> (position * width).astype(jnp.uint32)) & _u32(mask)) << _u32(place)


def _load_2d(ref: Ref, slot: Int, rows: jax.Array, first: Int, count: int) -> jax.Array:
    steps = first + jax.lax.broadcasted_iota(jnp.int32, (count,), 0)
    return ref[slot, rows[:, None], steps[None, :]]
