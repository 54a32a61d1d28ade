"""Bulk transfers between steps, from host rows and the disk: right bytes, or a counter."""

import dataclasses
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax import Engine
from moejax.checkpoints.experts import ExpertReader
from moejax.errors import MoejaxError
from moejax.experts import transfers as programs
from moejax.experts.budget import Limits
from moejax.experts.disk_cache import DiskExperts
from moejax.experts.host_store import HostStore
from moejax.experts.state import TierSlots
from tests.cache_model import check
from tests.cache_plan_contract import predict_needed
from tests.ssd_source import SECONDS
from tests.tiny_engine import VOCAB_SIZE, load_tiny_engine
from tests.transfers_case import ASK, CACHE, PROGRAMS, TransfersTestCase, prompt_transfers


class RequestTest(TransfersTestCase):
    def test_they_land_with_their_bytes_and_evict_the_least_recently_used(self):
        transfers = self.transfers()
        self.assertIs(transfers.advance(self.pool), self.pool)  # nothing to do, nothing dispatched
        for layer, expert in ASK:
            transfers.request(layer, [expert])
        num_traces = PROGRAMS.num_traces
        self.drain(transfers)
        self.assertEqual(self.resident(), set(ASK))
        transfers.request(0, [6, 7])
        self.drain(transfers)
        self.assertEqual(self.resident(), {(0, 6), (0, 7), (2, 3)})
        self.assertEqual(self.counts(), (5, 2, 2))
        self.assert_counters(transfers, requested=5, moved=5, inserted=5)
        self.assertEqual(PROGRAMS.num_traces, num_traces)

    def test_all_that_are_ready_go_on_a_stage_a_step(self):
        asked = [(0, 1), (0, 2), (1, 3), (2, 5), (3, 6)]
        with prompt_transfers(), mock.patch.object(programs, "MOST_INSERTED", 2):
            transfers = self.transfers(in_flight=5)
            for layer, expert in asked:
                transfers.request(layer, [expert])
            for _ in range(2):  # copied, sent
                self.advance(transfers)
                self.assertEqual(self.resident(), set())
            self.advance(transfers)
            self.assertEqual(self.resident(), set(asked))
            self.assertLen(transfers.pending, 5)
            self.advance(transfers)
        self.assertLen(transfers.pending, 0)
        self.assert_counters(transfers, requested=5, moved=5, inserted=5)

    def test_a_landing_writes_the_pool_in_place(self):
        self.transfers()
        insert, compiled = programs._insert_experts, PROGRAMS._programs
        found = [program for key, program in compiled.items() if key[0] is insert]
        self.assertNotEmpty(found)
        pool = sum(leaf.nbytes for leaf in jax.tree.leaves(self.pool))
        for program in found:
            self.assertGreaterEqual(program.memory_analysis().alias_size_in_bytes, pool)

    def test_old_owners_serve_until_the_bytes_are_there(self):
        transfers = self.transfers()
        transfers.request(0, [3, 5])
        self.drain(transfers)
        with mock.patch("moejax.experts.transfers.is_ready", return_value=False):
            transfers.request(0, [6, 7])
            for _ in range(5):
                self.advance(transfers)
                self.assertEqual(self.resident(), {(0, 3), (0, 5)})
        self.drain(transfers)
        self.assertEqual(self.resident(), {(0, 6), (0, 7)})

    def test_what_a_step_has_fetched_meanwhile_is_dropped_and_counted(self):
        transfers = self.transfers()
        transfers.request(1, [4])
        self.advance(transfers, lambda: transfers.counters.moved)
        wanted = jnp.zeros(8, bool).at[4].set(True)
        fetch, tables, counts = jax.jit(predict_needed, static_argnums=(0, 4))(
            CACHE, self.pool.residency, 1, wanted, 1, self.pool.counts
        )
        slot = int(fetch.slots[0])
        first, second = self.pool.banks
        second = tuple(part.at[slot].set(self.source.value(1, 4)) for part in second)
        self.pool = TierSlots((first, second), tables, counts)
        self.drain(transfers)
        self.assertEqual(self.resident(), {(1, 4)})
        self.assertEqual(self.counts(), (1, 1, 0))
        self.assert_counters(transfers, requested=1, moved=1, dropped=1)

    def test_more_than_a_layer_has_slots_are_dropped(self):
        layout = programs._BlobLayout.of(self.source.row)
        blobs = (jnp.zeros(layout.num_words, jnp.uint32),) * 3
        what = jnp.asarray(programs._pad_ids([(3, 0), (3, 1), (3, 2)], 3))
        insert = jax.jit(programs._insert_experts, static_argnums=(0, 1))
        self.pool, slots = insert(CACHE, layout, self.pool, blobs, what)
        check(self.pool.residency, CACHE)
        self.assertEqual(self.resident(), {(3, 0), (3, 1)})
        self.assertEqual(int(slots[2]), -1)
        self.assertEqual(self.counts(), (3, 1, 0))

    def test_repeats_are_no_requests(self):
        transfers = self.transfers()
        transfers.request(0, [1, 1, 2])
        transfers.request(1, [3, 4])
        self.assertEqual(transfers.pending, [(0, 1), (0, 2), (1, 3), (1, 4)])
        self.assert_counters(transfers, requested=4, repeated=1)
        for wrong in ((4, 0), (0, 8), (0, -1)):
            with self.assertRaisesRegex(ValueError, "no expert"):
                transfers.request(wrong[0], wrong[1:])
        self.drain(transfers)
        self.assert_counters(transfers, requested=4, repeated=1, moved=4, inserted=4)

    def test_closed_in_the_middle(self):
        transfers = self.transfers()
        transfers.request(0, [1, 2])
        self.advance(transfers)
        transfers.close()
        transfers.close()
        self.assertIs(transfers.advance(self.pool), self.pool)
        with self.assertRaisesRegex(ValueError, "closed"):
            transfers.request(0, [1])

    def test_a_failed_landing_is_an_error_and_frees_the_blocks(self):
        transfers = self.transfers()
        transfers.request(0, [1])
        self.advance(transfers, lambda: transfers.counters.moved)
        transfers.request(0, [2])
        failing = mock.Mock(side_effect=RuntimeError("no memory"), __name__="_insert_experts")
        lost = mock.patch("moejax.experts.transfers._insert_experts", failing)
        with lost, self.assertRaisesRegex(RuntimeError, "no memory"):
            self.advance(transfers)
        self.drain(transfers)
        self.assertEqual(self.resident(), {(0, 2)})

    def test_numbers_of_every_width_go_through_words(self):
        rng = np.random.default_rng(0)
        row = [
            rng.integers(0, 200, shape).astype(dtype)
            for shape, dtype in (
                ((3, 5), np.uint8), ((7,), jnp.bfloat16), ((2, 2), np.float32), ((5,), np.uint32)
            )
        ]  # fmt: skip
        layout = programs._BlobLayout.of(row)
        memory = np.zeros(layout.num_words, np.uint32)
        for view, part in zip(layout.views(memory), row, strict=True):
            view[...] = part
        for part, found in zip(row, layout.parts(jnp.asarray(memory)), strict=True):
            self.assertEqual(found.dtype, part.dtype)
            np.testing.assert_array_equal(found, part)
        with self.assertRaisesRegex(ValueError, "float64"):
            programs._BlobLayout.of([np.zeros(3)])


