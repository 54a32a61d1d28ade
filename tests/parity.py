"""Parity of an engine with a reference: logits, and greedy tokens that are beyond doubt."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from moejax import Engine
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import reference_model, write_checkpoint
from tests.numpy_model import RELATIVE_ERROR, relative_errors

RouterGap = Callable[..., torch.Tensor]  # of a model, a router's place and its logits

MIN_GAP = 1e-5  # below it the order of two logits, or of two router weights, is rounding
NUM_GREEDY = 64

# Logits [T, V] of one sequence, and how near each token's routers were to another choice, [T].
Reference = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def choice_gap(scores: torch.Tensor, num: int) -> torch.Tensor:
    """Distance between the last of `num` that are chosen and the first that is not, [T]."""
    if num == scores.shape[-1]:
        return torch.full(scores.shape[:-1], torch.inf)
    falling = scores.sort(-1, descending=True).values
    return falling[:, num - 1] - falling[:, num]


def softmax_gap(model: Any, place: int, logits: torch.Tensor) -> torch.Tensor:
    """The gap of a router of Mixtral and Qwen3."""
    del place
    return choice_gap(logits.softmax(-1), model.config.num_experts_per_tok)


def grouped_gap(model: Any, place: int, logits: torch.Tensor) -> torch.Tensor:
    """The gap of a router of DeepSeek-V2, V3 and GLM, of groups and of experts."""
    config = model.config
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    bias = getattr(gates[place], "e_score_correction_bias", None)
    has_bias = bias is not None
    scores = logits.sigmoid() + bias if has_bias else logits.softmax(-1)
    if not has_bias and config.topk_method == "greedy":
        return choice_gap(scores, config.num_experts_per_tok)
    grouped = scores.reshape(len(scores), config.n_group, -1)
    of_group = grouped.topk(2 if has_bias else 1, -1).values.sum(-1)
    kept = of_group.topk(config.topk_group, -1).indices
    inside = torch.zeros_like(of_group).scatter(1, kept, 1.0).bool()[:, :, None]
    masked = grouped.masked_fill(~inside, -torch.inf).reshape(scores.shape)
    of_experts = choice_gap(masked, config.num_experts_per_tok)
    return torch.minimum(choice_gap(of_group, config.topk_group), of_experts)


def of_transformers(model: Any, router_gap: RouterGap = softmax_gap) -> Reference:
    """A model of transformers; `router_gap` takes it, the place of a router, and its logits."""

    def run(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            out = model(tokens[None], output_router_logits=True)
        gaps = [router_gap(model, i, logits) for i, logits in enumerate(out.router_logits)]
        return out.logits[0], torch.stack(gaps).amin(0)

    return run


class ParityTestCase(FolderTestCase):
    """Checkpoints of `hf_checkpoints` by name, which a class shares."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.directory = cls.class_folder()

    def load(self, name: str, **how: Any) -> Engine:
        how = {"dtype": "float32", "platform": "cpu", "progress": False} | how
        return Engine.from_pretrained(write_checkpoint(name, self.directory), **how)

    def reference(self, name: str) -> torch.nn.Module:
        return reference_model(write_checkpoint(name, self.directory))


def check(
    test: Any,
    engine: Engine,
    reference: Reference,
    *,
    lengths: Sequence[int],
    num_tokens: int = 40,
    least_sure: float = 0.75,
) -> None:
    """Logits of a batch, and greedy tokens of prompts of several lengths at once.

    A token is in doubt from the first position on at which the two best logits, or the choices of a
    router, are nearer than MIN_GAP; `least_sure` of the tokens, as a share, are not.
    """
    # Token 0 may be padding.
    rng, size = np.random.default_rng(0), engine.config.vocab_size
    tokens = rng.integers(1, size, (2, num_tokens))
    expected = np.stack([reference(torch.as_tensor(row))[0].numpy() for row in tokens])
    found = engine.logits(tokens)
    test.assertEqual(found.dtype, np.float32)
    test.assertLess(relative_errors(found, expected).max(), RELATIVE_ERROR)
    prompts = [rng.integers(1, size, n).tolist() for n in lengths]
    answers = engine.generate(prompts, max_new_tokens=NUM_GREEDY, ignore_eos=True)
    num_sure = num_equal = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        test.assertLen(answer.tokens, NUM_GREEDY)
        # Each of its tokens follows from those before it, so these are the reference's own.
        logits, gaps = reference(torch.tensor(prompt + answer.tokens[:-1]))
        best, second = logits.topk(2, -1).values.unbind(-1)
        doubtful = np.flatnonzero(torch.minimum(best - second, gaps) < MIN_GAP)
        sure = max(0, min([NUM_GREEDY, *(doubtful - len(prompt) + 1)]))
        greedy = logits.argmax(-1)[len(prompt) - 1 :].tolist()
        test.assertEqual(answer.tokens[:sure], greedy[:sure])
        num_sure += sure
        num_equal += sum(a == b for a, b in zip(answer.tokens, greedy, strict=True))
    test.assertGreater(num_equal, 0.75 * len(prompts) * NUM_GREEDY)
    test.assertGreaterEqual(num_sure, least_sure * len(prompts) * NUM_GREEDY)
