"""A warp's part of x W^T: tiles of 16 rows, columns of x in tiles of 8, some blocks of K.

Words, scales and zeros are copied into shared memory while earlier ones are multiplied; a warp has
its own ring there and waits for no other. x comes straight from the caches. For a group of K

    sums[m] = sum of -offset x 2^-i and of x      (two rows of one product with a constant operand)
    acc     = -offset sum - zero sums[m], then += (offset + q 2^i) (x 2^-i)       the matrix units
    total  += scale acc

so the scale meets float32, never a weight (MiLo section 3.3 scales weights in fp16).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

from pallas_kernels.mosaic_decode.emit import Mlir, Value
from pallas_kernels.mosaic_decode.fragments import (
    STEP,
    CodeFormat,
    number_of,
    pair,
    prepare,
    values,
)
from pallas_kernels.mosaic_decode.matrix import (
    HALF_LINE,
    ROWS,
    X_SUMS,
    Matrix,
    StagePart,
    stage_parts,
    tile_bytes,
)
from pallas_kernels.packed import PLAIN_BITS


@dataclasses.dataclass(frozen=True)
class Lane:
    """Position of a thread: g and t of its lane, and `high`, 1 if t >= 2."""

    g: Value
    t: Value
    high: Value
    index: Value

    @staticmethod
    def here(e: Mlir, lane: Value) -> "Lane":
        """Position for a lane's index in its warp."""
        t = e.band(lane, 3)
        return Lane(e.shr(lane, 2), t, e.shr(t, 1), lane)


MAX_IMMEDIATE = 2**22  # bytes from a row to a part, within 24 bits of an instruction


# Rows of all slots where a tile begins: in the matrix's own arrays, then where its second plane
# lies if that is apart.
Rows = tuple[Value, ...]


