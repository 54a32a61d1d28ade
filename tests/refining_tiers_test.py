"""Tiers of refinement planes: they give what whole copies give, to the bit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.experts.cache import ExpertMemory, TierMemory, preload
from moejax.inference.runner import Runner
from moejax.policies.base import AnyPolicy
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from moejax.quantization.grid import Grid
from moejax.quantization.rtn import rtn
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

    def test_a_base_that_lacks_experts_is_refused(self):
        experts = by_planes()
        wide: dict[str, Weight] = {**random_weights(QWEN), **experts}
        high = refining(tier_memory(QWEN, wide, 3), experts, 0)
        low = tier_memory(QWEN, {**wide, **{n: experts[n].prefix(2) for n in EXPERTS}}, 4)
        for tiers in ([high, low], [low, high]):
            with self.assertRaisesRegex(ValueError, "a tier of refinements needs"):
                ExpertMemory(tiers, ["int4", "int2"], DyMoE(), width=2)