PROMPTS = [np.random.default_rng(n).integers(0, VOCAB_SIZE, n).tolist() for n in (9, 13)]
ROW_NBYTES = 3 * 16 * 32 * 4  # of an expert of the tiny model in float32


class InvisibleTest(parameterized.TestCase):
    """An engine with a disk, few rows and few slots; experts come and go between its steps."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        directory = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.expected = cls.tokens(load_tiny_engine(directory))
        cls.engine = Engine.from_pretrained(
            directory, dtype="float32", platform="cpu", progress=False, context=64,
            limits=Limits(slots=3, transient=2, host_gib=19.5 * ROW_NBYTES / 2**30, bulk=4),
        )  # fmt: skip
        (cls.memory,) = cls.engine._runner.memory.tiers
        cls.addClassCleanup(cls.memory.close)

    def setUp(self):
        super().setUp()
        transfers = self.memory.transfers
        end = time.monotonic() + 10
        while transfers.pending and time.monotonic() < end:  # what the case before left
            self.tokens(self.engine)

    @staticmethod
    def tokens(engine, between=lambda: None):
        found = []
        for prompt in PROMPTS:
            found.append([])
            for chunk in engine.stream(prompt, max_new_tokens=30):
                found[-1].append(chunk.token)
                between()
        return found

    def random_requests(self, rng):
        def between():
            transfers = self.memory.transfers
            layer, experts = int(rng.integers(2)), rng.choice(8, 3, replace=False).tolist()
            transfers.request(layer, experts)

        return between

    def test_planned_bytes_are_allocated_bytes(self):
        planned, memory = self.engine.budget, self.memory
        self.assertEqual(planned.tiers[0].host_rows, 3)
        blocks = [block.array.nbytes for block in memory.transfers._blocks]
        self.assertEqual(blocks, [ROW_NBYTES] * 4)
        room = planned.host["blocks of transfers between steps"]
        self.assertBetween(room, sum(blocks), 1.02 * sum(blocks))
        # On the device, and one that is being written to its slot.
        room = planned.device["experts on their way between steps"]
        self.assertBetween(room, 5 * ROW_NBYTES, 1.02 * 5 * ROW_NBYTES)
        pool = memory.pool
        tables = (pool.residency, pool.counts, pool.used, memory.store.row_of)
        found = sum(leaf.nbytes for leaf in jax.tree.leaves(tables))
        self.assertEqual(planned.device["residency tables"], found)

    def test_tokens_do_not_depend_on_what_is_in_flight(self):
        rng, bulk = np.random.default_rng(0), self.engine.ledger.total("bulk")
        before = dataclasses.replace(self.memory.transfers.counters)
        places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(self.memory.pool.banks)]
        self.assertEqual(self.tokens(self.engine, self.random_requests(rng)), self.expected)
        num_traces = self.engine.num_traces
        self.assertEqual(self.tokens(self.engine, self.random_requests(rng)), self.expected)
        self.assertEqual(self.engine.num_traces, num_traces)
        found = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(self.memory.pool.banks)]
        self.assertEqual(found, places)
        ledger = self.engine.ledger.tiers["stored"]
        counters = ledger.bulk_requests
        self.assertGreater(counters["inserted"], before.inserted + 10)
        self.assertEqual(counters["failed"], before.failed)
        # Transfers in flight at the start may have arrived since; those in flight now have not.
        moved = counters["moved"] - before.moved
        self.assertBetween(ledger.total("bulk") - bulk, moved - 4, moved + 4)
        self.assertEqual(ledger.bytes_by_cause["bulk"], ledger.total("bulk") * ROW_NBYTES)
        self.assertGreater(self.memory.disk.cache.evictions, 0)
        self.assertBetween(ledger.host_hit_rate, 0.1, 0.99)
        lines = " ".join(ledger.describe())
        self.assertIn("bulk requests: requested ", lines)
        self.assertIn("host memory had ", lines)
        check(self.memory.pool.residency, self.memory.spec.cache)

    @pytest.mark.slow
    def test_nor_on_a_disk_that_fails_in_the_background(self):
        rng, read = np.random.default_rng(1), ExpertReader.read
        failed = []

        def sometimes(reader, layer, expert, into, **how):
            # The thread of the ring, not a step that waits; three times: with its repetitions.
            if "moejax-ssd" in threading.current_thread().name and rng.random() < 0.7:
                failed.append((layer, expert))
                into[0][...] = 7
                raise MoejaxError("a bad sector")
            read(reader, layer, expert, into, **how)

        with mock.patch.object(ExpertReader, "read", sometimes):
            self.assertEqual(self.tokens(self.engine, self.random_requests(rng)), self.expected)
        self.assertNotEmpty(failed)
        self.assertEqual(self.tokens(self.engine), self.expected)
        while self.memory.transfers.pending:  # or they fail in another test
            self.tokens(self.engine)


class Uses:
    """A copy of last uses that is ready when it is told to be."""

    def __init__(self, uses):
        self.uses, self.ready = uses, False

    def is_ready(self):
        return self.ready

    def copy_to_host_async(self):
        pass

    def __array__(self, dtype=None, copy=None):
        return self.uses


class DiskTest(TransfersTestCase):
    def disk(self, num_rows, *, ring=2, **how):
        store = None
        if num_rows:
            store = HostStore(self.source, num_rows, self.device)
            store.fill(progress=False)
            self.rows = store.rows
        disk = DiskExperts(self.source, store, ring_blocks=ring, most_kept=2, **how)
        self.resources.callback(disk.close)
        self.asked = []
        return disk

    def step(self, disk, uses=None, ready=True):
        """Between two steps: the copy that was asked for last becomes ready, or not."""
        if self.asked:
            self.asked[-1].ready = ready
        changed = disk.advance(lambda: self.asked.append(Uses(uses)) or self.asked[-1])
        disk._writer.submit(int).result(SECONDS)  # what is being written is
        return changed

    @parameterized.parameters(0, 1, 5)
    def test_what_no_row_has_comes_from_the_disk(self, num_rows):
        disk = self.disk(num_rows)
        transfers = self.transfers(disk)
        uses = np.zeros((4, 8), np.int32)
        for layer, expert in ASK:
            transfers.request(layer, [expert])
        self.advance(transfers, lambda: self.step(disk, uses) is None or not transfers.pending)
        self.assertEqual(self.resident(), set(ASK))
        for _ in range(6):
            self.step(disk, uses)
        self.assertEqual((disk.row_of >= 0).sum(), num_rows)
        self.assertEqual(len(np.unique(disk.row_of[disk.row_of >= 0])), num_rows)
        for expert in zip(*np.nonzero(disk.row_of >= 0), strict=True):
            self.assert_row(disk, expert)
        self.assertLen(disk.reader._free, 2)  # the whole ring is free again

    def assert_row(self, disk, expert):
        for part in self.rows(int(disk.row_of[expert])):
            self.assertTrue((part == self.source.value(*expert)).all(), expert)

    def test_rows_go_to_others_by_last_use_once_no_step_reads_them(self):
        disk = self.disk(3)  # of (0, 0), (0, 1), (0, 2)
        uses = np.zeros((4, 8), np.int32)
        uses[0, :3] = 9, 7, 8
        self.assertIsNone(disk.acquire((3, 3)))
        request = disk._requests[3, 3]
        self.assertTrue(self.is_read(request))
        self.assertFalse(self.step(disk, uses))
        self.assertFalse(self.step(disk, uses, ready=False))
        self.assertGreaterEqual(disk.row_of[0, 1], 0)
        place = int(disk.row_of[0, 1])
        self.assertTrue(self.step(disk, uses))  # who is least recently used is known: (0, 1)
        self.assertEqual((disk.row_of[0, 1], disk.row_of[3, 3]), (-1, -1))
        for _ in range(3):  # a step that was told of the old table still runs
            self.assertFalse(self.step(disk, uses, ready=False))
            self.assertTrue((self.rows(place)[0] == self.source.value(0, 1)).all())
        self.assertFalse(self.step(disk, uses))
        self.assertTrue(self.step(disk, uses))
        self.assertEqual(disk.row_of[3, 3], place)
        self.assert_row(disk, (3, 3))
        self.assertEqual(disk.cache.evictions, 1)

    def test_a_row_that_is_being_copied_is_nobodys(self):
        disk = self.disk(1)
        uses = np.zeros((4, 8), np.int32)
        self.assertIsNotNone(disk.acquire((0, 0)))
        disk.read(1, np.array([5]))
        for _ in range(5):
            self.step(disk, uses)
        self.assertEqual(disk.row_of[0, 0], 0)
        disk.release((0, 0))
        disk.read(1, np.array([5]))
        for _ in range(5):
            self.step(disk, uses)
        self.assertEqual(disk.row_of[1, 5], 0)

    @parameterized.parameters(OSError(5, "Input/output error"), MoejaxError("another checksum"))
    @pytest.mark.slow
    def test_a_disk_that_fails_leaves_experts_where_they_are(self, fault):
        disk = self.disk(0, retries=0)
        self.source.faults = [fault]
        transfers = self.transfers(disk)
        transfers.request(0, [1, 2])
        with self.assertLogs("absl", "ERROR"):
            self.drain(transfers)
        self.assertEqual(self.resident(), {(0, 2)})
        transfers.request(0, [1])
        self.drain(transfers)
        self.assertEqual(self.resident(), {(0, 1), (0, 2)})
        self.assert_counters(transfers, requested=3, failed=1, moved=2, inserted=2)

    def test_a_failure_is_forgotten_with_the_request_that_was_served_another_way(self):
        disk, uses, read = self.disk(1, retries=0), np.zeros((4, 8), np.int32), self.source.read
        may_fail = threading.Event()

        def fails_in_the_ring(layer, expert, into, **how):
            if "moejax-ssd" in threading.current_thread().name:
                self.assertTrue(may_fail.wait(SECONDS))
                raise MoejaxError("a bad sector")
            read(layer, expert, into, **how)

        with mock.patch.object(self.source, "read", fails_in_the_ring):
            self.assertIsNone(disk.acquire((1, 4)))
            request = disk._requests[1, 4]
            disk.read(1, np.array([4]))  # a step cannot wait for the ring
            self.assertIsNotNone(disk.acquire((1, 4)))
            disk.release((1, 4))
            may_fail.set()
            self.assertTrue(self.is_read(request))
        for _ in range(5):
            self.step(disk, uses)
        self.assertEqual(disk.row_of[1, 4], 0)
        disk.read(2, np.array([6]))
        for _ in range(5):
            self.step(disk, uses)
        self.assertEqual(disk.row_of[1, 4], -1)
        self.assertIsNone(disk.acquire((1, 4)))  # read again, not refused for what was long ago

    def prefetch(self, disk, *experts):
        """Says so, and goes on until all that is read has its row."""
        uses = np.zeros((4, 8), np.int32)
        disk.prefetch(experts)
        for _ in range(16):
            self.step(disk, uses)
            for request in list(disk._requests.values()):
                self.assertTrue(self.is_read(request))

    def test_what_is_foreseen_is_read_ahead(self):
        disk = self.disk(6)  # of (0, 0) to (0, 5)
        self.prefetch(disk, (1, 4), (0, 0), (2, 5), (3, 7))
        for expert in ((1, 4), (0, 0), (2, 5)):
            self.assert_row(disk, expert)
        self.assertEqual(disk.row_of[3, 7], -1)  # more than half of the rows
        self.assertEqual(disk.reader.counters.reads, 2)  # (0, 0) was there, and stayed
        told = disk.counts_since()
        self.assertEqual((told["ahead"], told["ahead_used"]), (2, 0))
        self.assertIsNotNone(disk.acquire((1, 4)))
        disk.release((1, 4))
        self.assertIsNotNone(disk.acquire((1, 4)))  # a second use of the same is none
        disk.release((1, 4))
        self.assertIsNotNone(disk.acquire((0, 0)))  # was not read ahead
        told = disk.counts_since()
        self.assertEqual((told["ahead"], told["ahead_used"], told["reads"]), (0, 1, 0))

    def test_what_is_foreseen_waits_for_what_is_asked_for(self):
        disk, read, order = self.disk(12, ring=4), self.source.read, []
        uses = np.zeros((4, 8), np.int32)
        self.source.gate.clear()

        def noted(layer, expert, into, **how):
            order.append((layer, expert))
            read(layer, expert, into, **how)

        with mock.patch.object(self.source, "read", noted):
            disk.prefetch([(2, 1), (2, 2), (2, 3), (2, 4), (2, 5)])
            self.step(disk, uses)
            self.assertEqual(list(disk._requests), [(2, 1), (2, 2), (2, 3)])  # one place is left
            self.assertIsNone(disk.acquire((3, 6)))
            self.assertIsNone(disk.acquire((2, 3)))  # was only foreseen: asked for anew
            self.assertEqual(list(disk._requests)[2:], [(3, 6), (2, 3)])
            self.step(disk, uses)
            self.assertLen(disk._requests, 4)  # nothing more is read ahead
            self.source.gate.set()
            for _ in range(24):
                self.step(disk, uses)
                for request in list(disk._requests.values()):
                    self.assertTrue(self.is_read(request))
        order.remove((2, 1))  # which the thread may have begun
        self.assertEqual(order[:3], [(3, 6), (2, 3), (2, 2)])
        for expert in ((2, 1), (2, 2), (2, 3), (2, 4), (2, 5), (3, 6)):
            self.assert_row(disk, expert)
        self.assertEqual(disk.counts_since()["ahead"], 4)  # all but (3, 6) and (2, 3)
        self.assertEqual((disk._requests, disk._prefetches), ({}, {}))

    def test_a_failure_of_what_was_only_foreseen_is_nobodys(self):
        disk = self.disk(4, retries=0)  # of (0, 0) to (0, 3)
        self.source.faults = [OSError(5, "Input/output error")]
        with self.assertLogs("absl", "ERROR"):
            self.prefetch(disk, (1, 4))
        self.assertEqual(disk.row_of[1, 4], -1)
        self.assertEqual((disk.failures, disk._failed), (0, {}))
        self.assertIsNone(disk.acquire((1, 4)))  # asked for: read again
        self.assertEqual(disk.counts_since()["ahead"], 0)

    def test_closed_while_the_disk_reads(self):
        disk = self.disk(0)
        self.source.gate.clear()
        transfers = self.transfers(disk)
        transfers.request(1, [4, 5, 6])
        self.advance(transfers)
        transfers.close()
        self.source.gate.set()
        disk.close()
        disk.read(0, np.array([0]))
        self.assertEqual(disk.failures, 1)
        self.assertIn("the reader is closed", disk.error)
