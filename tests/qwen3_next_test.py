"""Qwen3-Next against transformers: layers by a gated delta rule beside gated attention."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from absl.testing import absltest, parameterized

from moejax.inference import steps
from moejax.models.config import DeltaConfig, ModelConfig, leaf_dtype, weight_shapes
from moejax.models.kv_cache import empty_cache
from moejax.models.transformer import ChunkSpec, merge_weights, model_definition
from tests import tiny_engine
from tests.cached_runners import random_weights as pooled_weights
from tests.numpy_model import RELATIVE_ERROR, relative_errors
from tests.parity import ParityTestCase

# Not as tests do for speed. Without optimisation jax 0.10.2 rounds a float32 product of a chunk's
# queries and keys in a way that depends on the rest of the program, and a scatter is a loop that
# copies.
AS_USERS_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 1}
if jax.__version__.startswith("0.10."):
    AS_USERS_COMPILE["xla_cpu_use_fusion_emitters"] = True
# A layer of each kind.
TWO_LAYERS = dataclasses.replace(
    tiny_engine.CONFIG,
    family="qwen3_next",
    rope_dim=4,
    attention_gate=True,
    zero_centred_norm=True,
    delta_net=DeltaConfig(
        layers=(0,), num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, conv_width=4
    ),
    shared_dim=16,
    shared_gate=True,
)


def random_tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 160, shape).astype(np.int32)


class ParityTest(ParityTestCase):
    @pytest.mark.slow
    def test_half_precision_is_near_and_keeps_what_decays(self):
        engine, tokens = self.load("next", dtype="bfloat16"), random_tokens(2, 40)
        self.assertEqual(engine.weights["delta.a_log"].dtype, jnp.float32)
        self.assertEqual(engine.weights["delta.qkvz_proj"].dtype, jnp.bfloat16)
        errors = relative_errors(engine.logits(tokens), self.load("next").logits(tokens))
        self.assertLess(np.median(errors), 0.1)
        self.assertLen(engine.generate([5, 6, 7], max_new_tokens=5, ignore_eos=True)[0].tokens, 5)

    @pytest.mark.slow
    def test_a_decay_that_is_off_is_noticed(self):
        engine, model, tokens = self.load("next"), self.reference("next"), random_tokens(1, 40)
        with torch.no_grad():
            model.model.layers[0].linear_attn.A_log[0] += 0.01
            expected = model(torch.as_tensor(tokens)).logits.numpy()
        self.assertGreater(relative_errors(engine.logits(tokens), expected).max(), RELATIVE_ERROR)


class CacheTest(absltest.TestCase):
    def test_a_row_that_rests_keeps_its_state_bit_for_bit(self):
        cache = empty_cache(TWO_LAYERS, 2, 32, jnp.dtype("float32"))
        cache = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.5), cache)
        weights, spec = pooled_weights(TWO_LAYERS), ChunkSpec(32, False, "dense", "xla")

        @jax.jit
        def step(tokens, mask, cache):
            model = merge_weights(model_definition(TWO_LAYERS), weights)
            return model(tokens, jnp.full((2, 1), 7, jnp.int32), mask, cache, spec)[0]

        tokens, mask = jnp.array([[3], [4]], jnp.int32), jnp.array([[False], [True]])
        after = step(tokens, mask, cache)
        for old, new in ((cache.states, after.states), (cache.tails, after.tails)):
            np.testing.assert_array_equal(new[:, 0], old[:, 0])
            self.assertTrue(np.any(new[:, 1] != old[:, 1]))


def compiled_token(config: ModelConfig, batch: int) -> jax.stages.Compiled:
    """A chunk of one token, of abstract arrays."""
    array, f32, i32 = jax.ShapeDtypeStruct, jnp.dtype("float32"), jnp.dtype("int32")
    weights = {n: array(s, leaf_dtype(n, f32)) for n, s in weight_shapes(config).items()}
    cache = jax.eval_shape(lambda: empty_cache(config, batch, 64, f32))
    spec = ChunkSpec(64, False, "block", "xla")
    step = functools.partial(steps.prefill_chunk, steps.StepProgram(model_definition(config)), spec)
    state = steps.PrefillState(cache, array((batch, config.model_dim), f32))
    chunk = steps.TokenChunk(array((batch, 1), i32), array((), i32), array((batch,), i32))
    inputs = steps.StepInputs(weights, None)
    lowered = jax.jit(step, donate_argnums=0).lower(state, None, inputs, chunk)
    return lowered.compile(AS_USERS_COMPILE)


class MemoryTest(parameterized.TestCase):
    @parameterized.parameters(1, 3)
    @pytest.mark.slow
    def test_a_decode_step_does_not_copy_the_states(self, batch):
        of = dataclasses.replace(TWO_LAYERS.delta_net, layers=(0, 1))
        config = dataclasses.replace(TWO_LAYERS, num_layers=3, moe_layers=(0, 1, 2), delta_net=of)
        states, text = f"f32[2,{batch},4,16,16]", compiled_token(config, batch).as_text()
        self.assertIn(states, text)
        copies = [line for line in text.splitlines() if f"= {states}" in line and "copy(" in line]
        self.assertEmpty(copies)
