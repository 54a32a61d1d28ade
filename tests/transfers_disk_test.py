"""Experts of the disk between steps: to rows and slots, or a counter or an error."""

import threading
from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized

from moejax.errors import MoejaxError
from moejax.experts.disk_cache import DiskExperts
from moejax.experts.host_store import HostStore
from tests.ssd_source import SECONDS
from tests.transfers_case import ASK, TransfersTestCase


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
        self.advance(transfers, lambda: self.step(disk, uses) is None or not transfers.num_pending)
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
        ticket = disk._tickets[3, 3]
        self.assertTrue(self.is_read(ticket))
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
            ticket = disk._tickets[1, 4]
            disk.read(1, np.array([4]))  # a step cannot wait for the ring
            self.assertIsNotNone(disk.acquire((1, 4)))
            disk.release((1, 4))
            may_fail.set()
            self.assertTrue(self.is_read(ticket))
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
            for ticket in list(disk._tickets.values()):
                self.assertTrue(self.is_read(ticket))

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
            self.assertEqual(list(disk._tickets), [(2, 1), (2, 2), (2, 3)])  # one place is left
            self.assertIsNone(disk.acquire((3, 6)))
            self.assertIsNone(disk.acquire((2, 3)))  # was only foreseen: asked for anew
            self.assertEqual(list(disk._tickets)[2:], [(3, 6), (2, 3)])
            self.step(disk, uses)
            self.assertLen(disk._tickets, 4)  # nothing more is read ahead
            self.source.gate.set()
            for _ in range(24):
                self.step(disk, uses)
                for ticket in list(disk._tickets.values()):
                    self.assertTrue(self.is_read(ticket))
        order.remove((2, 1))  # which the thread may have begun
        self.assertEqual(order[:3], [(3, 6), (2, 3), (2, 2)])
        for expert in ((2, 1), (2, 2), (2, 3), (2, 4), (2, 5), (3, 6)):
            self.assert_row(disk, expert)
        self.assertEqual(disk.counts_since()["ahead"], 4)  # all but (3, 6) and (2, 3)
        self.assertEqual((disk._tickets, disk._prefetches), ({}, {}))

    def test_a_failure_of_what_was_only_foreseen_is_nobodys(self):
        disk = self.disk(4, retries=0)  # of (0, 0) to (0, 3)
        self.source.faults = [OSError(5, "Input/output error")]
        with self.assertLogs("absl", "ERROR"):
            self.prefetch(disk, (1, 4))
        self.assertEqual(disk.row_of[1, 4], -1)
        self.assertEqual((disk.failures, disk._failed), (0, {}))
        self.assertIsNone(disk.acquire((1, 4)))  # asked for: read again
        self.assertEqual(disk.counts_since()["ahead"], 0)

    def test_a_slow_disk_holds_nobody_up(self):
        disk = self.disk(2, ring=1)  # of (0, 0), (0, 1)
        self.source.gate.clear()
        transfers = self.transfers(disk)
        transfers.request(1, [4, 5])
        transfers.request(0, [0])
        self.advance(transfers, lambda: transfers.num_pending == 2)
        self.assertEqual(self.resident(), {(0, 0)})
        self.source.gate.set()
        uses = np.zeros((4, 8), np.int32)
        self.advance(transfers, lambda: self.step(disk, uses) is None or not transfers.num_pending)
        self.assertEqual(self.resident(), {(0, 0), (1, 4), (1, 5)})

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
