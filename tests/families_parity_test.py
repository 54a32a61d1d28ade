"""Models of every family against transformers, their checkpoints written by it."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from absl.testing import parameterized
from safetensors.torch import load_file, save_file

from moejax import Engine
from moejax.demo import DEMO_DIRECTORY
from moejax.text.tokenizer import read_eos_ids
from tests import numpy_model, parity, slow
from tests.hf_checkpoints import (
    CHECKPOINTS,
    GLM,
    OLMOE,
    QWEN3_5,
    reference_model,
    write_checkpoint,
    write_with_vision_tower,
)
from tests.numpy_model import RELATIVE_ERROR, relative_errors


class ParityTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.directory = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    @slow.where(lambda name: name != "olmoe")
    @parameterized.parameters(*OLMOE)
    def test_olmoe(self, name):
        self.check(name, parity.softmax_gap)

    @slow.where(lambda name: name not in ("air", "flash"))
    @parameterized.parameters(*GLM)
    def test_glm(self, name):
        self.check(name, parity.grouped_gap)

    @slow.where(lambda name: name != "qwen35")
    @parameterized.parameters(*QWEN3_5)
    def test_qwen3_5(self, name):
        # The last is more than one chunk of the delta rule.
        self.check(name, parity.softmax_gap, lengths=(3, 17, 70), least_sure=0.6)

    @pytest.mark.slow
    def test_decoder_of_a_model_that_sees_images(self):
        path = self.directory / "nested"
        with torch.random.fork_rng():
            torch.manual_seed(1)
            write_with_vision_tower(path)
        tensors = load_file(path / "model.safetensors")
        further = {"mtp.fc.weight": torch.zeros(3)}
        save_file(tensors | further, path / "model.safetensors", {"format": "pt"})
        with self.assertLogs("absl", "WARNING") as logs:
            engine = Engine.from_pretrained(path, dtype="float32", platform="cpu", progress=False)
        said = "\n".join(logs.output)
        num_images = sum(name.startswith("model.visual.") for name in tensors)
        self.assertIn(f"left out {num_images} tensors (model.visual.", said)
        self.assertIn("left out 1 tensors (mtp.fc.weight", said)
        self.assertEqual(read_eos_ids(path, vocab_size=160), (7,))
        model = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(
            path, attn_implementation="eager"
        ).eval()
        tokens = np.random.default_rng(0).integers(10, 160, (2, 30))
        with torch.no_grad():
            expected = model(torch.as_tensor(tokens)).logits.numpy()
        found = engine.logits(tokens)
        self.assertLess(relative_errors(found, expected).max(), RELATIVE_ERROR)

    def check(self, name: str, router_gap: parity.RouterGap, **how: Any) -> None:
        path = write_checkpoint(name, self.directory)
        reference = parity.of_transformers(reference_model(path), router_gap)
        engine = Engine.from_pretrained(path, dtype="float32", platform="cpu", progress=False)
        parity.check(self, engine, reference, **{"lengths": (3, 17, 9)} | how)


FAST = ("mixtral", "qwen3")


class TransformersParityTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.directory = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    def load(self, name: str) -> tuple[Engine, torch.nn.Module]:
        path = DEMO_DIRECTORY if name == "demo" else write_checkpoint(name, self.directory)
        engine = Engine.from_pretrained(path, dtype="float32", platform="cpu", progress=False)
        return engine, reference_model(path)

    @slow.where(lambda name: name not in FAST)
    @parameterized.parameters(*sorted(CHECKPOINTS), "demo")
    def test_logits_and_greedy_tokens_are_those_of_transformers(self, name):
        engine, model = self.load(name)
        # The demo's 7 layers of 32 experts have a near tie in almost every sequence.
        sure = {} if name != "demo" else {"least_sure": 0.0}
        reference = parity.of_transformers(model)
        parity.check(self, engine, reference, lengths=(3, 17, 9, 30), **sure)

    def test_a_perturbed_weight_is_noticed(self):
        engine, model = self.load("qwen3")
        tokens = np.arange(20)[None]
        with torch.no_grad():
            model.model.layers[1].mlp.gate.weight[0] += 0.05
            expected = model(torch.as_tensor(tokens)).logits.numpy()
        errors = numpy_model.relative_errors(engine.logits(tokens), expected)
        self.assertGreater(errors.max(), numpy_model.RELATIVE_ERROR)
