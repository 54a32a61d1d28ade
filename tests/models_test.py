"""The decoder's parts and its gradient against float64 numpy; the ways to run experts agree."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moejax.models import attention
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.rope import model_angles, rotate
from moejax.models.stacked import rms_norm
from moejax.models.transformer import flat_weights, forward, merge_weights, model_definition
from tests import numpy_model, slow
from tests.host_test_case import HostTestCase
from tests.numpy_model import TINY, TOLERANCE, assert_near

CONFIGS = {
    "all_parts": TINY,
    "mixtral_like": dataclasses.replace(
        TINY,
        family="mixtral",
        moe_layers=(0, 1, 2),
        qk_norm=False,
        attention_bias=False,
        tied_embeddings=True,
        sliding_window=None,
        norm_topk_prob=False,
    ),
}


CAUSAL = jax.jit(attention.causal_attention, static_argnums=(3, 4))
CACHED = jax.jit(attention.cached_attention, static_argnums=4)


def wide_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights of a scale at which every part matters."""
    rng = np.random.default_rng(seed)
    return {
        name: (1 + 0.3 * rng.standard_normal(shape) if name.endswith("norm") else
               0.4 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in weight_shapes(config).items()
    }  # fmt: skip


class PartsTest(HostTestCase):
    @parameterized.product(dtype=sorted(TOLERANCE), scale=(1e-3, 1.0, 300.0))
    def test_rms_norm(self, dtype, scale):
        rng = np.random.default_rng(1)
        x = jnp.asarray(rng.standard_normal((3, 5, 16)) * scale, dtype)
        weight = jnp.asarray(rng.standard_normal(16), dtype)
        eps = 1e-5  # with scale 1e-3 it is what matters; 300 squared overflows float16
        expected = numpy_model.rms_norm(
            np.asarray(x).astype(np.float64), np.asarray(weight).astype(np.float64), eps
        )
        assert_near(rms_norm(x, weight, eps), expected, dtype)

    @slow.repeats()
    @parameterized.product(dtype=sorted(TOLERANCE), head_dim=(2, 24))
    def test_rope(self, dtype, head_dim):
        rng = np.random.default_rng(2)
        x = jnp.asarray(rng.standard_normal((2, 7, 3, head_dim)), dtype)
        positions = rng.integers(0, 50, (2, 7))
        config = dataclasses.replace(TINY, head_dim=head_dim, rope_theta=1e4)
        cos, sin = model_angles(config, jnp.asarray(positions, jnp.int32))
        expected = numpy_model.rotate(np.asarray(x).astype(np.float64), positions, 1e4)
        assert_near(rotate(x, cos, sin), expected, dtype, factor=10)  # angles of up to 50

    def test_rope_at_far_positions_and_large_theta(self):
        positions = np.array([[0, 1, 32767, 40959]])
        config = dataclasses.replace(TINY, head_dim=128, rope_theta=1e6)
        cos, sin = model_angles(config, jnp.asarray(positions, jnp.int32))
        angle = positions[..., None] * 1e6 ** (-np.arange(64) / 64)
        error = 4 * 2.0**-24 * np.maximum(angle, 1)  # of an angle in float32
        self.assertTrue(np.all(np.abs(np.asarray(cos) - np.cos(angle)) <= error))
        self.assertTrue(np.all(np.abs(np.asarray(sin) - np.sin(angle)) <= error))

    @slow.repeats()
    @parameterized.product(
        window=(None, 1, 3, 100), heads=((1, "float32"), (2, "bfloat16"), (4, "float32"))
    )
    def test_causal_attention(self, window, heads):
        num_kv, dtype = heads
        q, k, v = self._qkv(num_kv, dtype)
        positions = np.broadcast_to(np.arange(9), (2, 9))
        found = CAUSAL(q, k, v, window, "xla")
        assert_near(found, self._expected(q, k, v, positions, window), dtype)

    @slow.repeats()
    @parameterized.product(
        window=(None, 1, 3, 100), heads=((1, "float32"), (2, "bfloat16"), (4, "float32"))
    )
    def test_cached_attention_masks_by_position(self, window, heads):
        num_kv, dtype = heads
        q, k, v = self._qkv(num_kv, dtype)
        positions = np.array([[3, 4], [7, 8]])  # rows stand at different places
        expected = self._expected(q[:, :2], k, v, positions, window)
        k, v = (
            a.at[0, 5:].set(1e4) for a in (k, v)
        )  # what row 0 has not reached may hold anything
        found = CACHED(
            q[:, :2], k.swapaxes(1, 2), v.swapaxes(1, 2), jnp.asarray(positions, jnp.int32), window
        )
        assert_near(found, expected, dtype)

    def _qkv(self, num_kv: int, dtype: str) -> list[jax.Array]:
        rng = np.random.default_rng(3)
        return [
            jnp.asarray(2 * rng.standard_normal((2, 9, heads, 6)), dtype)
            for heads in (4, num_kv, num_kv)
        ]

    def _expected(self, q, k, v, positions, window) -> np.ndarray:
        return numpy_model.attend(
            *(np.asarray(a).astype(np.float64) for a in (q, k, v)), positions, window
        )


class TransformerTest(HostTestCase):
    def setUp(self):
        super().setUp()
        self.tokens = np.random.default_rng(8).integers(0, TINY.vocab_size, (2, 7))

    def _forward(self, name: str, weights: dict[str, Any], experts: str) -> tuple[Any, Any]:
        model = merge_weights(model_definition(CONFIGS[name]), weights)
        hidden, routing = forward(model, jnp.asarray(self.tokens, jnp.int32), experts=experts)
        return model.project_to_vocab(hidden), routing

    @slow.repeats()
    @parameterized.product(name=sorted(CONFIGS), experts=("dense", "block"))
    def test_forward_equals_float64(self, name, experts):
        weights = wide_weights(CONFIGS[name])
        logits, routing = jax.jit(functools.partial(self._forward, name, experts=experts))(weights)
        wide = {key: value.astype(np.float64) for key, value in weights.items()}
        expected, probabilities = numpy_model.forward(wide, CONFIGS[name], self.tokens)
        assert_near(logits, expected, factor=10)  # three layers
        assert_near(routing.probabilities, probabilities, factor=10)
        num_moe, num_tokens = len(CONFIGS[name].moe_layers), self.tokens.size
        self.assertEqual(routing.ids.shape, (num_moe, num_tokens, 2))
        self.assertEqual(routing.weights.shape, (num_moe, num_tokens, 2))

    @parameterized.parameters(sorted(CONFIGS))
    def test_merged_weights_come_back_unchanged(self, name):
        weights = {key: jnp.asarray(leaf) for key, leaf in wide_weights(CONFIGS[name]).items()}
        shuffled = dict(sorted(weights.items(), reverse=True))
        back = flat_weights(merge_weights(model_definition(CONFIGS[name]), shuffled))
        self.assertEqual(list(back), list(weights))
        for key, leaf in weights.items():
            self.assertIs(back[key], leaf)

    def test_an_unknown_way_is_refused(self):
        with self.assertRaisesRegex(ValueError, "'sorted' is none of 'row', 'block', "):
            jax.eval_shape(lambda w: self._forward("all_parts", w, "sorted"), wide_weights(TINY))


class ConfigTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"num_kv_heads": 3}, "num_heads 4 is no multiple of num_kv_heads 3"),
        ({"num_kv_heads": 0}, "num_kv_heads 0"),
        ({"experts_per_token": 0}, r"experts_per_token 0 is not in 1\.\.5"),
        ({"experts_per_token": 6}, r"experts_per_token 6 is not in 1\.\.5"),
        ({"moe_layers": (2, 0)}, r"moe_layers \(2, 0\) is not an increasing"),
        ({"moe_layers": (0, 0)}, "is not an increasing"),
        ({"moe_layers": (0, 3)}, "layers below 3"),
        ({"moe_layers": (-1,)}, "is not an increasing"),
        ({"head_dim": 7}, "7 rotated dimensions of a head of 7"),
        ({"sliding_window": 0}, "sliding_window 0 is not positive"),
    )
    def test_a_broken_invariant_is_named(self, change, message):
        with self.assertRaisesRegex(ValueError, message):
            dataclasses.replace(TINY, **change)

    def test_derived_sizes(self):
        self.assertEqual(TINY.dense_layers, (1,))
        self.assertEqual(TINY.qkv_dim, (4 + 2 + 2) * 6)
        self.assertEqual(hash(TINY), hash(dataclasses.replace(TINY)))

    def test_weight_shapes_leave_out_what_is_not_there(self):
        names = set(weight_shapes(CONFIGS["mixtral_like"]))
        absent = {"head", "attention.q_norm", "attention.qkv_bias", "mlp.gate_up"}
        self.assertFalse(names & absent)
        self.assertTrue(absent < set(weight_shapes(TINY)))
