"""Tiers of refinement planes, with slots of their own or shared: as whole copies, to the bit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.experts.cache import ExpertMemory, TierMemory, preload
from moejax.experts.residency import CacheSizes
from moejax.experts.state import TierSpec
from moejax.inference.runner import Runner
from moejax.policies.base import AnyPolicy
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from moejax.quantization.grid import Grid
from moejax.quantization.rtn import rtn
from moejax.routing.simulate.replay import EVENTS
from moejax.routing.simulate.runs import Run, run_policies
from moejax.weights import linear as ops
from moejax.weights.qtensor import QTensor, Weight, from_codes
from scripts.studies.dymoe.controls import AsAsked
from tests.cached_runners import (
    CPU,
    EXPERTS,
    PROMPTS,
    QWEN,
    answers,
    random_weights,
    tier_memory,
    without_experts,
)
from tests.tiered_kinds_test import recorded

NUM_LAYERS, NUM_EXPERTS = len(QWEN.moe_layers), QWEN.num_experts


def by_planes() -> dict[str, QTensor]:
    """Experts of 4 bits in two planes."""
    grid, found = Grid(bits=4, group_size=8, zero_kind="float"), {}
    for name in EXPERTS:
        codes = jax.device_get(rtn(jnp.asarray(random_weights(QWEN)[name]), grid))
        packed = from_codes(*codes, bits=4, group_size=8, zero_kind="float", by_planes=True)
        found[name] = jax.tree.map(jnp.asarray, packed)
    return found


def refining(whole: TierMemory, experts: dict[str, QTensor], first: int) -> TierMemory:
    """A tier of the last planes with the slots of `whole`."""
    planes = [experts[name].refinements[0] for name in EXPERTS]
    rows = [plane.reshape(-1, *plane.shape[2:]) for plane in planes]
    spec = dataclasses.replace(whole.spec, refines=2, is_complete=False)
    memory = TierMemory(spec, *rows, np.asarray(whole.store.row_of), CPU)
    if first > 0:
        experts_of = np.tile(np.arange(first, dtype=np.int32), (NUM_LAYERS, 1))
        preload(memory, QWEN, ops.NO_KERNELS, experts_of)
    return memory


def memory_of(policy: AnyPolicy, slots: int, *, planes: bool, **how: Any) -> ExpertMemory:
    """4 bits in some slots over 2 bits of all, as planes or as copies."""
    experts, emulated = by_planes(), how.get("emulated", False)
    wide: dict[str, Weight] = {**random_weights(QWEN), **experts}
    low: dict[str, Weight] = wide | {name: experts[name].prefix(2) for name in EXPERTS}
    base = tier_memory(QWEN, low, NUM_EXPERTS, emulated=emulated)
    high = tier_memory(QWEN, wide, slots, **how)
    if planes:
        high = refining(high, experts, how.get("first", -1))
    names, width = ["int4", "int2"], QWEN.experts_per_token
    return ExpertMemory([high, base], names, policy, width=width)


class RefiningTierTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("dymoe", DyMoE, {}, 3, {}),
        ("dymoe_that_looks_ahead", DyMoE, {"prefetch": 2}, 4, {"prefetch": 2}),
        ("dynaexq", DynaExq, {"choice": "first", "n_hot": 3}, 3, {"first": 3}),
        ("emulated", DyMoE, {}, 3, {"emulated": True}),
        ("longer_layers", DyMoE, {}, 3, {"longer_layers": 1}),
    )
    @pytest.mark.slow
    def test_answers_and_counts_are_those_of_whole_copies(self, policy, settings, slots, how):
        found = []
        for planes in (False, True):
            # A pair for low precision reads the base plane, wherever its refinement is.
            kind = AsAsked if policy is DyMoE and not planes else policy
            memory = memory_of(kind(**settings), slots, planes=planes, **how)
            runner = Runner(QWEN, without_experts(random_weights(QWEN)), CPU, memory=memory)
            tokens = answers(runner, PROMPTS)
            memory.read_counters()
            found.append((tokens, memory.ledger))
        (copies, of_copies), (tokens, ledger) = found
        self.assertEqual(tokens, copies)
        for name, tier in ledger.tiers.items():
            for event in ("needed", "hits", "misses", "admitted", "streamed", "prefetched"):
                expected = of_copies.tiers[name].total(event)
                self.assertEqual(tier.total(event), expected, (name, event))
        self.assertGreater(ledger.tiers["int4"].total("needed"), 0)
        self.assertGreater(ledger.tiers["int2"].total("needed"), 0)
        # Two bits a weight cross the link where four and the constants did.
        constants = of_copies.tiers["int4"].expert_bytes - 2 * ledger.tiers["int4"].expert_bytes
        self.assertGreater(constants, 0)


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

    @parameterized.parameters((7, 0), (9, 2))
    @pytest.mark.slow
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
