"""Residency is invisible on a GPU too: kernels, pinned host rows, pools that never move."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.benchmarking.random_weights import Packing, random_weights
from moejax.experts.cache import ExpertMemory, TierMemory
from moejax.experts.residency import CacheSizes
from moejax.experts.state import TierSpec
from moejax.inference import steps
from moejax.inference.runner import Runner
from moejax.models.kernel_choice import EXPERT_LEAVES
from moejax.models.shapes import SHAPES
from moejax.weights import linear as ops
from moejax.weights.qtensor import Weight
from tests import tiny_engine

NUM_EXPERTS, CONTEXT = 16, 512
QWEN = dataclasses.replace(
    SHAPES["Qwen3-30B-A3B"], vocab_size=1024, model_dim=1024, num_layers=4, num_heads=16,
    num_kv_heads=2, head_dim=64, num_experts=NUM_EXPERTS, experts_per_token=4, expert_dim=256,
    moe_layers=(0, 1, 2, 3),
)  # fmt: skip
MIXTRAL = dataclasses.replace(
    QWEN, family="mixtral", qk_norm=False, norm_topk_prob=True, experts_per_token=2
)
CONFIGS = {"qwen3_moe": QWEN, "mixtral": MIXTRAL}
ATTENTION = ("attention.qkv_proj", "attention.o_proj")
# Slots of a layer, transient ones, experts brought ahead.
POLICIES = {
    "all resident": (16, 1, 0),
    "75 %": (12, 4, 0),
    "50 % and prefetch": (8, 4, 4),
    "25 %": (4, 4, 0),
    "no cache": (0, 4, 0),
}


def pinned_rows(weight: Weight, device: jax.Device) -> Weight:
    """[M, E, ...] as rows [M E, ...] in pinned host memory."""
    place = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf.reshape(-1, *leaf.shape[2:]), place), weight
    )


def answers(runner: Runner, prompts: list[list[int]]) -> list[list[int]]:
    return tiny_engine.answers(runner, prompts, CONTEXT, num_tokens=24, per_call=8)


@pytest.mark.gpu
class InvisibleTest(parameterized.TestCase):
    @parameterized.parameters(
        *itertools.product(CONFIGS, (16, 4), POLICIES),
        ("qwen3_moe", 3, "25 %"),
        ("mixtral", 3, "50 % and prefetch"),
    )
    def test_tokens_and_logits_are_those_of_a_resident_model(self, name, bits, policy):
        config, device = CONFIGS[name], jax.devices("gpu")[0]
        slots, transient, prefetch = POLICIES[policy]
        weights = random_weights(config, Packing(bits=bits, attention_bits=bits), device)
        dense = {leaf: array for leaf, array in weights.items() if leaf not in EXPERT_LEAVES}
        hosts = [pinned_rows(weights[leaf], device) for leaf in EXPERT_LEAVES]
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in (9, 130, 33, 70)]
        tokens = rng.integers(0, config.vocab_size, (2, 96)).astype(np.int32)
        cache = CacheSizes(
            num_layers=config.num_layers, num_experts=NUM_EXPERTS, slots=slots,
            transient=transient, banks=2 if prefetch else 1,
        )  # fmt: skip
        row_of = np.arange(config.num_layers * NUM_EXPERTS).reshape(-1, NUM_EXPERTS)
        tier = TierMemory(TierSpec(cache, prefetch), *hosts, row_of, device)
        memory = ExpertMemory([tier])
        resident = Runner(config, weights, device)
        runner = Runner(config, dense, device, memory=memory)
        places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tier.pool.banks)]
        np.testing.assert_array_equal(runner.logits(tokens), resident.logits(tokens))
        for batch in (prompts[:1], prompts):
            self.assertEqual(answers(runner, batch), answers(resident, batch))
        events = memory.read_counters().as_dict()["totals"]
        self.assertEqual(events["unserved"], 0)
        self.assertEqual(events["streamed"] > 0, slots < NUM_EXPERTS)
        self.assertEqual(events["prefetched"] > 0, prefetch > 0)
        found = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tier.pool.banks)]
        self.assertEqual(found, places)
        self.check_memory(runner)

    @parameterized.parameters(
        *itertools.product(["qwen3_moe"], ("50 % and prefetch", "25 %", "no cache"), (0, 24)),
        ("mixtral", "25 %", 24),
    )
    def test_what_no_host_row_holds_the_step_waits_for(self, name, policy, held):
        config, device = CONFIGS[name], jax.devices("gpu")[0]
        slots, transient, prefetch = POLICIES[policy]
        weights = random_weights(config, Packing(bits=4, attention_bits=4), device)
        dense = {leaf: array for leaf, array in weights.items() if leaf not in EXPERT_LEAVES}
        rows = [
            jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), weights[leaf])
            for leaf in EXPERT_LEAVES
        ]
        kept, asked = jax.device_get([jax.tree.leaves(stack) for stack in rows]), []

        def read(layer, experts):
            asked.extend(int(expert) for expert in np.asarray(experts) if expert >= 0)
            index = int(layer) * NUM_EXPERTS + np.maximum(np.asarray(experts), 0)
            return tuple(np.asarray(leaf)[index] for stack in kept for leaf in stack)

        cache = CacheSizes(
            num_layers=config.num_layers, num_experts=NUM_EXPERTS, slots=slots,
            transient=transient, banks=2 if prefetch else 1,
        )  # fmt: skip
        number = np.arange(config.num_layers * NUM_EXPERTS)
        row_of = np.where(number < held, number, -1).reshape(-1, NUM_EXPERTS)
        hosts = [jax.tree.map(lambda leaf: leaf[:held], stack) for stack in rows]
        hosts = [pinned_rows(jax.tree.map(lambda leaf: leaf[None], host), device) for host in hosts]
        tier = TierMemory(TierSpec(cache, prefetch, read), *hosts, row_of, device)
        memory = ExpertMemory([tier])
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in (9, 70)]
        resident = Runner(config, weights, device)
        runner = Runner(config, dense, device, memory=memory)
        for batch in (prompts[:1], prompts):
            self.assertEqual(answers(runner, batch), answers(resident, batch))
        waits = memory.read_counters().as_dict()["totals"]["waits"]
        self.assertEqual(waits, len(asked))
        self.assertGreater(waits, 0)

    def check_memory(self, runner: Runner) -> None:
        """Compiled steps alias the pool, and need little beside it.

        Of plain attention matrices that no kernel serves XLA copies each layer's out of the stack.
        """
        pool_bytes = sum(x.nbytes for x in jax.tree.leaves(runner.memory.tiers[0].pool.banks))
        attention = [leaf for name, leaf in runner.weights.items() if name in ATTENTION]
        served = [ops.choose_product(1, runner.dtype, w, runner.kernels) for w in attention]
        copied = [
            w for w, of in zip(attention, served, strict=True) if of.implementation == "plain"
        ]
        most = 4 * 2**20 + sum(w.nbytes for w in copied)
        for key, program in runner.programs._programs.items():
            if key[0] is steps.decode:
                memory = program.memory_analysis()
                self.assertGreaterEqual(memory.alias_size_in_bytes, pool_bytes)
                self.assertLess(memory.temp_size_in_bytes, most, key)
                self.assertEqual(memory.host_temp_size_in_bytes, 0)


if __name__ == "__main__":
    absltest.main()
