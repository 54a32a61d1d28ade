"""Experts from disk: order, bounds, blocks, the waiting mode; faults, a slow disk, stress."""

import contextlib
import gc
import tempfile
import threading
import time
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
from absl.testing import parameterized

from moejax.checkpoints import open_checkpoint
from moejax.checkpoints.experts import _TensorFiles, open_experts
from moejax.errors import MoejaxError
from moejax.experts.disk_cache import _DiskReader, check_waiting
from tests.quantized_stores import QWEN, Own
from tests.random_checkpoints import empty_row
from tests.ssd_source import MOMENT, SECONDS, Source, SsdTestCase


class DiskReaderTest(SsdTestCase):
    @parameterized.parameters(1, 3)
    def test_every_expert(self, ring_blocks):
        source = Source()
        reader = self.reader(source, ring_blocks=ring_blocks)
        for expert, request in {of: reader.request(of) for of in np.ndindex(4, 8)}.items():
            row = request.result(SECONDS)
            self.assert_value(source, expert, row)
            reader.release(row)
        self.assertEqual(source.order, list(np.ndindex(4, 8)))
        counters = reader.counters
        self.assertEqual((counters.reads, counters.bytes), (32, 32 * source.row_nbytes))
        self.assertEqual((counters.errors, counters.retries), (0, 0))

    def test_blocks_are_used_again_and_never_before_release(self):
        source = Source()
        reader = self.reader(source)
        first, second, third = (reader.request((0, i)) for i in range(3))
        block, other = first.result(SECONDS), second.result(SECONDS)
        self.assertFalse(self.is_read(third, MOMENT))
        self.assert_value(source, (0, 0), block)
        reader.release(block)
        self.assertIs(third.result(SECONDS), block)
        self.assert_value(source, (0, 2), block)
        self.assert_value(source, (0, 1), other)

    def test_urgent_ones_come_first(self):
        source = Source()
        source.gate.clear()
        reader = self.reader(source, ring_blocks=8)
        found = [reader.request((0, 0))]
        self.assertTrue(source.began.acquire(timeout=SECONDS))
        for expert, urgent in ((1, False), (2, True), (3, False), (4, True)):
            found.append(reader.request((0, expert), urgent=urgent))
        source.gate.set()
        self.assertTrue(all(map(self.is_read, found)))
        self.assertEqual([expert for _, expert in source.order], [0, 2, 4, 1, 3])

    @parameterized.parameters("queued", "reading", "done", "failed")
    def test_a_request_that_is_forgotten_gives_its_block_back(self, state):
        source = Source([OSError("disk")] if state == "failed" else [])
        reader = self.reader(source, ring_blocks=1, retries=0)
        if state in ("queued", "reading"):
            source.gate.clear()
            busy = reader.request((3, 3))
            self.assertTrue(source.began.acquire(timeout=SECONDS))
        request = busy if state == "reading" else reader.request((0, 0))
        if state in ("done", "failed"):
            self.assertTrue(self.is_read(request))
        reader.forget(request)
        source.gate.set()
        if state == "queued":
            reader.release(busy.result(SECONDS))
        row = reader.request((0, 1)).result(SECONDS)  # in the only block
        self.assert_value(source, (0, 1), row)
        self.assertEqual(source.order[-1], (0, 1))
        self.assertEqual((0, 0) in source.order, state in ("done", "failed"))

    def test_a_ring_that_cannot_be_had(self):
        with (
            mock.patch.object(np, "empty", side_effect=MemoryError("no memory")),
            self.assertRaisesRegex(MoejaxError, "of host memory for experts cannot be had"),
        ):
            self.reader(Source())


class WaitingTest(SsdTestCase):
    def test_beside_a_stuck_ring(self):
        source = Source()
        reader = self.reader(source, ring_blocks=1)
        reader.request((0, 0)).result(SECONDS)  # and never released
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
        for request in [reader.request((0, expert)) for expert in (0, 1)]:
            request.result(SECONDS)
        counters = reader.counters
        self.assertEqual((counters.reads, counters.retries, counters.errors), (2, 3, 0))

    def test_given_up_and_the_next_is_read(self):
        source = Source([OSError(5, "Input/output error")] * 3)
        reader = self.reader(source, ring_blocks=1, retries=2)
        failed, read = (reader.request((0, expert)) for expert in (0, 1))
        self.assertIn("Input/output error", str(failed.exception(SECONDS)))
        self.assert_value(source, (0, 1), read.result(SECONDS))
        counters = reader.counters
        self.assertEqual((counters.reads, counters.retries, counters.errors), (1, 2, 1))
        self.assertEqual(counters.bytes, source.row_nbytes)

    def test_a_slow_disk(self):
        source = Source()
        source.gate.clear()
        reader = self.reader(source)
        slow = reader.request((0, 0))
        self.assertTrue(source.began.acquire(timeout=SECONDS))
        reader.request((0, 1))
        start = time.monotonic()
        self.assertFalse(self.is_read(slow, MOMENT))
        with self.assertLogs("absl", "WARNING") as logs:
            reader.close(MOMENT)
        self.assertLess(time.monotonic() - start, SECONDS / 2)
        self.assertIn("left behind", logs.output[0])
        for call in (lambda: reader.request((0, 0)), lambda: reader._read_now((0, 0))):
            with self.assertRaisesRegex(ValueError, "is closed"):
                call()

    def test_closing_ends_requests_and_the_thread(self):
        source = Source()
        reader = self.reader(source, ring_blocks=1)
        first, starving = (reader.request((0, i)) for i in range(2))
        first.result(SECONDS)  # and nobody releases the block
        reader.close()
        reader.close()
        self.assertFalse(starving.done())
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
        wrong, ended = [], []

        def take(requests):
            """Takes those that are done; others may wait for their blocks."""
            for expert, request in [one for one in requests if one[1].done()]:
                requests.remove((expert, request))
                if (error := request.exception()) is None:
                    row = request.result()
                    wrong.extend(a for a in row if (a != source.value(*expert)).any())
                    reader.release(row)
                elif "disk" not in str(error):
                    wrong.append(error)
            time.sleep(0.0002)

        def call(seed):
            own, mine = np.random.default_rng(seed), []
            for _ in range(150):
                expert = int(own.integers(4)), int(own.integers(8))
                mine.append((expert, reader.request(expert, urgent=bool(own.random() < 0.3))))
                if own.random() < 0.3:
                    reader.forget(mine.pop()[1])
                if own.random() < 0.1:
                    with contextlib.suppress(MoejaxError):
                        row = reader._read_now(expert)
                        wrong.extend(a for a in row if (a != source.value(*expert)).any())
                take(mine)
            while mine:
                take(mine)
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
        # Nothing is lost: every block can be had again.
        end = time.monotonic() + SECONDS
        while len(reader._free) < 3 and time.monotonic() < end:
            time.sleep(0.001)
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
            request = reader.request((1, 1))
            error = request.exception(SECONDS)
        counters = reader.counters
        self.assertEqual(counters.retries, 1)
        if num_corrupt == 1:
            for found, array in zip(request.result(), expected, strict=True):
                np.testing.assert_array_equal(found, array)
            return
        self.assertRegex(str(error), "expert 1 of sparse layer 1 is not what was read before")
        self.assertEqual((counters.errors, counters.reads), (1, 0))
