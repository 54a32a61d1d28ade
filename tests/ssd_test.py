"""Experts from disk in the background: order, bounds, blocks; and in the waiting mode."""

import gc
import time
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.errors import MoejaxError
from moejax.experts import pinned_memory as pinned
from moejax.experts.disk_reader import SsdReader, State, check_waiting
from tests.ssd_source import MOMENT, PARTS, SECONDS, Source, SsdTestCase


class SsdReaderTest(SsdTestCase):
    @parameterized.parameters((1, 1), (3, 2), (2, 4))
    def test_every_expert(self, ring_blocks, num_threads):
        source = Source()
        reader = self.reader(
            source, ring_blocks=ring_blocks, queue_length=32, num_threads=num_threads
        )
        for index in np.ndindex(4, 8):
            self.request(reader, *index)
        seen = set()
        for _ in range(32):
            ((ticket, arrays),) = self.finished(reader) if ring_blocks == 1 else self.one(reader)
            self.assertIsNone(ticket.error)
            self.assertTrue(all(isinstance(array, jax.Array) for array in arrays))
            self.assert_value(source, ticket, arrays)
            self.assert_value(source, ticket, reader.views(ticket))
            seen.add((ticket.layer, ticket.expert))
            reader.release(ticket)
        self.assertLen(seen, 32)
        counters = reader.counters
        self.assertEqual((counters.reads, counters.bytes), (32, 32 * source.row_nbytes))
        self.assertEqual((counters.errors, counters.retries, counters.refused), (0, 0, 0))
        self.assertGreater(counters.seconds, 0)

    def one(self, reader):
        """The next finished one; others that came with it are kept for the next call."""
        self.kept = getattr(self, "kept", [])
        end = time.monotonic() + SECONDS
        while not self.kept:
            self.assertLess(time.monotonic(), end)
            self.kept += reader.done()
        return [self.kept.pop(0)]

    def test_blocks_are_used_again_and_never_before_release(self):
        source = Source()
        reader = self.reader(source)
        tickets = [self.request(reader, 0, i) for i in range(3)]
        held = self.finished(reader, 2)
        self.assertFalse(reader.wait(tickets[2], MOMENT))
        self.assertEqual(tickets[2].state, State.QUEUED)
        for ticket, arrays in held:
            self.assert_value(source, ticket, arrays)
        pointers = [held[0][1][0].unsafe_buffer_pointer()]
        reader.release(held[0][0])
        ((ticket, arrays),) = self.finished(reader)
        pointers.append(arrays[0].unsafe_buffer_pointer())
        self.assertEqual(*pointers)
        self.assert_value(source, ticket, arrays)
        self.assert_value(source, *held[1])

    def test_a_full_queue_refuses(self):
        source = Source()
        source.gate.clear()
        reader = self.reader(source, queue_length=3)
        first = self.request(reader, 0, 0)
        self.assertTrue(source.began.acquire(timeout=SECONDS))
        waiting = [self.request(reader, 0, i) for i in (1, 2, 3)]
        for _ in range(2):
            self.assertIsNone(reader.request(1, 0))
            self.assertIsNone(reader.request(1, 0, urgent=True))
        self.assertEqual(reader.counters.refused, 4)
        reader.cancel(waiting[0])
        self.request(reader, 1, 1)
        source.gate.set()
        self.assertTrue(reader.wait(first, SECONDS))
        for ticket, _ in self.finished(reader, 2):
            reader.release(ticket)
        self.finished(reader, 2)
        self.assertEqual(source.order, [(0, 0), (0, 2), (0, 3), (1, 1)])

    def test_urgent_ones_come_first(self):
        source = Source()
        source.gate.clear()
        reader = self.reader(source, ring_blocks=8)
        self.request(reader, 0, 0)
        self.assertTrue(source.began.acquire(timeout=SECONDS))
        for expert, urgent in ((1, False), (2, True), (3, False), (4, True)):
            self.request(reader, 0, expert, urgent=urgent)
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
            busy = self.request(reader, 3, 3)
            self.assertTrue(source.began.acquire(timeout=SECONDS))
        ticket = self.request(reader, 0, 0)
        if state == "reading":
            self.assertTrue(source.began.acquire(timeout=SECONDS))
        elif state != "queued":
            self.assertTrue(reader.wait(ticket, SECONDS))
        if state == "delivered":
            self.finished(reader)
        for _ in range(2):
            self.assertEqual(reader.cancel(ticket), state != "delivered")
        self.assertTrue(reader.wait(ticket, 0))
        if state == "delivered":
            reader.release(ticket)
        self.assertEqual(reader.counters.cancelled, 0 if state == "delivered" else 1)
        source.gate.set()
        if state == "queued":
            self.assertEqual([found for found, _ in self.finished(reader)], [busy])
            reader.release(busy)
        other = self.request(reader, 0, 1)  # in the only block
        ((found, arrays),) = self.finished(reader)
        self.assertIs(found, other)
        self.assert_value(source, found, arrays)

    def test_release_twice_or_early(self):
        reader = self.reader(Source())
        ticket = self.request(reader, 0, 0)
        self.assertTrue(reader.wait(ticket, SECONDS))
        for method in (reader.release, reader.views):
            with self.assertRaisesRegex(ValueError, "a ticket that is done"):
                method(ticket)
        self.finished(reader)
        reader.release(ticket)
        for method in (reader.release, reader.views):
            with self.assertRaisesRegex(ValueError, "a ticket that is over"):
                method(ticket)

    def test_arguments(self):
        for wrong in ({"ring_blocks": 0}, {"queue_length": 0}, {"num_threads": 0}, {"retries": -1}):
            with self.assertRaisesRegex(ValueError, "at least"):
                self.reader(Source(), **wrong)

    def test_a_ring_without_pointers(self):
        with (
            mock.patch.object(pinned, "_view", return_value=None),
            self.assertRaisesRegex(MoejaxError, "gives no pointer to its host memory"),
        ):
            self.reader(Source())

    @pytest.mark.gpu
    def test_blocks_are_pinned_on_a_gpu(self):
        self.device = jax.devices("gpu")[0]
        source = Source()
        reader = self.reader(source, ring_blocks=1)
        on_device = jax.sharding.SingleDeviceSharding(self.device)
        for expert in range(4):
            self.request(reader, 0, expert)
            ((ticket, arrays),) = self.finished(reader)
            self.assertEqual({a.sharding.memory_kind for a in arrays}, {"pinned_host"})
            self.assert_value(
                source, ticket, jax.block_until_ready(jax.device_put(arrays, on_device))
            )
            reader.release(ticket)


