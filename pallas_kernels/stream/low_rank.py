"""Low-rank terms U (V x) of the streaming kernels, in the launch of their matrix (MiLo eq. 12-13).

While the first rows of the matrix are on their way, a block's warps share out K of V x, and its
threads bring U's values of the block's outputs to shared memory. Then the warps' parts of V x are
added in their order, and every output adds its own sum over the rank, all in float32.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pallas_kernels.stream.element import Element, num_words
from pallas_kernels.stream.emit import Mlir, Value
from pallas_kernels.stream.matrix import ROWS, Matrix
from pallas_kernels.stream.product import BlockOfX, Lane, Stream
from pallas_kernels.stream.terms import WARP, Share, Term
from pallas_kernels.stream.walk import Ring, Totals, Walk

STRIDE = 8  # terms of the sum over the rank that are written out


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


class _OfU(NamedTuple):
    """A value of U of a block."""

    place: Value  # of the values of a half
    used: Value  # i1: or zero
    element: Element


def alike(a: Matrix, b: Matrix) -> bool:
    """Whether x has the same operands and sums for both (`Stream.prepare_x`)."""
    return a.form == b.form and a.group == b.group


class BlockTerms:
    """The terms of one matrix in a thread block; with none, every method does nothing."""

    def __init__(
        self, e: Mlir, terms: Sequence[Term], share: Share, slot: Value, firsts: Sequence[Value],
        at: Value, thread: Value, part: Value | None = None, borrowed: Value | None = None,
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
          part: i32, of the block in its cluster.
          borrowed: i32, shared memory: `share.borrowed` bytes.
        """
        self.e, self.share, self.firsts, self.thread = e, share, firsts, thread
        self.part = e.const(0) if part is None else part
        self.copied_bytes = share.copied_bytes(terms)
        self.placed, self.copied = [], at
        if share.borrows(terms):
            self.copied = at if borrowed is None else borrowed
        else:
            at = e.add(at, share.parts_bytes(terms) + self.copied_bytes)
        parts = e.add(self.copied, self.copied_bytes)
        self.mailbox, at = at, e.add(at, share.mailbox_bytes(terms))
        for term in terms:
            self.placed.append(self._place(term, slot, parts, at))
            parts = e.add(parts, share.parts_bytes([term]))
            at = e.add(at, share.values_bytes(term))

    def _place(self, term: Term, slot: Value, at: Value, thin: Value) -> _Placed:
        e, share = self.e, self.share
        (start,) = e.load(e.offset(term.start, slot, 4), 0, 1)
        (rank,) = e.load(e.offset(term.rank, slot, 4), 0, 1)
        start = e.select(e.compare(rank, "gt", 0), start, 0)  # else maybe beyond the pool
        u, ranks, most = {}, {}, e.const(0)
        for number, half in enumerate(share.met(term)):
            ranks[half] = self._rank_here(term, half, rank)
            most = e.select(e.compare(ranks[half], "gt", 0), rank, most)
            u[half] = e.add(thin, 4 * term.padded * (share.columns + number * share.rows))
        if share.cluster > 1:
            most = rank  # another block of the cluster may need V x
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
        self.when_any(lambda: self._begin(x, lane))

    def _begin(self, x: Sequence[Value], lane: Lane) -> None:
        ways = self.start(x, lane)
        self.bring_u()
        self.parts(ways)

    def when_any(self, body: Callable[[], None]) -> None:
        """The body, if the block has to do with any term."""
        e, most = self.e, self.e.const(0)
        for placed in self.placed:
            most = e.bor(most, placed.rank)
        if self.placed:
            e.when(e.compare(most, "gt", 0), body)

    def start(self, x: Sequence[Value], lane: Lane) -> list[Walk]:
        """Starts copies of V; the walks that are to multiply it."""
        e, share, ways = self.e, self.share, []
        for placed in self.placed:
            term, warp = placed.term, e.shr(self.thread, 5)
            tiles = [self._tile(local) for local in range(share.tiles(term))]
            rows = [self._first_row(placed, tile) for tile in tiles]
            wanted = [
                e.select(e.compare(placed.rank, "gt", e.mul(tile, ROWS)), 1, 0) for tile in tiles
            ]
            stream = Stream(e, term.v, e.const(0), rows, lane, 1, wanted)
            ring = Ring(e.add(placed.parts, e.mul(warp, share.warp_bytes(term))), share.depth(term))
            ways.append(Walk(stream, warp, share.num_warps, x, ring))
            ways[-1].start()
        return ways

    def _tile(self, local: Value) -> Value:
        """Which of V's row tiles one of the block is."""
        return self.e.add(self.e.mul(local, self.share.cluster), self.part)

    def parts(
        self, ways: Sequence[Walk], held: list[BlockOfX] | None = None,
        like: Matrix | None = None, behind: int = 0,
    ) -> None:  # fmt: skip
        """Products of started walks, to shared memory.

        Args:
          ways: of `start`.
          held: x of each warp's only stage along `like`, if known.
          like: the matrix whose forms of x these are.
          behind: groups of copies that were started after those of `start`.
        """
        e = self.e
        for number, (placed, way) in enumerate(zip(self.placed, ways, strict=True)):
            once, stream = way.rounds == 1, way.stream
            later = [each.depth for each in ways[number + 1 :]]
            if all(each.rounds == 1 for each in ways[: number + 1]):
                way.behind = behind + sum(later)  # else copies of its own are the last ones
            shared = once and like is not None and alike(like, stream.matrix)
            zeros = [0.0] * (way.each * stream.num_tiles)
            totals = way.run(zeros, held if shared else None)[0]
            if not once:
                e.copies_wait(0)
            e.warp_barrier()  # the part takes the place of the ring
            part = Totals.here(e, way.ring_at, stream.lane, self.share.pitch(placed.term))
            for tile in range(stream.num_tiles):
                part.store(e, tile, totals[way.each * tile : way.each * (tile + 1)])

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

    def _of_u(
        self, placed: _Placed, half: int, begin: Value, chunk: int, thread: Value
    ) -> list[_OfU]:
        """Of a row of the block, which is the thread's, and every `ranks`-th r from `begin` on."""
        e, term, rows = self.e, placed.term, self.share.rows
        lanes, ranks = self.share.lanes()
        row = e.add(e.rem(thread, lanes), chunk * lanes)
        row = e.smaller(row, rows - 1)
        n = e.sub(e.add(self.firsts[half], row), term.first_row)
        inside = e.both(e.compare(n, "ge", 0), e.compare(n, "lt", term.u.num_inputs))
        n, first = e.select(inside, n, 0), e.add(begin, e.div(thread, lanes))
        found = []
        for number in range(self.share.at_once(term)):
            # Threads and ranks that are too many repeat the last one.
            r = e.smaller(e.add(first, number * ranks), term.padded - 1)
            used = e.both(inside, e.compare(r, "lt", placed.ranks[half]))
            place = e.add(e.mul(r, rows), row)
            element = Element(e, term.u, e.add(placed.start, e.select(used, r, 0)), n)
            found.append(_OfU(place, used, element))
        return found

    def copy_u(self) -> int:
        """Starts copying the words of values of U with which `bring_u` may begin; their groups."""
        if not self.copied_bytes:
            return 0
        for one, at, pitch in self._copied_u(self.thread):
            one.element.copy(at, pitch)
        self.e.copies_commit()
        return 1

    def _copied_u(self, thread: Value) -> list[tuple[_OfU, Value, int]]:
        """The thread's values, where their words are copied to, and from one word to the next."""
        e, placed, pitch = self.e, self.placed[0], 4 * WARP * self.share.num_warps
        found = self._of_u(placed, min(placed.u), e.const(0), 0, thread)
        at, size = e.add(self.copied, e.mul(thread, 4)), num_words(placed.term.u) * pitch
        return [(one, e.add(at, number * size), pitch) for number, one in enumerate(found)]

    def _store_u(self, placed: _Placed, half: int, found: Sequence[_OfU]) -> None:
        e = self.e
        for one in found:
            value = e.select(one.used, one.element.value(), 0.0)
            e.store_shared(e.add(placed.u[half], e.mul(one.place, 4)), 0, value)

    def bring_u(self, begun: int = 0) -> None:
        """U's values to shared memory; zero beyond the rank and the term's rows.

        Args:
          begun: of `copy_u`, whose copies have come.
        """
        e, (lanes, ranks) = self.e, self.share.lanes()
        for placed in self.placed:
            for half in placed.u:
                # What `add` reads: whole strides.
                whole = e.add(placed.ranks[half], STRIDE - 1)
                whole = e.mul(e.div(whole, STRIDE), STRIDE)
                step = ranks * self.share.at_once(placed.term)
                for chunk in range(-(-self.share.rows // lanes)):
                    first = 0
                    if begun:
                        # Made again, since nothing of it fits registers beside a tile's products.
                        copied = self._copied_u(e.opaque(self.thread))
                        for one, at, pitch in copied:
                            one.element.load_copied(at, pitch)
                        self._store_u(placed, half, [one for one, *_ in copied])
                        begun, first = 0, step
                    if first >= placed.term.padded:
                        continue

                    def some(
                        begin: Value, _: list[Value], placed: _Placed = placed, half: int = half,
                        chunk: int = chunk,
                    ) -> list[Value]:  # fmt: skip
                        found = self._of_u(placed, half, begin, chunk, self.thread)
                        for value in found:
                            value.element.load()
                        self._store_u(placed, half, found)
                        return []

                    e.loop(first, whole, step, [], some)

    def reduce(self) -> None:
        """Adds the warps' parts of V x; between two barriers, of the cluster if blocks share it."""
        e, share = self.e, self.share
        for placed in self.placed:
            term = placed.term
            size, width = share.warp_bytes(term), ROWS * share.tiles(term)

            def one(
                index: Value, placed: _Placed = placed, size: int = size, width: int = width
            ) -> None:
                term = placed.term
                column, local = e.div(index, width), e.rem(index, width)
                tile = self._tile(e.div(local, ROWS))
                r = e.add(e.mul(tile, ROWS), e.rem(local, ROWS))
                used = e.compare(r, "lt", placed.rank)
                first = self._first_row(placed, tile)
                # Row r of the matrix lies as much further on as its tile was moved back.
                moved = e.sub(e.add(placed.start, e.mul(tile, ROWS)), first)
                place = e.select(used, e.add(local, moved), 0)
                place = e.add(e.mul(column, share.pitch(term)), place)
                at = e.add(placed.parts, e.mul(place, 4))
                total = e.load_shared(at, 0)
                for part in range(1, share.num_warps):
                    total = e.fadd(total, e.load_shared(at, part * size))
                total = e.select(used, total, 0.0)
                place = e.add(e.mul(column, term.padded), r)
                to = e.add(placed.thin, e.mul(place, 4))
                if share.cluster == 1:
                    e.store_shared(to, 0, total)
                    return

                def to_all() -> None:
                    e.store_shared(to, 0, total)
                    for later in range(1, share.cluster):
                        block = e.rem(e.add(self.part, later), share.cluster)
                        e.send(to, block, total, self.mailbox)

                e.when(e.compare(r, "lt", term.padded), to_all)

            columns = share.num_x or share.columns
            count = e.select(e.compare(placed.rank, "gt", 0), columns * width, 0)
            self._every(count, 32 * share.num_warps, one)

    def receive(self) -> None:
        """Waits for what other blocks of the cluster send."""
        e, share, expected = self.e, self.share, self.e.const(0)
        if not self.placed or share.cluster == 1:
            return
        for placed in self.placed:
            own = e.div(e.sub(placed.term.num_tiles + share.cluster - 1, self.part), share.cluster)
            tiles = e.sub(placed.term.num_tiles, own)
            sent = e.mul(tiles, 4 * ROWS * (share.num_x or share.columns))
            sent = e.select(e.compare(placed.rank, "gt", 0), sent, 0)
            expected = e.add(expected, sent)
        e.receive(self.mailbox, self.thread, expected)

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
