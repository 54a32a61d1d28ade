"""The experts' kernels for many tokens: the list of jobs, thread blocks that share out all of them.

Carried out by the simulator, as far as it goes: once as it is, with copies that arrive at once, and
once with copies that arrive as late as their waits allow.
"""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import mosaic_decode
from pallas_kernels.grouped_dequant_matmul import mosaic
from pallas_kernels.mosaic_decode import tiles
from pallas_kernels.mosaic_decode.accumulate import _Accumulation
from pallas_kernels.mosaic_decode.jobs import JobList, Pairs
from pallas_kernels.mosaic_decode.matrix import COLUMNS
from pallas_kernels.mosaic_decode.product import Lane
from pallas_kernels.mosaic_decode.tiles import StreamTiles
from pallas_kernels.testing import simulator
from pallas_kernels.testing.simulator import _Simulator
from tests import slow
from tests.grouped_dequant_matmul_cases import INT2, INT3, INT4, INT8, PLAIN, WHOLE
from tests.grouped_dequant_matmul_contract import (
    BEYOND,
    SKIPPED,
    Case,
    Operands,
    Tier,
    alike,
    product_by_product,
    random_operands,
    violation,
)
from tests.host_test_case import HostTestCase
from tests.packed_operands import Terms, seed


class Late(_Simulator):
    """Copies arrive when a thread waits for them, and not before."""

    def __init__(self, *machine):
        super().__init__(*machine)
        self.open = [[] for _ in self.threads]
        self.groups = [[] for _ in self.threads]

    def copy_async(self, to, to_imm, base, imm, present, num_bytes):
        found = self._bytes(base + imm, num_bytes, self.active & (self._word(present) != 0))
        at = self._of_shared(to) + to_imm
        for thread in np.flatnonzero(self.active):
            self.open[thread].append((at[thread], found[thread]))

    def copies_commit(self):
        for thread in np.flatnonzero(self.active):
            self.groups[thread].append(self.open[thread])
            self.open[thread] = []

    def copies_wait(self, pending):
        for thread in np.flatnonzero(self.active):
            mine = self.groups[thread]
            while len(mine) > pending:
                for at, found in mine.pop(0):
                    buffer, first = at >> simulator._BUFFER, at & (1 << simulator._BUFFER) - 1
                    self.memory[buffer][first : first + len(found)] = found


def layer(operands: Operands, tiles: StreamTiles) -> tuple[np.ndarray, np.ndarray]:
    """Hidden values and the layer's; traced anew, so that a kernel may be tampered with."""
    jax.clear_caches()
    hidden, y = product_by_product(operands, "mosaic", tiles, interpret=True)
    return np.asarray(hidden), np.asarray(y)


SOME_TERMS = Tier(
    INT3, INT3, down_terms=(Terms(INT3, (3, 2, 3), max_rank=3, first_row=80, num_rows=160),)
)
SMALL = Case((alike(INT4, 5),), tokens=16, model_dim=256, expert_dim=256)
SEVERAL = Case(
    (alike(INT4), alike(PLAIN, 2), Tier(INT2, INT8)), tokens=12, model_dim=512, expert_dim=256,
    skipped=0.2,
)  # fmt: skip
CASES = {
    "few_experts": (SMALL, StreamTiles(1, 2, 2, depth=2, workers=3)),
    "ring_of_three_tiles": (SMALL, StreamTiles(2, 2, 2, depth=3, workers=3)),
    "many_experts": (
        SMALL._replace(tiers=(alike(INT3, 40),), tokens=16),
        StreamTiles(2, 4, 1, depth=3, workers=5),
    ),
    "64_tokens": (
        SMALL._replace(tiers=(alike(INT2, 6),), tokens=64, skipped=0.1),
        StreamTiles(2, 4, 1, depth=2, workers=4),
    ),
    "float16_of_many_tokens": (
        SMALL._replace(tokens=40, dtype="float16"), StreamTiles(1, 4, 1, depth=3, workers=4)
    ),
    "more_blocks_than_items": (
        SMALL._replace(tokens=2), StreamTiles(2, 4, 1, depth=1, workers=40)
    ),
    "a_warp_has_several_stages": (
        SMALL._replace(tokens=9, model_dim=1280), StreamTiles(1, 2, 2, depth=3, workers=4)
    ),
    "warps_without_a_stage": (
        SMALL._replace(expert_dim=768), StreamTiles(1, 1, 4, depth=4, workers=4)
    ),
    "outputs_that_tiles_do_not_divide": (
        SMALL._replace(expert_dim=768), StreamTiles(5, 2, 2, depth=3, workers=5)
    ),
    "sums_of_x_kept": (
        SMALL._replace(model_dim=768), StreamTiles(1, 4, 1, depth=3, kept=True, workers=3)
    ),
    "sums_of_x_kept_of_few_tokens": (SMALL, StreamTiles(1, 2, 2, depth=3, kept=True)),
    "several_tiers": (SEVERAL, StreamTiles(1, 2, 2, depth=3, workers=5)),
    "half_a_block_of_k": (
        SMALL._replace(tiers=(alike(INT4), Tier(INT4, INT3)), expert_dim=384, tokens=12),
        StreamTiles(1, 2, 2, depth=3, workers=5),
    ),
    "half_a_block_of_k_and_sums_of_x_kept": (
        SMALL._replace(tiers=(alike(INT2),), model_dim=512, expert_dim=896),
        StreamTiles(1, 2, 2, depth=2, kept=True, workers=3),
    ),
    "all_is_skipped": (
        SMALL._replace(pairs=((SKIPPED, BEYOND),) * 16), StreamTiles(2, 4, 1, workers=3)
    ),
    "one_expert_has_all_pairs": (
        SMALL._replace(tokens=37, width=1, pairs=(((0, 1),),) * 37),
        StreamTiles(1, 4, 1, depth=2, workers=3),
    ),
    "terms": (WHOLE["whole_low_rank_and_plain"], StreamTiles(1, 2, 2, depth=3, workers=5)),
    "terms_of_12_tokens": (
        WHOLE["whole_low_rank"]._replace(tokens=12), StreamTiles(2, 4, 1, depth=2, workers=3)
    ),
    # A block's first outputs have no term, its later ones have.
    "terms_of_some_rows": (
        SMALL._replace(tiers=(SOME_TERMS,), tokens=12), StreamTiles(1, 2, 2, depth=3, workers=3)
    ),
}  # fmt: skip


