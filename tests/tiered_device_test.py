"""Experts of several tiers on a GPU: where they are is invisible, whatever policy decides."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.benchmarking.random_weights import Packing, random_weights
from moejax.experts.cache import ExpertMemory, TierMemory, preload
from moejax.experts.residency import CacheSizes
from moejax.experts.state import TierSpec
from moejax.inference import steps
from moejax.inference.runner import Runner
from moejax.models.config import ModelConfig
from moejax.models.kernel_choice import EXPERT_LEAVES
from moejax.policies.base import (
    SKIPPED,
    AnyPolicy,
    Decision,
    Observation,
    Policy,
    PolicySpec,
)
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from moejax.policies.on_demand import OnDemand
from moejax.policies.resident import as_routed
from moejax.weights import linear as ops
from pallas_kernels.target import target_of
from tests.pooled_device_test import CONFIGS, NUM_EXPERTS, answers, pinned_rows


@dataclasses.dataclass(frozen=True)
class ByNumber(Policy[jax.Array]):
    """Expert e in tier e % T, every fifth left out: whatever is resident."""

    name = "by_number"
    num_tiers: int

    def init(self, spec: PolicySpec) -> jax.Array:
        return jnp.zeros((), jnp.int32)

    def decide(self, state: jax.Array, observation: Observation) -> tuple[Decision, jax.Array]:
        ids = observation.ids
        tier = jnp.where(ids % 5 == 4, SKIPPED, ids % self.num_tiers)
        return as_routed(observation, tier.astype(jnp.int32)), state


def memory_of(
    config: ModelConfig,
    policy: AnyPolicy,
    bits: tuple[int, ...],
    slots: tuple[int, ...],
    weights: list[dict[str, Any]],
    prefetch: int = 0,
) -> ExpertMemory:
    """Tiers with so many slots of a layer; one that has room for all holds all from the start."""
    device = jax.devices("gpu")[0]
    row_of = np.arange(config.num_layers * NUM_EXPERTS).reshape(-1, NUM_EXPERTS)
    tiers = []
    for size, stored in zip(slots, weights, strict=True):
        cache = CacheSizes(
            num_layers=config.num_layers, num_experts=NUM_EXPERTS, slots=size, transient=4,
            banks=2 if prefetch else 1,
        )  # fmt: skip
        hosts = [pinned_rows(stored[leaf], device) for leaf in EXPERT_LEAVES]
        memory = TierMemory(TierSpec(cache, prefetch), *hosts, row_of, device)
        if size == NUM_EXPERTS:
            everyone = np.tile(np.arange(NUM_EXPERTS, dtype=np.int32), (config.num_layers, 1))
            preload(memory, config, ops.Kernels(target_of(device)), everyone)
        tiers.append(memory)
    names = [f"int{width}" for width in bits]
    return ExpertMemory(tiers, names, policy, width=config.experts_per_token)


def random_tiers(config: ModelConfig, bits: tuple[int, ...]) -> list[dict[str, Any]]:
    """Makes a model for each width, whose experts are the tier."""
    device = jax.devices("gpu")[0]
    return [random_weights(config, Packing(bits=b, attention_bits=4), device) for b in bits]


@pytest.mark.gpu
class DeviceTiersTest(parameterized.TestCase):
    def runner(self, config: ModelConfig, memory: ExpertMemory, weights: Any) -> Runner:
        dense = {leaf: array for leaf, array in weights.items() if leaf not in EXPERT_LEAVES}
        return Runner(config, dense, jax.devices("gpu")[0], memory=memory)

    def inputs(self, config: ModelConfig) -> tuple[list[list[int]], np.ndarray]:
        # Few sizes: of several tiers each program of a prompt takes long to compile.
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in (9, 40)]
        return prompts, rng.integers(0, config.vocab_size, (2, 48)).astype(np.int32)

    @parameterized.parameters(
        ("qwen3_moe", (4, 2), (8, 4)), ("qwen3_moe", (4, 2), (4, 16)),
        ("qwen3_moe", (16, 4), (8, 8)), ("mixtral", (4, 2), (8, 4)),
        ("mixtral", (4, 2), (0, 0)), ("mixtral", (16, 4), (4, 16)),
    )  # fmt: skip
    def test_where_experts_are_does_not_show(self, name, bits, slots):
        config = CONFIGS[name]
        weights = random_tiers(config, bits)
        prompts, tokens = self.inputs(config)
        found = []
        for sizes in ((NUM_EXPERTS,) * 2, slots):
            memory = memory_of(config, ByNumber(len(bits)), bits, sizes, weights)
            runner = self.runner(config, memory, weights[0])
            logits = runner.logits(tokens)
            found.append((logits.tobytes(), answers(runner, prompts)))
            ledger = memory.read_counters().as_dict()
            self.check_programs(runner)
        self.assertTrue(np.isfinite(logits).all())
        self.assertEqual(found[0], found[1])
        streamed = [tier["totals"]["streamed"] for tier in ledger["tiers"].values()]
        asked = [sum(e % len(bits) == t and e % 5 != 4 for e in range(NUM_EXPERTS)) for t in (0, 1)]
        self.assertEqual(
            [n > 0 for n in streamed], [size < n for size, n in zip(slots, asked, strict=True)]
        )

    @parameterized.parameters(("qwen3_moe", 8), ("mixtral", 4))
    def test_one_tier_on_demand_is_the_resident_model(self, name, slots):
        config = CONFIGS[name]
        [weights] = random_tiers(config, (4,))
        prompts, tokens = self.inputs(config)
        memory = memory_of(config, OnDemand(), (4,), (slots,), [weights])
        runner = self.runner(config, memory, weights)
        resident = Runner(config, weights, jax.devices("gpu")[0])
        np.testing.assert_array_equal(runner.logits(tokens), resident.logits(tokens))
        self.assertEqual(answers(runner, prompts), answers(resident, prompts))

    @parameterized.parameters(
        ("qwen3_moe", DynaExq(period=8)),
        ("qwen3_moe", DyMoE(retention=0.75, low="skip", prefetch=2)),
        ("mixtral", DyMoE(retention=0.75, prefetch=0)),
    )
    def test_a_policy_runs_and_says_the_same_again(self, name, policy):
        config, bits = CONFIGS[name], (4, 2)
        weights = random_tiers(config, bits)
        prompts, tokens = self.inputs(config)
        found = []
        for _ in range(2):
            ahead = 2 if policy.needs.predicted else 0
            memory = memory_of(config, policy, bits, (4, NUM_EXPERTS), weights, ahead)
            runner = self.runner(config, memory, weights[0])
            logits = runner.logits(tokens)
            self.assertTrue(np.isfinite(logits).all())
            found.append((logits.tobytes(), answers(runner, prompts)))
            gate = memory.read_counters().shares
            self.assertAlmostEqual(sum(gate[t] for t in ("int4", "int2", "skipped")), 1, places=3)
        self.assertEqual(found[0], found[1])

    def check_programs(self, runner: Runner) -> None:
        """A decode step aliases all pools."""
        held = runner.memory.pool
        pool_bytes = sum(x.nbytes for pool in held.tiers for x in jax.tree.leaves(pool.banks))
        for key, program in runner.programs._programs.items():
            if key[0] is steps.decode:
                memory = program.memory_analysis()
                self.assertGreaterEqual(memory.alias_size_in_bytes, pool_bytes)
                self.assertLess(memory.temp_size_in_bytes, 4 * 2**20)


if __name__ == "__main__":
    absltest.main()
