"""Simulated caches against plain Python, brute force and the engine's own ledger."""

import itertools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.experts.tiering import Tiering
from moejax.policies.on_demand import OnDemand
from moejax.routing.simulate.ceilings import belady, next_uses
from moejax.routing.simulate.replay import EVENTS
from moejax.routing.simulate.runs import Run, run_policies
from moejax.routing.simulate.workload import Workload, make_workload
from moejax.routing.trace import read_trace
from tests.simulated_traces import random_trace
from tests.tiny_engine import load_tiny_engine

# A prompt in two chunks, tokens one by one, a batch of three, another prompt, more tokens.
STEPS = [40, 9, *[1] * 25, *[3] * 6, 30, *[1] * 25]
COUNTED = tuple(name for name in EVENTS if name not in ("reused", "bulk"))


def run_of(slots: int, prefetch: int) -> Run:
    policy = OnDemand(prefetch=prefetch)
    return Run(policy=policy, tiers=("stored",), expert_bytes=(1,), slots=(slots,))


def on_device(workload: Workload) -> Workload:
    return jax.tree.map(jnp.asarray, workload)


class OnDemandTest(parameterized.TestCase):
    """The replay of on_demand is the engine's cache; `replay_test` has loops beside it."""

    @pytest.mark.slow
    def test_counts_are_those_of_the_engine(self):
        slots, prefetch = 4, 2  # a prompt needs more experts than that, a token fewer
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        policy = Tiering(policy=OnDemand(prefetch=prefetch), slots=(slots,))
        engine = load_tiny_engine(folder, policy=policy)
        prompts = [list(range(20)), list(range(60, 160, 9))]
        with engine.recording(folder / "trace", foreseen=prefetch):
            for prompt in prompts:
                engine.generate(prompt, max_new_tokens=30, ignore_eos=True)
        ledger = engine.ledger
        trace = read_trace(folder / "trace")
        [tallied] = run_policies(trace, [run_of(slots, prefetch)])
        found = tallied.events.sum(0)[..., 0]
        for name in COUNTED:
            self.assertEqual(found[EVENTS.index(name)], ledger.total(name), name)
        self.assertGreater(ledger.total("misses"), 0)
        self.assertGreater(ledger.total("prefetched"), 0)


class CeilingsTest(parameterized.TestCase):
    def test_belady_is_brute_force(self):
        for seed in range(6):
            trace = random_trace(
                step_sizes=[1] * 9, num_layers=2, num_experts=5, width=2, seed=seed
            )
            workload = make_workload(trace)
            slots = [0, 1, 2, 3, 5]
            found = belady(on_device(workload), next_uses(workload), jnp.asarray(slots))
            for k, layer in itertools.product(range(len(slots)), range(2)):
                best = most_hits(workload.masks()[:, layer], slots[k])
                self.assertEqual(int(found.hits[1, layer, k]), best)

    @pytest.mark.slow
    def test_belady_is_a_literal_version_and_beats_lru(self):
        trace = random_trace(step_sizes=STEPS, num_layers=2, num_experts=64, width=6)
        workload, slots = make_workload(trace), (0, 3, 8, 20, 40, 64)
        self.assertGreater((workload.wide_at >= 0).sum(), 0)
        found = belady(on_device(workload), next_uses(workload), jnp.asarray(slots))
        masks = workload.masks()
        for layer in range(2):
            for k, size in enumerate(slots):
                hits = literal_belady(masks[:, layer], size)
                is_decode = workload.is_decode
                expected = [hits[~is_decode].sum(), hits[is_decode].sum()]
                np.testing.assert_array_equal(found.hits[:, layer, k], expected)
        runs = run_policies(trace, [run_of(size, 0) for size in slots[:-1]])
        lru = np.array([run.events[:, EVENTS.index("hits")].sum() for run in runs])
        best = np.asarray(found.hits).sum((0, 1))[:-1]
        self.assertTrue((lru <= best).all())
        self.assertTrue((lru < best).any())
        needed = [masks[~workload.is_decode].sum(), masks[workload.is_decode].sum()]
        np.testing.assert_array_equal(found.needed[..., 0].sum(1), needed)

    def test_hits_are_those_of_a_list_in_order_of_use(self):
        trace = random_trace(step_sizes=[1] * 300, num_layers=2, num_experts=16, width=3)
        runs = run_policies(trace, [run_of(4, 0), run_of(9, 0)])
        hits = [run.events[:, EVENTS.index("hits")].sum() for run in runs]
        expected = literal_lru(make_workload(trace).masks(), (4, 9)).sum(axis=1)
        np.testing.assert_array_equal(hits, expected)


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


def literal_belady(masks: np.ndarray, slots: int) -> np.ndarray:
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


def literal_lru(masks: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """int[len(sizes), M], hits; of the experts of one step the smaller id is the older one."""
    hits = np.zeros((len(sizes), masks.shape[1]), int)
    for layer, (i, size) in itertools.product(range(masks.shape[1]), enumerate(sizes)):
        order: list[int] = []
        for mask in masks[:, layer]:
            needed = np.flatnonzero(mask).tolist()
            hits[i, layer] += len(set(needed) & set(order[:size]))
            order = needed[::-1] + [e for e in order if e not in needed]
    return hits
