"""Qwen3-MoE checkpoints of random bfloat16 weights as Hugging Face has them.

A file a layer. Matrices are N(0, 1/K); the experts of all layers are the same numbers in another
order, which costs no time to make. The tokenizer is the demo model's: prompts are token ids, and
tokens that it does not know have no text.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from moejax.checkpoints.safetensors_writer import write_safetensors
from moejax.demo import DEMO_DIRECTORY
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.models.hf.config import to_hf_config

FAMILY = "qwen3_moe"
PARTS = ("gate_proj", "up_proj", "down_proj")

Tensors = dict[str, np.ndarray]


def _normal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    values = rng.standard_normal((rows, columns), np.float32) * columns**-0.5
    return values.astype(ml_dtypes.bfloat16)


def _ones(count: int) -> np.ndarray:
    return np.ones(count, ml_dtypes.bfloat16)


def files(c: ModelConfig, seed: int = 0) -> Iterator[Tensors]:
    """Tensors of the model's files: embeddings and head, then a layer each."""
    rng = np.random.default_rng(seed)
    yield {
        "model.embed_tokens.weight": _normal(rng, c.vocab_size, c.model_dim),
        "model.norm.weight": _ones(c.model_dim),
        "lm_head.weight": _normal(rng, c.vocab_size, c.model_dim),
    }
    sizes = dict.fromkeys(PARTS[:2], (c.expert_dim, c.model_dim))
    sizes["down_proj"] = (c.model_dim, c.expert_dim)
    experts = [{part: _normal(rng, *size) for part, size in sizes.items()} for _ in range(8)]
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}."
        found = {
            "input_layernorm.weight": _ones(c.model_dim),
            "post_attention_layernorm.weight": _ones(c.model_dim),
            "self_attn.q_proj.weight": _normal(rng, queries, c.model_dim),
            "self_attn.k_proj.weight": _normal(rng, keys, c.model_dim),
            "self_attn.v_proj.weight": _normal(rng, keys, c.model_dim),
            "self_attn.o_proj.weight": _normal(rng, c.model_dim, queries),
            "self_attn.q_norm.weight": _ones(c.head_dim),
            "self_attn.k_norm.weight": _ones(c.head_dim),
            "mlp.gate.weight": _normal(rng, c.num_experts, c.model_dim),
        }
        for expert in range(c.num_experts):
            for part in PARTS:
                one = experts[(expert + layer) % len(experts)][part]
                found[f"mlp.experts.{expert}.{part}.weight"] = one
        yield {prefix + name: value for name, value in found.items()}


def write(config: ModelConfig, folder: Path) -> int:
    """Writes weights, configuration and tokenizer; bytes of the weights.

    Raises:
      MoejaxError: the shape is of another family.
    """
    if config.family != FAMILY:
        raise MoejaxError(f"a random checkpoint is of {FAMILY}, not of {config.family}")
    folder.mkdir(parents=True, exist_ok=True)
    fields = to_hf_config(config, dtype="bfloat16", eos_token_id=0)
    (folder / "config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIRECTORY / name, folder / name)
    index: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(files(config)):
        name = f"model-{number:05d}-of-{config.num_layers:05d}.safetensors"
        write_safetensors(folder / name, tensors)
        index |= dict.fromkeys(tensors, name)
        total += sum(value.nbytes for value in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return total
