"""DeepSeek's families against transformers and torch: logits, greedy tokens, chunks."""

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from absl.testing import parameterized
from safetensors.numpy import load_file, save_file

from moejax import Engine
from moejax.checkpoints import save_hf_checkpoint
from moejax.checkpoints.safetensors_reader import stored_tensors
from moejax.checkpoints.safetensors_writer import write_safetensors
from moejax.errors import MoejaxError
from moejax.models import latent_attention
from moejax.models.attention import Attended
from moejax.models.config import LatentConfig as Widths
from moejax.models.config import ModelConfig, RopeScaling, RouterRule
from moejax.models.kv_cache import empty_cache
from moejax.models.latent_attention import _is_expanded
from moejax.models.layer_index import layer_indices
from moejax.models.moe import prefetch_scores, routing_of
from moejax.models.rope import model_angles
from moejax.models.shapes import SHAPES
from moejax.models.transformer import ChunkSpec, Transformer, merge_weights, model_definition
from moejax.policies.dymoe import attention_received
from moejax.weights.qtensor import Weight
from tests import parity, slow, tiny_engine
from tests.deepseek_moe_torch import DeepseekMoe, Shape
from tests.hf_checkpoints import load_leaves, reference_model, write_checkpoint
from tests.numpy_model import RELATIVE_ERROR, relative_errors
from tests.parity import grouped_gap, of_transformers

MOE_16B = {
    "as_published": Shape(num_hidden_layers=3),
    "grouped_queries_tied": Shape(num_key_value_heads=2, tie_word_embeddings=True),
    "normalised_every_second": Shape(
        num_hidden_layers=4, moe_layer_freq=2, norm_topk_prob=True, num_experts_per_tok=3
    ),
    "no_shared_experts": Shape(n_shared_experts=None, first_k_dense_replace=0),
    "odd_sizes": Shape(
        hidden_size=30, num_attention_heads=3, num_key_value_heads=1, n_routed_experts=5,
        n_shared_experts=3, moe_intermediate_size=7, num_experts_per_tok=1, rope_theta=1e5,
    ),
}  # fmt: skip

TINY = dataclasses.replace(
    tiny_engine.CONFIG, family="deepseek_v2", num_layers=6, num_kv_heads=4, head_dim=16,
    moe_layers=(1, 2, 3, 4, 5), qk_norm=False, norm_topk_prob=False, interleaved_rope=True,
    shared_dim=32, router=RouterRule(num_groups=4, top_groups=2, scale=1.5),
    latent=Widths(kv_rank=24, query_rank=12, nope_dim=10, rope_dim=6, value_dim=12),
    rope_scaling=RopeScaling(
        kind="yarn", factor=4.0, original_positions=64, mscale=1.0, mscale_all_dim=0.5
    ),
)  # fmt: skip
LENGTH, SLOTS = 24, 32


def sigmoid_router(config: ModelConfig) -> ModelConfig:
    """DeepSeek-V3's."""
    rule = dataclasses.replace(config.router, scoring="sigmoid", has_bias=True, group_score="top2")
    return dataclasses.replace(config, family="deepseek_v3", router=rule, norm_topk_prob=True)


class ParityTest(parity.ParityTestCase):
    def test_a_bias_of_minus_infinity_masks_experts(self):
        source = write_checkpoint("v3", self.directory)
        path = self.directory / "masked"
        shutil.copytree(source, path)
        file = path / "model.safetensors"
        tensors = load_file(file)
        biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
        for name in biases:
            tensors[name][[0, 5]] = -np.inf
        save_file(tensors, file, {"format": "pt"})
        tokens = np.random.default_rng(0).integers(0, 160, (1, 40))
        expected = of_transformers(reference_model(path), grouped_gap)(torch.as_tensor(tokens[0]))[
            0
        ].numpy()
        unmasked = of_transformers(reference_model(source), grouped_gap)(
            torch.as_tensor(tokens[0])
        )[0].numpy()
        self.assertGreater(relative_errors(unmasked, expected).max(), 0.01)
        engine = Engine.from_pretrained(path, dtype="float32", platform="cpu", progress=False)
        found = engine.logits(tokens)[0]
        self.assertLess(relative_errors(found, expected).max(), RELATIVE_ERROR)
        # Written like `moejax.quantize` copies plain leaves.
        write_safetensors(
            self.directory / "copy.safetensors", {"x": stored_tensors(path)[biases[0]]}
        )
        copied = load_file(self.directory / "copy.safetensors")["x"]
        np.testing.assert_array_equal(copied, tensors[biases[0]])
        for value, shown in ((np.nan, "nan"), (np.inf, "inf"), (-1e30, r"-1e\+30")):
            tensors[biases[0]][3] = value
            save_file(tensors, file)
            with self.assertRaisesRegex(MoejaxError, rf"{biases[0]} holds {shown} at \[3\]"):
                Engine.from_pretrained(path, platform="cpu", progress=False)

    @parameterized.parameters(*MOE_16B)
    @pytest.mark.slow
    def test_deepseek_moe(self, name):
        model = DeepseekMoe(MOE_16B[name], seed=10 + sorted(MOE_16B).index(name))
        path = self.directory / name
        model.write(path)
        engine = Engine.from_pretrained(path, dtype="float32", platform="cpu", progress=False)
        parity.check(self, engine, model.logits, lengths=(3, 17, 9))


