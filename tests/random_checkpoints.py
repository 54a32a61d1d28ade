"""Small random Hugging Face directories of any shape, made without torch."""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import tokenizers

from moejax.checkpoints import save_hf_checkpoint
from moejax.checkpoints.experts import ExpertReader
from moejax.models.config import ModelConfig, weight_shapes

TINY: dict[str, Any] = {
    "family": "qwen3_moe", "vocab_size": 160, "model_dim": 64, "num_layers": 3, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 16, "num_experts": 4, "experts_per_token": 2, "expert_dim": 32,
    "mlp_dim": 96, "moe_layers": (0, 2), "norm_topk_prob": True, "norm_eps": 1e-6,
    "rope_theta": 1e4, "max_positions": 256, "tied_embeddings": False, "qk_norm": True,
    "attention_bias": False, "sliding_window": None,
}  # fmt: skip


def write_random_checkpoint(
    directory: pathlib.Path, *, seed: int = 0, dtype: Any = jnp.bfloat16, **fields: Any
) -> pathlib.Path:
    """Writes a checkpoint of `TINY` with `fields` changed; returns the directory."""
    config = ModelConfig(**{**TINY, **fields})
    rng = np.random.default_rng(seed)
    weights = {
        # Student's t has the tails that trained weights have.
        leaf: (0.1 * rng.standard_t(5, shape)).astype(np.float32)
        for leaf, shape in weight_shapes(config).items()
    }
    save_hf_checkpoint(directory, config, weights, dtype=dtype)
    return directory


def write_tokenizer(directory: pathlib.Path, vocab_size: int, special: Sequence[str] = ()) -> None:
    """A token a character: printable ASCII, Chinese ones, `special` tokens the last."""
    letters = [chr(32 + i) if i < 95 else chr(0x4E00 + i) for i in range(vocab_size)]
    letters[vocab_size - len(special) :] = special
    model = tokenizers.models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([*special])
    tokenizer.save(str(directory / "tokenizer.json"))


def empty_row(reader: ExpertReader) -> list[np.ndarray]:
    """Memory for one expert of a checkpoint."""
    return [np.empty(array.shape, array.dtype) for array in reader.row]
