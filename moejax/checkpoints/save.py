"""Writes a Hugging Face directory that transformers and the other readers load.

Tensors carry their published names, one an expert and projection. config.json, without which
nothing counts as a checkpoint, goes first and comes back last; weights take their places when all
are written.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory

from moejax.checkpoints.safetensors_reader import INDEX_FILE, WEIGHTS_FILE
from moejax.checkpoints.safetensors_writer import write_safetensors
from moejax.files.whole import write_whole
from moejax.models.config import ModelConfig, leaf_dtype
from moejax.models.hf.config import to_hf_config
from moejax.models.hf.names import placements, published_spelling

_CONFIG_FILE = "config.json"
_NEW = ".new"  # ends the names of weights until all are written


def save_hf_checkpoint(
    directory: Path,
    config: ModelConfig,
    weights: Mapping[str, jax.Array | np.ndarray],
    *,
    dtype: jnp.dtype,
    max_shard_bytes: int = 5 * 10**9,
    token_ids: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes config.json, generation_config.json, the weights and extra files.

    Args:
      directory: made if need be; weights of an earlier checkpoint there are replaced.
      weights: leaves as `Checkpoint.load` returns them.
      dtype: type in the file: bfloat16, float16 or float32.
      max_shard_bytes: no file is larger, unless a single tensor is.
      token_ids: "bos_token_id", "eos_token_id", "pad_token_id", as far as there are any.
      extra_files: contents by file name: tokenizer.json, tokenizer_config.json, a card.
    """
    dtype = np.dtype(dtype)
    token_ids = dict(token_ids or {})
    fields = to_hf_config(config, dtype=dtype.name, **token_ids)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _CONFIG_FILE).unlink(missing_ok=True)
    names = _write_shards(directory, config, weights, dtype, max_shard_bytes)
    for name in names:
        (directory / (name + _NEW)).replace(directory / name)
    stale = {WEIGHTS_FILE, INDEX_FILE, *(p.name for p in directory.glob("model-*.safetensors"))}
    for name in stale - set(names):
        (directory / name).unlink(missing_ok=True)
    others = {"generation_config.json": _json(token_ids), **(extra_files or {})}
    others[_CONFIG_FILE] = _json(fields)  # last
    for name, content in others.items():
        write_whole(directory / name, content)


def _write_shards(
    directory: Path,
    config: ModelConfig,
    weights: Mapping[str, jax.Array | np.ndarray],
    dtype: np.dtype,
    max_shard_bytes: int,
) -> list[str]:
    """Writes the weights beside their places, with an index of several files; returns the names."""
    host = {leaf: np.asarray(weight) for leaf, weight in weights.items()}
    placed = {p.name: p for p in placements(config, published_spelling(config.family))}
    split = split_state_dict_into_shards_factory(
        placed, max_shard_size=max_shard_bytes, filename_pattern="model{suffix}.safetensors",
        get_storage_size=lambda p: math.prod(p.shape) * leaf_dtype(p.leaf, dtype).itemsize,
    )  # fmt: skip
    for name, own in split.filename_to_tensors.items():
        tensors = {}
        for p in (placed[tensor] for tensor in sorted(own)):
            rows = p.rows(host[p.leaf][p.index])
            tensors[p.name] = np.ascontiguousarray(rows, leaf_dtype(p.leaf, dtype)).reshape(p.shape)
        write_safetensors(directory / (name + _NEW), tensors)
    names = list(split.filename_to_tensors)
    if not split.is_sharded:
        return names
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    write_whole(directory / (INDEX_FILE + _NEW), _json(index))
    return [*names, INDEX_FILE]


def _json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2) + "\n").encode()
