"""Converts packed words to register operands of Hopper's m64nNk16, within each lane.

Four warps take 64 rows, 16 each; lane (g, t) = (lane / 4, lane mod 4) of a warp holds of rows g and
g + 8 the pairs k = 2t, 2t + 1 and 2t + 8, 2t + 9 of every 16 k. In `layout` such a pair is one bit
position of both halves of one word, and 16 consecutive k are one position of 8 consecutive words,
so the lane needs words t and t + 4 of these and x keeps its natural order.

A field of w bits at bit e of a half, put under the bits 0x4300, is 128 + q 2^e in bf16. As float32,
the low half alone (shifted up) is that number exactly; the whole word is the high half's number and
a small rest that the low half leaves, below 0.27 with a spread under 3e-4 (of a step of 2^e). So
one fused multiply-add each, with the offsets in its constant term, makes the weight in float32 and
one rounding the operand:

    w = (128 + q 2^e) (s 2^-e) - (128 2^-e + z) s
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels import layout
from pallas_kernels.mosaic_decode.emit import Value
from pallas_kernels.mosaic_decode.fragments import number_of
from pallas_kernels.mosaic_prefill.emit import BYTE_OFFSET, Emitter
from pallas_kernels.packed import PackedMatrices

BLOCK = layout.BLOCK  # k that a lane unpacks words of at a time
STAGE = 64  # k of one register operand: four instructions
SLICE = 16  # k of an instruction
STAGES = BLOCK // STAGE
ROWS = 64  # of four warps

_MAGIC = 0x43004300  # both halves 128 in bf16
# The low half's part of the whole word as float32: 0x4300 in its last places.
_REST = 0x4300 * 2.0**-16


class _Tile(NamedTuple):
    """Consecutive words of a block's row that one copy puts into shared memory."""

    first_word: int  # of the row, for block 0
    num_words: int  # 8, 16 or 32: the length of a swizzled row in shared memory
    pitch: int  # words from block to block of the row
    refined: bool = False  # of the plane that lies apart


