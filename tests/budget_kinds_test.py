"""Budgets of models whose layers are not all alike: caches of latents, states, shared experts."""

import dataclasses
import math
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax import Engine
from moejax.benchmarking.measuring import floor_bytes
from moejax.benchmarking.random_weights import Packing
from moejax.checkpoints.sizes import shape_sizes
from moejax.errors import MoejaxError
from moejax.experts.budget import GIB, BudgetError, Limits, RunSizes, make_budget
from moejax.experts.budget.tiers import STATES
from moejax.experts.load import tier_of
from moejax.models.config import weight_shapes
from moejax.models.kv_cache import empty_cache
from moejax.models.leaf_kinds import kind_of
from moejax.models.shapes import SHAPES, with_layers
from moejax.policies.dymoe import importance_nbytes
from moejax.weights.qtensor import CodesKind
from tests import model_kinds
from tests.random_checkpoints import TINY, write_random_checkpoint

NAMES = ("DeepSeek-V2-Lite", "DeepSeek-MoE-16B", "Qwen3-Next-80B-A3B")
INT4 = CodesKind(bits=4, group_size=64, zero_kind="float", scale_dtype="float16")
BF16 = np.dtype(np.float16)  # of its size


def budget_of(name, *, batch=1, context=4096, chunk=1024, kind=INT4, **limits):
    config = SHAPES[name]
    sizes = shape_sizes(config, BF16, expert_kind=kind)
    run = RunSizes(
        config=config, weights_nbytes=sizes.weights_nbytes, batch=batch, context=context,
        chunk=chunk, platform="gpu",
    )  # fmt: skip
    return make_budget(run, [tier_of(sizes)], Limits(**limits)).tiers[0]


