"""Residency is invisible: the same tokens and logits to the bit, wherever the experts are."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.experts.cache import ExpertMemory, TierMemory
from moejax.experts.residency import CacheSizes
from moejax.experts.state import TierSpec
from moejax.inference import steps
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner
from moejax.models.config import ModelConfig
from moejax.quantization.grid import Grid
from moejax.quantization.rtn import rtn
from moejax.weights.qtensor import Weight, from_codes
from tests import slow, tiny_engine

QWEN = tiny_engine.CONFIG
MIXTRAL = dataclasses.replace(
    QWEN, family="mixtral", num_experts=4, moe_layers=(0, 1), qk_norm=False, norm_topk_prob=True
)
CONFIGS = {"qwen3_moe": QWEN, "mixtral": MIXTRAL}
PROMPTS = [
    np.random.default_rng(n).integers(0, QWEN.vocab_size, n).tolist() for n in (7, 20, 3, 11)
]
EXPERTS = ("moe.gate_up", "moe.down")
CPU = jax.devices("cpu")[0]
# Slots of a layer of 8 experts, of which one token needs 2; transient ones; experts ahead.
POLICIES = {
    "all resident": (8, 1, 0),
    "75 %": (6, 2, 0),
    "50 %": (4, 2, 0),
    "50 % and prefetch": (4, 2, 2),
    "25 %": (2, 2, 0),
    "25 % and prefetch": (2, 3, 1),
    "no cache": (0, 2, 0),
}


def random_weights(config: ModelConfig, bits: int = 16) -> dict[str, Weight]:
    """Weights of a tiny model; its experts plain (16), or in codes of a width."""
    weights: dict[str, Weight] = {
        name: jnp.asarray(array) for name, array in tiny_engine.random_weights(config).items()
    }
    if bits < 16:
        grid = Grid(bits=bits, group_size=8, zero_kind="float")
        for name in EXPERTS:
            found = rtn(weights[name], grid)
            weights[name] = from_codes(
                found.codes, found.scales, found.zeros, bits=bits, group_size=8, zero_kind="float"
            )
    return weights


def without_experts(weights: dict[str, Weight]) -> dict[str, Weight]:
    return {name: leaf for name, leaf in weights.items() if name not in EXPERTS}


def rows_of(weight: Weight) -> Weight:
    """[M, E, ...] as rows [M E, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), weight)


def pooled_runner(config: ModelConfig, weights: dict[str, Weight], policy: Any) -> Runner:
    slots, transient, prefetch = policy
    num_layers, num_experts = len(config.moe_layers), config.num_experts
    cache = CacheSizes(
        num_layers=num_layers, num_experts=num_experts, slots=min(slots, num_experts),
        transient=transient, banks=2 if prefetch else 1,
    )  # fmt: skip
    tier = TierMemory(
        TierSpec(cache, prefetch), *(rows_of(weights[name]) for name in EXPERTS),
        np.arange(num_layers * num_experts).reshape(num_layers, num_experts), CPU,
    )  # fmt: skip
    return Runner(config, without_experts(weights), CPU, memory=ExpertMemory([tier]))


def answers(runner: Runner, prompts: list[list[int]], num_tokens: int = 12) -> list[list[int]]:
    return tiny_engine.answers(runner, prompts, 64, num_tokens, per_call=4)


@functools.cache
def of_resident(
    config: ModelConfig, bits: int = 16
) -> tuple[np.ndarray, np.ndarray, list[list[list[int]]]]:
    """Tokens and their logits, and answers to one and to all prompts, with no expert moved."""
    resident = Runner(config, random_weights(config, bits), CPU)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24)).astype(np.int32)
    batches = PROMPTS[:1], PROMPTS
    return tokens, np.asarray(resident.logits(tokens)), [answers(resident, b) for b in batches]


