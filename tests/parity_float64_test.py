"""Long sequences beside transformers, and how far both are from the same model in float64.

Two float32 models differ by their roundings. Which of them is off, and by how much more than it
must be, a third one tells: `numpy_model`, in float64. It is run with exact rotary angles, and with
the angles that transformers rounds to float32, as a rounded angle is part of what is to be matched.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from absl.testing import parameterized
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from moejax import Engine
from moejax.models.rope import model_angles
from moejax.models.shapes import SHAPES
from tests import numpy_model
from tests.hf_checkpoints import TinyCheckpoint, reference_model, write_random_checkpoint
from tests.host_test_case import HostTestCase

RELATIVE_ERROR = 1e-4  # of the logits beside those of transformers
FACTOR = 2  # of transformers' own float32 error, which ours may reach
FLOOR = 2e-5  # a position at which transformers is right by luck
FAR = 40960  # positions of Qwen3-30B-A3B
ANGLE_ERROR = 1e-5  # of a cosine that far: one float32 step of a frequency of 2e-3 at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny checkpoint and what it reads, of which no router has a near tie."""

    family: str
    fields: dict[str, Any]
    shape: tuple[int, int]  # of the tokens, more than a chunk of prefill
    seed: int


CASES = {
    "qwen3_full_attention": Case(
        family="qwen3_moe",
        fields={"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        shape=(1, 1500),
        seed=0,
    ),
    "qwen3_head24_window_300": Case(
        family="qwen3_moe",
        fields={
            "head_dim": 24,
            "norm_topk_prob": False,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 300,
        },
        shape=(2, 1100),
        seed=2,
    ),
}


def norm_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Norm of the error over the norm of what was expected, at each position."""
    error = np.linalg.norm(found - expected, axis=-1)
    return error / np.linalg.norm(expected, axis=-1)


def largest_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Largest error over the largest value that was expected, at each position."""
    return np.abs(found - expected).max(-1) / np.abs(expected).max(-1)


class Float64ParityTest(HostTestCase):
    @parameterized.parameters(*CASES)
    @pytest.mark.slow
    def test_long_logits_are_as_near_to_float64_as_those_of_transformers(self, name):
        case = CASES[name]
        spec = TinyCheckpoint(
            family=case.family, fields={"max_position_embeddings": 4096, **case.fields}
        )
        with tempfile.TemporaryDirectory() as parent:
            write_random_checkpoint(spec, Path(parent) / name, case.seed)
            model = reference_model(Path(parent) / name)
            engine = Engine.from_pretrained(
                Path(parent) / name, dtype="float32", platform="cpu", progress=False
            )
        tokens = np.random.default_rng(case.seed).integers(0, engine.config.vocab_size, case.shape)
        found = engine.logits(tokens)
        with torch.no_grad():
            theirs = model(torch.as_tensor(tokens)).logits.numpy()
        self.assertLess(norm_errors(found, theirs).max(), RELATIVE_ERROR)

        wide = {key: np.asarray(leaf, np.float64) for key, leaf in engine.weights.items()}
        positions = np.broadcast_to(np.arange(case.shape[1]), case.shape)
        frequencies = model.model.rotary_emb.inv_freq.numpy()
        rounded = positions.astype(np.float32)[..., None] * frequencies
        for angles in (None, rounded.astype(np.float64)):
            exact, _ = numpy_model.forward(wide, engine.config, tokens, angles)
            ours, of_theirs = (largest_errors(of, exact) for of in (found, theirs))
            self.assertLess(ours.max(), FACTOR * of_theirs.max())
            self.assertLess((ours - FACTOR * of_theirs).max(), FLOOR)

    @parameterized.parameters(
        (MixtralRotaryEmbedding, transformers.MixtralConfig, 8, 1e6),
        (MixtralRotaryEmbedding, transformers.MixtralConfig, 96, 1e5),
        (MixtralRotaryEmbedding, transformers.MixtralConfig, 128, 1e6),
        (Qwen3MoeRotaryEmbedding, transformers.Qwen3MoeConfig, 24, 1e4),
        (Qwen3MoeRotaryEmbedding, transformers.Qwen3MoeConfig, 128, 1e6),
        (Qwen3MoeRotaryEmbedding, transformers.Qwen3MoeConfig, 128, 1e7),
    )
    def test_compiled_rotary_angles_are_those_of_transformers(self, module, config, width, theta):
        rope = {"rope_type": "default", "rope_theta": theta}
        positions = np.arange(FAR, dtype=np.int32)[None]
        expected = module(config(head_dim=width, rope_parameters=rope))(
            torch.zeros(1), torch.as_tensor(positions)
        )
        own = dataclasses.replace(SHAPES["Qwen3-30B-A3B"], head_dim=width, rope_theta=theta)
        found = jax.jit(lambda positions: model_angles(own, positions))(jnp.asarray(positions))
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(
                ours, theirs[..., : width // 2].numpy(), rtol=0, atol=ANGLE_ERROR
            )
