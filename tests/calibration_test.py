"""Calibration: layers one by one equal the model, Hessians float64 sums; the text that ships."""

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import moejax
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.quantization.pipeline.calibration import TEXT_PATH, calibration_tokens, shipped_text
from moejax.quantization.pipeline.forward import LayerRun, _file_backed
from moejax.text.tokenizer import Tokenizer
from tests import numpy_model
from tests.host_test_case import HostTestCase
from tests.models_test import CONFIGS, wide_weights


def layer_weights(weights: dict[str, Any], config: ModelConfig, layer: int) -> dict[str, Any]:
    """The leaves of one layer without the layers' axis."""
    found = {}
    for name, leaf in weights.items():
        kind = name.partition(".")[0]
        if kind in ("attention", "mlp_norm"):
            found[name] = leaf[layer]
        elif kind == "moe" and layer in config.moe_layers:
            found[name] = leaf[config.moe_layers.index(layer)]
        elif kind == "mlp" and layer in config.dense_layers:
            found[name] = leaf[config.dense_layers.index(layer)]
    return found


def layer_inputs(
    x: np.ndarray, w: dict[str, np.ndarray], c: ModelConfig
) -> tuple[np.ndarray, dict[str, Any]]:
    """One layer in float64 numpy: [B, T, D] behind it, and the rows that each matrix read."""
    (batch, length, _), read = x.shape, {}
    positions = np.broadcast_to(np.arange(length), x.shape[:2])
    read["attention.qkv_proj"] = normed = numpy_model.rms_norm(x, w["attention.norm"], c.norm_eps)
    qkv = normed @ w["attention.qkv_proj"].T + w.get("attention.qkv_bias", 0.0)
    qkv = qkv.reshape(batch, length, -1, c.head_dim)
    q, k, v = np.split(qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
    if c.qk_norm:
        q = numpy_model.rms_norm(q, w["attention.q_norm"], c.norm_eps)
        k = numpy_model.rms_norm(k, w["attention.k_norm"], c.norm_eps)
    q, k = (numpy_model.rotate(heads, positions, c.rope_theta) for heads in (q, k))
    attended = numpy_model.attend(q, k, v, positions, c.sliding_window)
    read["attention.o_proj"] = attended = attended.reshape(batch, length, -1)
    x = x + attended @ w["attention.o_proj"].T + w.get("attention.o_bias", 0.0)
    flat = numpy_model.rms_norm(x, w["mlp_norm"], c.norm_eps).reshape(-1, c.model_dim)

    def inner(rows: np.ndarray, gate_up: np.ndarray) -> np.ndarray:
        gate, up = np.split(rows @ gate_up.T, 2, axis=-1)
        return numpy_model.silu(gate) * up

    if "moe.router" in w:
        _, weights, ids = numpy_model.route(flat, w["moe.router"], c)
        read["moe.router"] = flat
        read["moe.gate_up"] = [flat[(ids == e).any(1)] for e in range(c.num_experts)]
        read["moe.down"] = [
            inner(*both) for both in zip(read["moe.gate_up"], w["moe.gate_up"], strict=True)
        ]
        out = numpy_model.experts(flat, ids, weights, w["moe.gate_up"], w["moe.down"])
    else:
        read["mlp.gate_up"], read["mlp.down"] = flat, inner(flat, w["mlp.gate_up"])
        out = read["mlp.down"] @ w["mlp.down"].T
    return x + out.reshape(x.shape), read


def mean_of(rows: np.ndarray) -> np.ndarray:
    """2 X^T X / n; zero for no rows."""
    rows = rows.reshape(-1, rows.shape[-1])
    return 2 * rows.T @ rows / max(1, len(rows))


class LayerRunTest(HostTestCase):
    def setUp(self):
        super().setUp()
        self.tokens = np.random.default_rng(3).integers(0, 29, (5, 9)).astype(np.int32)

    def _run(self, name: str, weights: dict[str, Any], **how: Any) -> LayerRun:
        how = {"dtype": jnp.float32, "device": jax.devices("cpu")[0], **how}
        return LayerRun(CONFIGS[name], self.tokens, weights["embed"], **how)

    @parameterized.parameters(sorted(CONFIGS))
    @pytest.mark.slow
    def test_equals_float64_sums(self, name):
        config, weights = CONFIGS[name], wide_weights(CONFIGS[name])
        run = self._run(name, weights, tokens_per_step=18, hessian_bytes=1)
        x = weights["embed"].astype(np.float64)[self.tokens]
        for layer in range(config.num_layers):
            of_layer = layer_weights(weights, config, layer)
            wide = {key: leaf.astype(np.float64) for key, leaf in of_layer.items()}
            captured = run.capture(of_layer)
            x, read = layer_inputs(x, wide, config)
            self.assertEqual(captured.num_tokens, 45)
            for leaf, rows in read.items():
                if isinstance(rows, list):
                    np.testing.assert_array_equal(captured.expert_tokens, [len(r) for r in rows])
                    self.assertEqual(sum(captured.expert_tokens), 90)
                    found = [captured.hessian(leaf, e) for e in range(config.num_experts)]
                    expected = [mean_of(each) for each in rows]
                    counts = [len(each) for each in rows]
                else:
                    found, expected, counts = [captured.hessian(leaf)], [mean_of(rows)], [45]
                self.assertEqual([each.num_tokens for each in found], counts)
                for each, hessian in zip(found, expected, strict=True):
                    numpy_model.assert_near(each.mean, hessian, factor=20)
            run.advance(of_layer)
        numpy_model.assert_near(run.hidden, x, factor=20)


class CalibrationTextTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        directory = Path(moejax.__file__).parent / "demo"
        self.tokenizer = Tokenizer.from_directory(directory)
        self.model = {"vocab_size": 4096, "max_positions": 2048}

    def test_the_text_that_ships(self):
        text = shipped_text()
        self.assertBetween(len(text.encode()), 300_000, 400_000)
        self.assertLess(TEXT_PATH.stat().st_size, 150_000)
        chinese = sum("\u4e00" <= letter <= "\u9fff" for letter in text)
        self.assertBetween(chinese * 3 / len(text.encode()), 0.1, 0.3)
        for part in ("self.", "lemma", "Question:", "paddle"):
            self.assertGreater(text.count(part), 20, part)
        notice = (TEXT_PATH.parent / "README.md").read_text()
        self.assertIn("Copyright (c) 2021 OpenAI", notice)
        self.assertIn("public domain", notice)

    def test_gives_as_many_samples_as_it_has(self):
        tokens = calibration_tokens(self.tokenizer, **self.model)
        self.assertEqual((tokens.dtype, tokens.shape[1]), (np.int32, 2048))
        self.assertBetween(tokens.shape[0], 50, 127)
        whole = self.tokenizer.encode(shipped_text(), add_special_tokens=False)
        self.assertEqual(tokens.shape[0], len(whole) // 2048)
        self.assertEqual(tokens[0].tolist(), whole[:2048])
        shorter = calibration_tokens(self.tokenizer, **{**self.model, "max_positions": 500})
        self.assertEqual(shorter.shape, (128, 500))

    def test_an_own_text(self):
        text = " ".join(str(i) for i in range(400))
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        wanted = {"text": text, "length": 50, **self.model}
        fit = len(ids) // 50
        tokens = calibration_tokens(self.tokenizer, num_samples=fit, **wanted)
        self.assertEqual(tokens.shape, (fit, 50))
        starts = [i * len(ids) // fit for i in range(fit)]
        self.assertEqual(tokens.tolist(), [ids[start : start + 50] for start in starts])
        few = calibration_tokens(self.tokenizer, num_samples=2, **wanted)
        self.assertEqual(few[1].tolist(), ids[len(ids) // 2 :][:50])
        said = rf"has {len(ids)} tokens, {fit + 1} x 50 = {50 * fit + 50} are needed; give a longer"
        with self.assertRaisesRegex(MoejaxError, said):
            calibration_tokens(self.tokenizer, num_samples=fit + 1, **wanted)

    def test_what_is_refused(self):
        for change, said in (
            ({"tokenizer": None}, "calibration needs a tokenizer.json"),
            ({"num_samples": -1}, "give at least one sample"),
            ({"num_samples": 10**5}, "that ships has .* tokens, 100000 x 2048"),
            ({"length": 4096}, "of 4096 tokens do not fit the model's context of 2048"),
            ({"vocab_size": 300}, "outside the model's vocabulary of 300"),
            ({"length": 10**6, "max_positions": 10**6}, "that ships has .* tokens, 1 x 1000000"),
        ):
            with self.assertRaisesRegex(MoejaxError, said):
                calibration_tokens(**{"tokenizer": self.tokenizer, **self.model, **change})


class FileBackedTest(absltest.TestCase):
    def test_zeros_that_can_be_written_and_leave_nothing_behind(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        with mock.patch.object(tempfile, "tempdir", directory):
            array = _file_backed((3, 5, 7), jnp.bfloat16)
        np.testing.assert_array_equal(array, np.zeros((3, 5, 7)))
        array[1] = 2.5
        self.assertEqual(float(array.astype(np.float64).sum()), 2.5 * 35)
        self.assertIsInstance(array.base, np.memmap)
        self.assertEmpty(list(Path(directory).iterdir()))

    def test_no_room_is_said_before_anything_is_written(self):
        with self.assertRaises(OSError):
            _file_backed((2**50,), np.float32)
