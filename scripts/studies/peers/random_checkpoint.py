"""Qwen3-MoE checkpoints of random weights as Hugging Face has them, in bfloat16 or in INT4.

A file a layer. Matrices are N(0, 1/K), or codes with scales and zero points in the form that
`moejax.quantize` writes, which are as wide; then the head is in INT8. The experts of all layers are
the same numbers in another order, which costs no time to make. The tokenizer is the demo model's:
prompts are token ids, and the head gives tokens that it does not know a logit of zero, so that
answers have text.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers

from moejax.checkpoints.formats.manifest import MANIFEST_FILE, quantization_config
from moejax.checkpoints.safetensors_writer import write_safetensors
from moejax.demo import DEMO_DIRECTORY
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.models.hf.config import to_hf_config
from pallas_kernels import layout

FAMILY = "qwen3_moe"
PARTS = ("gate_proj", "up_proj", "down_proj")
PLAIN, HEAD_BITS, GROUP_SIZE = 16, 8, 64

Tensors = dict[str, np.ndarray]


def _matrix(rng: np.random.Generator, rows: int, columns: int, bits: int) -> Tensors:
    """Tensors of a matrix by what their names end in."""
    if bits == PLAIN:
        values = rng.standard_normal((rows, columns), np.float32) * columns**-0.5
        return {"weight": values.astype(ml_dtypes.bfloat16)}
    groups = rows, layout.num_groups(columns, GROUP_SIZE)
    scale = (12 / ((4**bits - 1) * columns)) ** 0.5  # of uniform codes
    return {
        "words": rng.integers(0, 2**32, (rows, layout.num_words(columns, bits)), np.uint32),
        "scales": np.full(groups, scale, np.float16),
        "zeros": np.full(groups, (2**bits - 1) / 2, np.float16),
    }


def _ones(count: int) -> np.ndarray:
    return np.ones(count, ml_dtypes.bfloat16)


def _named(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}.{end}": values for end, values in tensors.items()}


def _sizes(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's matrices but its router, and of one expert's."""
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return {
        "self_attn.q_proj": (queries, c.model_dim), "self_attn.k_proj": (keys, c.model_dim),
        "self_attn.v_proj": (keys, c.model_dim), "self_attn.o_proj": (c.model_dim, queries),
        "gate_proj": (c.expert_dim, c.model_dim), "up_proj": (c.expert_dim, c.model_dim),
        "down_proj": (c.model_dim, c.expert_dim),
    }  # fmt: skip


def num_texts() -> int:
    """Tokens that the tokenizer has."""
    return tokenizers.Tokenizer.from_file(str(DEMO_DIRECTORY / "tokenizer.json")).get_vocab_size()


def files(c: ModelConfig, bits: int = PLAIN, seed: int = 0) -> Iterator[Tensors]:
    """Tensors of the model's files: embeddings and head, then a layer each."""
    rng, size = np.random.default_rng(seed), _sizes(c)
    vocabulary, head_bits = (c.vocab_size, c.model_dim), bits if bits == PLAIN else HEAD_BITS
    head = _matrix(rng, *vocabulary, head_bits)
    head["weight" if head_bits == PLAIN else "scales"][num_texts() :] = 0
    yield {
        "model.norm.weight": _ones(c.model_dim),
        **_named("model.embed_tokens", _matrix(rng, *vocabulary, PLAIN)),
        **_named("lm_head", head),
    }
    experts = [{part: _matrix(rng, *size[part], bits) for part in PARTS} for _ in range(8)]
    for layer in range(c.num_layers):
        found = {
            "input_layernorm.weight": _ones(c.model_dim),
            "post_attention_layernorm.weight": _ones(c.model_dim),
            "self_attn.q_norm.weight": _ones(c.head_dim),
            "self_attn.k_norm.weight": _ones(c.head_dim),
            **_named("mlp.gate", _matrix(rng, c.num_experts, c.model_dim, PLAIN)),
        }
        for name in size.keys() - PARTS:
            found |= _named(name, _matrix(rng, *size[name], bits))
        for expert in range(c.num_experts):
            for part in PARTS:
                one = experts[(expert + layer) % len(experts)][part]
                found |= _named(f"mlp.experts.{expert}.{part}", one)
        yield _named(f"model.layers.{layer}", found)


def _manifest(c: ModelConfig, bits: int) -> dict[str, object]:
    """The manifest of what is packed, without checksums."""
    size = _sizes(c)
    forms = {"lm_head": ((c.vocab_size, c.model_dim), HEAD_BITS)}
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}"
        forms |= {f"{prefix}.{name}": (size[name], bits) for name in size.keys() - PARTS}
        for expert in range(c.num_experts):
            of = f"{prefix}.mlp.experts.{expert}"
            forms |= {f"{of}.{part}": (size[part], bits) for part in PARTS}
    entries = {
        f"{name}.weight": {
            "shape": shape, "bits": width, "group_size": GROUP_SIZE, "zero_kind": "float",
        }
        for name, (shape, width) in forms.items()
    }  # fmt: skip
    return {"layout": layout.LAYOUT, "tensors": entries, "files": {}}


def write(config: ModelConfig, folder: Path, bits: int = PLAIN) -> int:
    """Writes weights, configuration and tokenizer; bytes of the weights.

    Args:
      bits: of experts and attention; 16: all is in bfloat16.

    Raises:
      MoejaxError: the shape is of another family.
    """
    if config.family != FAMILY:
        raise MoejaxError(f"a random checkpoint is of {FAMILY}, not of {config.family}")
    folder.mkdir(parents=True, exist_ok=True)
    fields = to_hf_config(config, dtype="bfloat16", eos_token_id=0)
    if bits != PLAIN:
        fields = {**fields, "quantization_config": quantization_config()}
        said = json.dumps(_manifest(config, bits))
        (folder / MANIFEST_FILE).write_text(said, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIRECTORY / name, folder / name)
    index: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(files(config, bits)):
        name = f"model-{number:05d}-of-{config.num_layers:05d}.safetensors"
        write_safetensors(folder / name, tensors)
        index |= dict.fromkeys(tensors, name)
        total += sum(value.nbytes for value in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return total
