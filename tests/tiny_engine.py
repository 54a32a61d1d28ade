"""A tiny random model with a tokenizer, loaded as a user would."""

import itertools
import json
import string
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models

from moejax import Engine
from tests.hf_checkpoints import write_checkpoint

VOCAB_SIZE = 160  # of the checkpoints of tests.hf_checkpoints
CHARACTERS = [chr(code) for code in range(32, 127)]
PAIRS = list(itertools.product(string.ascii_lowercase, repeat=2))[7::10][: VOCAB_SIZE - 95]


def write_tokenizer(directory: Path) -> None:
    """A tokenizer.json whose every id spells one or two printable characters."""
    pieces = CHARACTERS + ["".join(pair) for pair in PAIRS]
    assert len(pieces) == VOCAB_SIZE
    vocab = {piece: i for i, piece in enumerate(pieces)}
    encoder = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=PAIRS))
    encoder.decoder = decoders.Fuse()
    encoder.save(str(directory / "tokenizer.json"))


def load_tiny_engine(
    parent: Path, *, tokenizer: bool = True, eos_ids: tuple[int, ...] = (), **how: Any
) -> Engine:
    """Qwen3-MoE with 160 tokens and a context of 256, in float32 on the CPU."""
    directory = write_checkpoint("qwen3", parent)
    if tokenizer:
        write_tokenizer(directory)
    fields = {"eos_token_id": list(eos_ids)} if eos_ids else {}
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return Engine.from_pretrained(
        directory, dtype="float32", platform="cpu", compilation_cache="", progress=False, **how
    )
