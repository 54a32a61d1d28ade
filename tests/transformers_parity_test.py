"""Logits and greedy tokens against Hugging Face transformers, on checkpoints that it wrote."""

import operator
import tempfile
from pathlib import Path

import numpy as np
import torch
from absl.testing import absltest, parameterized

from moejax import Engine
from moejax.demo import DEMO_DIRECTORY
from tests import slow
from tests.hf_checkpoints import CHECKPOINTS, reference_model, write_checkpoint

RELATIVE_ERROR = 1e-4
MIN_GAP = 1e-5  # below it the order of two logits, or of two router weights, is rounding
NUM_GREEDY = 64
PROMPT_LENGTHS = (3, 17, 9, 30)
FAST = ("mixtral", "qwen3")
# Each compiles four more programs.
ALSO_ALONE = ("mixtral", "demo", "qwen3", "qwen3_mlp_only")


def relative_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Norm of the error over the norm of what was expected, at each position."""
    error = np.linalg.norm(found - expected, axis=-1)
    return error / np.linalg.norm(expected, axis=-1)


def greedy_reference(
    model: torch.nn.Module, prompt: list[int], num_tokens: int
) -> tuple[list[int], int]:
    """transformers' greedy tokens, and how many of them are beyond doubt.

    A token is in doubt from the first position on at which the two best logits, or the last expert
    that was chosen and the first that was not, are nearer than MIN_GAP.
    """
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0]
        run = model(out[None], output_router_logits=True)
    width = model.config.num_experts_per_tok
    router_gap = np.inf
    for layer_logits in run.router_logits:
        falling = layer_logits.softmax(-1).sort(-1, descending=True).values
        if falling.shape[-1] > width:
            router_gap = np.minimum(router_gap, (falling[:, width - 1] - falling[:, width]).numpy())
    best = run.logits[0].sort(-1, descending=True).values
    gap = np.minimum((best[:, 0] - best[:, 1]).numpy(), router_gap)
    doubtful = np.flatnonzero(gap[: len(out) - 1] < MIN_GAP)
    sure = len(out) - len(prompt)
    if doubtful.size:
        sure = min(sure, max(0, int(doubtful[0]) + 1 - len(prompt)))
    return out[len(prompt) :].tolist(), sure


class TransformersParityTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls._directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls._directory.cleanup)

    def _load(self, name: str) -> tuple[Engine, torch.nn.Module]:
        if name == "demo":
            path = DEMO_DIRECTORY
        else:
            path = write_checkpoint(name, Path(self._directory.name))
        engine = Engine.from_pretrained(path, dtype="float32", platform="cpu", progress=False)
        return engine, reference_model(path)

    @slow.where(lambda name: name not in FAST)
    @parameterized.parameters(*sorted(CHECKPOINTS), "demo")
    def test_logits_and_greedy_tokens_are_those_of_transformers(self, name):
        engine, model = self._load(name)
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, engine.config.vocab_size, (2, 40))
        with torch.no_grad():
            expected = model(torch.as_tensor(tokens)).logits.numpy()
        found = engine.logits(tokens)
        self.assertEqual(found.dtype, np.float32)
        self.assertLess(relative_errors(found, expected).max(), RELATIVE_ERROR)

        prompts = [rng.integers(0, engine.config.vocab_size, n).tolist() for n in PROMPT_LENGTHS]
        together = engine.generate(prompts, max_new_tokens=NUM_GREEDY, ignore_eos=True)
        num_sure = num_equal = 0
        for prompt, answer in zip(prompts, together, strict=True):
            expected_tokens, sure = greedy_reference(model, prompt, NUM_GREEDY)
            self.assertLen(answer.tokens, NUM_GREEDY)
            self.assertEqual(answer.tokens[:sure], expected_tokens[:sure])
            num_sure += sure
            num_equal += sum(map(operator.eq, answer.tokens, expected_tokens))
        self.assertGreater(num_equal, 0.75 * len(prompts) * NUM_GREEDY)
        if name != "demo":  # its 7 layers of 32 experts have a near tie in almost every sequence
            self.assertGreater(num_sure, 0.75 * len(prompts) * NUM_GREEDY)
        if name in ALSO_ALONE:
            alone = engine.generate(prompts[1], max_new_tokens=NUM_GREEDY, ignore_eos=True)[0]
            self.assertEqual(alone.tokens, together[1].tokens)

    def test_a_perturbed_weight_is_noticed(self):
        engine, model = self._load("qwen3")
        tokens = np.arange(20)[None]
        with torch.no_grad():
            model.model.layers[1].mlp.gate.weight[0] += 0.05
            expected = model(torch.as_tensor(tokens)).logits.numpy()
        self.assertGreater(relative_errors(engine.logits(tokens), expected).max(), RELATIVE_ERROR)


if __name__ == "__main__":
    absltest.main()
