"""Jobs of the expert kernels: up to 8 pairs of one matrix, found on the device.

Among the pairs (token, a) of one tier and slot, in their order, the first leads a job, and each
that comes 8 pairs later leads another. Thread blocks either belong to a pair, and those of
one that leads no job end (`job_of_pair`), or share all jobs among them (`JobList`).
"""

import dataclasses
import functools
from typing import NamedTuple

from pallas_kernels.mosaic_decode.emit import Mlir, Value
from pallas_kernels.mosaic_decode.matrix import COLUMNS
from pallas_kernels.mosaic_decode.product import Lane

WARP = 32


class ExpertJob(NamedTuple):
    """A job: pairs of one matrix."""

    slot: Value
    count: Value  # 1 .. 8
    members: Value  # i32, shared memory: their numbers, i32 each, in order


@dataclasses.dataclass(frozen=True)
class Pairs:
    """All pairs of a launch: addresses of int32[number] each."""

    tier: Value
    slot: Value
    number: int

    def _load(self, e: Mlir, index: Value) -> tuple[Value, Value]:
        """Loads the tier and slot of a pair."""
        (tier,) = e.load(e.offset(self.tier, index, 4), 0, 1)
        (slot,) = e.load(e.offset(self.slot, index, 4), 0, 1)
        return tier, slot


def job_of_pair(
    e: Mlir, pairs: Pairs, lane: Lane, pair: Value, at: Value
) -> tuple[Value, ExpertJob, Value]:
    """Finds a pair's tier, its job if it leads one, and whether it does (i1).

    Every warp writes the members to one place, so that none has to wait for another.

    Args:
      at: i32, shared memory: i32[8].
    """
    tier, slot = pairs._load(e, pair)
    earlier, count = e.const(0), e.const(0)
    below = e.sub(e.shl(1, lane.index), 1)
    for chunk in range(0, pairs.number, WARP):
        index = e.add(lane.index, chunk)
        its_tier, its_slot = pairs._load(e, e.smaller(index, pairs.number - 1))
        same = e.both(e.compare(its_tier, "eq", tier), e.compare(its_slot, "eq", slot))
        same = e.both(same, e.compare(index, "lt", pairs.number))
        before = e.ballot(e.both(same, e.compare(index, "lt", pair)))
        same = e.both(same, e.compare(index, "ge", pair))
        mask = e.ballot(same)
        rank = e.add(count, e.count_ones(e.band(mask, below)))
        chosen = e.both(same, e.compare(rank, "lt", COLUMNS))
        place = e.add(at, e.mul(rank, 4))
        e.when(chosen, functools.partial(e.store_shared, place, 0, index, "b32"))
        earlier = e.add(earlier, e.count_ones(before))
        count = e.add(count, e.count_ones(mask))
    e.warp_barrier()
    leads = e.compare(e.rem(earlier, COLUMNS), "eq", 0)
    return tier, ExpertJob(slot, e.smaller(count, COLUMNS), at), leads


class Work(NamedTuple):
    """Work of a thread block on the jobs of one tier; an item is a tile of a job's outputs."""

    first: Value  # item
    end: Value
    first_job: Value
    end_job: Value
    first_record: Value  # of the jobs that it knows, which begin with `first_job`


