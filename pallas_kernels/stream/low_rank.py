"""Low-rank terms U (V x) of the streaming kernels, in the launch of their matrix (MiLo eq. 12-13).

While the first rows of the matrix are on their way, a block's warps share out K of V x, and its
threads bring U's values of the block's outputs to shared memory. Then the warps' parts of V x are
added in their order, and every output adds its own sum over the rank, all in float32.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from pallas_kernels.stream.element import Element
from pallas_kernels.stream.emit import Mlir, Value
from pallas_kernels.stream.matrix import ROWS
from pallas_kernels.stream.product import Lane, Stream
from pallas_kernels.stream.terms import Share, Term
from pallas_kernels.stream.walk import Ring, Totals, walk

STRIDE = 8  # terms of the sum over the rank that are written out
AT_ONCE = 4  # values of U that a thread loads before it uses the first


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A term in a block: where its parts lie in shared memory, and what is left of its rank."""

    term: Term
    start: Value
    parts: Value  # of all warps
    thin: Value  # V x: float32[columns, padded]
    u: dict[int, Value]  # of a half: float32[padded, rows]
    ranks: dict[int, Value]  # of a half: 0 where the block has none of its rows
    rank: Value  # 0 where no half has any


class BlockTerms:
    """The terms of one matrix in a thread block; with none, every method does nothing."""

    def __init__(
        self, e: Mlir, terms: Sequence[Term], share: Share, slot: Value, firsts: Sequence[Value],
        at: Value, thread: Value,
    ):  # fmt: skip
        """Loads the ranks.

        Args:
          e: the instructions.
          terms: with their addresses.
          share: of the block.
          slot: i32, which matrix.
          firsts: i32 for each half: its first matrix row.
          at: i32, shared memory: `share.room(terms)` bytes.
          thread: i32, of the block.
        """
        self.e, self.share, self.firsts, self.thread = e, share, firsts, thread
        self.placed = []
        for term in terms:
            self.placed.append(self._place(term, slot, at))
            at = e.add(at, share.room([term]))

    def _place(self, term: Term, slot: Value, at: Value) -> _Placed:
        e, share = self.e, self.share
        (start,) = e.load(e.offset(term.start, slot, 4), 0, 1)
        (rank,) = e.load(e.offset(term.rank, slot, 4), 0, 1)
        thin = e.add(at, share.num_warps * term.warp_bytes(share.columns))
        u, ranks, most = {}, {}, e.const(0)
        for number, half in enumerate(share.met(term)):
            ranks[half] = self._rank_here(term, half, rank)
            most = e.select(e.compare(ranks[half], "gt", 0), rank, most)
            u[half] = e.add(thin, 4 * term.padded * (share.columns + number * share.rows))
        return _Placed(term, start, at, thin, u, ranks, most)

    def _rank_here(self, term: Term, half: int, rank: Value) -> Value:
        """The rank, or 0 where the block's rows of a half have no term."""
        e, share, first = self.e, self.share, self.firsts[half]
        if term.covers(half * share.num_outputs, share.num_outputs):
            return rank
        end = term.first_row + term.u.num_inputs
        above = e.compare(e.add(first, share.rows), "gt", term.first_row)
        return e.select(e.both(above, e.compare(first, "lt", end)), rank, 0)

    def begin(self, x: Sequence[Value], lane: Lane) -> None:
        """Parts of V x of every warp, and U, to shared memory; a block barrier has to follow.

        Args:
          x: as in `walk`.
          lane: of this thread.
        """
        e, most = self.e, self.e.const(0)
        for placed in self.placed:
            most = e.bor(most, placed.rank)
        if self.placed:
            e.when(e.compare(most, "gt", 0), lambda: self._thin_parts(0, x, lane))

    def _thin_parts(self, number: int, x: Sequence[Value], lane: Lane) -> None:
        """Those of term `number` and later, which start their copies before they wait for any."""
        if number == len(self.placed):
            for placed in self.placed:
                for half in placed.u:
                    self._bring_u(placed, half)
            self.e.warp_barrier()  # threads had different numbers of values; products need all
            return
        e, placed = self.e, self.placed[number]
        term, warp = placed.term, e.shr(self.thread, 5)
        tiles = range(term.num_tiles)
        rows = [self._first_row(placed, e.const(tile)) for tile in tiles]
        wanted = [e.select(e.compare(placed.rank, "gt", ROWS * tile), 1, 0) for tile in tiles]
        stream = Stream(e, term.v, e.const(0), rows, lane, 1, wanted)
        mine = e.add(placed.parts, e.mul(warp, term.warp_bytes(self.share.columns)))
        later = functools.partial(self._thin_parts, number + 1, x, lane)
        ring = Ring(mine, term.depth)
        totals = walk(stream, warp, self.share.num_warps, x, ring, later)
        e.copies_wait(0)
        e.warp_barrier()  # the part takes the place of the ring
        part, each = Totals.here(e, mine, lane, term.pitch), 4 * len(x)
        for tile in tiles:
            part.store(e, tile, totals[each * tile : each * (tile + 1)])

    def _first_row(self, placed: _Placed, tile: Value) -> Value:
        """Of V's pool; its last tile is repeated where a tile would reach beyond it."""
        e = self.e
        first = e.add(placed.start, e.mul(tile, ROWS))
        return e.smaller(first, placed.term.v.num_rows - ROWS)

    def _every(self, count: Value, step: int, body: Callable[[Value], None]) -> None:
        """The body for this thread's indices below `count`, which all threads share."""

        def one(index: Value, _: list[Value]) -> list[Value]:
            body(index)
            return []

        self.e.loop(self.thread, count, step, [], one)

    def _bring_u(self, placed: _Placed, half: int) -> None:
        """U's values of the block's rows of a half; zero beyond the rank and the term's rows."""
        e, term, rows = self.e, placed.term, self.share.rows
        threads = 32 * self.share.num_warps
        whole = e.mul(e.div(e.add(placed.ranks[half], STRIDE - 1), STRIDE), STRIDE * rows)

        def some(index: Value) -> None:
            found = []
            for number in range(AT_ONCE):
                mine = e.smaller(e.add(index, number * threads), e.sub(whole, 1))
                r, row = e.div(mine, rows), e.rem(mine, rows)
                n = e.sub(e.add(self.firsts[half], row), term.first_row)
                inside = e.both(
                    e.both(e.compare(n, "ge", 0), e.compare(n, "lt", term.u.num_inputs)),
                    e.compare(r, "lt", placed.ranks[half]),
                )
                pool_row = e.add(placed.start, e.select(inside, r, 0))
                element = Element(e, term.u, pool_row, e.select(inside, n, 0))
                found.append((mine, inside, element))
            for mine, inside, element in found:
                value = e.select(inside, element.value(), 0.0)
                e.store_shared(e.add(placed.u[half], e.mul(mine, 4)), 0, value)

        self._every(whole, AT_ONCE * threads, some)

    def reduce(self) -> None:
        """Adds the warps' parts of V x; between two block barriers."""
        e, share = self.e, self.share
        for placed in self.placed:
            term = placed.term
            size = term.warp_bytes(share.columns)

            def one(index: Value, placed: _Placed = placed, size: int = size) -> None:
                term = placed.term
                column, r = e.div(index, term.padded), e.rem(index, term.padded)
                used = e.compare(r, "lt", placed.rank)
                first = self._first_row(placed, e.div(r, ROWS))
                # Row r of the matrix lies as much further on as its tile was moved back.
                tile = e.sub(r, e.rem(r, ROWS))
                place = e.add(tile, e.sub(e.add(placed.start, r), first))
                place = e.add(e.mul(column, term.pitch), e.select(used, place, 0))
                at = e.add(placed.parts, e.mul(place, 4))
                total = e.load_shared(at, 0)
                for part in range(1, share.num_warps):
                    total = e.fadd(total, e.load_shared(at, part * size))
                total = e.select(used, total, 0.0)
                e.store_shared(e.add(placed.thin, e.mul(index, 4)), 0, total)

            count = e.select(e.compare(placed.rank, "gt", 0), share.columns * term.padded, 0)
            self._every(count, 32 * share.num_warps, one)

    def add(self, total: Value, half: int, column: Value, row: Value) -> Value:
        """total + the terms of one output.

        Args:
          total: float32.
          half: static.
          column: i32, of x.
          row: i32, of the block's rows of a half.
        """
        e, rows = self.e, self.share.rows
        for placed in self.placed:
            if half not in placed.u:
                continue
            of_x = e.add(placed.thin, e.mul(column, 4 * placed.term.padded))
            of_u = e.add(placed.u[half], e.mul(row, 4))

            def some(
                r: Value, carried: list[Value], of_x: Value = of_x, of_u: Value = of_u
            ) -> list[Value]:
                (total,) = carried
                thin = e.add(of_x, e.mul(r, 4))
                u = e.add(of_u, e.mul(r, 4 * rows))
                words = e.load_shared_words(thin, 0, 4) + e.load_shared_words(thin, 16, 4)
                for i, word in enumerate(words):
                    total = e.fma(e.f32_of_bits(word), e.load_shared(u, 4 * i * rows), total)
                return [total]

            (total,) = e.loop(0, placed.ranks[half], STRIDE, [total], some)
        return total