@dataclasses.dataclass(frozen=True)
class MatrixFormat:
    """Static facts of packed matrices [N, K] of 2, 3, 4 or 8 bits."""

    bits: int
    kind: str  # of x and of the operand: "bf16" or "f16"
    num_rows: int
    num_inputs: int
    group_size: int
    num_groups: int
    scale_bytes: int
    zero_kind: str
    paired: bool = False  # tiles take the matrix's halves alternately, eight rows each
    apart: bool = False  # planes lie in arrays of their own

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of each plane of a row."""
        return (layout.PREFIX_PLANES if self.apart else layout.PLANES)[self.bits]

    @property
    def num_blocks(self) -> int:
        """Blocks of K; the last may be half of one."""
        return -(-self.num_inputs // BLOCK)

    @property
    def ends_in_half(self) -> bool:
        """Whether the last block is half of one."""
        return self.num_inputs % BLOCK != 0

    @property
    def groups_per_block(self) -> int:
        """Scales per block of a row."""
        return max(1, BLOCK // self.group_size)

    @property
    def tiles(self) -> tuple[_Tile, ...]:
        """Tiles of a block's row, at most 32 words (128 bytes) each."""
        if self.apart:
            planes = layout.planes_apart(self.num_inputs, self.bits)
        else:
            planes = layout.planes(self.num_inputs, self.bits)
        found = []
        for number, plane in enumerate(planes):
            words = BLOCK * plane.width // 32
            size, refined = min(words, 32), self.apart and number > 0
            found += [
                _Tile(plane.first_word + i, size, words, refined) for i in range(0, words, size)
            ]
        return tuple(found)

    @property
    def _words_per_block(self) -> int:
        """Words per block of a row."""
        return BLOCK * self.bits // 32

    @property
    def num_raw(self) -> int:
        """Registers per lane for the words of a block, of both rows."""
        return 2 * self._words_per_block // 4

    @property
    def zero_bytes(self) -> int:
        """Bytes of one zero point in memory."""
        return {"float": self.scale_bytes, "integer": 1, "symmetric": 0}[self.zero_kind]

    @property
    def num_constants(self) -> int:
        """Registers per lane for the scales and zeros of a block."""
        return 2 * (self._registers(self.scale_bytes) + self._registers(self.zero_bytes))

    def _registers(self, size: int) -> int:
        return -(-self.groups_per_block * size // 4)

    def _constant(
        self, e: Emitter, constants: Sequence[Value], row: int, group: int
    ) -> tuple[Value, Value]:
        """Reads scale and zero, float32, of row g (0) or g + 8 (1) in a group of the block.

        Args:
          constants: scales of both rows of the block, then zeros of both rows.
          row: 0 or 1.
        """
        per_row = self._registers(self.scale_bytes)
        scale = number_of(e, constants[row * per_row :], group, self.scale_bytes)
        if self.zero_kind == "symmetric":
            return scale, float(2 ** (self.bits - 1))
        rest = constants[2 * per_row + row * self._registers(self.zero_bytes) :]
        zero = number_of(e, rest, group, self.zero_bytes)
        if not self.apart:
            return scale, zero
        derived = layout.prefix_constants(self.bits)
        zero = e.fma(zero, derived.zero_factor, derived.zero_offset)
        return e.fmul(scale, derived.scale_factor), zero


def form_of(weights: PackedMatrices, kind: str, paired: bool = False) -> MatrixFormat:
    """Static facts of packed (not plain) matrices."""
    assert weights.scales is not None
    return MatrixFormat(
        bits=weights.bits,
        kind=kind,
        num_rows=weights.num_outputs,
        num_inputs=weights.num_inputs,
        group_size=weights.group_size,
        num_groups=weights.num_groups,
        scale_bytes=weights.scales.dtype.itemsize,
        zero_kind=weights.zero_kind,
        paired=paired,
        apart=bool(weights.refinements),
    )


def lane_words(form: MatrixFormat) -> list[tuple[int, int, int]]:
    """Words that a lane loads, the t-th from each (row 0 or 1, tile, first word).

    The order is that of `prepare`: rows outermost.
    """
    return [
        (row, i, first)
        for row in range(2)
        for i, tile in enumerate(form.tiles)
        for first in range(0, tile.num_words, 4)
    ]


def prepare(e: Emitter, form: MatrixFormat, raw: Sequence[Value]) -> list[Value]:
    """Converts a block's words for `operand`: only those of two planes change, to nibbles.

    Even positions of the first plane, which has two bits, become the nibbles of one word, odd ones
    those of another. A second plane of two bits has the same positions in the same words. Word j of
    a one-bit plane serves words j and j + 8 of the first: its bit 2p the position p of the former,
    bit 2p + 1 that of the latter; the fourth bit of a nibble is then left as it comes.

    Returns:
      Of two planes: for each row the even nibbles of its four words, then the odd ones.
    """
    if len(form.widths) == 1:
        return list(raw)
    found = []
    if form.widths[1] == 2:
        for row in range(2):
            both = list(
                zip(raw[8 * row : 8 * row + 4], raw[8 * row + 4 : 8 * row + 8], strict=True)
            )
            found += [e.merge(e.shl(two, 2), 0xCCCCCCCC, low, "select") for two, low in both]
            found += [e.merge(two, 0xCCCCCCCC, e.shr(low, 2), "select") for two, low in both]
        return found
    for row in range(2):
        two, one = raw[6 * row : 6 * row + 4], raw[6 * row + 4 : 6 * row + 6]
        for odd in range(2):
            for i, word in enumerate(two):
                high = e.shr(word, 1) if odd else e.shl(word, 1)
                low = e.shr(one[i % 2], 2 * odd + i // 2)
                found.append(e.merge(high, 0x66666666, low, "select"))
    return found


def from_half_block(e: Emitter, form: MatrixFormat, raw: Sequence[Value]) -> list[Value]:
    """Puts the codes of half a block where those of the same k lie in a full one.

    A position has half as many words there. What a full block has beyond 128 k is left as it comes:
    it meets zeros of x.

    Args:
      raw: the lane's words of a block, of which the second half of each row lies beyond the codes.
    """
    found: list[Value] = []
    per_row = len(raw) // 2
    for row in range(2):
        words = raw[row * per_row : row * per_row + per_row // 2]
        for later in range(2):  # of the positions 2 p + later that become p
            found += [_every_other(e, form.bits, e.shr(word, later * form.bits)) for word in words]
    return found


def _every_other(e: Emitter, bits: int, word: Value) -> Value:
    """Moves fields 0, 2, 4, ... of each half of a word to the places 0, 1, 2, ... ."""
    width = bits
    while width < 8:
        mask = sum((1 << width) - 1 << place for place in range(0, 32, 4 * width))
        word = e.merge(word, mask, e.shr(word, width), "select")
        width *= 2
    return word


class _Field(NamedTuple):
    """Position of a slice's codes in a lane's prepared words of one row."""

    word: int  # of the first pair; the second pair is in the next one
    shift: int  # to the right, of the whole word
    exponent: int  # of the lowest bit then


def _field(form: MatrixFormat, piece: int) -> _Field:
    """Position of 16 k, number `piece` of a block."""
    if len(form.widths) == 2:
        position, part = divmod(piece, 2)
        nibble, word = position // 2, 4 * (position % 2) + 2 * part
        if form.bits == 4:  # 7 bits of mantissa hold no second nibble
            return _Field(word, 4 * nibble, 0)
        return _Field(word, 8 * (nibble // 2), 4 * (nibble % 2))
    position, part = divmod(piece, form.bits)  # 16 w k, or w pieces, at a position
    if form.bits == 8:
        return _Field(2 * part, 8 * position, 0)
    in_place = 7 // form.bits  # fields that the mantissa holds at once
    stage, within = divmod(position, in_place)
    return _Field(2 * part, form.bits * in_place * stage, form.bits * within)


def operand(
    e: Emitter, form: MatrixFormat, words: Sequence[Value], constants: Sequence[Value], stage: int
) -> list[Value]:
    """Unpacks the register operand of 64 k: 16 words of pairs.

    Returns:
      For each 16 k: pairs of rows g and g + 8 at k 2t, 2t + 1, then both at k 2t + 8, 2t + 9.
    """
    per_row = len(words) // 2
    factors: dict[tuple[int, int, int], tuple[Value, Value, Value]] = {}
    found = []
    for piece in range(stage * STAGES, (stage + 1) * STAGES):
        where = _field(form, piece)
        group = piece * SLICE // form.group_size if form.group_size < BLOCK else 0
        for pair in range(2):
            for row in range(2):
                key = (row, group, where.exponent)
                if key not in factors:
                    factors[key] = _factors(
                        e, form, *form._constant(e, constants, row, group), key[2]
                    )
                word = words[row * per_row + where.word + pair]
                found.append(_pair(e, form, word, where, factors[key]))
    return found


def _factors(
    e: Emitter, form: MatrixFormat, scale: Value, zero: Value, exponent: int
) -> tuple[Value, Value, Value]:
    """Factor of a code's number, and addends of the low and high half, float32."""
    step = 2.0**-exponent
    if form.bits == 8:
        low = high = BYTE_OFFSET
    else:
        low = 128 * step
        high = (128 + _REST) * step + (2**form.bits - 1) / 2 * 2.0**-16
    minus = e.fmul(scale, -1.0)
    added = [e.fmul(e.fadd(zero, offset), minus) for offset in (low, high)]
    return (e.fmul(scale, step) if exponent else scale), added[0], added[1]


def _pair(
    e: Emitter, form: MatrixFormat, word: Value, where: _Field, factors: tuple[Value, Value, Value]
) -> Value:
    scale, low_term, high_term = factors
    if form.bits == 8:
        first = where.shift // 8
        low, high = (e.byte_number(word, first + 2 * half) for half in range(2))
    else:
        mask = ((1 << form.bits) - 1 << where.exponent) * 0x10001
        high = e.merge(e.shr(word, where.shift), mask, _MAGIC, "or")
        low = e.shl(high, 16)
    numbers = [
        e.fma(e.f32_of_bits(bits), scale, term)
        for bits, term in ((low, low_term), (high, high_term))
    ]
    return e.pack_pair(form.kind, numbers[0], numbers[1])