@dataclasses.dataclass(frozen=True)
class JobList:
    """All jobs, which `workers` thread blocks share in neighbouring items of equal weight.

    Every block finds all jobs, since that needs no launch, and notes its own. Planes of bits tell
    which pairs share a key: bit i of plane b of a chunk of 32 pairs is bit b of the key of its pair
    i, so that one instruction per bit compares a pair with 32 others.
    """

    num_pairs: int
    weights: tuple[int, ...]  # of an item, for each tier
    num_slots: int  # the most of a tier
    num_items: int  # of a job
    workers: int
    num_warps: int

    @property
    def _rounds(self) -> int:
        """Chunks of 32 pairs per warp."""
        return -(-self.num_pairs // (WARP * self.num_warps))

    @property
    def _chunks(self) -> int:
        """Chunks of all warps, a multiple of 4."""
        return self._rounds * self.num_warps

    @property
    def _key_bits(self) -> int:
        """Bits of a slot and tier; one more marks skipped pairs."""
        return (self.num_slots * len(self.weights) - 1).bit_length()

    @property
    def _plane_words(self) -> int:
        """Words of a chunk's planes, a multiple of 4."""
        return -(-(self._key_bits + 1) // 4) * 4

    @property
    def _record_bytes(self) -> int:
        """Bytes of a record: members, their number, the slot."""
        return 4 * (COLUMNS + 4)

    @property
    def records(self) -> int:
        """Most jobs in which a block has a part."""
        heaviest = -(-self.num_pairs * self.num_items * max(self.weights) // self.workers)
        most = sum(heaviest // (weight * self.num_items) + 2 for weight in self.weights)
        return min(self.num_pairs, most)

    @property
    def _places(self) -> tuple[int, int, int]:
        """Byte offsets of planes, masks of leaders and records; keys come first."""
        planes = 4 * WARP * self._chunks
        masks = planes + 4 * self._plane_words * self._chunks
        return planes, masks, masks + 4 * len(self.weights) * self._chunks

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory, a multiple of 16."""
        return self._places[2] + self.records * self._record_bytes

    def make(
        self, e: Mlir, pairs: Pairs, lane: Lane, warp: Value, block: Value, at: Value
    ) -> list[Work]:
        """Finds all jobs and the block's work per tier; has block barriers.

        Args:
          block: i32 in 0..workers - 1.
        """
        planes, masks, _ = (e.add(at, place) for place in self._places)
        below = e.sub(e.shl(1, lane.index), 1)
        chunks = [e.add(warp, i * self.num_warps) for i in range(self._rounds)]
        found = [self._keys(e, pairs, lane, chunk, at, planes) for chunk in chunks]
        e.block_barrier()
        tiers = []
        for chunk, (key, tier) in zip(chunks, found, strict=True):
            rank = self._rank(e, key, chunk, below, planes)
            leads = e.compare(e.rem(rank, COLUMNS), "eq", 0)
            tiers.append(e.select(leads, tier, -1))
            self._note_leaders(e, tiers[-1], lane, chunk, masks)
        e.block_barrier()
        jobs, before = self._count(e, chunks, below, masks)
        shares, num_records = self._shares(e, jobs, block)
        for chunk, tier, numbers in zip(chunks, tiers, before, strict=True):
            pair = e.add(e.mul(chunk, WARP), lane.index)
            for n, (share, number) in enumerate(zip(shares, numbers, strict=True)):
                mine = e.both(e.compare(number, "ge", share.first_job),
                              e.compare(number, "lt", share.end_job))  # fmt: skip
                mine = e.both(mine, e.compare(tier, "eq", n))
                place = e.add(share.first_record, e.sub(number, share.first_job))
                note = functools.partial(e.store_shared, self._record(e, at, place), 0, pair, "b32")
                e.when(mine, note)
        e.block_barrier()

        def members(record: Value, _: list[Value]) -> list[Value]:
            self._members(e, record, lane, below, at)
            return []

        e.loop(warp, num_records, self.num_warps, [], members)
        e.block_barrier()
        return shares

    def _record(self, e: Mlir, at: Value, number: Value) -> Value:
        return e.add(e.add(at, self._places[2]), e.mul(number, self._record_bytes))

    def job(self, e: Mlir, at: Value, record: Value) -> ExpertJob:
        """Reads a job of the block's, after `make`."""
        place = self._record(e, at, record)
        count = e.load_shared(place, 4 * COLUMNS, "b32")
        slot = e.load_shared(place, 4 * COLUMNS + 4, "b32")
        return ExpertJob(slot, count, place)

    def skipped(self, e: Mlir, at: Value, pair: Value) -> Value:
        """Whether a pair's tier is out of range, i1, after `make`."""
        key = e.load_shared(e.add(at, e.mul(pair, 4)), 0, "b32")
        return e.compare(key, "ge", 1 << self._key_bits)

    def _keys(
        self, e: Mlir, pairs: Pairs, lane: Lane, chunk: Value, at: Value, planes: Value
    ) -> tuple[Value, Value]:
        """Writes a chunk's keys to shared memory; returns keys, and tiers or -1 if skipped."""
        index = e.add(e.mul(chunk, WARP), lane.index)
        tier, slot = pairs._load(e, e.smaller(index, pairs.number - 1))
        runs = e.both(e.compare(tier, "ge", 0), e.compare(tier, "lt", len(self.weights)))
        runs = e.both(runs, e.compare(index, "lt", pairs.number))
        key = e.add(e.mul(slot, len(self.weights)), tier)
        key = e.select(runs, key, 1 << self._key_bits)
        e.store_shared(e.add(at, e.mul(index, 4)), 0, key, "b32")
        bits = [e.band(e.shr(key, bit), 1) for bit in range(self._key_bits + 1)]
        words = [e.ballot(e.compare(bit, "ne", 0)) for bit in bits]
        mine = e.add(planes, e.mul(chunk, 4 * self._plane_words))

        def store() -> None:
            for bit, word in enumerate(words):
                e.store_shared(mine, 4 * bit, word, "b32")

        e.when(e.compare(lane.index, "eq", 0), store)
        return key, e.select(runs, tier, -1)

    def _rank(self, e: Mlir, key: Value, chunk: Value, below: Value, planes: Value) -> Value:
        """Counts the earlier pairs with a pair's key."""
        bits = range(self._key_bits + 1)
        others = [e.sub(e.band(e.shr(key, bit), 1), 1) for bit in bits]  # all bits where 0

        def add(other: Value, carried: list[Value]) -> list[Value]:
            words: list[Value] = []
            mine = e.add(planes, e.mul(other, 4 * self._plane_words))
            for first in range(0, self._plane_words, 4):
                words += e.load_shared_words(mine, 4 * first, 4)
            same = e.select(e.compare(other, "eq", chunk), below, 0xFFFFFFFF)
            for bit in bits:
                same = e.band(same, e.bxor(words[bit], others[bit]))
            return [e.add(carried[0], e.count_ones(same))]

        (rank,) = e.loop(0, e.add(chunk, 1), 1, [e.const(0)], add)
        return rank

    def _note_leaders(self, e: Mlir, tier: Value, lane: Lane, chunk: Value, masks: Value) -> None:
        """Writes masks of a chunk's leaders for each tier."""
        words = [e.ballot(e.compare(tier, "eq", n)) for n in range(len(self.weights))]

        def store() -> None:
            for n, word in enumerate(words):
                place = e.add(masks, e.mul(e.add(chunk, n * self._chunks), 4))
                e.store_shared(place, 0, word, "b32")

        e.when(e.compare(lane.index, "eq", 0), store)

    def _count(
        self, e: Mlir, chunks: list[Value], below: Value, masks: Value
    ) -> tuple[list[Value], list[list[Value]]]:
        """Counts each tier's jobs, and those before the pair of each of this thread's chunks."""
        jobs: list[Value] = []
        before: list[list[Value]] = [[] for _ in chunks]
        for n in range(len(self.weights)):
            words: list[Value] = []
            for first in range(0, self._chunks, 4):
                words += e.load_shared_words(masks, 4 * (n * self._chunks + first), 4)
            jobs.append(functools.reduce(e.add, [e.count_ones(word) for word in words]))
            for number, chunk in enumerate(chunks):
                total = e.const(0)
                for other, word in enumerate(words):
                    own = e.select(e.compare(chunk, "eq", other), e.band(word, below), 0)
                    seen = e.select(e.compare(chunk, "gt", other), word, own)
                    total = e.add(total, e.count_ones(seen))
                before[number].append(total)
        return jobs, before

    def _shares(self, e: Mlir, jobs: list[Value], block: Value) -> tuple[list[Work], Value]:
        """Work of the block, and the number of jobs in which it has a part."""
        items = [e.mul(number, self.num_items) for number in jobs]
        weighted = [e.mul(*pair) for pair in zip(items, self.weights, strict=True)]
        whole = functools.reduce(e.add, weighted)
        each = e.div(e.add(whole, self.workers - 1), self.workers)
        first = e.mul(each, block)
        shares, record = [], e.const(0)
        for number, weight, size in zip(items, self.weights, weighted, strict=True):

            def item(place: Value, weight: int = weight, number: Value = number) -> Value:
                """First item that begins at `place` or later."""
                positive = e.select(e.compare(place, "gt", 0), place, 0)
                return e.smaller(e.div(e.add(positive, weight - 1), weight), number)

            begin, end = item(first), item(e.add(first, each))
            job = e.div(begin, self.num_items)
            end_job = e.div(e.add(end, self.num_items - 1), self.num_items)
            end_job = e.select(e.compare(end, "gt", begin), end_job, job)
            shares.append(Work(begin, end, job, end_job, record))
            record = e.add(record, e.sub(end_job, job))
            first = e.sub(first, size)
        return shares, record

    def _members(self, e: Mlir, record: Value, lane: Lane, below: Value, at: Value) -> None:
        """Completes a record that has its leader."""
        place = self._record(e, at, record)
        leader = e.load_shared(place, 0, "b32")
        key = e.load_shared(e.add(at, e.mul(leader, 4)), 0, "b32")

        def add(first: Value, carried: list[Value]) -> list[Value]:
            index = e.add(first, lane.index)
            its = e.load_shared(e.add(at, e.mul(index, 4)), 0, "b32")
            same = e.both(e.compare(its, "eq", key), e.compare(index, "ge", leader))
            mask = e.ballot(same)
            rank = e.add(carried[0], e.count_ones(e.band(mask, below)))
            chosen = e.both(same, e.compare(rank, "lt", COLUMNS))
            to = e.add(place, e.mul(rank, 4))
            e.when(chosen, functools.partial(e.store_shared, to, 0, index, "b32"))
            return [e.add(carried[0], e.count_ones(mask))]

        start = e.band(leader, 0xFFFFFFFF - (WARP - 1))
        e.warp_barrier()  # all lanes have read the leader before it is written again
        (count,) = e.loop(start, WARP * self._chunks, WARP, [e.const(0)], add)
        e.store_shared(place, 4 * COLUMNS, e.smaller(count, COLUMNS), "b32")
        slot = e.div(key, len(self.weights))
        e.store_shared(place, 4 * COLUMNS + 4, slot, "b32")