class PartsTest(parameterized.TestCase):
    @parameterized.product(name=tuple(SHAPES), batch=(1, 3))
    def test_cache_and_states_are_what_is_allocated(self, name, batch):
        budget, config = budget_of(name, batch=batch), SHAPES[name]
        cache = jax.eval_shape(lambda: empty_cache(config, batch, 4096, jnp.bfloat16))
        found = [budget.device["KV cache"], budget.device.get(STATES, 0)]
        kept = [(cache.keys, cache.values), (cache.states, cache.tails)]
        self.assertEqual(found, [_nbytes(part) for part in kept])

    def test_by_hand(self):
        """Figures come from the papers and the published configs."""
        # 27 layers of 512 + 64 numbers: MLA caches a fraction of what 16 heads of 128 would.
        cache = budget_of("DeepSeek-V2-Lite").device["KV cache"]
        self.assertEqual(cache, 27 * 576 * 2 * 4096)
        self.assertEqual(budget_of("DeepSeek-MoE-16B").device["KV cache"], 28 * 2 * 2048 * 2 * 4096)
        next_ = budget_of("Qwen3-Next-80B-A3B").device
        self.assertEqual(next_["KV cache"], 12 * 2 * 2 * 256 * 2 * 4096)
        self.assertEqual(next_[STATES], 36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192))
        longer = budget_of("Qwen3-Next-80B-A3B", context=8192).device
        self.assertEqual(longer[STATES], next_[STATES])
        self.assertEqual(longer["KV cache"], 2 * next_["KV cache"])

    @parameterized.parameters(*NAMES)
    def test_what_every_token_takes_stays_on_the_device(self, name):
        config = SHAPES[name]
        budget = budget_of(name, slots=config.experts_per_token)
        shapes = weight_shapes(config)
        for leaf in ("shared.gate_up", "shared.down"):
            self.assertEqual(budget.device[f"weights {leaf}"], 2 * math.prod(shapes[leaf]))
        experts = len(config.moe_layers) * config.num_experts
        self.assertEqual(budget.host["experts"], experts * budget.tier.expert_nbytes)
        per_expert = 3 * config.model_dim * config.expert_dim
        self.assertEqual(budget.tier.expert_nbytes, per_expert // 2 + per_expert // 64 * 4)

    def test_kinds_are_packed_apart(self):
        config = SHAPES["Qwen3-Next-80B-A3B"]
        plain = shape_sizes(config, BF16, expert_kind=INT4).weights_nbytes
        packed = shape_sizes(
            config, BF16, expert_kind=INT4, attention_kind=INT4, shared_kind=INT4
        ).weights_nbytes
        for leaf, nbytes in plain.items():
            share = packed[leaf] / nbytes
            is_packed = kind_of(leaf) in ("attention", "shared_experts")
            # 4 bits a weight, and a scale and a zero point of 16 for 64 of them.
            self.assertEqual(share, 4.5 / 16 if is_packed else 1, leaf)
        self.assertEqual(plain["delta.a_log"], 4 * 36 * 32)  # float32, whatever the rest is
        with_mlp = SHAPES["DeepSeek-V2-Lite"]
        of = shape_sizes(with_mlp, BF16, expert_kind=INT4).weights_nbytes
        self.assertEqual(of["mlp.down"] / math.prod(weight_shapes(with_mlp)["mlp.down"]), 4.5 / 8)

    @parameterized.product(name=tuple(SHAPES), seed=(0, 1))
    def test_limits_are_kept_and_filled(self, name, seed):
        rng = np.random.default_rng(seed)
        how = {"batch": int(rng.integers(1, 5)), "context": int(2 ** rng.integers(9, 14))}
        gib = float(rng.uniform(4, 60))
        try:
            budget = budget_of(name, device_gib=gib, **how)
        except BudgetError as error:
            gib = float(str(error).partition("would do is ")[2].split(" GiB")[0])
            budget = budget_of(name, device_gib=gib, **how)
        self.assertLessEqual(budget.total_device, gib * GIB)
        if budget.pooled and budget.slots < SHAPES[name].num_experts:
            more = {"slots": budget.slots + 1, "transient": budget.transient}
            with self.assertRaises(BudgetError):
                budget_of(name, device_gib=gib, **how, **more)


class ContractTest(parameterized.TestCase):
    """Compiled programs take no more than the plan reserves for them."""

    # Latents, the delta rule, shared experts take the most.
    @parameterized.parameters(
        ("shared", {"shared_dim": 2048}, 64, 4),
        ("latent", {}, 256, 1),
        ("delta", {"delta_net": dataclasses.replace(
            model_kinds.DELTA["delta_net"], num_key_heads=4, num_value_heads=8, key_dim=64,
            value_dim=64)}, 256, 1),
    )  # fmt: skip
    @pytest.mark.slow
    def test_programs_take_no_more_than_planned_and_not_much_less(
        self, name, changes, context, batch
    ):
        directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        write_random_checkpoint(directory, **{**model_kinds.KINDS[name], **changes})
        engine = Engine.from_pretrained(
            directory, dtype="float32", platform="cpu", context=context, compilation_cache="",
            progress=False, limits=Limits(), batch=batch,
        )  # fmt: skip
        prompts = np.random.default_rng(0).integers(0, TINY["vocab_size"], (batch, context - 8))
        engine.generate(prompts.tolist(), max_new_tokens=3)
        engine.logits(prompts)  # in longer chunks than a CPU's prompts
        planned = engine.budget.device["activations and workspace"]
        programs = engine._runner.programs._programs.values()
        found = max(program.memory_analysis().temp_size_in_bytes for program in programs)
        self.assertLessEqual(found, planned)
        self.assertLess(planned, 2 * found)

    def test_importance_of_either_form_of_latent_attention(self):
        config = SHAPES["DeepSeek-V2-Lite"]
        self.assertEqual(config.watched_heads, ((16, 192), (1, 576)))
        self.assertEqual(SHAPES["Qwen3-Next-80B-A3B"].watched_heads, ((2, 256),))
        how = {"batch": 1, "num_keys": 4096, "num_heads": 16, "itemsize": 2, "platform": "gpu"}
        heads, one = (
            [importance_nbytes(num_kv_heads=k, head_dim=c, length=length, **how)
             for length in (64, 4096)] for k, c in config.watched_heads
        )  # fmt: skip
        self.assertGreater(heads[0], one[0])  # few queries: keys of all heads are the most
        self.assertGreater(one[1], heads[1])


class BenchmarksTest(parameterized.TestCase):
    @parameterized.parameters(("DeepSeek-V2-Lite", 3, (1, 2), None),
                              ("Qwen3-Next-80B-A3B", 5, (0, 1, 2, 3, 4), (0, 1, 2, 4)))  # fmt: skip
    def test_first_layers_are_as_they_are(self, name, num_layers, sparse, deltas):
        config = with_layers(SHAPES[name], num_layers)
        self.assertEqual((config.num_layers, config.moe_layers), (num_layers, sparse))
        self.assertEqual(config.delta_net and config.delta_net.layers, deltas)
        self.assertIs(with_layers(SHAPES[name], 0), SHAPES[name])
        with self.assertRaisesRegex(MoejaxError, "100 layers are more than"):
            with_layers(SHAPES[name], 100)

    def test_least_bytes_of_a_step(self):
        config = SHAPES["Qwen3-Next-80B-A3B"]
        least = [
            floor_bytes(
                config, {}, experts_nbytes=0, positions=batch * length, itemsize=2, batch=batch
            )
            for batch, length in ((1, 0), (1, 1000), (2, 1000))
        ]
        states = 2 * 36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
        cache = 1000 * 12 * 2 * 2 * 256 * 2
        self.assertEqual(least, [states, states + cache, 2 * (states + cache)])

    def test_bits_of_each_kind(self):
        packing = Packing(bits=2, attention_bits=4, shared_bits=8, head_bits=3)
        bits = {leaf: packing._bits_of(leaf) for leaf in weight_shapes(SHAPES[NAMES[2]])}
        self.assertEqual({leaf for leaf, of in bits.items() if of == 4},
                         {"attention.qkv_proj", "attention.o_proj", "delta.qkvz_proj",
                          "delta.o_proj"})  # fmt: skip
        self.assertEqual({leaf for leaf, of in bits.items() if of == 8},
                         {"shared.gate_up", "shared.down"})  # fmt: skip
        self.assertEqual((bits["moe.down"], bits["head"], bits["shared.gate"]), (2, 3, 16))
        self.assertIn("shared experts INT8", packing.describe())


def _nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