class InvisibleTest(parameterized.TestCase):
    @slow.where(lambda name, policy: (name, policy) != ("qwen3_moe", "25 % and prefetch"))
    @parameterized.parameters(
        *(("qwen3_moe", policy) for policy in POLICIES if policy not in ("25 %", "50 %")),
        ("mixtral", "25 % and prefetch"),
    )
    def test_tokens_and_logits_are_those_of_a_resident_model(self, name, policy):
        self.check(CONFIGS[name], 16, policy)

    @pytest.mark.slow
    def test_packed_experts_too(self):
        self.check(QWEN, 3, "25 %")

    def check(self, config, bits, policy):
        tokens, logits, (one, four) = of_resident(config, bits)
        runner = pooled_runner(config, random_weights(config, bits), POLICIES[policy])
        np.testing.assert_array_equal(runner.logits(tokens), logits)
        self.assertEqual(answers(runner, PROMPTS[:1]), one)
        self.assertEqual(answers(runner, PROMPTS), four)
        events = runner.memory.read_counters().as_dict()["totals"]
        self.assertEqual(events["unserved"], 0)
        self.assertEqual(events["misses"], events["admitted"] + events["streamed"])
        slots, _, prefetch = POLICIES[policy]
        self.assertEqual(events["streamed"] > 0, slots < config.num_experts)
        self.assertEqual(events["prefetched"] > 0, prefetch > 0)

    @parameterized.parameters("prefill", "decode")
    @pytest.mark.slow
    def test_one_phase_alone_looks_ahead(self, phase):
        config, policy = CONFIGS["qwen3_moe"], POLICIES["50 % and prefetch"]
        runner = pooled_runner(config, random_weights(config), policy)
        memory = runner.memory
        pool = dataclasses.replace(memory.spec.tiers[0], prefetch_in=phase)
        memory.spec = dataclasses.replace(memory.spec, tiers=(pool,))
        runner = Runner(config, runner.weights, CPU, memory=memory)
        settings, came = GenerationSettings.of(max_new_tokens=9), []
        session = runner.prefill(PROMPTS[:1], 64, settings, ())
        for _ in range(2):
            came.append(memory.read_counters().total("prefetched"))
            runner.decode(session, 4, 4)
        came.append(memory.read_counters().total("prefetched"))
        self.assertEqual(came[0] > 0, phase == "prefill")
        self.assertEqual(came[2] > came[0], phase == "decode")
        self.assertEqual(answers(runner, PROMPTS[:1]), of_resident(config)[2][0])

    @pytest.mark.slow
    def test_a_step_neither_retraces_nor_copies_the_pool(self):
        runner = pooled_runner(QWEN, random_weights(QWEN), POLICIES["50 % and prefetch"])
        self.assertEqual(answers(runner, PROMPTS), of_resident(QWEN)[2][1])
        (tier,) = runner.memory.tiers
        places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tier.pool.banks)]
        num_traces = runner.programs.num_traces
        for _ in range(3):
            answers(runner, PROMPTS)
        found = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tier.pool.banks)]
        self.assertEqual(found, places)
        self.assertEqual(runner.programs.num_traces, num_traces)
        pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tier.pool.banks))
        programs = runner.programs._programs
        (decode,) = [programs[key] for key in programs if key[0] is steps.decode]
        memory = decode.memory_analysis()
        self.assertGreaterEqual(memory.alias_size_in_bytes, pool_bytes)


class DiskTest(parameterized.TestCase):
    """Experts that no host row holds: the step waits for them, and says how often."""

    @parameterized.parameters((None, 5), ("25 % and prefetch", 0))
    @pytest.mark.slow
    def test_the_waiting_mode_is_invisible(self, policy, num_rows):
        weights = random_weights(QWEN)
        slots, transient, prefetch = POLICIES[policy] if policy else (0, 1, 0)
        rows = [rows_of(weights[name]) for name in EXPERTS]
        asked = []

        def read(layer, experts):
            asked.extend(int(expert) for expert in np.asarray(experts) if expert >= 0)
            index = int(layer) * 8 + np.maximum(np.asarray(experts), 0)
            return tuple(np.asarray(row)[index] for row in rows)

        cache = CacheSizes(
            num_layers=2,
            num_experts=8,
            slots=slots,
            transient=transient,
            banks=2 if prefetch else 1,
        )
        row_of = np.where(np.arange(16) < num_rows, np.arange(16), -1).reshape(2, 8)
        tier = TierMemory(
            TierSpec(cache, prefetch, read), *(row[:num_rows] for row in rows), row_of, CPU
        )
        memory = ExpertMemory([tier])
        runner = Runner(QWEN, without_experts(weights), CPU, memory=memory)
        _, _, (_, expected) = of_resident(QWEN)
        self.assertEqual(answers(runner, PROMPTS), expected)
        waits = memory.read_counters().as_dict()["totals"]["waits"]
        self.assertEqual(waits, len(asked))
        self.assertGreater(waits, 0)


if __name__ == "__main__":
    absltest.main()
