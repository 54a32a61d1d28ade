"""Neighbouring values of a pool's rows, for factors that are read across rows.

The words are copied to shared memory while other work goes on, and become float32 later: reading
single values from global memory would make threads wait.
"""

import dataclasses
from typing import NamedTuple

from pallas_kernels import layout
from pallas_kernels.mosaic_decode.emit import Mlir, Value
from pallas_kernels.mosaic_decode.matrix import Matrix
from pallas_kernels.packed import PLAIN_BITS

WORD = 4  # bytes that a copy brings, the fewest there are
LANES = 32


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Part of one array to copy: `count` words of every row, each with one entry or more."""

    of: str  # "words", "scales" or "zeros"
    row_bytes: int
    first: int  # byte of the row that has the first entry
    each: int  # bytes from entry to entry: of words 4
    count: int
    at: int  # the first one's place among the words of a row
    plane: layout.Plane | None = None

    def low(self, e: Mlir, row: Value, byte: Value) -> Value:
        """Low bits of a byte's address in a row, up to a multiple of 4 common to the row."""
        if self.row_bytes % WORD == 0:
            return byte
        return e.add(e.mul(row, self.row_bytes), byte)


def _segments(matrix: Matrix, count: int) -> list[_Segment]:
    """Segments of `count` neighbouring values of a row, wherever they begin."""
    m, found, at = matrix, [], 0
    if m.form.bits == PLAIN_BITS:
        return [_Segment("words", 2 * m.num_inputs, 0, WORD, count // 2 + 1, 0)]
    blocks = -(-(count - 1) // layout.BLOCK) + 1
    for plane in layout.planes(m.num_inputs, m.form.bits):
        words = min(plane.num_words, blocks * layout.BLOCK * plane.width // layout.WORD_BITS)
        row, first = WORD * m.num_words, WORD * plane.first_word
        found.append(_Segment("words", row, first, WORD, words, at, plane))
        at += words
    groups = min(m.num_groups, -(-(count - 1) // m.group_size) + 1)
    sizes = {"float": m.scale_bytes, "integer": 1}
    for of, size in (("scales", m.scale_bytes), ("zeros", sizes.get(m.zero_kind, 0))):
        if size:
            found.append(_Segment(of, size * m.num_groups, 0, size, groups, at))
            at += groups
    return found


def row_words(matrix: Matrix, count: int) -> int:
    """Words copied per row; odd, so that rows begin at different banks."""
    last = _segments(matrix, count)[-1]
    return (last.at + last.count) | 1


def _end_of(part: _Segment, matrix: Matrix) -> int:
    """Bytes of a part's array."""
    return part.row_bytes * matrix.num_rows


class _PairPosition(NamedTuple):
    """Position of a pair of values among the copied words of a row."""

    index: Value  # of the first
    planes: list[tuple[Value, Value, layout.Plane]]  # byte, and bit of the first
    groups: list[Value]  # of both; one where they always share it


class PoolColumns:
    """Values first .. first + count of a pool's rows, two neighbours at a time.

    Byte offsets in an array are signed 32-bit.
    """

    def __init__(self, e: Mlir, matrix: Matrix, first: Value, count: int):
        """Prepares the columns; `first`, i32 and even, may lie outside a row."""
        self.e, self.matrix, self.segments = e, matrix, _segments(matrix, count)
        inside = e.select(e.compare(first, "gt", 0), first, 0)
        self.first = e.smaller(inside, matrix.num_inputs - 1)
        self.pitch = WORD * row_words(matrix, count)

    def _first_byte(self, part: _Segment) -> Value:
        """Byte of a row at which the first copied entry lies."""
        e = self.e
        if part.of != "words":
            return e.mul(e.div(self.first, self.matrix.group_size), part.each)
        if part.plane is None:
            return e.mul(self.first, 2)
        words = layout.BLOCK * part.plane.width // layout.WORD_BITS
        return e.add(e.mul(e.div(self.first, layout.BLOCK), WORD * words), part.first)

    def start_copy(
        self, row: Value, to: Value, rows: Value, places: Value, warp: Value, num_warps: int,
        lane: Value,
    ) -> None:  # fmt: skip
        """Starts copying a warp's rows warp, warp + num_warps, ...; ends no group of copies.

        Args:
          to: i32, shared memory, `pitch` bytes a row.
          places: i32, rows to fill: those after `rows` with zeros.
          warp: i32, in 0..num_warps - 1.
        """
        e, m = self.e, self.matrix
        bases = {"words": m.words, "scales": m.scales, "zeros": m.zeros}
        count, chunks = self.segments[-1].at + self.segments[-1].count, []
        for start in range(0, count, LANES):
            slot = e.smaller(e.add(lane, start), count - 1)
            source: list[Value] = []
            for part in self.segments:
                if start < part.at + part.count and part.at < start + LANES:
                    mine = self._source(part, slot, bases[part.of])
                    here = e.compare(slot, "ge", part.at)
                    both = zip(mine, source or mine, strict=True)
                    source = [e.select(here, a, b) for a, b in both]
            chunks.append((e.add(to, e.mul(slot, WORD)), source))
        whole = all(_end_of(part, m) % WORD == 0 for part in self.segments)

        last = e.sub(rows, 1)

        def one(r: Value, _: list[Value]) -> list[Value]:
            for place, (base, row_bytes, byte, total) in chunks:
                at = e.add(e.mul(e.add(row, e.smaller(r, last)), row_bytes), byte)
                at = e.band(at, 0xFFFFFFFF - (WORD - 1))
                there, source = e.add(place, e.mul(r, self.pitch)), e.offset(base, at)
                present = e.select(e.compare(r, "lt", rows), 1, 0)
                if whole:
                    e.copy_async(there, 0, source, 0, present, WORD)
                else:
                    size = e.smaller(e.sub(total, at), WORD)  # no bytes beyond the array
                    e.copy_word_async(there, source, e.mul(size, present))
            return []

        e.loop(warp, places, num_warps, [], one)

    def _source(self, part: _Segment, slot: Value, base: Value) -> list[Value]:
        """Source of a part: its array, bytes per row, a slot's first byte in it, bytes of all."""
        e = self.e
        byte = e.add(self._first_byte(part), e.mul(e.sub(slot, part.at), part.each))
        end = part.row_bytes
        if part.plane is not None:
            end = part.first + WORD * part.plane.num_words
        byte = e.smaller(byte, end - (2 if self._plain else part.each))
        return [base, e.const(part.row_bytes), byte, e.const(_end_of(part, self.matrix))]

    @property
    def _plain(self) -> bool:
        return self.matrix.form.bits == PLAIN_BITS

    def position_of(self, index: Value) -> _PairPosition:
        """Position of values index and index + 1; the first is even and copied."""
        e, planes = self.e, []
        for part in self.segments:
            if part.plane is not None:
                word, bit = self._word_and_bit(part.plane, index)
                byte = e.sub(e.add(e.mul(word, WORD), part.first), self._first_byte(part))
                planes.append((e.add(byte, WORD * part.at), bit, part.plane))
        shared = self.matrix.group_size % 2 == 0
        after = e.smaller(e.add(index, 1), self.matrix.num_inputs - 1)
        both = [] if self._plain else [index] if shared else [index, after]
        return _PairPosition(index, planes, [e.div(i, self.matrix.group_size) for i in both])

    def _word_and_bit(self, plane: layout.Plane, index: Value) -> tuple[Value, Value]:
        """Word of the plane and bit at which an even code's part begins, by `layout`."""
        e, width = self.e, plane.width
        block, k = e.div(index, layout.BLOCK), e.rem(index, layout.BLOCK)
        length = layout.padded_length(self.matrix.num_inputs)
        full, rest = divmod(length, layout.BLOCK)

        def within(codes: int) -> tuple[Value, Value]:
            each = codes * width // 16  # of a position
            return e.div(k, each), e.shr(e.rem(k, each), 1)

        position, word = within(layout.BLOCK if full else rest)
        if full and rest:
            short = e.compare(block, "eq", full)
            pairs = zip(within(rest), (position, word), strict=True)
            position, word = (e.select(short, a, b) for a, b in pairs)
        word = e.add(word, e.mul(block, layout.BLOCK * width // layout.WORD_BITS))
        return word, e.mul(position, width)

    def values(self, position: _PairPosition, row: Value, at: Value) -> list[Value]:
        """Unpacks both values of a row as float32."""
        e = self.e
        if self._plain:
            return [self._plain_value(e.add(position.index, i), row, at) for i in range(2)]
        codes = e.const(0)  # in the halves of a word
        for byte, bit, plane in position.planes:
            word = e.shr(e.load_shared(e.add(at, byte), 0, "b32"), bit)
            part = e.band(word, ((1 << plane.width) - 1) * 0x10001)
            codes = e.bor(codes, e.shl(part, plane.shift))
        # 1024 + code, and from it 1024 and a zero point that is whole: exact in fp16.
        symmetric = self.matrix.zero_kind == "symmetric"
        less = (0xE400 + symmetric * 2 ** (self.matrix.form.bits - 1)) * 0x10001
        exact = e.fma_pair("f16", e.bor(codes, 0x64006400), 0x3C003C00, less)
        constants = [self._constants(group, row, at) for group in position.groups]
        values = []
        for half, (scale, *zero) in enumerate([constants[0], constants[-1]]):
            number = e.half_to_f32(exact, half)
            for of_group in zero:
                number = e.fma(of_group, -1.0, number)
            values.append(e.fmul(number, scale))
        return values

    def _plain_value(self, index: Value, row: Value, at: Value) -> Value:
        e, (part,) = self.e, self.segments
        first, mine = (part.low(e, row, e.mul(i, 2)) for i in (self.first, index))
        word = e.sub(e.shr(mine, 2), e.shr(first, 2))
        found = e.load_shared(e.add(at, e.mul(word, WORD)), 0, "b32")
        found = e.band(e.shr(found, e.mul(e.band(mine, 2), 8)), 0xFFFF)
        return e.f32_of_16(self.matrix.form.kind, found)

    def _constants(self, group: Value, row: Value, at: Value) -> list[Value]:
        """Reads the scale, and the zero point if one is stored, as float32."""
        e, m, found = self.e, self.matrix, []
        for part in self.segments:
            if part.of == "words":
                continue
            among = e.sub(group, e.div(self.first, m.group_size))
            word = e.load_shared(e.add(at, e.mul(among, WORD)), WORD * part.at, "b32")
            low = e.band(part.low(e, row, e.mul(group, part.each)), WORD - 1)
            word = word if part.each == WORD else e.shr(word, e.mul(low, 8))
            if part.each == WORD:
                found.append(e.f32_of_bits(word))
            else:
                found.append(e.half_to_f32(word, 0) if part.each == 2 else e.byte_to_f32(word, 0))
        return found