class Stream:
    """Blocks of some row tiles of one matrix, as a warp copies and multiplies them.

    A stage is a block of all the tiles. It lies in shared memory tile by tile:
    words, a second plane, scales, zeros, each row by row as in the matrix, so that copies read
    whole cache lines. Rows are spaced so that the lanes' reads fall on different banks.
    """

    def __init__(
        self, e: Mlir, matrix: Matrix, slot: Value, first_rows: Sequence[Value], lane: Lane,
        wanted: Sequence[Value] | None = None, tiles_at: Sequence[int] = (0,),
    ):  # fmt: skip
        """Computes the addresses that this lane copies from.

        Args:
          first_rows: i32 each, where a row tile begins, or some of them; a multiple of 16. At most
            2^32 rows of all slots have an address.
          wanted: i32 for each tile, 0 to use zeros; None for all.
          tiles_at: rows from each of `first_rows` to the row tiles that share its addresses.
        """
        self.wanted, self.tiles_at = wanted, tiles_at
        self.e, self.matrix, self.lane = e, matrix, lane
        self.parts = stage_parts(matrix)
        self.tile_bytes = tile_bytes(matrix)
        self.num_tiles = len(first_rows) * len(tiles_at)
        slots, bases = [slot], {"scales": matrix.scales, "zeros": matrix.zeros}
        if matrix.form.apart:
            slots += e.load(e.offset(matrix.refined_slots, slot, 4), 0, 1)
            bases["second"] = matrix.refined
        self.rows: list[Rows] = [
            tuple(e.add(e.mul(slot, matrix.num_rows), first) for slot in slots)
            for first in first_rows
        ]
        self.bases = [bases.get(part.of, matrix.words) for part in self.parts]
        pairs = zip(self.parts, self.bases, strict=True)
        self.sources = [self._source(*pair) for pair in pairs if pair[0].copied]
        if self._paired():
            upper, zeros = e.compare(lane.index, "ge", ROWS), self.sources.pop()
            self.sources[-1] = e.select(upper, zeros, self.sources[-1])

    def _source(self, part: StagePart, base: Value) -> Value:
        """Address i64 of this lane's first copy of a part of row 0.., stage 0."""
        e = self.e
        row = self._row_in_pass(part)
        at = e.offset(base, e.sub(e.mul(row, part.matrix_row_bytes), self._skew(part, row)))
        return e.offset(at, e.rem(self.lane.index, part.lanes_per_row), part.piece)

    def _skew(self, part: StagePart, row: Value) -> Value:
        """Bytes from the start of a row's first word to the row; tiles begin at even rows."""
        return self.e.mul(self.e.band(row, 1), 2) if part.skewed else 0

    def _row_in_pass(self, part: StagePart) -> Value:
        row = self.e.div(self.lane.index, part.lanes_per_row)
        return self.e.band(row, ROWS - 1)  # a part of few bytes is copied twice, to one place

    def fetch(
        self, tile: int, stage: Value, present: Value, to: Value, row: Rows | None = None
    ) -> None:
        """Starts copying a tile's stage into shared memory; zeros if `present` (i32) is 0.

        What a short last block lacks is zeros.

        Args:
          row: in place of the first of `rows`.
        """
        e, copied = self.e, [part for part in self.parts if part.copied]
        if self.wanted is not None:
            present = e.band(present, self.wanted[tile])
        pieces = [(part, *self._place(part)) for part in copied]
        if self._paired():  # one copy brings scales by half of the lanes, zeros by the other
            (scales, place, column), (zeros, _, _) = pieces[-2:]
            upper = e.compare(self.lane.index, "ge", ROWS)
            column = e.add(column, e.select(upper, zeros.at - scales.at, 0))
            pieces = [*pieces[:-2], (scales, place, column)]
        number, among = divmod(tile, len(self.tiles_at))
        row = self.rows[number] if row is None else row
        for (part, place, column), base in zip(pieces, self.sources, strict=True):
            place = e.add(to, e.add(e.mul(place, part.pitch), column))
            of_part = row[-1] if part.of == "second" else row[0]
            source = e.offset(base, of_part, part.matrix_row_bytes)
            below = self.tiles_at[among] * part.matrix_row_bytes
            if below >= MAX_IMMEDIATE:
                source, below = e.offset(source, below), 0
            source, inside = e.offset(source, stage, part.row_bytes), present
            if self.matrix.last_size:
                first = e.mul(e.rem(self.lane.index, part.lanes_per_row), part.piece)
                first = e.add(e.mul(stage, part.row_bytes), first)
                end = e.add(self._skew(part, self._row_in_pass(part)), part.stored)
                inside = e.select(e.compare(first, "lt", end), present, 0)
            for number in range(part.passes):
                rows = number * part.rows_per_pass
                imm = part.imm + below + rows * part.matrix_row_bytes
                e.copy_async(
                    place, part.at + rows * part.pitch, source, imm, inside, part.piece
                )  # fmt: skip
        e.copies_commit()

    def _place(self, part: StagePart) -> tuple[Value, Value]:
        """Row and byte in the row that this lane copies first in a part."""
        e, row = self.e, self._row_in_pass(part)
        column = e.mul(e.rem(self.lane.index, part.lanes_per_row), part.piece)
        if part.swapped:
            column = e.bxor(column, e.mul(e.band(row, 1), HALF_LINE))
        return row, column

    def _paired(self) -> bool:
        last = [part for part in self.parts if part.copied][-2:]
        alike = len({part.row_bytes for part in last}) == 1
        return (
            alike
            and [part.of for part in last] == ["scales", "zeros"]
            and (last[0].lanes_per_row == 1)
        )

    def _is_short(self, stage: Value) -> Value | None:
        """Whether a stage is the short block at the end of K, i1; None where all are full."""
        if not self.matrix.last_size:
            return None
        return self.e.compare(stage, "eq", self.matrix.num_blocks - 1)

    def _words(self, at: Value, short_block: Value | None = None) -> list[list[Value]]:
        """Registers of rows g and g + 8 of the stage.

        Args:
          short_block: of `_is_short`.
        """
        e, form, lane = self.e, self.matrix.form, self.lane
        rows: list[list[Value]] = [[], []]
        for part in self.parts[: form.planes]:
            second = part.of == "second"
            shared = second and form.widths[1] == 1  # by lanes t and t + 2
            column = e.mul(e.band(lane.t, 1) if shared else lane.t, 16)
            if shared and short_block is not None:
                column = e.select(short_block, 0, column)
            place = e.add(at, e.add(e.mul(lane.g, part.pitch), column))
            swap = e.mul(e.band(lane.g, 1), HALF_LINE) if part.swapped else 0
            places = [e.add(place, swap), e.sub(place, swap)]
            imm = part.at
            for half in range(2):
                for chunk in range(1 if second else form.chunks):
                    place = places[chunk % 2 if part.swapped else 0]
                    where = HALF_LINE * chunk + imm + 8 * half * part.pitch
                    rows[half] += e.load_shared_words(place, where, 4)
        return rows

    def _constants(self, tile: int, at: Value, stage: Value) -> list[list[list[Value]]]:
        """Words of scales and of zeros, for rows g and g + 8 of the stage."""
        e, m, found = self.e, self.matrix, []
        for i, part in enumerate(self.parts):
            if part.of not in ("scales", "zeros"):
                continue
            width = part.row_bytes
            halves: list[list[Value]] = [[], []]
            for half in range(2):
                if part.copied:
                    place = e.add(at, e.mul(self.lane.g, part.pitch))
                    imm = part.at + 8 * half * part.pitch
                    count = (part.pitch if part.skewed else width) // 4
                    for piece in range(0, count, 4):
                        number = min(4, count - piece)
                        halves[half] += e.load_shared_words(place, imm + 4 * piece, number)
                    if part.skewed:
                        odd, words = e.compare(e.band(self.lane.g, 1), "eq", 1), halves[half]
                        of_word = e.select(odd, 0x5432, 0x3210)
                        pairs = itertools.islice(itertools.pairwise(words), width // 4)
                        halves[half] = [e.permute(low, high, of_word) for low, high in pairs]
                else:
                    k = e.mul(stage, m.form.block)
                    number, among = divmod(tile, len(self.tiles_at))
                    row = e.add(self.lane.g, self.tiles_at[among] + 8 * half)
                    row = e.add(self.rows[number][0], row)
                    source = e.offset(self.bases[i], row, part.matrix_row_bytes)
                    size = width // m.groups_per_block
                    source = e.offset(source, e.div(k, m.group_size), size)
                    halves[half].append(e.load_small(source, 0, width))
            found.append(halves)
        return found

    def operands(
        self, x: Sequence[Value], block: Value, in_order: bool = False
    ) -> list[list[list[Value]]]:
        """Loads a block of x: four words of pairs per column tile and step.

        Args:
          x: i64 for each column tile: this lane's column, plus 16 t bytes.
          in_order: keeps the order with copies; else the compiler chooses.
        """
        e, form = self.e, self.matrix.form
        pointers = [e.offset(pointer, block, 2 * form.block) for pointer in x]
        if (short_block := self._is_short(block)) is not None:
            load = functools.partial(self._of_either_block, short_block, in_order)
            return [[load(p, s) for s in range(form.steps)] for p in pointers]
        return [
            [e.load(p, 2 * STEP * s, 4, in_order=in_order) for s in range(form.steps)]
            for p in pointers
        ]

    def _of_either_block(
        self, short_block: Value, in_order: bool, pointer: Value, step: int
    ) -> list[Value]:
        """Loads x of a step of a full block or of a short one; zeros where that has no codes."""
        e, high = self.e, self.lane.high
        first, exists, by_two = self.matrix.form.short_block(self.matrix.last_size, step)
        place: Value = 2 * first
        if by_two and first:
            place = e.sub(place, e.mul(high, 32))  # else lanes without codes read beyond x
        pointer = e.offset(pointer, e.select(short_block, place, 2 * STEP * step))
        words = e.load(pointer, 0, 4, in_order=in_order)
        absent = e.both(short_block, e.compare(high, "eq", 1)) if by_two and exists else short_block
        return words if exists and not by_two else [e.select(absent, 0, w) for w in words]

    def prepare_x(self, words: list[list[list[Value]]], sums_at: Value | None = None) -> "BlockOfX":
        """Scales a block of x and sums it over every group.

        Args:
          sums_at: i32, shared memory for the sums (`x_sums_bytes`) plus 16 t; None for registers. A
            warp barrier must precede their reads.
        """
        e, columns = self.e, len(words)
        words = [[self._scaled(part, step) for step, part in enumerate(c)] for c in words]
        if self.matrix.zero_kind == "none":
            return BlockOfX(words, lambda group, column: [])
        sums = [[self._sums(s, column) for column in words] for s in self._spans()]
        if sums_at is None:
            return BlockOfX(words, lambda group, column: sums[group][column])
        for group, of_group in enumerate(sums):
            for column, four in enumerate(of_group):
                e.store_shared_floats(sums_at, X_SUMS * (columns * group + column), four)

        def load(group: int, column: int) -> list[Value]:
            at = X_SUMS * (columns * group + column)
            return [e.f32_of_bits(word) for word in e.load_shared_words(sums_at, at, 4)]

        return BlockOfX(words, load)

    def _spans(self) -> list[range]:
        """Steps of each group of a block."""
        steps = self.matrix.group // STEP
        return [range(g * steps, (g + 1) * steps) for g in range(self.matrix.groups_per_block)]

    def multiply(
        self, tile: int, at: Value, stage: Value, x: "BlockOfX", totals: list[Value]
    ) -> list[Value]:
        """Adds the product of a stage of one tile to its totals."""
        e, m, form, high = self.e, self.matrix, self.matrix.form, self.lane.high
        totals = list(totals)
        short_block = self._is_short(stage)
        raw = self._words(at, short_block)
        if form.bits == PLAIN_BITS:
            return _products(e, form, raw, range(form.steps), x.words, totals)
        constants = self._constants(tile, at, stage)
        if short_block is not None:
            high = e.select(short_block, e.band(self.lane.t, 1), high)
            constants = [self._of_short_groups(short_block, *pair) for pair in zip(
                constants, self._constant_bytes(), strict=True)]  # fmt: skip
        rows = [prepare(e, form, words, high) for words in raw]
        for group, span in enumerate(self._spans()):
            scale = [self._scale(words, group) for words in constants[0]]
            acc: list[Value] = [0.0] * (4 * len(x.words))
            if m.zero_kind != "none":
                zero, of_columns = self._zeros(constants, group), range(len(x.words))
                sums = [x.sums(group, j) for j in of_columns]
                acc = [
                    e.fma(zero[c // 2], of_x[2 + c % 2], of_x[c % 2])
                    for of_x in sums for c in range(4)
                ]  # fmt: skip
            acc = _products(e, form, rows, span, x.words, acc)
            both = zip(acc, totals, strict=True)
            totals = [e.fma(scale[i % 4 // 2], a, b) for i, (a, b) in enumerate(both)]
        return totals

    def _constant_bytes(self) -> list[int]:
        """Bytes of a scale, and of a zero where there are any."""
        m = self.matrix
        sizes = {"float": [m.scale_bytes], "integer": [1]}
        return [m.scale_bytes, *sizes.get(m.zero_kind, [])]

    def _of_short_groups(
        self, short_block: Value, rows: list[list[Value]], size: int
    ) -> list[list[Value]]:
        """Gives what are several groups of a full block the constant of one, in a short block."""
        e, times = self.e, self.matrix.form.block // self.matrix.last_size
        if self.matrix.groups_per_block == 1:
            return rows
        return [
            [
                e.select(short_block, _repeated(e, words, i, size, times), word)
                for i, word in enumerate(words)
            ]
            for words in rows
        ]

    def _scale(self, words: list[Value], group: int) -> Value:
        e, form = self.e, self.matrix.form
        if form.is_mxfp4:  # its exponent, in the highest byte
            top = e.permute(words[group // 4], 0, group % 4 << 12 | 0x0444)
            return e.fmul(e.f32_of_bits(e.shr(top, 1)), 2.0**form.scale_power)
        return number_of(self.e, words, group, self.matrix.scale_bytes)

    def _zeros(self, constants: list[list[list[Value]]], group: int) -> list[Value]:
        m = self.matrix
        if m.zero_kind == "symmetric":
            return [float(2 ** (m.form.bits - 1))] * 2
        size = m.scale_bytes if m.zero_kind == "float" else 1
        return [number_of(self.e, words, group, size) for words in constants[1]]

    def _scaled(self, words: list[Value], step: int) -> list[Value]:
        """Scales x of a step by 2^-i, or as all steps of MXFP4."""
        form = self.matrix.form
        exponent = form.x_power - form.field(step).exponent
        if not exponent:
            return words
        factor = pair(form.kind, exponent)
        return [self.e.fma_pair(form.kind, word, factor, 0x80008000) for word in words]

    def _sums(self, span: range, column: list[list[Value]]) -> list[Value]:
        """Sums of a group: -offset times that of x 2^-i, twice, and minus that of x, twice."""
        form = self.matrix.form
        sums: list[Value] = [0.0] * 4
        power = form.offset.bit_length() - 1
        top = pair(form.kind, power, negative=True) if form.offset else 0
        for step in span:
            bottom = pair(form.kind, form.field(step).exponent, negative=True)
            for half in range(2):
                part = column[step][2 * half : 2 * half + 2]
                sums = self.e.mma(form.kind, [top, bottom, top, bottom], part, sums)
        if (derived := self.matrix.constants) is None:
            return sums
        # With alpha + beta zero in place of zero: alpha and beta are put into the sums.
        pairs = list(zip(sums[:2], sums[2:], strict=True))
        moved = [self.e.fma(derived.zero_offset, of_x, offset) for offset, of_x in pairs]
        return moved + [self.e.fmul(derived.zero_factor, of_x) for _, of_x in pairs]


@dataclasses.dataclass(frozen=True)
class BlockOfX:
    """A block of x in registers."""

    words: list[list[list[Value]]]  # column tiles, steps, 4 words
    sums: Callable[[int, int], list[Value]]  # of a group and column tile: `Stream._sums`


def _repeated(e: Mlir, words: list[Value], index: int, size: int, times: int) -> Value:
    """A word of constants of `size` bytes, of which each stands as many `times`."""
    count = 4 // size
    numbers = [(index * count + i) // times for i in range(count)]
    places = [size * (number % count) + byte for number in numbers for byte in range(size)]
    selector = sum(place << 4 * i for i, place in enumerate(places))
    return e.permute(words[numbers[0] // count], 0, selector)


def _products(
    e: Mlir, form: CodeFormat, rows: list[list[Value]], steps: range, x: list[list[list[Value]]],
    acc: list[Value],
) -> list[Value]:  # fmt: skip
    """Adds products of some steps and every column tile to `acc`; rows are g and g + 8.

    It goes step by step, so that few unpacked weights are in registers at a time.
    """
    acc = list(acc)
    for step in steps:
        low, high = (values(e, form, row, step) for row in rows)
        for i in (0, 2):
            a = [low[i], high[i], low[i + 1], high[i + 1]]
            for j, column in enumerate(x):
                mine = slice(4 * j, 4 * j + 4)
                acc[mine] = e.mma(form.kind, a, column[step][i : i + 2], acc[mine])
    return acc