def next_item_stays_behind(self, unit, base, to, fetch=_Accumulation.fetch):
    """Copies of the next item are those of this one."""
    row = self.next_item and self.stream.rows[0]
    next_item = self.next_item and dataclasses.replace(self.next_item, row=row)
    with mock.patch.object(self, "next_item", next_item):
        fetch(self, unit, base, to)


def ring_does_not_run_on(self, *rest, run=_Accumulation.run):
    """The next item looks for its first tile where the ring begins."""
    totals, _ = run(self, *rest)
    return totals, self.ring_at


def one_pair_fewer(self, e, at, record, job=JobList.job):
    """The last pair of a job is left out."""
    found = job(self, e, at, record)
    several = e.compare(found.count, "gt", 1)
    return found._replace(count=e.sub(found.count, e.select(several, 1, 0)))


def job_of_another(self, e, at, record, job=JobList.job):
    """The next slot."""
    found = job(self, e, at, record)
    return found._replace(slot=e.rem(e.add(found.slot, 1), self.num_slots))


def one_item_fewer(self, e, found, block, shares=JobList._shares):
    """Every block leaves its last item out."""
    works, records = shares(self, e, found, block)
    return [work._replace(end=e.sub(work.end, 1)) for work in works], records


BROKEN = (
    (_Accumulation, "fetch", next_item_stays_behind),
    (_Accumulation, "run", ring_does_not_run_on),
    (JobList, "job", one_pair_fewer),
    (JobList, "job", job_of_another),
    (JobList, "_shares", one_item_fewer),
)


# Each of a kind of which another stays.
FAST = ("all_is_skipped", "few_experts", "several_tiers", "terms_of_12_tokens")


class KernelTest(HostTestCase):
    @slow.where(lambda name: name not in FAST)
    @parameterized.parameters(sorted(CASES))
    def test_value_is_that_of_float64(self, name):
        case, tiles = CASES[name]
        operands = random_operands(case, seed(name))
        self.assertIsNone(violation(*layer(operands, tiles), operands))

    @slow.repeats()
    @parameterized.parameters(
        "few_experts", "ring_of_three_tiles", "warps_without_a_stage", "terms",
    )  # fmt: skip
    def test_late_copies_are_waited_for(self, name):
        case, tiles = CASES[name]
        operands = random_operands(case._replace(tokens=min(case.tokens, 4)), seed(name))
        with mock.patch.object(simulator, "_Simulator", Late):
            self.assertIsNone(violation(*layer(operands, tiles), operands))

    @parameterized.parameters(11, 0)
    @pytest.mark.slow
    def test_who_does_the_work_changes_no_bit(self, workers):
        case, tiles = CASES["few_experts"]
        operands = random_operands(case, seed(self.id()))
        found = layer(operands, tiles)
        again = layer(operands, dataclasses.replace(tiles, workers=workers))
        for mine, other in zip(found, again, strict=True):
            np.testing.assert_array_equal(mine, other)

    @slow.repeats()
    @parameterized.parameters((16, 2), (64, 7))
    def test_heuristic_tiles_have_the_value(self, tokens, width):
        experts = (alike(INT4, 12),)
        case = SMALL._replace(tiers=experts, tokens=tokens, width=width, skipped=0.1)
        operands = random_operands(case, seed(self.id()))

        def few_processors(tiers, num_tokens, width, gated, num_processors, terms):
            del num_processors
            return tiles.expert_tiles(tiers, num_tokens, width, gated, 5, terms)

        with mock.patch.object(mosaic_decode, "expert_tiles", few_processors):
            self.assertIsNone(violation(*layer(operands, None), operands))

    @parameterized.parameters(*BROKEN)
    @pytest.mark.slow
    def test_a_wrong_kernel_fails(self, owner, name, broken):
        case, tiles = CASES["ring_of_three_tiles"]
        operands = random_operands(case, seed(self.id()))
        self.assertIsNone(violation(*layer(operands, tiles), operands))
        with mock.patch.object(owner, name, broken):
            self.assertIsNotNone(violation(*layer(operands, tiles), operands))

    @pytest.mark.slow
    def test_a_wait_for_too_few_copies_fails(self):
        case, tiles = CASES["few_experts"]
        operands = random_operands(case, seed(self.id()))
        wait = Late.copies_wait
        with (
            mock.patch.object(simulator, "_Simulator", Late),
            mock.patch.object(Late, "copies_wait", lambda self, n: wait(self, n + 1)),
        ):
            self.assertIsNotNone(violation(*layer(operands, tiles), operands))

    def test_limits(self):
        self.assertTrue(mosaic._streams(64, 8, None))
        self.assertTrue(mosaic._streams(32, 2, None))
        self.assertFalse(mosaic._streams(33, 2, None))
        self.assertFalse(mosaic._streams(65, 7, None))
        self.assertFalse(mosaic._streams(64, 9, None))


