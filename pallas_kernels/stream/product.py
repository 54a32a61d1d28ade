"""A warp's part of x W^T: tiles of 16 rows, columns of x in tiles of 8, some blocks of K.

Words, scales and zeros are copied into shared memory while earlier ones are multiplied; a warp has
a ring of its own there and waits for no other. x comes straight from the caches. For a group of K

    sums[m] = sum of -offset x 2^-i and of x      (two rows of one product with a constant operand)
    acc     = -offset sum - zero sums[m], then += (offset + q 2^i) (x 2^-i)       the matrix units
    total  += scale acc

so the scale meets float32, never a weight (MiLo section 3.3 scales weights in fp16).
"""

import dataclasses
from collections.abc import Callable, Sequence

from pallas_kernels.packed import PLAIN_BITS
from pallas_kernels.stream.emit import Mlir, Value
from pallas_kernels.stream.fragments import STEP, Form, pair, prepare, values
from pallas_kernels.stream.matrix import HALF_LINE, ROWS, Matrix, Part, stage_parts, tile_bytes


@dataclasses.dataclass(frozen=True)
class Lane:
    """Where a thread stands: g and t of its lane, and 1 in `high` where t >= 2."""

    g: Value
    t: Value
    high: Value
    index: Value

    @staticmethod
    def here(e: Mlir, lane: Value) -> "Lane":
        """Of a lane's index in its warp."""
        t = e.band(lane, 3)
        return Lane(e.shr(lane, 2), t, e.shr(t, 1), lane)


