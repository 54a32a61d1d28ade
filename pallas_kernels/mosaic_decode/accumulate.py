"""A warp's pass along K: its ring of stages in shared memory, and its totals."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from pallas_kernels.mosaic_decode.emit import Mlir, Value
from pallas_kernels.mosaic_decode.fused_low_rank import FusedStream
from pallas_kernels.mosaic_decode.matrix import COLUMNS, ROWS
from pallas_kernels.mosaic_decode.product import BlockOfX, Lane, Rows, Stream

Words = list[list[list[Value]]]  # of a block of x: column tiles, steps, 4 words
UNROLLED = 1  # stages of a warp that are written out; above, a loop
# With totals in shared memory: stages times row tiles, of 250 to 400 instructions each.
UNROLLED_KEPT = 14


@dataclasses.dataclass(frozen=True)
class Ring:
    """Ring of one warp in shared memory: stages of `depth` tiles, copied or in flight."""

    at: Value
    depth: int


@dataclasses.dataclass(frozen=True)
class Totals:
    """Totals of a warp in shared memory: float32[columns, rows]; a lane has its own."""

    at: Value  # i32: of row g of the first tile and column 2 t
    pitch: int  # floats from column to column

    @staticmethod
    def here(e: Mlir, first: Value, lane: Lane, pitch: int) -> "Totals":
        """Totals of this lane; `first` is the address of column 0 of the warp's first row."""
        place = e.add(lane.g, e.mul(lane.t, 2 * pitch))
        return Totals(e.add(first, e.mul(place, 4)), pitch)

    def _places(self, tile: int, count: int) -> list[int]:
        """Byte offsets of a tile's totals: 4 per column tile, as c of `Mlir.mma`."""
        found = []
        for number in range(count):
            j, c = divmod(number, 4)
            row, column = ROWS * tile + 8 * (c // 2), COLUMNS * j + c % 2
            found.append(4 * (column * self.pitch + row))
        return found

    def store(self, e: Mlir, tile: int, totals: Sequence[Value]) -> None:
        """Stores the totals of one row tile."""
        for place, value in zip(self._places(tile, len(totals)), totals, strict=True):
            e.store_shared(self.at, place, e.const_f32(value))

    def load(self, e: Mlir, tile: int, count: int) -> list[Value]:
        """Loads `count` totals of one row tile."""
        return [e.load_shared(self.at, place) for place in self._places(tile, count)]


@dataclasses.dataclass(frozen=True)
class SharedAccumulators:
    """Shared memory of a warp for values that would otherwise be in registers."""

    totals: Totals | None  # None: in registers
    sums_at: Value  # i32: of x (`Stream.prepare_x`), a stage's, plus 16 t


@dataclasses.dataclass(frozen=True)
class NextItem:
    """Next pass of a row of passes: this one's first tiles are in flight, it starts the next's.

    All passes have as many row tiles and stages, one after a first row, and one ring.
    """

    at: Value  # i32, where its first tile lies
    row: Rows  # where the next one's begin
    present: Value  # i32, 0 if it is the last


class _Accumulation:
    """Pass over the warp's stages first, first + step, ... of a stream."""

    def __init__(
        self, stream: Stream | FusedStream[Totals], first: Value, step: int, x: Sequence[Value],
        ring: Ring, kept: SharedAccumulators | None = None, next_item: NextItem | None = None,
        of_row: bool = False,
    ):  # fmt: skip
        e = stream.e
        self.e, self.stream, self.x, self.kept, self.next_item = e, stream, x, kept, next_item
        self.first, self.step, self.ring_at = first, step, ring.at
        self.stages = stream.matrix.num_blocks
        self.rounds = -(-self.stages // step)
        self.stored = None if kept is None else kept.totals
        self.whole = self.stages % step == 0  # every warp has as many
        # A ring holds tiles of this pass and the next, whose warps may have a stage fewer.
        fewest = self.rounds - (of_row and self.rounds > UNROLLED and not self.whole)
        self.depth = min(ring.depth, fewest * stream.num_tiles)
        self.end = e.add(ring.at, self.depth * stream.tile_bytes)
        # Where the pass begins in the ring is known, and so where each of its tiles lies.
        even = self.rounds * stream.num_tiles % self.depth == 0
        self.fixed = self.rounds <= UNROLLED and (even or not of_row)
        self.each = 4 * len(x)  # totals of a tile
        self.later: Callable[[], None] | None = None

    def place(self, unit: int) -> Value:
        """Address of the warp's tile `unit` in the ring."""
        return self.e.add(self.ring_at, unit % self.depth * self.stream.tile_bytes)

    def start(self) -> None:
        """Fills the ring."""
        for unit in range(self.depth):
            self.fetch(unit, self.first, self.place(unit))

    def fetch(self, unit: int, base: Value, to: Value) -> None:
        """Fetches tile `unit` of the stages from `base` on, or of the next pass's first ones."""
        e, stream, next_item = self.e, self.stream, self.next_item
        later, tile = divmod(unit, stream.num_tiles)
        stage, present, row = e.add(base, later * self.step), None, None
        if next_item is not None:
            (row,) = stream.rows
            if self.rounds <= UNROLLED:  # then `base` is the first
                if later >= self.rounds:
                    stage = e.sub(stage, self.rounds * self.step)
                    present, row = next_item.present, next_item.row
            else:
                beyond = e.compare(stage, "ge", self.stages)
                stage = e.select(beyond, e.sub(stage, self.passed), stage)
                present = e.select(beyond, next_item.present, 1)
                both = zip(next_item.row, row, strict=True)
                row = tuple(e.select(beyond, *pair) for pair in both)
        if next_item is None or not self.whole:
            inside = e.select(e.compare(stage, "lt", self.stages), 1, 0)
            present = inside if present is None else e.band(inside, present)
            stage = e.smaller(stage, self.stages - 1)
        stream.fetch(tile, stage, 1 if present is None else present, to, row)

    @functools.cached_property
    def passed(self) -> Value:
        """Distance from this pass's stages to the next one's: `step` times its stages."""
        e = self.e
        if self.whole:
            return e.const(self.rounds * self.step)
        left = e.sub(self.stages + self.step - 1, self.first)
        return e.mul(e.div(left, self.step), self.step)

    def following(self, at: Value, unit: int | None) -> Value:
        """Next address in the ring; `unit` is the tile's here, if known."""
        e = self.e
        if unit is not None:
            return self.place(unit + 1)
        moved = e.add(at, self.stream.tile_bytes)
        return e.select(e.compare(moved, "eq", self.end), self.ring_at, moved)

    def load_x(self, stage: Value, in_order: bool = False) -> Words:
        """Loads x of a stage."""
        return self.stream.operands(self.x, stage, in_order)

    def prepare_x(self, words: Words) -> BlockOfX:
        """Prepares x of a stage as operands."""
        return self.stream.prepare_x(words, None if self.kept is None else self.kept.sums_at)

    def _one_stage(
        self, stage: Value, at: Value, totals: list[Value], left: int | None,
        x: Words | None = None, preloaded: BlockOfX | None = None,
    ) -> tuple[list[Value], Value]:  # fmt: skip
        """Computes a stage's products.

        Args:
          left: stages after this one; None if unknown, for stages inside the matrix.

        Returns:
          The totals, and the address of the next stage's first tile.
        """
        e, stream, tiles = self.e, self.stream, self.stream.num_tiles
        totals, stage_id = list(totals), e.smaller(stage, self.stages - 1)  # absent: reads inside
        sure = self.stored is not None or left is None or left > 0 or self.whole
        part = preloaded or self.prepare_x(x or self.load_x(stage_id))
        for tile in range(tiles):
            after = tiles * (left + 1) - 1 - tile if left is not None else self.depth
            if self.next_item is not None:
                after = self.depth  # there are always more
            e.copies_wait(min(self.depth - 1, after))
            e.warp_barrier()
            before = self._totals_of(tile, totals, left)
            mine = stream.multiply(tile, at, stage_id, part, before)
            if not sure:
                keep = e.compare(stage, "lt", self.stages)
                mine = [e.select(keep, a, b) for a, b in zip(mine, before, strict=True)]
            self.put(tile, totals, mine)
            if self.later is not None:
                self.later()
                self.later = None
            if after >= self.depth:
                e.warp_barrier()  # all lanes have read what is now overwritten
                self.fetch(tile + self.depth, stage, at)
            if isinstance(stream, FusedStream) and self.rounds == 1 and self.whole:
                stream.after_tile(tile, self.depth)
            unit = None
            if self.fixed and left is not None:
                unit = tiles * (self.rounds - left - 1) + tile
            at = self.following(at, unit)
        return totals, at

    def _totals_of(self, tile: int, totals: list[Value], left: int | None) -> list[Value]:
        """Totals of a tile so far; `left` as in `_one_stage`."""
        stored, number = self._kept_at(tile)
        if stored is None:
            return totals[self.each * number : self.each * (number + 1)]
        if left == self.rounds - 1:
            return [0.0] * self.each
        return stored.load(self.e, number, self.each)

    def put(self, tile: int, totals: list[Value], mine: list[Value]) -> None:
        """Stores a tile's new totals."""
        stored, number = self._kept_at(tile)
        if stored is None:
            totals[self.each * number : self.each * (number + 1)] = mine
        else:
            stored.store(self.e, number, mine)

    def _kept_at(self, tile: int) -> tuple[Totals | None, int]:
        """Storage of a tile's totals, None for registers, and its number there."""
        if not isinstance(self.stream, FusedStream):
            return self.stored, tile
        other, number = self.stream.number(tile)
        return self.stream.totals if other else self.stored, number

    def clear(self) -> None:
        """Sets the totals in shared memory to zero."""
        for tile in range(self.stream.num_tiles):
            if self._kept_at(tile)[0] is not None:
                self.put(tile, [], [0.0] * self.each)

    def do(self, meanwhile: Callable[[], None]) -> None:
        """Runs `meanwhile` at once, or after the first tile if its inputs are known only then."""
        if isinstance(self.stream, FusedStream) and self.rounds == 1 and self.whole:
            self.later = meanwhile
            if self.stored is None:  # else there is a branch, as `run_kept` says
                self.e.warp_barrier()  # compilers move no load that it waits for beyond this
        else:
            meanwhile()

    def run(
        self, totals: list[Value], preloaded: BlockOfX | None = None
    ) -> tuple[list[Value], Value]:
        """Runs every stage; returns the totals in registers, and the ring's position."""
        e, at = self.e, self.ring_at if self.next_item is None or self.fixed else self.next_item.at
        if self.rounds <= UNROLLED:
            for i in range(self.rounds):
                stage = e.add(self.first, i * self.step)
                left = self.rounds - 1 - i
                totals, at = self._one_stage(stage, at, totals, left, preloaded=preloaded)
            return totals, at

        def body(stage: Value, carried: list[Value]) -> list[Value]:
            added, at = self._one_stage(stage, carried[-1], carried[:-1], None)
            return [*added, at]

        start = [e.const_f32(total) for total in totals]
        *totals, at = e.loop(self.first, self.stages, self.step, [*start, at], body)
        return totals, at

    def run_kept(self, meanwhile: Callable[[], None]) -> None:
        """Runs every stage, with totals in shared memory.

        Unrolled stages are in branches, although all warps may take them: no compiler then moves
        products, which wait for x, before the first copies, which need not.
        """
        e, stored, tiles = self.e, self.stored, self.stream.num_tiles
        assert stored is not None
        loop = self.rounds * tiles > UNROLLED_KEPT
        x = None if loop else self.load_x(e.smaller(self.first, self.stages - 1), in_order=True)
        self.start()
        self.do(meanwhile)
        if loop or self.stages < self.step:  # the first stage adds to them, or there is none
            self.clear()
        if loop:
            _ignore(self.run([]))
            return
        for i in range(self.rounds):
            stage, words = e.add(self.first, i * self.step), None if i else x

            def one(i: int = i, stage: Value = stage, words: Words | None = words) -> None:
                if i:
                    e.warp_barrier()  # all lanes have read the sums that are now overwritten
                _ignore(
                    self._one_stage(stage, self.place(i * tiles), [], self.rounds - 1 - i, words)
                )

            e.when(e.compare(stage, "lt", self.stages), one)


def accumulate(
    stream: Stream | FusedStream[Totals], first: Value, step: int, x: Sequence[Value], ring: Ring,
    meanwhile: Callable[[], None] = lambda: None, kept: SharedAccumulators | None = None,
) -> list[Value]:  # fmt: skip
    """Multiplies stages first, first + step, ... of the matrix.

    Args:
      first: i32 in 0..step - 1.
      x: i64 for each column tile: this lane's column of x, plus 16 t bytes.
      meanwhile: runs once the first copies have started; may wait for later ones of its own.
      kept: shared memory for sums of x and maybe the totals; None for registers.

    Returns:
      float32, 4 a row tile and column tile, row tiles outermost, as c of `mma`; none if
      these are kept.
    """
    sums = _Accumulation(stream, first, step, x, ring, kept)
    if sums.stored is not None:
        sums.run_kept(meanwhile)
        return []
    sums.start()
    sums.do(meanwhile)
    if sums.rounds > UNROLLED:
        sums.clear()
    own = stream.own_tiles if isinstance(stream, FusedStream) else stream.num_tiles
    return sums.run([0.0] * (sums.each * own))[0]


def preload_x(
    stream: Stream, first: Value, step: int, x: Sequence[Value], kept: SharedAccumulators | None
) -> BlockOfX | None:
    """Loads x of a warp with a single stage, for all passes along equal K and x."""
    sums = _Accumulation(stream, first, step, x, Ring(stream.e.const(0), 1), kept)
    if sums.rounds > 1:
        return None
    return sums.prepare_x(sums.load_x(stream.e.smaller(first, sums.stages - 1)))


def start_copies(stream: Stream, first: Value, step: int, ring: Ring) -> None:
    """Starts the copies of the first in a row of passes; see `accumulate_pipelined`."""
    _Accumulation(stream, first, step, [], ring, of_row=True).start()


def accumulate_pipelined(
    stream: Stream, first: Value, step: int, x: Sequence[Value], ring: Ring, next_item: NextItem,
    meanwhile: Callable[[], None], kept: SharedAccumulators | None,
    preloaded: BlockOfX | None,
) -> tuple[list[Value], Value]:  # fmt: skip
    """Multiplies like `accumulate`, one of a row of passes through which copies never pause.

    Args:
      kept: storage for sums of x; None for registers.

    Returns:
      The totals, and the address of the next pass's first tile.
    """
    sums = _Accumulation(stream, first, step, x, ring, kept, next_item, of_row=True)
    meanwhile()
    return sums.run([0.0] * (sums.each * stream.num_tiles), preloaded)


def _ignore(_: object) -> None:
    return None