class JobListTest(parameterized.TestCase):
    """All blocks together run every job once, in tiles, in shares of equal weight."""

    def setUp(self):
        super().setUp()
        self.rng = np.random.default_rng(seed(self.id()))

    def make(self, listed: JobList, tier: np.ndarray, slot: np.ndarray):
        """Work of each block, and the jobs it knows as (slot, members)."""
        threads, blocks = 32 * listed.num_warps, []
        for block in range(listed.workers):
            room = np.full(listed.num_bytes, 0xFF, np.uint8)
            buffers = [np.ascontiguousarray(a, np.int32).view(np.uint8) for a in (tier, slot)]
            e = _Simulator(block, threads, [*buffers, room], 2)
            pairs = Pairs(e.address(0), e.address(1), len(tier))
            lane, at = Lane.here(e, e.threads % 32), e.shared_address(2)
            works = listed.make(e, pairs, lane, e.threads // 32, e.const(block), at)
            records = []
            for record in range(listed.records):
                job = listed.job(e, at, e.const(record))
                place = int(job.members[0]) & 0xFFFFFF
                members = room[place : place + 4 * COLUMNS].view(np.int32)
                records.append((int(job.slot[0]), members[: min(99, int(job.count[0]))].tolist()))
            blocks.append(([[int(part[0]) for part in work] for work in works], records))
        return blocks

    @slow.repeats(lambda slots, workers: (slots, workers))
    @parameterized.product(
        tokens=(1, 17, 64), weights=((1,), (4, 7), (4, 32, 5)), slots=(1, 9, 128), workers=(1, 7)
    )
    def test_every_item_once(self, tokens, weights, slots, workers):
        items, width = int(self.rng.integers(1, 9)), 8
        listed = JobList(tokens * width, weights, slots, items, workers, num_warps=4)
        tier = self.rng.integers(-1, len(weights) + 1, tokens * width)
        slot = self.rng.integers(0, slots, tokens * width)
        slot[(tier < 0) | (tier >= len(weights))] = 1 << 20
        expected = self.expected(tier, slot, len(weights))
        done = {(n, i): 0 for n, jobs in enumerate(expected) for i in range(len(jobs) * items)}
        most = sum(len(jobs) * items * w for jobs, w in zip(expected, weights, strict=True))
        for works, records in self.make(listed, tier, slot):
            load = 0
            for n, (first, end, first_job, end_job, record) in enumerate(works):
                for item in range(first, end):
                    done[n, item] += 1
                    self.assertBetween(item // items, first_job, end_job - 1)
                for job in range(first_job, end_job):
                    self.assertEqual(records[record + job - first_job], expected[n][job])
                load += (end - first) * weights[n]
            self.assertLess(load, -(-most // workers) + max(weights))
        self.assertEqual(set(done.values()) - {1}, set())

    def expected(self, tier, slot, tiers) -> list[list[tuple[int, list[int]]]]:
        """Jobs of each tier, in the order of their first pairs."""
        found = []
        for n in range(tiers):
            found.append([])
            for s in dict.fromkeys(slot[tier == n].tolist()):
                mine = np.flatnonzero((tier == n) & (slot == s)).tolist()
                found[-1] += [
                    (s, mine[first : first + COLUMNS]) for first in range(0, len(mine), COLUMNS)
                ]
            found[-1].sort(key=lambda job: job[1][0])
        return found
