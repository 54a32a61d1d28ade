"""Logits and greedy tokens against Hugging Face transformers, on checkpoints that it wrote."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from absl.testing import parameterized

from moejax import Engine
from moejax.demo import DEMO_DIRECTORY
from tests import numpy_model, parity, slow
from tests.hf_checkpoints import CHECKPOINTS, reference_model, write_checkpoint

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
