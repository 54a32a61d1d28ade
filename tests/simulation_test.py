"""Simulated caches against plain Python, brute force and the engine's own ledger."""

import itertools
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.experts.residency import CacheSizes
from moejax.experts.tiering import Tiering
from moejax.policies.on_demand import OnDemand
from moejax.routing.simulate.ceilings import MAX_SEARCHED, belady, needed_experts
from moejax.routing.simulate.replay import EVENTS
from moejax.routing.simulate.runs import Run, run_policies
from moejax.routing.trace import PREFILL, Trace, read_trace
from tests.cache_model import CacheModel
from tests.simulated_traces import random_trace
from tests.tiny_engine import load_tiny_engine

# A prompt in two chunks, tokens one by one, a batch of three, another prompt, more tokens.
STEPS = [40, 9, *[1] * 25, *[3] * 6, 30, *[1] * 25]
GRID = ((0, 0), (1, 1), (3, 0), (5, 3), (9, 3), (16, 1))
COUNTED = tuple(name for name in EVENTS if name not in ("reused", "bulk"))


def run_of(slots: int, prefetch: int) -> Run:
    policy = OnDemand(prefetch=prefetch)
    return Run(policy=policy, tiers=("stored",), expert_bytes=(1,), slots=(slots,))


def plain_python(trace: Trace, slots: int, prefetch: int) -> np.ndarray:
    """int[2, n] of one setting by phase, one decision after the other, the layers in turn."""
    num_layers, num_experts = trace.num_layers, trace.num_experts
    spec = CacheSizes(
        num_layers=num_layers, num_experts=num_experts, slots=slots, transient=num_experts
    )
    model, limit = CacheModel(spec, num_experts), min(prefetch, slots)
    if slots == num_experts:  # such pools hold everything from the start
        for layer in model.slots:
            for expert, slot in enumerate(layer):
                slot.owner = expert
    found = np.zeros((2, len(COUNTED)), np.int64)
    for step in np.unique(trace.step):
        rows = trace.step == step
        before = np.sum([[of[name] for name in COUNTED] for of in model.counts], axis=0)
        for layer in range(num_layers):
            if layer and limit:
                model.predict(layer, foreseen(trace, rows, layer, limit), limit)
            model.plan(layer, set(trace.ids[rows, layer].reshape(-1).tolist()))
        after = np.sum([[of[name] for name in COUNTED] for of in model.counts], axis=0)
        found[int(trace.phase[rows][0])] += after - before
    return found


def foreseen(trace: Trace, rows: np.ndarray, layer: int, limit: int) -> set[int]:
    """DyMoE eq. 7 (prompts: how many tokens choose it) and eq. 8 (decode: its probability)."""
    ids, mass = trace.predicted_ids[rows, layer - 1], trace.predicted_probabilities[rows, layer - 1]
    demand = np.zeros(trace.num_experts, np.float32)
    if trace.phase[rows][0] == PREFILL:
        ids, mass = ids[:, : trace.width], np.ones((len(ids), trace.width))
    np.add.at(demand, ids.reshape(-1), mass.reshape(-1))
    first = np.argsort(-demand, kind="stable")[:limit].tolist()
    return {expert for expert in first if demand[expert] > 0}


class OnDemandTest(parameterized.TestCase):
    """The replay of on_demand in one tier is the engine's cache, to the last count."""

    @parameterized.parameters(
        {"num_layers": 3, "num_experts": 16, "width": 3, "foreseen": 3},
        {"num_layers": 2, "num_experts": 64, "width": 6, "foreseen": 6},
    )
    @pytest.mark.slow
    def test_counts_are_those_of_plain_python(self, **shape):
        trace = random_trace(step_sizes=STEPS, seed=len(shape), **shape)
        for slots, prefetch in GRID:
            [tallied] = run_policies(trace, [run_of(slots, prefetch)])
            events = [tallied.events[:, EVENTS.index(name), 0] for name in COUNTED]
            np.testing.assert_array_equal(
                np.stack(events, axis=1),
                plain_python(trace, slots, prefetch),
                str((slots, prefetch)),
            )

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
            masks, is_decode = needed_experts(trace)
            slots = [0, 1, 2, 3, 5]
            found = belady(masks, is_decode, jnp.asarray(slots))
            for k, layer in itertools.product(range(len(slots)), range(2)):
                best = most_hits(masks[:, layer], slots[k])
                self.assertEqual(int(found.hits[1, layer, k]), best)

    @pytest.mark.slow
    def test_belady_is_a_literal_version_and_beats_lru(self):
        trace = random_trace(step_sizes=STEPS, num_layers=2, num_experts=64, width=6)
        (masks, is_decode), slots = needed_experts(trace), (0, 3, 8, 20, 40, 64)
        self.assertGreater(masks.sum(2).max(), MAX_SEARCHED)
        found = belady(masks, is_decode, jnp.asarray(slots))
        for layer in range(2):
            for k, size in enumerate(slots):
                hits = literal_belady(masks[:, layer], size)
                expected = [hits[~is_decode].sum(), hits[is_decode].sum()]
                np.testing.assert_array_equal(found.hits[:, layer, k], expected)
        runs = run_policies(trace, [run_of(size, 0) for size in slots[:-1]])
        lru = np.array([run.events[:, EVENTS.index("hits")].sum() for run in runs])
        best = np.asarray(found.hits).sum((0, 1))[:-1]
        self.assertTrue((lru <= best).all())
        self.assertTrue((lru < best).any())
        needed = [masks[~is_decode].sum(), masks[is_decode].sum()]
        np.testing.assert_array_equal(found.needed[..., 0].sum(1), needed)

    def test_hits_are_those_of_a_list_in_order_of_use(self):
        trace = random_trace(step_sizes=[1] * 300, num_layers=2, num_experts=16, width=3)
        runs = run_policies(trace, [run_of(4, 0), run_of(9, 0)])
        hits = [run.events[:, EVENTS.index("hits")].sum() for run in runs]
        expected = literal_lru(needed_experts(trace)[0], (4, 9)).sum(axis=1)
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


if __name__ == "__main__":
    absltest.main()