class WaitingTest(SsdTestCase):
    def test_inside_a_step(self):
        source = Source()
        reader = self.reader(source)
        shapes = tuple(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in PARTS)

        @jax.jit
        def step(expert):
            row = jax.pure_callback(lambda e: reader.read_now(2, int(e)), shapes, expert)
            return tuple(array + jnp.ones((), array.dtype) for array in row)

        for expert in range(8):
            for array in step(jnp.int32(expert)):
                self.assertTrue((np.asarray(array) == source.value(2, expert) + 1).all())
        counters = reader.counters
        self.assertEqual((counters.waits, counters.reads), (8, 8))

    def test_beside_a_stuck_ring(self):
        source = Source()
        reader = self.reader(source, ring_blocks=1, queue_length=1)
        self.request(reader, 0, 0)
        self.finished(reader)  # and never released
        self.request(reader, 0, 1)
        self.assertIsNone(reader.request(0, 2, urgent=True))
        for array in reader.read_now(0, 2):
            self.assertTrue((array == source.value(0, 2)).all())

    def test_a_reader_that_only_waits_keeps_nothing_alive(self):
        reader = SsdReader(Source(), self.device, ring_blocks=1, queue_length=1)
        reader.read_now(0, 0)
        seen = weakref.ref(reader)
        del reader
        gc.collect()
        self.assertIsNone(seen())

    def test_failure(self):
        reader = self.reader(Source([OSError(5, "Input/output error")] * 3))
        with self.assertRaisesRegex(MoejaxError, "Input/output error"):
            reader.read_now(0, 0)
        self.assertEqual(reader.counters.errors, 1)

    def test_what_computes_while_it_reads(self):
        source = Source()
        source.uses_jax = True
        reader = self.reader(source)
        with self.assertRaisesRegex(MoejaxError, "cannot be read inside a step on the CPU"):
            reader.read_now(0, 0)
        self.assertEmpty(source.order)
        check_waiting(source, mock.Mock(platform="gpu"))
        check_waiting(Source(), self.device)
        with self.assertRaisesRegex(MoejaxError, "^experts of a: experts that are converted"):
            check_waiting(source, self.device, "experts of a")


if __name__ == "__main__":
    absltest.main()
