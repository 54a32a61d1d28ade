"""Two tiers of planes that share slots: answers as of whole copies, by a rule in plain Python."""

from typing import Any

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.experts.cache import ExpertMemory, TierMemory
from moejax.experts.residency import CacheSizes
from moejax.experts.state import TierSpec
from moejax.inference.runner import Runner
from moejax.policies.base import AnyPolicy
from moejax.policies.dymoe import DyMoE
from moejax.routing.simulate.replay import EVENTS
from moejax.routing.simulate.runs import Run, run_policies
from scripts.studies.dymoe.controls import AsAsked
from tests import slow
from tests.cached_runners import (
    CPU,
    EXPERTS,
    PROMPTS,
    QWEN,
    answers,
    random_weights,
    without_experts,
)
from tests.refining_tiers_test import NUM_EXPERTS, NUM_LAYERS, by_planes, memory_of
from tests.tiered_kinds_test import recorded


def shared_memory(
    policy: AnyPolicy, slots: int, *, transient: int = 2, prefetch: int = 0
) -> ExpertMemory:
    """4 and 2 bits by planes in one pool."""
    experts, tiers = by_planes(), []
    cache = CacheSizes(
        num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, slots=slots, transient=transient, planes=2,
        banks=2 if prefetch else 1,
    )  # fmt: skip
    row_of = np.arange(NUM_LAYERS * NUM_EXPERTS).reshape(NUM_LAYERS, NUM_EXPERTS)
    for refines in (2, 0):
        spec = TierSpec(cache, prefetch, refines=refines, shares_slots=refines > 0)
        rows: list[Any] = []
        for name in EXPERTS:
            plane = experts[name].refinements[0]
            part: Any = plane if refines else experts[name].prefix(2)
            rows.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), part))
        tiers.append(TierMemory(spec, rows[0], rows[1], row_of, CPU))
    return ExpertMemory(tiers, ["int4", "int2"], policy, width=QWEN.experts_per_token)


def told(memory: ExpertMemory) -> tuple[list[list[int]], ExpertMemory]:
    """Answers of a runner, whose counters are read."""
    runner = Runner(QWEN, without_experts(random_weights(QWEN)), CPU, memory=memory)
    found = answers(runner, PROMPTS)
    memory.read_counters()
    return found, memory


class SharedSlotsTest(parameterized.TestCase):
    @parameterized.parameters((3, 2, 0), (7, 5, 0), (6, 2, 2))
    @pytest.mark.slow
    def test_answers_are_those_of_whole_copies(self, slots, transient, prefetch):
        expected, whole = told(memory_of(AsAsked(prefetch=0), NUM_EXPERTS, planes=False))
        policy = DyMoE(prefetch=prefetch)
        found, shared = told(shared_memory(policy, slots, transient=transient, prefetch=prefetch))
        self.assertEqual(found, expected)
        for name, tier in shared.ledger.tiers.items():
            self.assertGreater(tier.total("needed"), 0, name)
            self.assertGreater(tier.total("misses"), 0, name)
        self.assertEqual(shared.ledger.shares, whole.ledger.shares)

    @slow.where(lambda prefetch: prefetch)  # predictions: cache_plan_wiring_test.py
    @parameterized.parameters((7, 0), (9, 2))
    def test_a_trace_gives_the_counts_of_the_engine(self, slots, prefetch):
        settings = {"retention": 0.5, "selection": "load"}
        policy = DyMoE(prefetch=prefetch, **settings)
        memory = shared_memory(policy, slots, prefetch=prefetch)
        whole = memory_of(AsAsked(prefetch=0, **settings), NUM_EXPERTS, planes=False)
        weights = without_experts(random_weights(QWEN))
        shared, copies = (Runner(QWEN, weights, CPU, memory=of) for of in (memory, whole))
        said, trace = recorded(shared, PROMPTS[:1], 40)
        self.assertEqual(said, answers(copies, PROMPTS[:1], 40))
        memory.read_counters()
        whole.read_counters()
        self.assertEqual(memory.ledger.shares, whole.ledger.shares)
        run = Run(
            policy=policy, tiers=("int4", "int2"), expert_bytes=(2, 3), slots=(slots, slots),
            refines=(True, False), shares_slots=True,
        )  # fmt: skip
        (found,) = run_policies(trace, [run])
        for name in ("needed", "hits", "misses", "admitted", "streamed", "evictions",
                     "prefetched", "prefetch_hits", "prefetch_waste"):  # fmt: skip
            tallied = found.events.sum(axis=0)[EVENTS.index(name)].tolist()
            counted = [tier.total(name) for tier in memory.ledger.tiers.values()]
            self.assertEqual(counted, tallied, name)
        self.assertGreater(memory.ledger.total("evictions"), 10)
