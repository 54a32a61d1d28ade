"""Models of every family against transformers, their checkpoints written by it."""

from collections.abc import Iterable
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
from tests import parity, slow
from tests.hf_checkpoints import (
    CHECKPOINTS,
    DEEPSEEK_CHECKPOINTS,
    GLM,
    GPT_OSS,
    OLMOE,
    QWEN3_5,
    QWEN3_NEXT,
    reference_model,
    write_checkpoint,
    write_with_vision_tower,
)
from tests.numpy_model import RELATIVE_ERROR, relative_errors

# Checkpoints of each family, the gap of their routers, and how they are checked.
FAMILIES: tuple[tuple[Iterable[str], parity.RouterGap, dict[str, Any]], ...] = (
    (sorted(CHECKPOINTS), parity.softmax_gap, {"lengths": (3, 17, 9, 30)}),
    # The demo's 7 layers of 32 experts have a near tie in almost every sequence.
    (["demo"], parity.softmax_gap, {"lengths": (3, 17, 9, 30), "least_sure": 0.0}),
    (OLMOE, parity.softmax_gap, {"lengths": (3, 17, 9)}),
    (GLM, parity.grouped_gap, {"lengths": (3, 17, 9)}),
    (DEEPSEEK_CHECKPOINTS, parity.grouped_gap, {"lengths": (3, 17, 9)}),
    # The last prompt is more than one chunk of the delta rule.
    (QWEN3_5, parity.softmax_gap, {"lengths": (3, 17, 70), "least_sure": 0.6}),
    (QWEN3_NEXT, parity.softmax_gap, {"lengths": (3, 17, 70), "num_tokens": 80, "least_sure": 0.6}),
    (GPT_OSS, parity.softmax_gap, {"lengths": (3, 17, 40), "num_tokens": 60, "least_sure": 0.6}),
)
FAST = ("mixtral", "qwen3", "olmoe", "air", "flash", "v2_groups", "qwen35", "next", "oss")


class ParityTest(parity.ParityTestCase):
    @slow.where(lambda name: name not in FAST)
    @parameterized.parameters(*[(name, *how) for names, *how in FAMILIES for name in names])
    def test_logits_and_greedy_tokens_are_those_of_transformers(self, name, router_gap, how):
        path = DEMO_DIRECTORY if name == "demo" else write_checkpoint(name, self.directory)
        engine = Engine.from_pretrained(path, dtype="float32", platform="cpu", progress=False)
        reference = parity.of_transformers(reference_model(path), router_gap)
        parity.check(self, engine, reference, **how)

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

    def test_a_perturbed_weight_is_noticed(self):
        engine, model = self.load("qwen3"), self.reference("qwen3")
        tokens = np.arange(20)[None]
        with torch.no_grad():
            model.model.layers[1].mlp.gate.weight[0] += 0.05
            expected = model(torch.as_tensor(tokens)).logits.numpy()
        errors = relative_errors(engine.logits(tokens), expected)
        self.assertGreater(errors.max(), RELATIVE_ERROR)