@functools.cache
def tiny_weights(config: ModelConfig = TINY) -> dict[str, Weight]:
    return {name: jnp.asarray(a) for name, a in tiny_engine.random_weights(config).items()}


def run_whole() -> jax.Array:
    """Outputs [2, LENGTH, D] of a prompt at once, in expanded form."""
    definition, mask = model_definition(TINY), jnp.ones((2, LENGTH), bool)
    tokens = np.random.default_rng(5).integers(0, TINY.vocab_size, (2, LENGTH), np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    cache = empty_cache(TINY, 2, SLOTS, jnp.float32)

    @jax.jit
    def run(weights: Any, cache: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        model = merge_weights(definition, weights)
        return model(tokens, positions, mask, cache, ChunkSpec(0, True, "dense", "xla"))[1]

    with mock.patch.object(latent_attention, "_is_expanded", lambda *_, **__: True):
        return run(tiny_weights(), cache, tokens, positions)


class FurtherLayersTest(parameterized.TestCase):
    def test_what_predicts_further_tokens_is_left_out(self):
        config = sigmoid_router(TINY)
        path = Path(self.enterContext(tempfile.TemporaryDirectory()))
        weights = tiny_engine.random_weights(config)
        save_hf_checkpoint(path, config, weights, dtype=np.dtype(jnp.bfloat16))
        file = path / "model.safetensors"
        tensors = load_file(file)
        bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
        self.assertEqual(bias.dtype, np.float32)  # it decides who is chosen
        np.testing.assert_array_equal(bias, np.asarray(weights["moe.router_bias"][0]))
        extra = f"model.layers.{config.num_layers}.enorm.weight"
        save_file(tensors | {extra: np.zeros(4, np.float32)}, file)
        with self.assertLogs("absl", "WARNING") as logs:
            loaded = load_leaves(path, jnp.bfloat16)
        self.assertTrue(any(f"1 tensors ({extra}" in line for line in logs.output))
        self.assertEqual(loaded["moe.router_bias"].dtype, jnp.float32)
        second = extra.replace(f".{config.num_layers}.", f".{config.num_layers + 1}.")
        both = tensors | dict.fromkeys((extra, second), np.zeros(4, np.float32))
        save_file(both, file)
        with self.assertLogs("absl", "WARNING") as logs:
            load_leaves(path, jnp.bfloat16)
        self.assertTrue(any("2 tensors" in line for line in logs.output))
        decoders = f"model.layers.{config.num_layers}.input_layernorm.weight"
        # The config may say too few layers: one of a decoder has no norm of an embedding.
        for wrong in ("model.layers.0.other", second, decoders):
            save_file(tensors | {wrong: np.zeros(4, np.float32)}, file)
            with self.assertRaisesRegex(MoejaxError, f"unexpected tensors.*{wrong}"):
                load_leaves(path, jnp.bfloat16)

    def test_a_bias_decides_who_is_chosen_and_not_the_order(self):
        config = dataclasses.replace(
            sigmoid_router(TINY), router=RouterRule(scoring="sigmoid", has_bias=True)
        )
        logits = jax.random.normal(jax.random.key(0), (16, config.num_experts))
        bias = jnp.linspace(5, 0, config.num_experts)
        found = routing_of(logits, config, bias)
        chosen = np.arange(config.experts_per_token)  # those of the largest bias
        np.testing.assert_array_equal(np.sort(found.ids), np.tile(chosen, (16, 1)))
        self.assertTrue((np.diff(found.weights) <= 0).all())
        scores = np.take_along_axis(np.asarray(found.probabilities), np.asarray(found.ids), 1)
        self.assertTrue((np.diff(scores) <= 0).all())

    @slow.repeats()
    @parameterized.parameters("softmax", "sigmoid")
    def test_what_is_foreseen_is_what_would_be_chosen(self, scoring):
        rule = RouterRule(
            scoring=scoring, has_bias=True, num_groups=4, top_groups=2, group_score="top2"
        )
        config = dataclasses.replace(sigmoid_router(TINY), router=rule)
        logits = jax.random.normal(jax.random.key(0), (64, config.num_experts))
        bias = 0.3 * jax.random.normal(jax.random.key(1), (config.num_experts,))
        found = routing_of(logits, config, bias)
        _, ahead = jax.lax.top_k(prefetch_scores(found, config), config.experts_per_token)
        np.testing.assert_array_equal(np.sort(ahead), np.sort(found.ids))
        _, by_score = jax.lax.top_k(found.probabilities, config.experts_per_token)
        self.assertFalse((np.sort(by_score) == np.sort(found.ids)).all())
        plain = dataclasses.replace(config, router=RouterRule(), family="deepseek")
        found = routing_of(logits, plain)
        self.assertIs(prefetch_scores(found, plain), found.probabilities)


class PromptTest(parameterized.TestCase):
    """Six layers: one dense, four in a loop whose layer is a number on the device, and one more."""

    def check_near(self, found: jax.Array, expected: jax.Array) -> None:
        errors = relative_errors(np.asarray(found), np.asarray(expected))
        self.assertLess(errors.max(), RELATIVE_ERROR)

    @parameterized.parameters(True, False)
    @pytest.mark.slow
    def test_queries_in_blocks(self, loops):
        own_loops = Transformer.loops if loops else lambda *_: False
        with (
            mock.patch.object(Transformer, "loops", own_loops),
            mock.patch.object(latent_attention, "SCORE_BYTES", 4 * 2 * 4 * LENGTH * 7),
        ):
            found = run_whole()
        self.check_near(found, run_whole())


class FormsTest(parameterized.TestCase):
    """One layer's attention, and what it shows to who watches."""

    def shown_and_attended(
        self, expanded: bool, dtype: Any = jnp.float32
    ) -> tuple[Attended, jax.Array]:
        """In `dtype`, of numbers that bfloat16 has."""

        def as_dtype(array: Any) -> jax.Array:
            return jnp.asarray(array, jnp.bfloat16).astype(dtype)

        weights = jax.tree.map(as_dtype, tiny_weights())
        model = merge_weights(model_definition(TINY), weights)
        rng = np.random.default_rng(1)
        cache = jax.tree.map(
            lambda of: as_dtype(rng.standard_normal(of.shape)), empty_cache(TINY, 2, SLOTS, dtype)
        )
        positions = jnp.broadcast_to(jnp.arange(9, 14, dtype=jnp.int32)[None], (2, 5))
        normed = as_dtype(rng.standard_normal((2, 5, TINY.model_dim)))
        spec, mask = ChunkSpec(SLOTS, False, "dense", "xla"), jnp.ones((2, 5), bool)
        attend = model.attention_of(cache, positions, spec, mask, is_observed=True)
        index, angles = layer_indices(TINY)[2], model_angles(TINY, positions)
        with mock.patch.object(latent_attention, "_is_expanded", lambda *_, **__: expanded):
            found = model.attention(normed, index, angles, attend)
            return attend.take_attended(), found

    @pytest.mark.slow
    def test_absorbed_is_expanded(self):
        one, expected = self.shown_and_attended(True)
        other, found = self.shown_and_attended(False)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        self.assertEqual((one.q.shape, one.keys.shape), ((2, 5, 4, 16), (2, SLOTS, 4, 16)))
        self.assertEqual((other.q.shape, other.keys.shape), ((2, 5, 4, 30), (2, SLOTS, 1, 30)))
        # Scores are those of the model's own scale, however wide what is shown is.
        received = [
            attention_received(q * (TINY.score_scale * q.shape[-1] ** 0.5), k, positions, mask)
            for q, k, positions, mask, *_ in (one, other)
        ]
        np.testing.assert_allclose(*received, rtol=1e-4, atol=1e-6)

    @parameterized.parameters(
        (1, 4096, False), (16, 8192, False), (165, 32768, False), (171, 32768, True),
        (64, 96, True), (1024, 8192, True), (1024, 163840, False),
    )  # fmt: skip
    def test_which_form_a_chunk_takes(self, length, slots, expected):
        c = SHAPES["DeepSeek-V2-Lite"]
        found = _is_expanded(c.latent, c.num_heads, batch=1, length=length, slots=slots, itemsize=2)
        self.assertEqual(found, expected)
