"""Budgets of models whose layers are not all alike: caches of latents, states, shared experts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moejax.benchmarking.measuring import floor_bytes
from moejax.benchmarking.random_weights import Packing
from moejax.checkpoints.sizes import shape_sizes
from moejax.errors import MoejaxError
from moejax.experts.budget import Limits, RunSizes, make_budget
from moejax.experts.budget.tiers import STATES
from moejax.experts.load import tier_of
from moejax.models.config import weight_shapes
from moejax.models.kv_cache import empty_cache
from moejax.models.leaf_kinds import kind_of
from moejax.models.shapes import SHAPES, with_layers
from moejax.policies.dymoe import importance_nbytes
from moejax.weights.qtensor import CodesKind
from tests.packed_weights import num_bytes

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
        self.assertEqual(found, [num_bytes(part) for part in kept])

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
