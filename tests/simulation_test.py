"""Ceilings of simulated caches, against brute force, and the cost of simulated steps."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moejax.routing.simulate.costs import (
    GIB,
    Machine,
    Traffic,
    _MeasuredRun,
    bandwidth_bound_ms,
    calibrate,
    step_ms,
)
from moejax.routing.simulate.sweeping import _most_hits, _needed_experts
from tests.simulated_traces import random_trace

# A prompt in two chunks, tokens one by one, a batch of three, another prompt, more tokens.


class CeilingsTest(parameterized.TestCase):
    def test_most_hits_is_brute_force(self):
        for seed in range(6):
            trace = random_trace(
                step_sizes=[1] * 9, num_layers=2, num_experts=5, width=2, seed=seed
            )
            masks, is_decode = _needed_experts(trace)
            slots = [0, 1, 2, 3, 5]
            found = _most_hits(masks, is_decode, jnp.asarray(slots))
            for k, layer in itertools.product(range(len(slots)), range(2)):
                best = most_hits(masks[:, layer], slots[k])
                self.assertEqual(int(found.hits[1, layer, k]), best)


def most_hits(masks: np.ndarray, slots: int) -> int:
    """The most hits of one layer, by trying every content after every step."""
    experts = range(masks.shape[1])
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for mask in masks:
        needed = frozenset(np.flatnonzero(mask).tolist())
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            there = held | needed
            for size in range(min(slots, len(there)) + 1):
                for kept in itertools.combinations(sorted(there & set(experts)), size):
                    value = hits + len(held & needed)
                    after[frozenset(kept)] = max(after.get(frozenset(kept), 0), value)
        best = after
    return max(best.values())


def traffic(**changed: Any) -> Traffic:
    """Traffic of 10 steps of 4 layers: 8 misses of 1 GiB in 5 layers, 3 x 2 prefetched."""
    fields: dict[str, Any] = {
        "num_layers": 4,
        "steps": 10,
        "fetches": 5,
        "misses": np.array([8]),
        "ahead": np.array([[37], [0], [3]]),
        "bulk": np.array([0]),
        "expert_bytes": np.array([GIB]),
    }
    return Traffic(**(fields | changed))


class CostsTest(parameterized.TestCase):
    def test_a_step_by_hand(self):
        machine = Machine(base_ms=40.0, link_gib_per_s=50.0, fetch_ms=0.5)  # 20 ms a GiB
        # 40 + (5 x 0.5 + 8 x 20 + 3 x (2 x 20 + 0.5)) / 10
        self.assertAlmostEqual(step_ms(machine, traffic()), 68.4)
        hides = Machine(base_ms=40.0, link_gib_per_s=50.0, fetch_ms=0.5, overlap=1.0)
        # A layer's 10 ms hide as much of each 40.5.
        self.assertAlmostEqual(step_ms(hides, traffic()), 40 + (2.5 + 160 + 3 * 30.5) / 10)
        moved = traffic().bytes_by_cause
        self.assertEqual(moved, {"demand": 0.8 * GIB, "prefetch": 0.6 * GIB, "bulk": 0.0})

    def test_the_link_is_no_faster_than_its_bytes(self):
        machine = Machine(base_ms=1.0, link_gib_per_s=50.0, overlap=1.0)
        full = traffic(bulk=np.array([100]), misses=np.array([0]), fetches=0)
        self.assertAlmostEqual(step_ms(machine, full), 20 * (0.6 + 10))
        self.assertEqual(bandwidth_bound_ms(machine, GIB), 20.0)
        self.assertEqual(bandwidth_bound_ms(machine, 0), 1.0)

    def test_two_tiers_have_their_own_bytes(self):
        machine = Machine(base_ms=0.0, link_gib_per_s=50.0)
        two = traffic(
            misses=np.array([1, 4]), ahead=np.zeros((1, 2), int), bulk=np.zeros(2, int),
            expert_bytes=np.array([GIB, GIB // 2]),
        )  # fmt: skip
        self.assertAlmostEqual(step_ms(machine, two), (20 + 4 * 10) / 10)

    def test_calibration_finds_the_machine(self):
        true = Machine(base_ms=4.0, link_gib_per_s=44.0)
        rng = np.random.default_rng(0)
        measured = []
        for share in (0.05, 0.1, 0.3, 0.6, 1.0):
            tpot = true.base_ms + float(true._link_ms(share * GIB))
            measured.append(
                _MeasuredRun(tpot_ms=tpot * rng.normal(1, 0.002), num_bytes=share * GIB)
            )
        found = calibrate(measured, fetch_ms=0.02)
        self.assertAlmostEqual(found.link_gib_per_s, 44, delta=1)
        self.assertAlmostEqual(found.base_ms, 4, delta=0.2)
        self.assertEqual(found.fetch_ms, 0.02)
