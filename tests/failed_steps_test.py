"""Steps that the disk or the device fails: who is told, and that what follows is whole."""

import threading
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import absltest

from moejax.errors import MoejaxError
from moejax.experts.cache import ExpertMemory
from moejax.experts.disk_cache import DiskExperts
from moejax.experts.transfer_programs import TransferRequests
from moejax.experts.transfers import _State
from moejax.policies.base import Requests
from moejax.policies.make import make_policy
from tests.cached_runners import QWEN, cached_runner, random_weights, tier_memory
from tests.transfers_case import ASK, TransfersTestCase

FAILURE = jax.errors.JaxRuntimeError("INTERNAL: the step failed")


class Lost:
    """An array that ran behind a step which failed on the device: ready, and nobody can read it."""

    def is_ready(self):
        return True

    def block_until_ready(self):
        raise FAILURE

    def __array__(self, dtype=None, copy=None):
        raise FAILURE


class BadDisk:
    """The disk of a tier that counts its failures."""

    failures, error = 0, "a bad sector"

    def advance(self, last_uses):
        del last_uses
        return False

    def counts_since(self):
        return {}


def held(memory) -> int:
    """Experts in slots."""
    return int((np.asarray(memory.pool.residency.slot_of) >= 0).sum())


class TiersTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        policy = make_policy("dynaexq", period=16, max_requests=32)
        _, cls.memory = cached_runner(policy, (4, 2), (3, QWEN.num_experts), emulated=True,
                                       first=3)  # fmt: skip

    @pytest.mark.slow
    def test_an_outage_of_several_tiers_ends_the_sessions_of_its_time_alone(self):
        for tier in self.memory.tiers:
            tier.disk = BadDisk()
        before = self.memory.failure_count()
        for tier in self.memory.tiers:
            tier.disk.failures += 1
        since = self.memory.failure_count()
        self.assertEqual([held(tier) for tier in self.memory.tiers], [0, 0])
        for around in (self.memory.step, self.memory.reading):
            for _ in range(2):
                with self.assertRaisesRegex(MoejaxError, "a bad sector"), around(before):
                    pass
            with around(since):
                pass

    def test_what_ran_behind_a_failed_step_is_asked_for_again(self):
        lost = Requests(*[Lost()] * len(Requests._fields))
        self.memory._answer = TransferRequests(lost, lost, Lost())
        with self.memory.step():
            pass
        self.assertNotIsInstance(self.memory._answer.idle, Lost)

    def test_state_that_a_failed_step_made_is_not_used(self):
        for around in (self.memory.step, self.memory.reading):
            pool = self.memory.pool
            old = {id(leaf) for leaf in jax.tree.leaves((pool.state, pool.gate))}
            with self.assertRaises(jax.errors.JaxRuntimeError), around():
                raise FAILURE
            pool = self.memory.pool
            new = jax.tree.leaves((pool.state, pool.gate))
            self.assertEmpty(old & {id(leaf) for leaf in new})
            self.assertIsNone(self.memory._answer)


class SettleTest(absltest.TestCase):
    def test_no_step_starts_between_reading_counts_and_clearing_them(self):
        tier = tier_memory(QWEN, random_weights(QWEN), 2)
        memory, stepped, add = ExpertMemory([tier]), threading.Event(), tier.ledger.add

        def step():
            with memory.step():
                stepped.set()

        other = threading.Thread(target=step)

        def added(*counts, **disk):
            other.start()
            self.assertFalse(stepped.wait(0.05))
            add(*counts, **disk)

        tier.ledger.add = added
        memory.read_counters()
        other.join()
        self.assertTrue(stepped.is_set())


class TransfersTest(TransfersTestCase):
    def test_what_a_failed_step_found_is_looked_for_no_more(self):
        transfers = self.transfers()
        for layer, expert in ASK:
            transfers.request(layer, [expert])
        self.advance(transfers)
        for transfer in transfers._moving.values():
            transfer.result = Lost(), 0
        self.drain(transfers)
        self.assertEqual(self.resident(), set(ASK))

    def test_what_landed_in_a_pool_that_is_lost_is_dropped(self):
        transfers = self.transfers()
        transfers.request(0, [3])  # two may land one after the other
        self.advance(transfers, lambda: transfers._in(_State.INSERTING))
        for transfer in transfers._moving.values():
            transfer.result = Lost(), 0
        transfers.forget_steps()
        self.assertLen(transfers.pending, 0)
        transfers.request(2, [3, 5])
        self.drain(transfers)
        self.assert_counters(transfers, requested=3, moved=3, inserted=2, dropped=1)

    @pytest.mark.slow
    def test_a_thread_that_cannot_start_is_tried_again(self):
        disk = DiskExperts(self.source, None, ring_blocks=2, most_kept=2)
        self.resources.callback(disk.close)
        transfers = self.transfers(disk)
        for layer, expert in ASK:
            transfers.request(layer, [expert])
        start = threading.Thread.start
        no_threads = ["moejax-ssd", "moejax-transfers"]  # once of each

        def limited(thread):
            if no_threads and thread.name.startswith(no_threads[0]):
                raise RuntimeError(f"can't start new thread {no_threads.pop(0)}")
            start(thread)

        with mock.patch.object(threading.Thread, "start", limited):
            for name in tuple(no_threads):
                with self.assertRaisesRegex(RuntimeError, name):
                    self.drain(transfers)
            self.drain(transfers)
        self.assertEqual(self.resident(), set(ASK))
