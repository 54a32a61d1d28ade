"""A source of experts that fails, waits and counts as it is told, and what the tests of it share.

Whatever waits, waits for seconds.
"""

import concurrent.futures
import contextlib
import threading

import jax
import numpy as np
from absl.testing import parameterized

from moejax.experts.disk_cache import _DiskReader

SECONDS = 20.0  # for what must happen
MOMENT = 0.05  # for what must not
PARTS = (jax.ShapeDtypeStruct((8, 3), np.uint32), jax.ShapeDtypeStruct((5,), np.float16))


class Source:
    """Rows of one number each, and what goes wrong: `faults` are raised by reads, one each."""

    num_layers, num_experts, row, uses_jax = 4, 8, PARTS, False
    row_nbytes = 8 * 3 * 4 + 5 * 2

    def __init__(self, faults=()):
        self.faults, self.order = list(faults), []
        self.gate = threading.Event()  # reads wait for it
        self.gate.set()
        self.began = threading.Semaphore(0)

    def value(self, layer, expert):
        return layer * self.num_experts + expert + 1

    def read(self, layer, expert, into, *, check=True):
        assert check  # an expert from disk is read again and again
        self.order.append((layer, expert))
        self.began.release()
        assert self.gate.wait(SECONDS)
        if self.faults:
            fault = self.faults.pop(0)
            if fault is not None:
                into[0][...] = 0  # and half a row is there
                raise fault
        for memory in into:
            memory[...] = self.value(layer, expert)


class SsdTestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.device = jax.devices("cpu")[0]
        self.enter_context(jax.default_device(self.device))
        self.resources = self.enter_context(contextlib.ExitStack())

    def reader(self, source, *, ring_blocks=2, retries=2):
        reader = _DiskReader(source, ring_blocks=ring_blocks, retries=retries)
        self.resources.callback(reader.close)
        if isinstance(source, Source):
            self.resources.callback(source.gate.set)  # before the reader is closed
        return reader

    def is_read(self, request, seconds=SECONDS):
        """Whether a request is read, failed or cancelled within this time."""
        return bool(concurrent.futures.wait([request], seconds).done)

    def assert_value(self, source, expert, row):
        for array, part in zip(row, source.row, strict=True):
            self.assertEqual((array.shape, array.dtype), (part.shape, part.dtype))
            self.assertTrue((array == source.value(*expert)).all(), (array, expert))
