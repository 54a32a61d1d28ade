"""Shared parts of tests of bulk transfers: a pool of numbers, and steps that check them."""

import concurrent.futures
import contextlib
import dataclasses
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from moejax.experts import cache, residency, transfers
from moejax.experts.host_store import HostStore
from moejax.experts.residency import no_counts
from moejax.experts.state import TierSlots
from moejax.experts.transfers import Transfers
from moejax.programs import CompiledPrograms
from tests.cache_model import check, columns
from tests.ssd_source import SECONDS, Source, SsdTestCase

CACHE = residency.CacheSizes(num_layers=4, num_experts=8, slots=2, transient=1, banks=2)
PROGRAMS = CompiledPrograms()  # of all cases: compiling is what takes the time
ASK = [(0, 3), (0, 5), (2, 3)]


class _AtOnce(concurrent.futures.ThreadPoolExecutor):
    """Runs what is submitted before it returns."""

    def submit(self, *args, **kwargs):
        future = super().submit(*args, **kwargs)
        future.result()
        return future


@contextlib.contextmanager
def prompt_transfers():
    """Transfers that take a call for each of their stages, whatever the clock says."""
    is_ready = mock.Mock(side_effect=lambda array: jax.block_until_ready(array) is array)
    with (
        mock.patch.object(transfers, "is_ready", is_ready),
        mock.patch.object(cache, "is_ready", is_ready),
        mock.patch.object(transfers, "_copier", lambda: _AtOnce(1)),
    ):
        yield


class TransfersTestCase(SsdTestCase):
    def setUp(self):
        super().setUp()
        shared = mock.patch("moejax.experts.transfers.CompiledPrograms", return_value=PROGRAMS)
        self.enter_context(shared)
        self.source = Source()
        part, other = ((CACHE.num_slots, *part.shape) for part in self.source.row)
        self.pool = TierSlots(
            tuple((jnp.zeros(part, jnp.uint32), jnp.zeros(other, jnp.float16)) for _ in range(2)),
            jax.tree.map(jnp.copy, residency.empty(CACHE)), no_counts(CACHE.num_layers),
        )  # fmt: skip

    def held(self):
        store = HostStore(self.source, 32, self.device)
        store.row_of[...] = np.arange(32).reshape(4, 8)
        for row in range(32):
            for part in store.rows(row):
                part[...] = row + 1
        return store

    def transfers(self, supply=None, **how):
        how = {"in_flight": 3} | how
        found = Transfers(CACHE, self.pool, supply or self.held(), self.device, **how)
        self.resources.callback(found.close)
        return found

    def advance(self, transfers, until=lambda: True):
        """Advances like steps would, until a condition holds."""
        end = time.monotonic() + SECONDS
        while True:
            self.pool = transfers.advance(self.pool)
            transfers.send()
            jax.block_until_ready(self.pool)
            check(self.pool.residency, CACHE)
            self.assert_right_bytes()
            if until():
                return
            self.assertLess(time.monotonic(), end, "nothing more happens")
            time.sleep(0.001)

    def drain(self, transfers):
        self.advance(transfers, lambda: not transfers.pending)

    def assert_right_bytes(self):
        owner = np.asarray(columns(self.pool.residency).owner)
        for layer, slot in zip(*np.nonzero(owner >= 0), strict=True):
            value = self.source.value(layer, owner[layer, slot])
            for part in self.pool.banks[layer % 2]:
                found = np.asarray(part[layer // 2 * CACHE.slots + slot])
                self.assertTrue((found == value).all(), (layer, owner[layer, slot], found))

    def resident(self):
        return set(zip(*np.nonzero(np.asarray(self.pool.residency.slot_of) >= 0), strict=True))

    def counts(self):
        names = ("bulk", "prefetch_waste", "evictions")
        return tuple(int(getattr(self.pool.counts, name).sum()) for name in names)

    def assert_counters(self, transfers, **expected):
        found = dataclasses.asdict(transfers.counters)
        self.assertEqual({name: n for name, n in found.items() if n}, expected)
