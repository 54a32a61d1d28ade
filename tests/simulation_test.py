"""Ceilings of simulated caches, against brute force; `replay_test` has the policies."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.policies.baselines import OnDemand
from moejax.routing.simulate.replay import EVENTS
from moejax.routing.simulate.runs import Run, run_policies
from moejax.routing.simulate.sweeping import MAX_SEARCHED, _most_hits, _needed_experts
from tests.simulated_traces import random_trace

# A prompt in two chunks, tokens one by one, a batch of three, another prompt, more tokens.
STEPS = [40, 9, *[1] * 25, *[3] * 6, 30, *[1] * 25]


def run_of(slots: int, prefetch: int) -> Run:
    policy = OnDemand(prefetch=prefetch)
    return Run(policy=policy, tiers=("stored",), expert_bytes=(1,), slots=(slots,))


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

    @pytest.mark.slow
    def test_most_hits_is_a_literal_version_and_beats_lru(self):
        trace = random_trace(step_sizes=STEPS, num_layers=2, num_experts=64, width=6)
        (masks, is_decode), slots = _needed_experts(trace), (0, 3, 8, 20, 40, 64)
        self.assertGreater(masks.sum(2).max(), MAX_SEARCHED)
        found = _most_hits(masks, is_decode, jnp.asarray(slots))
        for layer in range(2):
            for k, size in enumerate(slots):
                hits = literal_most_hits(masks[:, layer], size)
                expected = [hits[~is_decode].sum(), hits[is_decode].sum()]
                np.testing.assert_array_equal(found.hits[:, layer, k], expected)
        runs = run_policies(trace, [run_of(size, 0) for size in slots[:-1]])
        lru = np.array([run.events[:, EVENTS.index("hits")].sum() for run in runs])
        best = np.asarray(found.hits).sum((0, 1))[:-1]
        self.assertTrue((lru <= best).all())
        self.assertTrue((lru < best).any())
        needed = [masks[~is_decode].sum(), masks[is_decode].sum()]
        np.testing.assert_array_equal(found.needed[..., 0].sum(1), needed)


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


def literal_most_hits(masks: np.ndarray, slots: int) -> np.ndarray:
    """int[S], hits of one layer, with a look at the whole future for every choice."""
    held: set[int] = set()
    hits = np.zeros(len(masks), int)
    for s, mask in enumerate(masks):
        needed = set(np.flatnonzero(mask).tolist())
        hits[s] = len(held & needed)
        held |= needed
        while len(held) > slots:
            uses = {e: np.flatnonzero(masks[s + 1 :, e]) for e in held}
            held.remove(max(held, key=lambda e: uses[e][0] if len(uses[e]) else len(masks)))
    return hits
