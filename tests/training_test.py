"""Losses, optimiser, batches, evaluation and resumption of the demo's training."""

import dataclasses
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx

from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.shapes import SHAPES
from moejax.models.transformer import Transformer, flat_weights, forward
from scripts.demo_training import corpus as corpus_lib
from scripts.demo_training.batches import crop_source, sample_crops
from scripts.demo_training.losses import head_loss
from scripts.demo_training.objective import Objective, training_forward
from scripts.demo_training.optimizer import OptimizerConfig, from_views, to_views
from scripts.demo_training.scoring import cut_windows, make_scorer, score_windows
from scripts.demo_training.trainer import CheckpointStore, StepConfig, initial_state, make_step
from tests.numpy_model import TINY

QWEN = dataclasses.replace(
    TINY, vocab_size=48, model_dim=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    num_experts=4, mlp_dim=24, moe_layers=(0, 1), tied_embeddings=True, attention_bias=False,
    sliding_window=None,
)  # fmt: skip
MIXTRAL = dataclasses.replace(
    QWEN, family="mixtral", qk_norm=False, tied_embeddings=False, num_experts=8
)
ONE_DENSE = dataclasses.replace(QWEN, moe_layers=(1,))

MUON = OptimizerConfig(
    name="muon",
    learning_rate=0.02,
    adam_learning_rate=0.01,
    weight_decay=0.1,
    adam_b2=0.95,
    max_grad_norm=1.0,
    warmup_steps=3,
    decay_fraction=0.5,
    total_steps=20,
)


def objective(dropout: float = 0.0) -> Objective:
    return Objective(
        dtype=jnp.dtype(jnp.float32),
        attention="xla",
        dropout=dropout,
        balance_coefficient=0.01,
        z_coefficient=1e-4,
    )


def step_config(model: ModelConfig, optimizer: OptimizerConfig, dropout: float) -> StepConfig:
    return StepConfig(
        model=model,
        objective=objective(dropout),
        optimizer=optimizer,
        batch_size=4,
        context=16,
        mixture=(0.5, 0.5),
        final_mixture=(0.25, 0.75),
        seed=3,
    )


def small_corpus() -> corpus_lib.Corpus:
    """Two streams of simple structure: counting up, and counting down."""
    up = 4 + np.arange(600) % 40
    return corpus_lib.pack_corpus({"up": (up, 1200), "down": (up[::-1], 1200)})


class DirectoryTest(parameterized.TestCase):
    def directory(self) -> Path:
        return Path(self.enterContext(tempfile.TemporaryDirectory()))


