"""A disk that fails, stalls or returns other bytes: no deadlock, a counter or an error."""

import contextlib
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
from absl.testing import parameterized

from moejax.checkpoints import open_checkpoint
from moejax.checkpoints.experts import _TensorFiles, open_experts
from moejax.errors import MoejaxError
from moejax.experts.disk_cache import _State
from tests.quantized_stores import QWEN, Gptq, Own
from tests.random_checkpoints import empty_row
from tests.ssd_source import MOMENT, SECONDS, Source, SsdTestCase


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

    @parameterized.parameters(Own, Gptq)
    def test_rows(self, kind):
        source = self.open(kind(QWEN))
        reader = self.reader(source, ring_blocks=6)
        for index in np.ndindex(2, 3):
            reader.request(index)
        for ticket in self.finished(reader, 6):
            row = empty_row(source)
            source.read(*ticket.expert, row)
            for found, expected in zip(ticket.row, row, strict=True):
                np.testing.assert_array_equal(found, expected)

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