class Stream:
    """The blocks of some row tiles of one matrix, as a warp copies and multiplies them.

    A stage is `span` neighbouring blocks of all the tiles. It lies in shared memory tile by tile:
    words, INT3's second plane, scales, zeros, each row by row as in the matrix, so that copies read
    whole cache lines. Rows are spaced so that the lanes' reads fall on different banks.
    """

    def __init__(
        self, e: Mlir, matrix: Matrix, slot: Value, first_rows: Sequence[Value], lane: Lane,
        span: int, wanted: Sequence[Value] | None = None,
    ):  # fmt: skip
        """Computes the addresses that this lane copies from.

        Args:
          e: the instructions.
          matrix: with its addresses.
          slot: i32, which of the stack.
          first_rows: i32 each, where a row tile begins; a multiple of 16.
          lane: of this thread.
          span: blocks of a stage; divides those of a row.
          wanted: i32 for each tile, 0 to take zeros for it; None for all.
        """
        self.wanted = wanted
        self.e, self.matrix, self.lane, self.span = e, matrix, lane, span
        self.parts = stage_parts(matrix, span)
        self.tile_bytes = tile_bytes(matrix, span)
        self.num_tiles = len(first_rows)
        bases = {"scales": matrix.scales, "zeros": matrix.zeros}
        self.bases = [
            [
                e.offset(bases.get(p.of, matrix.words), slot, matrix.num_rows * p.matrix_row_bytes)
                for p in self.parts
            ]
        ] * len(first_rows)
        self.first_rows = list(first_rows)
        self.sources = [
            [self._sources(part, base, first) for part, base in zip(self.parts, row, strict=True)]
            for row, first in zip(self.bases, first_rows, strict=True)
        ]

    def _sources(self, part: Part, base: Value, first: Value) -> Value:
        """i64: what this lane copies in the first pass over a part, of stage 0."""
        e = self.e
        row = e.add(first, self._row_in_pass(part))
        at = e.offset(base, row, part.matrix_row_bytes)
        return e.offset(at, e.rem(self.lane.index, part.lanes_per_row), part.piece)

    def _row_in_pass(self, part: Part) -> Value:
        row = self.e.div(self.lane.index, part.lanes_per_row)
        return self.e.band(row, ROWS - 1)  # a part of few bytes is copied twice, to one place

    def fetch(self, tile: int, stage: Value, present: Value, to: Value) -> None:
        """Starts copying a tile's stage into shared memory; zeros where `present` (i32) is 0."""
        e, copied = self.e, [i for i, part in enumerate(self.parts) if part.copied]
        if self.wanted is not None:
            present = e.band(present, self.wanted[tile])
        pieces = [(i, *self._place(self.parts[i])) for i in copied]
        sources = {i: self.sources[tile][i] for i in copied}
        if self._paired():  # one copy brings scales by half of the lanes, zeros by the other
            (scales, row, column), (zeros, _, _) = pieces[-2:]
            upper = e.compare(self.lane.index, "ge", ROWS)
            step = self.parts[zeros].at - self.parts[scales].at
            column = e.add(column, e.select(upper, step, 0))
            sources[scales] = e.select(upper, sources[zeros], sources[scales])
            pieces = [*pieces[:-2], (scales, row, column)]
        for i, row, column in pieces:
            part = self.parts[i]
            place = e.add(to, e.add(e.mul(row, part.pitch), column))
            source = e.offset(sources[i], stage, part.row_bytes)
            for number in range(part.passes):
                rows = number * part.rows_per_pass
                e.copy_async(
                    place, part.at + rows * part.pitch,
                    source, part.imm + rows * part.matrix_row_bytes, present, part.piece,
                )  # fmt: skip
        e.copies_commit()

    def _place(self, part: Part) -> tuple[Value, Value]:
        """Row and byte in the row that this lane copies in the first pass over a part."""
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

    def _words(self, at: Value, block: int) -> list[list[Value]]:
        """The registers of rows g and g + 8 of a block of the stage."""
        e, form, lane = self.e, self.matrix.form, self.lane
        rows: list[list[Value]] = [[], []]
        for part in self.parts[: form.planes]:
            second = part.of == "second"
            column = e.mul(e.band(lane.t, 1) if second else lane.t, 16)
            place = e.add(at, e.add(e.mul(lane.g, part.pitch), column))
            swap = e.mul(e.band(lane.g, 1), HALF_LINE) if part.swapped else 0
            places = [e.add(place, swap), e.sub(place, swap)]
            first = block * (part.row_bytes // self.span)
            imm = part.at
            for half in range(2):
                for chunk in range(1 if second else form.chunks):
                    where = first + HALF_LINE * chunk
                    place = places[where // HALF_LINE % 2 if part.swapped else 0]
                    where += imm + 8 * half * part.pitch
                    rows[half] += e.load_shared_words(place, where, 4)
        return rows

    def _constants(self, tile: int, at: Value, stage: Value, block: int) -> list[list[list[Value]]]:
        """Words of scales and of zeros, of rows g and g + 8 of a block of the stage."""
        e, m, found = self.e, self.matrix, []
        for i, part in enumerate(self.parts):
            if part.of not in ("scales", "zeros"):
                continue
            width = part.row_bytes // self.span
            halves: list[list[Value]] = [[], []]
            for half in range(2):
                if part.copied:
                    place = e.add(at, e.mul(self.lane.g, part.pitch))
                    imm = part.at + 8 * half * part.pitch + block * width
                    count = width // 4
                    for piece in range(0, count, 4):
                        number = min(4, count - piece)
                        halves[half] += e.load_shared_words(place, imm + 4 * piece, number)
                else:
                    k = e.mul(e.add(e.mul(stage, self.span), block), m.form.block)
                    row = e.add(self.first_rows[tile], e.add(self.lane.g, 8 * half))
                    source = e.offset(self.bases[tile][i], row, part.matrix_row_bytes)
                    size = width // m.groups_per_block
                    source = e.offset(source, e.div(k, m.group_size), size)
                    halves[half].append(e.load_small(source, 0, width))
            found.append(halves)
        return found

    def operands(self, x: Sequence[Value], block: Value) -> list[list[list[Value]]]:
        """Issues the loads of a block of x: of each column tile and step four words of pairs.

        Args:
          x: i64 for each column tile: this lane's column, plus 16 t bytes.
          block: i32, of K.
        """
        e, form = self.e, self.matrix.form
        pointers = [e.offset(pointer, block, 2 * form.block) for pointer in x]
        return [[e.load(p, 2 * STEP * s, 4) for s in range(form.steps)] for p in pointers]

    def prepare_x(self, x: Sequence[Value], block: Value) -> "BlockOfX":
        """x of a block, scaled, and its sums of every group.

        Args:
          x: as in `operands`.
          block: i32, of K.
        """
        words = self.operands(x, block)
        if self.matrix.form.bits == PLAIN_BITS:
            return BlockOfX(words, [])
        words = [[self._scaled(part, step) for step, part in enumerate(c)] for c in words]
        return BlockOfX(words, [[self._sums(s, column) for column in words] for s in self._spans()])

    def _spans(self) -> list[range]:
        """The steps of each group of a block."""
        steps = self.matrix.group // STEP
        return [range(g * steps, (g + 1) * steps) for g in range(self.matrix.groups_per_block)]

    def multiply(
        self, tile: int, at: Value, stage: Value, block: int, x: "BlockOfX", totals: list[Value]
    ) -> list[Value]:
        """totals + the product of a block of one tile.

        Args:
          tile: static.
          at: where its stage lies in shared memory.
          stage: its index.
          block: static, in 0..span - 1.
          x: `prepare_x`.
          totals: of the tile: float32, 4 a column tile, as c of `mma`.
        """
        e, m, form = self.e, self.matrix, self.matrix.form
        totals = list(totals)
        raw = self._words(at, block)
        if form.bits == PLAIN_BITS:
            for j, column in enumerate(x.words):
                for step in range(form.steps):
                    part = totals[4 * j : 4 * j + 4]
                    totals[4 * j : 4 * j + 4] = _two(e, form, raw, step, column[step], part)
            return totals
        constants = self._constants(tile, at, stage, block)
        rows = [prepare(e, form, words, self.lane.high) for words in raw]
        for group, span in enumerate(self._spans()):
            scale = [_value(e, words, group, m.scale_bytes) for words in constants[0]]
            zero = self._zeros(constants, group)
            for j, column in enumerate(x.words):
                of_x = x.sums[group][j]
                acc = [e.fma(zero[c // 2], of_x[2 + c % 2], of_x[c % 2]) for c in range(4)]
                for step in span:
                    acc = _two(e, form, rows, step, column[step], acc)
                for c in range(4):
                    totals[4 * j + c] = e.fma(scale[c // 2], acc[c], totals[4 * j + c])
        return totals

    def _zeros(self, constants: list[list[list[Value]]], group: int) -> list[Value]:
        m = self.matrix
        if m.zero_kind == "symmetric":
            return [float(2 ** (m.form.bits - 1))] * 2
        size = m.scale_bytes if m.zero_kind == "float" else 1
        return [_value(self.e, words, group, size) for words in constants[1]]

    def _scaled(self, words: list[Value], step: int) -> list[Value]:
        """x 2^-i of a step."""
        form = self.matrix.form
        exponent = form.field(step).exponent
        if not exponent:
            return words
        factor = pair(form.kind, -exponent)
        return [self.e.fma_pair(form.kind, word, factor, 0x80008000) for word in words]

    def _sums(self, span: range, column: list[list[Value]]) -> list[Value]:
        """-offset times the sum of x 2^-i, twice, and minus the sum of x, twice: of a group."""
        form = self.matrix.form
        sums: list[Value] = [0.0] * 4
        power = form.offset.bit_length() - 1
        top = pair(form.kind, power, negative=True) if form.offset else 0
        for step in span:
            bottom = pair(form.kind, form.field(step).exponent, negative=True)
            for half in range(2):
                part = column[step][2 * half : 2 * half + 2]
                sums = self.e.mma(form.kind, [top, bottom, top, bottom], part, sums)
        return sums


@dataclasses.dataclass(frozen=True)
class BlockOfX:
    """A block of x in registers."""

    words: list[list[list[Value]]]  # column tiles, steps, 4 words
    sums: list[list[list[Value]]]  # groups, column tiles, 4 float32 (`Stream._sums`)


def _value(e: Mlir, words: list[Value], index: int, size: int) -> Value:
    """float32 of one scale or zero of a row."""
    word, within = divmod(index * size, 4)
    found = words[word]
    if size == 4:
        return e.f32_of_bits(found)
    return e.byte_to_f32(found, within) if size == 1 else e.half_to_f32(found, within // 2)


def _two(
    e: Mlir, form: Form, rows: list[list[Value]], step: int, x: list[Value], acc: list[Value]
) -> list[Value]:
    """acc + the two products of a step; rows are those of g and g + 8."""
    low, high = (values(e, form, row, step) for row in rows)
    for half in range(2):
        i = 2 * half
        a = [low[i], high[i], low[i + 1], high[i + 1]]
        acc = e.mma(form.kind, a, x[i : i + 2], acc)
    return acc


@dataclasses.dataclass(frozen=True)
class Ring:
    """Shared memory of one warp: the stages of `depth` tiles, on their way or there."""

    at: Value
    depth: int


UNROLLED = 1  # stages of a warp that are written out; above, a loop


def walk(
    stream: Stream, first: Value, step: int, x: Sequence[Value], totals: list[Value], ring: Ring,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Value]:  # fmt: skip
    """totals + the products of stages first, first + step, ... of the matrix.

    Args:
      stream: the rows.
      first: i32 in 0..step - 1.
      step: static.
      x: i64 for each column tile: this lane's column of x, plus 16 t bytes.
      totals: float32, 4 a row tile and column tile, row tiles outermost, as c of `mma`.
      ring: 1 or more tiles deep.
      meanwhile: done once the first copies have started; may wait for later ones of its own.
    """
    e, span, tiles = stream.e, stream.span, stream.num_tiles
    stages = stream.matrix.num_blocks // span
    rounds = -(-stages // step)
    depth = min(ring.depth, rounds * tiles)
    size, end = stream.tile_bytes, e.add(ring.at, depth * stream.tile_bytes)
    each = 4 * len(x)
    whole = stages % step == 0

    def fetch(unit: int, base: Value, to: Value) -> None:
        """Tile `unit` of the stages that begin with `base`."""
        later, tile = divmod(unit, tiles)
        stage = e.add(base, later * step)
        present = e.select(e.compare(stage, "lt", stages), 1, 0)
        stream.fetch(tile, e.smaller(stage, stages - 1), present, to)

    def following(at: Value) -> Value:
        moved = e.add(at, size)
        return e.select(e.compare(moved, "eq", end), ring.at, moved)

    def one_stage(
        stage: Value, at: Value, totals: list[Value], left: int | None
    ) -> tuple[list[Value], Value]:
        """left: stages after this one, or None if not known."""
        totals, stage_id = list(totals), e.smaller(stage, stages - 1)  # what is absent reads inside
        parts = [stream.prepare_x(x, e.add(e.mul(stage_id, span), block)) for block in range(span)]
        for tile in range(tiles):
            after = depth if left is None else tiles * (left + 1) - 1 - tile
            e.copies_wait(min(depth - 1, after))
            e.warp_barrier()
            mine = slice(each * tile, each * (tile + 1))
            for block in range(span):
                totals[mine] = stream.multiply(
                    tile, at, stage_id, block, parts[block], totals[mine]
                )
            if left is None or after >= depth:
                e.warp_barrier()  # all lanes have read what is now overwritten
                fetch(tile + depth, stage, at)
            at = following(at)
        return totals, at

    for unit in range(depth):
        fetch(unit, first, e.add(ring.at, unit * size))
    meanwhile()
    if rounds <= UNROLLED:
        at = ring.at
        for i in range(rounds):
            stage = e.add(first, i * step)
            added, at = one_stage(stage, at, totals, rounds - 1 - i)
            if not whole and i == rounds - 1:
                keep = e.compare(stage, "lt", stages)
                added = [e.select(keep, a, b) for a, b in zip(added, totals, strict=True)]
            totals = added
        return totals

    def body(stage: Value, carried: list[Value]) -> list[Value]:
        added, at = one_stage(stage, carried[-1], carried[:-1], None)
        return [*added, at]

    start = [e.const_f32(total) for total in totals]
    return e.loop(first, stages, step, [*start, ring.at], body)[:-1]
