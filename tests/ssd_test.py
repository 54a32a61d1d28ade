"""Experts from disk: order, bounds, blocks, the waiting mode; faults, a slow disk, stress."""

import contextlib
import gc
import tempfile
import threading
import time
import weakref
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moejax.checkpoints import open_checkpoint
from moejax.checkpoints.experts import _TensorFiles, open_experts
from moejax.errors import MoejaxError
from moejax.experts.disk_cache import _DiskReader, _State, check_waiting
from tests.quantized_stores import QWEN, Own
from tests.random_checkpoints import empty_row
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


class FaultTest(SsdTestCase):
    @parameterized.parameters(
        OSError(5, "Input/output error"), MoejaxError("another checksum"), RuntimeError("a bug")
    )
    def test_tried_again(self, fault):
        source = Source([fault, None, fault, fault, None])
        reader = self.reader(source, retries=2)
        for expert in (0, 1):
            reader.request((0, expert))
        for ticket in self.finished(reader, 2):
            self.assertIsNone(ticket.error)
            self.assert_value(source, ticket)
        counters = reader.counters
        self.assertEqual((counters.reads, counters.retries, counters.errors), (2, 3, 0))

    def test_given_up_and_the_next_is_read(self):
        source = Source([OSError(5, "Input/output error")] * 3)
        reader = self.reader(source, ring_blocks=1, retries=2)
        for expert in (0, 1):
            reader.request((0, expert))
        failed, read = self.finished(reader, 2)
        self.assertIn("Input/output error", failed.error)
        self.assertIsNone(failed.row)
        self.assert_value(source, read)
        reader.release(failed)
        reader.release(read)
        counters = reader.counters
        self.assertEqual((counters.reads, counters.retries, counters.errors), (1, 2, 1))
        self.assertEqual(counters.bytes, source.row_nbytes)

    def test_a_slow_disk(self):
        source = Source()
        source.gate.clear()
        reader = self.reader(source)
        slow = reader.request((0, 0))
        self.assertTrue(source.began.acquire(timeout=SECONDS))
        queued = reader.request((0, 1))
        start = time.monotonic()
        self.assertFalse(self.is_read(slow, MOMENT))
        self.assertEqual(reader.done(), [])
        with self.assertLogs("absl", "WARNING") as logs:
            reader.close(MOMENT)
        self.assertLess(time.monotonic() - start, SECONDS / 2)
        self.assertIn("left behind", logs.output[0])
        self.assertEqual(queued.state, _State.OVER)
        for call in (lambda: reader.request((0, 0)), lambda: reader._read_now((0, 0))):
            with self.assertRaisesRegex(ValueError, "is closed"):
                call()

    def test_closing_ends_requests_and_the_thread(self):
        source = Source()
        reader = self.reader(source, ring_blocks=1)
        reader.request((0, 0))
        starving = reader.request((0, 1))  # nobody releases the block
        self.finished(reader)
        reader.close()
        reader.close()
        self.assertEqual(starving.state, _State.OVER)
        self.assertFalse(reader._thread.is_alive())

    def test_a_retry_does_not_hold_up_closing(self):
        source = Source([OSError("disk")] * 100)
        reader = self.reader(source, retries=99)
        reader.request((0, 0))
        self.assertTrue(source.began.acquire(timeout=SECONDS))
        start = time.monotonic()
        reader.close(SECONDS)
        self.assertLess(time.monotonic() - start, SECONDS / 2)

    def test_stress(self):
        """Callers and threads at random, a read in eight fails: all ends, no byte is wrong.

        How many requests are cancelled in time or fail twice hangs on what else the machine
        does: the expert that never can be read makes errors certain.
        """

        class Flaky(Source):
            def read(self, layer, expert, into, *, check=True):
                with lock:
                    draw = rng.random()
                time.sleep(0.0005 * draw)
                into[0][...] = 99
                if draw < 0.125 or (layer, expert) == (3, 7):
                    raise OSError("disk")
                super().read(layer, expert, into, check=check)

        rng, lock = np.random.default_rng(0), threading.Lock()
        source = Flaky()
        reader = self.reader(source, ring_blocks=3, retries=1)
        wrong, ended, cancelled = [], [], []

        def call(seed):
            own = np.random.default_rng(seed)
            for _ in range(150):
                layer, expert = int(own.integers(4)), int(own.integers(8))
                ticket = reader.request((layer, expert), urgent=bool(own.random() < 0.3))
                if own.random() < 0.3:
                    cancelled.append(reader.cancel(ticket))
                if own.random() < 0.1:
                    with contextlib.suppress(MoejaxError):
                        row = reader._read_now((layer, expert))
                        wrong.extend(a for a in row if (a != source.value(layer, expert)).any())
                for ticket in reader.done():
                    if ticket.row is not None:
                        value = source.value(*ticket.expert)
                        wrong.extend(a for a in ticket.row if (a != value).any())
                    elif "disk" not in ticket.error:
                        wrong.append(ticket.error)
                    reader.release(ticket)
                time.sleep(0.0002)
            ended.append(seed)

        callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(3 * SECONDS)
        self.assertLen(ended, 4)
        self.assertEmpty(wrong)
        counters = reader.counters
        self.assertGreater(counters.reads, 50)
        self.assertGreater(counters.errors, 0)
        self.assertTrue(any(cancelled))
        # Nothing is lost: every request is read, and every block can be had again.
        end = time.monotonic() + SECONDS
        while (reader._queue or len(reader._free) < 3) and time.monotonic() < end:
            for ticket in reader.done():
                reader.release(ticket)
        self.assertLen(reader._free, 3)


class CheckpointTest(SsdTestCase):
    """With a true checkpoint under it."""

    def open(self, store):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        store.write(self.directory)
        checkpoint = open_checkpoint(str(self.directory))
        source = open_experts(checkpoint, dtype="auto", device=self.device)
        self.resources.callback(source.close)
        return source

    @parameterized.parameters(1, 100)
    def test_corrupt_bytes(self, num_corrupt):
        """Bytes that the disk gets wrong after the first read: read again, or reported."""
        source = self.open(Own(QWEN))
        reader = self.reader(source, retries=1)
        expected = empty_row(source)
        source.read(1, 1, expected)
        left, read = [num_corrupt], _TensorFiles.read

        def corrupt(files, tensor, destination):
            read(files, tensor, destination)
            if left[0] and tensor.name.endswith("up_proj.scales"):
                left[0] -= 1
                destination.reshape(-1).view(np.uint8)[3] ^= 4

        with mock.patch.object(_TensorFiles, "read", corrupt):
            reader.request((1, 1))
            (ticket,) = self.finished(reader)
        counters = reader.counters
        self.assertEqual(counters.retries, 1)
        if num_corrupt == 1:
            for found, array in zip(ticket.row, expected, strict=True):
                np.testing.assert_array_equal(found, array)
            return
        self.assertIsNone(ticket.row)
        self.assertRegex(ticket.error, "expert 1 of sparse layer 1 is not what was read before")
        self.assertEqual((counters.errors, counters.reads), (1, 0))