class LossesTest(parameterized.TestCase):
    @parameterized.parameters(1, 4)
    def test_head_loss_equals_float64(self, num_chunks):
        rng = np.random.default_rng(0)
        n, d, v, z = 12, 5, 11, 0.01
        hidden, head = rng.normal(size=(n, d)), rng.normal(size=(v, d))
        targets, scale = rng.integers(0, v, n), rng.random(n)
        logits = hidden @ head.T
        log_z = np.log(np.exp(logits).sum(axis=1))
        expected = ((log_z - logits[np.arange(n), targets]) * scale).sum()
        expected_z = (z * log_z**2 * scale).sum()
        slope = np.exp(logits - log_z[:, None]) * (1 + 2 * z * log_z)[:, None]
        slope[np.arange(n), targets] -= 1
        slope *= scale[:, None]

        def total(x: jax.Array, w: jax.Array) -> jax.Array:
            args = jnp.asarray(targets, jnp.int32), jnp.asarray(scale, jnp.float32)
            loss, z_loss = head_loss(x, w, *args, z, n // num_chunks)
            return 2.0 * (loss + z_loss)

        args = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
        value, grads = jax.value_and_grad(total, argnums=(0, 1))(*args)
        np.testing.assert_allclose(value, 2 * (expected + expected_z), rtol=1e-5)
        np.testing.assert_allclose(grads[0], 2 * slope @ head, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(grads[1], 2 * slope.T @ hidden, rtol=1e-4, atol=1e-5)

    @parameterized.parameters(QWEN, MIXTRAL, ONE_DENSE)
    @pytest.mark.slow
    def test_training_forward_is_the_models(self, config):
        model = Transformer(config, rngs=nnx.Rngs(0))
        tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, config.vocab_size)
        expected, routing = forward(model, tokens)
        embedded = model.embed[...][tokens]
        found, found_routing = training_forward(
            model, embedded, attention="xla", dropout=0.5, dropout_key=None
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found_routing.ids, routing.ids)
        dropped, _ = training_forward(
            model, embedded, attention="xla", dropout=0.5, dropout_key=jax.random.key(0)
        )
        self.assertGreater(float(jnp.max(jnp.abs(dropped - expected))), 1e-3)


class OptimizerTest(parameterized.TestCase):
    @parameterized.parameters(QWEN, MIXTRAL, ONE_DENSE)
    def test_views_round_trip(self, config):
        weights = flat_weights(Transformer(config, rngs=nnx.Rngs(0)))
        views = to_views(weights, config)
        found = from_views(views, config)
        self.assertEqual({n: a.shape for n, a in found.items()}, weight_shapes(config))
        for name, leaf in weights.items():
            np.testing.assert_array_equal(found[name], leaf)
        heads = views["attention.qkv_proj"][0]  # queries, then keys, then values
        np.testing.assert_array_equal(heads[-1], weights["attention.qkv_proj"][0, -8:])


class BatchesTest(DirectoryTest):
    def test_crops_lie_in_their_streams_in_the_wanted_shares(self):
        corpus = small_corpus()
        source = crop_source(corpus, ["up", "down"], 17)
        mixture = jnp.asarray([0.25, 0.75])
        for seed in range(5):
            crops = sample_crops(jax.random.key(seed), source, mixture, num_crops=8, crop_length=17)
            steps = np.diff(np.asarray(crops), axis=1) % 40
            rising = np.all(steps == 1, axis=1)
            falling = np.all(steps == 39, axis=1)
            self.assertEqual((rising.sum(), falling.sum()), (2, 6))

    def test_too_short_and_unknown_streams_are_named(self):
        with self.assertRaisesRegex(MoejaxError, "'up' has 600 tokens"):
            crop_source(small_corpus(), ["up"], 600)
        with self.assertRaisesRegex(MoejaxError, "no stream 'side'"):
            crop_source(small_corpus(), ["side"], 8)

    def test_corpus_round_trip_and_truncation(self):
        directory = self.directory()
        corpus_lib.write_corpus(directory, small_corpus())
        found = corpus_lib.read_corpus(directory)
        np.testing.assert_array_equal(found.tokens, small_corpus().tokens)
        self.assertEqual(found.streams, small_corpus().streams)
        data = (directory / "tokens.xz").read_bytes()
        (directory / "tokens.xz").write_bytes(data[: len(data) // 2])
        with self.assertRaisesRegex(MoejaxError, "cannot read a packed corpus"):
            corpus_lib.read_corpus(directory)


class EvaluationTest(parameterized.TestCase):
    @parameterized.product(length=(1, 7, 8, 9, 30), stride=(2, 3, 8))
    def test_every_target_is_scored_once_with_its_context(self, length, stride):
        ids = 10 + np.arange(length)
        windows = cut_windows(ids, 8, stride)
        targets = windows.tokens[:, 1:][windows.scored]
        np.testing.assert_array_equal(np.sort(targets), ids)
        for tokens, scored in zip(windows.tokens, windows.scored, strict=True):
            for place in np.flatnonzero(scored):
                target = tokens[place + 1]
                self.assertGreaterEqual(place + 1, min(8 - stride + 1, target - 9))
                expected = target - 1 if target > 10 else corpus_lib.END_OF_TEXT_ID
                self.assertEqual(tokens[place], expected)

    def test_batches_do_not_change_the_score(self):
        weights = flat_weights(Transformer(QWEN, rngs=nnx.Rngs(0)))
        windows = cut_windows(small_corpus().stream("up")[:50], 8, 4)
        scorer = make_scorer(QWEN, jnp.float32, "xla")
        one = score_windows(scorer, weights, windows, batch_size=1)
        three = score_windows(scorer, weights, windows, batch_size=3)
        np.testing.assert_allclose(one.bits, three.bits, rtol=1e-5)
        np.testing.assert_array_equal(one.expert_counts, three.expert_counts)
        self.assertEqual(one.expert_counts.sum(), 50 * 2 * 2)  # tokens, layers, top-2


class OtherFamiliesTest(parameterized.TestCase):
    @parameterized.parameters("DeepSeek-V2-Lite", "Qwen3-Next-80B-A3B")
    def test_they_are_refused(self, name):
        with self.assertRaisesRegex(MoejaxError, "are not trained here"):
            make_scorer(SHAPES[name], jnp.dtype("float32"), "xla")


class TrainerTest(DirectoryTest):
    @parameterized.named_parameters(
        ("muon", QWEN, MUON),
        ("adamw", QWEN, dataclasses.replace(MUON, name="adamw", learning_rate=0.01)),
        ("mixtral", MIXTRAL, MUON),
    )
    @pytest.mark.slow
    def test_loss_falls_and_a_resumed_run_repeats(self, model, optimizer):
        config = step_config(model, optimizer, dropout=0.1)
        source = crop_source(small_corpus(), ["up", "down"], config.context + 1)
        store = CheckpointStore(self.directory())
        take_step = make_step(config)
        state, losses = initial_state(config), []
        for step in range(20):
            if step == 10:
                store.save(state)
            state, metrics, _ = take_step(state, source)
            losses.append(float(metrics.cross_entropy))
        self.assertLess(losses[-1], 0.8 * losses[0])

        resumed = store.restore_latest(initial_state(config))
        assert resumed is not None
        self.assertEqual(int(resumed.step), 10)
        repeated = []
        for _ in range(10):
            resumed, metrics, _ = take_step(resumed, source)
            repeated.append(float(metrics.cross_entropy))
        store.close()
        self.assertEqual(repeated, losses[10:])
        for name, leaf in state.views.items():
            np.testing.assert_array_equal(resumed.views[name], leaf)

    def test_a_checkpoint_of_another_model_is_refused(self):
        store = CheckpointStore(self.directory())
        self.assertIsNone(store.restore_latest(initial_state(step_config(QWEN, MUON, 0.0))))
        store.save(initial_state(step_config(QWEN, MUON, 0.0)))
        with self.assertRaisesRegex(MoejaxError, "does not fit"):
            store.restore_latest(initial_state(step_config(MIXTRAL, MUON, 0.0)))
        store.close()
