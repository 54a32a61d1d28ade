"""Experts from disk in the background: order, bounds, blocks; and in the waiting mode."""

import gc
import time
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moejax.errors import MoejaxError
from moejax.experts.disk_cache import _DiskReader, _State, check_waiting
from tests.ssd_source import MOMENT, PARTS, SECONDS, Source, SsdTestCase


class DiskReaderTest(SsdTestCase):
    @parameterized.parameters(1, 3)
    def test_every_expert(self, ring_blocks):
        source = Source()
        reader = self.reader(source, ring_blocks=ring_blocks)
        for index in np.ndindex(4, 8):
            reader.request(index)
        seen, end = [], time.monotonic() + SECONDS
        while len(seen) < 32 and time.monotonic() < end:
            for ticket in reader.done():
                self.assertIsNone(ticket.error)
                self.assert_value(source, ticket)
                seen.append(ticket.expert)
                reader.release(ticket)
        self.assertEqual(seen, list(np.ndindex(4, 8)))
        counters = reader.counters
        self.assertEqual((counters.reads, counters.bytes), (32, 32 * source.row_nbytes))
        self.assertEqual((counters.errors, counters.retries), (0, 0))

    def test_blocks_are_used_again_and_never_before_release(self):
        source = Source()
        reader = self.reader(source)
        tickets = [reader.request((0, i)) for i in range(3)]
        first, second = self.finished(reader, 2)
        self.assertFalse(self.is_read(tickets[2], MOMENT))
        self.assertEqual(tickets[2].state, _State.QUEUED)
        self.assert_value(source, first)
        block = first.row
        reader.release(first)
        (third,) = self.finished(reader)
        self.assertIs(third.row[0], block[0])
        self.assert_value(source, third)
        self.assert_value(source, second)

    def test_urgent_ones_come_first(self):
        source = Source()
        source.gate.clear()
        reader = self.reader(source, ring_blocks=8)
        reader.request((0, 0))
        self.assertTrue(source.began.acquire(timeout=SECONDS))
        for expert, urgent in ((1, False), (2, True), (3, False), (4, True)):
            reader.request((0, expert), urgent=urgent)
        source.gate.set()
        self.finished(reader, 5)
        self.assertEqual([expert for _, expert in source.order], [0, 2, 4, 1, 3])

    @parameterized.parameters("queued", "reading", "done", "delivered", "failed")
    def test_cancel(self, state):
        source = Source([OSError("disk")] if state == "failed" else [])
        reader = self.reader(source, ring_blocks=1, retries=0)
        if state in ("queued", "reading"):
            source.gate.clear()
        if state == "queued":
            busy = reader.request((3, 3))
            self.assertTrue(source.began.acquire(timeout=SECONDS))
        ticket = reader.request((0, 0))
        if state == "reading":
            self.assertTrue(source.began.acquire(timeout=SECONDS))
        elif state != "queued":
            self.assertTrue(self.is_read(ticket))
        if state == "delivered":
            self.finished(reader)
        for _ in range(2):
            self.assertEqual(reader.cancel(ticket), state != "delivered")
        if state == "delivered":
            reader.release(ticket)
        self.assertEqual(ticket.state, _State.OVER)
        source.gate.set()
        if state == "queued":
            self.assertEqual(self.finished(reader), [busy])
            reader.release(busy)
        other = reader.request((0, 1))  # in the only block
        (found,) = self.finished(reader)
        self.assertIs(found, other)
        self.assert_value(source, found)

    def test_release_twice_or_early(self):
        reader = self.reader(Source())
        ticket = reader.request((0, 0))
        self.assertTrue(self.is_read(ticket))
        with self.assertRaisesRegex(ValueError, "a ticket that is done"):
            reader.release(ticket)
        self.finished(reader)
        reader.release(ticket)
        self.assertIsNone(ticket.row)
        with self.assertRaisesRegex(ValueError, "a ticket that is over"):
            reader.release(ticket)

    def test_a_ring_that_cannot_be_had(self):
        with (
            mock.patch.object(np, "empty", side_effect=MemoryError("no memory")),
            self.assertRaisesRegex(MoejaxError, "of host memory for experts cannot be had"),
        ):
            self.reader(Source())


class WaitingTest(SsdTestCase):
    def test_inside_a_step(self):
        source = Source()
        reader = self.reader(source)
        shapes = tuple(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in PARTS)

        @jax.jit
        def step(expert):
            row = jax.pure_callback(lambda e: tuple(reader._read_now((2, int(e)))), shapes, expert)
            return tuple(array + jnp.ones((), array.dtype) for array in row)

        for expert in range(8):
            for array in step(jnp.int32(expert)):
                self.assertTrue((np.asarray(array) == source.value(2, expert) + 1).all())
        counters = reader.counters
        self.assertEqual((counters.waits, counters.reads), (8, 8))

    def test_beside_a_stuck_ring(self):
        source = Source()
        reader = self.reader(source, ring_blocks=1)
        reader.request((0, 0))
        self.finished(reader)  # and never released
        reader.request((0, 1))
        for array in reader._read_now((0, 2)):
            self.assertTrue((array == source.value(0, 2)).all())

    def test_a_reader_that_only_waits_keeps_nothing_alive(self):
        reader = _DiskReader(Source(), ring_blocks=1, retries=2)
        reader._read_now((0, 0))
        seen = weakref.ref(reader)
        del reader
        gc.collect()
        self.assertIsNone(seen())

    def test_failure(self):
        reader = self.reader(Source([OSError(5, "Input/output error")] * 3))
        with self.assertRaisesRegex(MoejaxError, "Input/output error"):
            reader._read_now((0, 0))
        self.assertEqual(reader.counters.errors, 1)

    def test_what_computes_while_it_reads(self):
        source = Source()
        source.uses_jax = True
        check_waiting(source, mock.Mock(platform="gpu"), "experts of a")
        check_waiting(Source(), self.device, "experts of a")
        with self.assertRaisesRegex(MoejaxError, "^experts of a: experts that are converted"):
            check_waiting(source, self.device, "experts of a")
