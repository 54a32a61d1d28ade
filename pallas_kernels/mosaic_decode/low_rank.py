"""Low-rank terms U (V x) of streaming kernels, in their matrix's launch (MiLo eq. 12-13).

A block's warps split K of V x: with V's rows among the matrix's own and shared in a cluster
(`fused_low_rank`), or, if there are several terms or another form, separately and before. Each warp
copies some of U's ranks, for the block's outputs, to shared memory as stored, and unpacks them
later. Then the warps' parts of V x are added in their order, and every output adds its own sum over
the rank, all in float32.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from pallas_kernels.mosaic_decode.accumulate import Ring, Totals, accumulate
from pallas_kernels.mosaic_decode.emit import Mlir, Value
from pallas_kernels.mosaic_decode.fused_low_rank import FusedStream
from pallas_kernels.mosaic_decode.low_rank_spec import Share, Term
from pallas_kernels.mosaic_decode.matrix import ROWS
from pallas_kernels.mosaic_decode.product import Lane, Stream
from pallas_kernels.mosaic_decode.u_factor import PoolColumns

CHAINS = 4  # sums of these that do not wait for each other


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The warps' parts of V x in shared memory: float32[number, columns, V's rows]."""

    at: Value
    number: int
    part_bytes: int
    pitch: int  # floats from column to column
    sharers: int = 1  # blocks of the cluster: tile t is in block t mod sharers


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A term in a block: addresses in shared memory, and its effective rank."""

    term: Term
    start: Value
    parts: _Parts
    thin: Value  # V x: float32[columns, padded]
    u: dict[int, Value]  # of a half: float32[padded, width]
    raw: dict[int, Value]  # of a half: U's words of every rank
    ranks: dict[int, Value]  # of a half: 0 where the block has none of its rows
    rank: Value  # 0 where no half has any


class BlockTerms:
    """Terms of one matrix in a thread block; without terms, every method does nothing."""

    def __init__(
        self, e: Mlir, terms: Sequence[Term], share: Share, slot: Value, firsts: Sequence[Value],
        at: Value, thread: Value, sharers: int = 1, is_new: Value | None = None,
    ):  # fmt: skip
        """Loads the ranks.

        Args:
          at: i32, shared memory: `share.room(terms)` bytes.
          is_new: i1, whether V x is not there from other outputs of the same matrix and x; None:
            it never is.
        """
        self.at, self.sharers, self.placed = at, sharers, []
        every = [(term, half * share.num_outputs) for term in terms for half in share.met(term)]
        # Else the first outputs may be without a term.
        are_whole = all(term.covers(first, share.num_outputs) for term, first in every)
        self.is_new = is_new if are_whole else None
        self.e, self.share, self.firsts, self.thread = e, share, firsts, thread
        if share.thin:
            (self.term,) = terms
            of_rank = e.compare(e.band(thread, 1), "eq", 1)
            both = [e.offset(of, slot, 4) for of in (self.term.rank, self.term.start)]
            self.loaded = e.load_volatile(e.select(of_rank, *both))
            return
        for term in terms:
            (start,) = e.load(e.offset(term.start, slot, 4), 0, 1)
            (rank,) = e.load(e.offset(term.rank, slot, 4), 0, 1)
            self.placed.append(self._place(term, at, start, rank))
            at = e.add(at, share.room([term]))

    def _read(self) -> None:
        """Reads the only term's loaded start (even lanes) and rank (odd lanes).

        If every lane had both, compilers would make scalars of them at once, and wait for that.
        """
        start, rank = (self.e.shuffle(self.loaded, lane) for lane in range(2))
        self.placed = [self._place(self.term, self.at, start, rank)]

    def _place(self, term: Term, at: Value, start: Value, rank: Value) -> _Placed:
        e, share = self.e, self.share
        each, pitch = share.part_bytes(term), share.part_pitch(term)
        parts = _Parts(at, share.num_warps, each, pitch, self.sharers)
        thin = e.add(at, share.num_warps * parts.part_bytes)
        u, raw, ranks, most = {}, {}, {}, e.const(0)
        place = e.add(thin, 4 * term.padded * share.columns)
        for half in share.met(term):
            ranks[half] = self._rank_here(term, half, rank)
            most = e.select(e.compare(ranks[half], "gt", 0), rank, most)
            u[half], raw[half] = place, e.add(place, 4 * term.padded * term.width(share.rows))
            place = e.add(place, 4 * term.padded * term.u_words(share.rows))
        return _Placed(term, start, parts, thin, u, raw, ranks, most)

    def _rank_here(self, term: Term, half: int, rank: Value) -> Value:
        """Rank of a term, or 0 if the block's rows of a half have no term."""
        e, share, first = self.e, self.share, self.firsts[half]
        if term.covers(half * share.num_outputs, share.num_outputs):
            return rank
        end = term.first_row + term.u.num_inputs
        above = e.compare(e.add(first, share.rows), "gt", term.first_row)
        return e.select(e.both(above, e.compare(first, "lt", end)), rank, 0)

    def begin(self, x: Sequence[Value], lane: Lane) -> None:
        """Computes V x by warps if it is new, and copies U; a block barrier must follow."""
        e, most = self.e, self.e.const(0)
        for placed in self.placed:
            most = e.bor(most, placed.rank)

        def all_parts() -> None:
            self._start_u_copies(lane)  # with the first copies of V
            if self.is_new is None:
                self._thin_parts(0, x, lane)
            else:
                e.when(self.is_new, lambda: self._thin_parts(0, x, lane))
                e.copies_commit()  # U's words, where no V was copied
                e.copies_wait(0)
                e.warp_barrier()
            self._unpack(lane)

        if self.placed:
            e.when(e.compare(most, "gt", 0), all_parts)

    def _start_u_copies(self, lane: Lane) -> None:
        """Starts copying U's words, with the next group of copies."""
        for placed in self.placed:
            for half in placed.u:
                self._start_u_copy(placed, half, lane)

    def _unpack(self, lane: Lane) -> None:
        """Unpacks U's values that this warp copied, once the copies are done."""
        for placed in self.placed:
            for half in placed.u:
                self._unpack_u(placed, half, lane)

    def fuse(self, stream: Stream, lane: Lane, sharer: Value, after: int) -> FusedStream[Totals]:
        """Joins a warp's rows of the matrix with its share of V's rows of the only term."""
        e, share = self.e, self.share
        tiles = [e.add(sharer, number * self.sharers) for number in range(share.thin)]

        def make() -> Stream:
            self._read()
            return self._rows_of_v(self.placed[0], tiles, lane)

        mine = e.add(self.at, e.mul(e.shr(self.thread, 5), share.part_bytes(self.term)))
        totals = Totals.here(e, mine, lane, share.part_pitch(self.term))
        unpack = functools.partial(self._unpack, lane)
        return FusedStream(stream, make, share.thin, after, totals, unpack)

    def begin_fused(self, stream: FusedStream[Totals], lane: Lane) -> None:
        """Replaces `begin` if V's rows are among the matrix's."""
        stream.other_stream()
        self._start_u_copies(lane)

    def end_fused(self, stream: FusedStream[Totals], lane: Lane) -> None:
        """Completes the fused tiles after the pass; a block barrier must follow."""
        self._read()  # in branches of the pass, where no value leaves
        if not stream.paused:
            self.e.copies_commit()  # U's words, if no tile was copied after them
            self.e.copies_wait(0)
            self.e.warp_barrier()
            self._unpack(lane)

    def _rows_of_v(self, placed: _Placed, tiles: Sequence[Value], lane: Lane) -> Stream:
        e = self.e
        rows = [self._first_row(placed, tile) for tile in tiles]
        wanted = [e.select(e.compare(placed.rank, "gt", e.mul(tile, ROWS)), 1, 0) for tile in tiles]
        return Stream(e, placed.term.v, e.const(0), rows, lane, wanted)

    def _thin_parts(self, number: int, x: Sequence[Value], lane: Lane) -> None:
        """Computes V x of term `number` and later; all copies start before any wait."""
        if number == len(self.placed):
            return
        e, placed = self.e, self.placed[number]
        term, warp = placed.term, e.shr(self.thread, 5)
        tiles = range(term.num_tiles)
        stream = self._rows_of_v(placed, [e.const(tile) for tile in tiles], lane)
        mine = e.add(placed.parts.at, e.mul(warp, placed.parts.part_bytes))
        later = functools.partial(self._thin_parts, number + 1, x, lane)
        ring = Ring(mine, term.depth)
        totals = accumulate(stream, warp, self.share.num_warps, x, ring, later)
        e.copies_wait(0)
        e.warp_barrier()  # the part takes the place of the ring
        part, each = Totals.here(e, mine, lane, term.pitch), 4 * len(x)
        for tile in tiles:
            part.store(e, tile, totals[each * tile : each * (tile + 1)])

    def _first_row(self, placed: _Placed, tile: Value) -> Value:
        """First row of a tile in V's pool; the last tile repeats rows to stay in range."""
        e = self.e
        first = e.add(placed.start, e.mul(tile, ROWS))
        return e.smaller(first, placed.term.v.num_rows - ROWS)

    def _every(
        self, count: Value, step: int, body: Callable[[Value], None], last: bool = False
    ) -> None:
        """Runs the body for this thread's indices below `count`, shared by all threads."""

        def one(index: Value, _: list[Value]) -> list[Value]:
            body(index)
            return []

        first = self.e.sub(step - 1, self.thread) if last else self.thread
        self.e.loop(first, count, step, [], one)

    def _columns(self, placed: _Placed, half: int) -> PoolColumns:
        """Columns of U for the block's rows of a half, in pairs of an even and an odd one."""
        first = self.e.sub(self.firsts[half], placed.term.first_row + placed.term.odd)
        return PoolColumns(self.e, placed.term.u, first, placed.term.width(self.share.rows))

    def _start_u_copy(self, placed: _Placed, half: int, lane: Lane) -> None:
        """Starts copying the words of U for the block's rows of a half."""
        warp, raw = self.e.shr(self.thread, 5), placed.raw[half]
        columns, warps = self._columns(placed, half), self.share.num_warps
        rank = placed.ranks[half]
        places = self._rounded(placed, rank)
        columns.start_copy(placed.start, raw, rank, places, warp, warps, lane.index)

    def _rounded(self, placed: _Placed, rank: Value) -> Value:
        """Rounds a rank up to a multiple of the unrolled terms."""
        stride = placed.term.stride
        return self.e.band(self.e.add(rank, stride - 1), 0xFFFFFFFF - (stride - 1))

    def _unpack_u(self, placed: _Placed, half: int, lane: Lane) -> None:
        """Unpacks U for the rows that this warp copied; zero beyond rank and term."""
        e, term, share = self.e, placed.term, self.share
        columns, width = self._columns(placed, half), term.width(share.rows)
        whole = not term.odd and term.covers(half * share.num_outputs, share.num_outputs)
        pairs = []
        for start in range(0, width // 2, 32):
            pair = e.smaller(e.add(lane.index, start), width // 2 - 1)  # the last one repeatedly
            n = e.sub(e.add(self.firsts[half], e.mul(pair, 2)), term.first_row + term.odd)
            inside = [] if whole else [self._has(term, e.add(n, i)) for i in range(2)]
            place = columns.position_of(n if whole else e.select(inside[0], n, columns.first))
            pairs.append((e.add(placed.u[half], e.mul(pair, 8)), inside, place))

        def one(r: Value, _: list[Value]) -> list[Value]:
            at, row = e.add(placed.raw[half], e.mul(r, columns.pitch)), e.add(placed.start, r)
            for to, inside, place in pairs:
                both = columns.values(place, row, at)
                if inside:
                    both = [e.select(*pair, 0.0) for pair in zip(inside, both, strict=True)]
                e.store_shared_floats(e.add(to, e.mul(r, 4 * width)), 0, both)
            return []

        rounded = self._rounded(placed, placed.ranks[half])
        e.loop(e.shr(self.thread, 5), rounded, share.num_warps, [], one)

    def _has(self, term: Term, n: Value) -> Value:
        """Whether a term has a row n of its own, i1."""
        e = self.e
        return e.both(e.compare(n, "ge", 0), e.compare(n, "lt", term.u.num_inputs))

    def reduce(self) -> None:
        """Adds the parts of V x if it is new; between two barriers of blocks that have some."""
        e, share = self.e, self.share
        for placed in self.placed:
            term = placed.term

            def one(index: Value, placed: _Placed = placed) -> None:
                padded = placed.term.padded
                column, r = e.div(index, padded), e.rem(index, padded)
                used = e.compare(r, "lt", placed.rank)
                total = self._thin(placed, column, e.select(used, r, 0))
                total = e.select(used, total, 0.0)
                e.store_shared(e.add(placed.thin, e.mul(index, 4)), 0, total)

            count = e.select(e.compare(placed.rank, "gt", 0), share.num_x * term.padded, 0)
            if self.is_new is not None:
                count = e.select(self.is_new, count, 0)
            # By the last threads first: they have the fewest values of U to unpack.
            self._every(count, 32 * share.num_warps, one, last=True)

    def _thin(self, placed: _Placed, column: Value, r: Value) -> Value:
        """Computes one value of V x, float32, adding the warps' parts in order."""
        e, parts = self.e, placed.parts
        tile = e.div(r, ROWS)
        # Row r of the matrix lies as much further on as its tile was moved back.
        within = e.sub(e.add(placed.start, r), self._first_row(placed, tile))
        place = e.add(e.mul(e.div(tile, parts.sharers), ROWS), within)
        at = e.add(parts.at, e.mul(e.add(e.mul(column, parts.pitch), place), 4))
        owner = e.rem(tile, parts.sharers)
        total: Value = 0.0
        for imm in range(0, parts.number * parts.part_bytes, parts.part_bytes):
            remote = parts.sharers > 1
            found = e.load_cluster(at, owner, imm) if remote else e.load_shared(at, imm)
            total = found if imm == 0 else e.fadd(total, found)
        return total

    def add(self, total: Value, half: int, column: Value, row: Value) -> Value:
        """Adds the terms of one output to a total."""
        e = self.e
        for placed in self.placed:
            if half not in placed.u:
                continue
            width, stride = placed.term.width(self.share.rows), placed.term.stride
            of_x = e.add(placed.thin, e.mul(column, 4 * placed.term.padded))
            of_u = e.add(placed.u[half], e.mul(e.add(row, placed.term.odd), 4))

            def some(
                r: Value, sums: list[Value], of_x: Value = of_x, of_u: Value = of_u,
                width: int = width, stride: int = stride,
            ) -> list[Value]:  # fmt: skip
                thin, u = e.add(of_x, e.mul(r, 4)), e.add(of_u, e.mul(r, 4 * width))
                for first in range(0, stride, 4):
                    for i, word in enumerate(e.load_shared_words(thin, 4 * first, 4), first):
                        value = e.load_shared(u, 4 * i * width)
                        sums[i % CHAINS] = e.fma(e.f32_of_bits(word), value, sums[i % CHAINS])
                return sums

            zeros = [e.const_f32(0.0)] * CHAINS
            for part in e.loop(0, placed.ranks[half], stride, zeros, some):
                total = e.fadd(total, part)
        return total
