"""A tiny random model and a tokenizer, written as a checkpoint and loaded as a user would.

Two layers keep compiling short; the weights are drawn wide, so that routing and logits are far
from ties.
"""

import itertools
import string
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models

from moejax import Engine
from moejax.checkpoints import save_hf_checkpoint
from moejax.inference.batch import RowBatch, raise_errors
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner
from moejax.models.config import ModelConfig, weight_shapes
from tests.random_checkpoints import TINY

VOCAB_SIZE = TINY["vocab_size"]
CONFIG = ModelConfig(**TINY | {
    "model_dim": 32, "num_layers": 2, "head_dim": 8, "num_experts": 8, "expert_dim": 16,
    "mlp_dim": 40, "moe_layers": (0, 1),
})  # fmt: skip
CHARACTERS = [chr(code) for code in range(32, 127)]
PAIRS = list(itertools.product(string.ascii_lowercase, repeat=2))[7::10][: VOCAB_SIZE - 95]


def random_weights(config: ModelConfig) -> dict[str, np.ndarray]:
    """Norms around one, everything else N(0, 0.3^2)."""
    rng = np.random.default_rng(0)
    return {
        name: (name.endswith("norm") + 0.3 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in weight_shapes(config).items()
    }


def tokenizer_json() -> bytes:
    """A tokenizer whose every id spells one or two printable characters."""
    pieces = CHARACTERS + ["".join(pair) for pair in PAIRS]
    assert len(pieces) == VOCAB_SIZE
    vocab = {piece: i for i, piece in enumerate(pieces)}
    encoder = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=PAIRS))
    encoder.decoder = decoders.Fuse()
    return encoder.to_str().encode()


def load_tiny_engine(
    directory: Path,
    *,
    config: ModelConfig = CONFIG,
    tokenizer: bool = True,
    eos_ids: tuple[int, ...] = (),
    **how: Any,
) -> Engine:
    """Float32 on the CPU, from a checkpoint written to `directory`."""
    save_hf_checkpoint(
        directory,
        config,
        random_weights(config),
        dtype=np.dtype(np.float32),
        token_ids={"eos_token_id": list(eos_ids)} if eos_ids else None,
        extra_files={"tokenizer.json": tokenizer_json()} if tokenizer else None,
    )
    return Engine.from_pretrained(directory, dtype="float32", platform="cpu", progress=False, **how)


def answers(
    runner: Runner, prompts: list[list[int]], cache_length: int, num_tokens: int, per_call: int
) -> list[list[int]]:
    """Greedy tokens of each prompt."""
    settings = [GenerationSettings(max_new_tokens=num_tokens)] * len(prompts)
    batch = RowBatch(runner, None, prompts, settings, cache_length, (), steps_per_call=per_call)
    for deltas in batch.steps():
        raise_errors(deltas)
    return [answer.tokens for answer in batch.answers]
