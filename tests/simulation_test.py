"""Simulated caches against plain Python, brute force and the engine's own ledger."""

import itertools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moejax.memory.budget import Limits
from moejax.memory.residency import CacheSpec
from moejax.simulation.caches import COUNTED, Outcome, Settings, simulate
from moejax.simulation.ceilings import belady, next_uses
from moejax.simulation.workload import Workload, make_workload
from moejax.traces import read_trace
from tests.cache_model import CacheModel
from tests.simulated_traces import random_trace
from tests.tiny_engine import load_tiny_engine

# A prompt in two chunks, tokens one by one, a batch of three, another prompt, more tokens.
STEPS = [40, 9, *[1] * 25, *[3] * 6, 30, *[1] * 25]
SLOTS, PREFETCH = (0, 1, 2, 3, 5, 9, 16), (0, 1, 3)
GRID = list(itertools.product(SLOTS, PREFETCH))


def settings_of(grid: list[tuple[int, int]]) -> Settings:
    slots, prefetch = np.asarray(grid, np.int32).T
    return Settings(jnp.asarray(slots), jnp.asarray(prefetch))


def on_device(workload: Workload) -> Workload:
    return jax.tree.map(jnp.asarray, workload)


def plain_python(workload: Workload, slots: int, prefetch: int) -> np.ndarray:
    """int[2, M, n] of one setting, one decision after the other."""
    num_layers, num_experts = workload.num_layers, workload.num_experts
    spec = CacheSpec(
        num_layers=num_layers, num_experts=num_experts, slots=slots, transient=num_experts
    )
    model = CacheModel(spec, num_experts)
    masks, found = workload.masks(), np.zeros((2, num_layers, len(COUNTED)), np.int64)
    for s in range(workload.num_steps):
        before = [dict(counts) for counts in model.counts]
        for layer in range(num_layers):
            limit = min(prefetch, slots)
            near = workload.rank[s, layer] < limit
            wanted = set(workload.foreseen[s, layer][near].tolist()) - {num_experts}
            if wanted:
                model.predict(layer, wanted, limit)
            misses = model.counts[layer]["misses"]
            model.plan(layer, set(np.flatnonzero(masks[s, layer]).tolist()))
            row = found[int(workload.is_decode[s]), layer]
            row[COUNTED.index("fetches")] += model.counts[layer]["misses"] > misses
            for i, name in enumerate(COUNTED[:-1]):
                row[i] += model.counts[layer][name] - before[layer][name]
    return found


class CachesTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"num_layers": 3, "num_experts": 16, "width": 3, "foreseen": 3}, 0),
        (
            {"num_layers": 2, "num_experts": 64, "width": 6, "foreseen": 3},
            1,
        ),  # steps that are sorted
    )
    def test_counts_are_those_of_plain_python(self, shape, seed):
        trace = random_trace(step_sizes=STEPS, seed=seed, **shape)
        ahead = shape["foreseen"]
        workload = make_workload(trace, ahead)
        grid = [(slots, prefetch) for slots, prefetch in GRID if prefetch <= ahead]
        outcome = simulate(on_device(workload), settings_of(grid), ahead)
        counts = np.asarray(outcome.counts)
        for k, (slots, prefetch) in enumerate(grid):
            np.testing.assert_array_equal(
                counts[..., k], plain_python(workload, slots, prefetch), str((slots, prefetch))
            )
        if seed == 1:
            self.assertGreater((workload.wide_at >= 0).sum(), 0)

    def test_counts_are_those_of_the_engine(self):
        slots, prefetch = 4, 2  # a prompt needs more experts than that, a token fewer
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        engine = load_tiny_engine(
            folder, limits=Limits(slots=slots, prefetch=prefetch, transient=2)
        )
        prompts = [list(range(20)), list(range(60, 160, 9))]
        with engine.recording(folder / "trace", foreseen=prefetch):
            for prompt in prompts:
                engine.generate(prompt, max_new_tokens=30, ignore_eos=True)
        ledger = engine.ledger
        trace = read_trace(folder / "trace")
        workload = make_workload(trace, prefetch)
        outcome = simulate(on_device(workload), settings_of([(slots, prefetch)]), prefetch)
        found = np.asarray(outcome.counts)[..., 0].sum(0)
        for layer, events in enumerate(ledger.layers):
            for name in COUNTED[:-1]:
                self.assertEqual(found[layer, COUNTED.index(name)], events[name], name)
        self.assertGreater(ledger.total("misses"), 0)
        self.assertEqual(ledger.total("prefetched") > 0, prefetch > 0)


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
        outcome = simulate(on_device(workload), settings_of([(size, 0) for size in slots]), 0)
        lru, best = total(outcome, "hits"), np.asarray(found.hits).sum((0, 1))
        self.assertTrue((lru <= best).all())
        self.assertTrue((lru < best).any())
        needed = [masks[~workload.is_decode].sum(), masks[workload.is_decode].sum()]
        np.testing.assert_array_equal(found.needed[..., 0].sum(1), needed)

    def test_hits_are_those_of_a_list_in_order_of_use(self):
        trace = random_trace(step_sizes=[1] * 300, num_layers=2, num_experts=16, width=3)
        workload = make_workload(trace)
        outcome = simulate(on_device(workload), settings_of([(4, 0), (9, 0)]), 0)
        hits = np.asarray(outcome.counts)[:, :, COUNTED.index("hits")].sum(0)
        np.testing.assert_array_equal(hits.T, literal_lru(workload.masks(), (4, 9)))


def total(outcome: Outcome, name: str) -> np.ndarray:
    """Of both phases and all layers, int[K]."""
    return np.asarray(outcome.counts)[:, :, COUNTED.index(name)].sum((0, 1))


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
