"""A dense Llama model cut into experts of the family Mixtral, which compute the same function.

Each MLP of width I is cut into S shards of width I / S, and every shard is there R times: S R
experts, of which S run. Expert r S + s is replica r of shard s, and all shards of a replica start
with one router row ("virtual groups", He et al., arXiv:2410.07524), so that the S best
experts are the shards of one replica, each once, at weight 1 / S. The down projections are S times
the parent's, which makes up for those weights: exactly so in bfloat16 where S is a power of two.

With R = 1 the model is the parent itself, written as experts that all run.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors.flax

from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.models.hf.config import model_config, read_json

Leaves = dict[str, np.ndarray]
TRAINED = ("moe.router", "moe.gate_up", "moe.down")  # the rest stays the parent's


def parent_config(directory: Path, num_shards: int) -> ModelConfig:
    """The parent as a Mixtral with one replica of each shard.

    Raises:
      MoejaxError: config.json is not that of a Llama model with tied embeddings and plain rotary
        embedding, or `num_shards` does not divide its MLP's width.
    """
    fields = read_json(directory / "config.json")
    width = fields.get("intermediate_size", 0)
    faults = [
        f"{name} is {fields.get(name)!r}, expected {expected!r}"
        for name, expected in (("model_type", "llama"), ("tie_word_embeddings", True))
        if fields.get(name) != expected
    ]
    faults += [
        f"{name} is set" for name in ("rope_scaling", "attention_bias", "mlp_bias") if
        fields.get(name)
    ]  # fmt: skip
    if width % num_shards:
        faults.append(f"intermediate_size {width} is no multiple of {num_shards} shards")
    if faults:
        raise MoejaxError(f"{directory} cannot be cut into experts: {'; '.join(faults)}")
    return model_config(
        fields
        | {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "intermediate_size": width // num_shards,
            "num_local_experts": num_shards,
            "num_experts_per_tok": num_shards,
            "sliding_window": None,
        }
    )


def read_parent(directory: Path, config: ModelConfig) -> Leaves:
    """Leaves of `weight_shapes(config)`, in the files' dtype; routers are zero.

    Args:
      config: of `parent_config`, whose experts are the shards.
    """
    tensors: Mapping[str, np.ndarray] = {
        name: np.asarray(tensor)
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in safetensors.flax.load_file(path).items()
    }
    if not tensors:
        raise MoejaxError(f"{directory} has no *.safetensors file")

    def stacked(*parts: str) -> np.ndarray:
        """Rows of the parts one after another, of all layers."""
        try:
            return np.stack(
                [
                    np.concatenate([tensors[f"model.layers.{i}.{part}.weight"] for part in parts])
                    for i in range(config.num_layers)
                ]
            )
        except KeyError as error:
            raise MoejaxError(f"{directory} lacks the tensor {error}") from error

    num, wide = config.num_experts, config.expert_dim
    shape = (config.num_layers, num, wide, config.model_dim)
    gate, up = (stacked(f"mlp.{part}_proj").reshape(shape) for part in ("gate", "up"))
    down = stacked("mlp.down_proj").reshape(config.num_layers, config.model_dim, num, wide)
    return {
        "embed": tensors["model.embed_tokens.weight"],
        "attention.norm": stacked("input_layernorm"),
        "attention.qkv_proj": stacked(*(f"self_attn.{part}_proj" for part in "qkv")),
        "attention.o_proj": stacked("self_attn.o_proj"),
        "mlp_norm": stacked("post_attention_layernorm"),
        "final_norm": tensors["model.norm.weight"],
        "moe.router": np.zeros((config.num_layers, num, config.model_dim), down.dtype),
        "moe.gate_up": np.concatenate([gate, up], axis=2),
        "moe.down": np.ascontiguousarray(down.swapaxes(1, 2)) * np.asarray(num, down.dtype),
    }


def replicated(parent: Leaves, rows: np.ndarray) -> Leaves:
    """Copies every shard R times.

    Args:
      parent: of `read_parent`, S shards a layer.
      rows: float[L, R, D], the router row of each replica; different ones of a layer differ.
    """
    num_shards, num_replicas = parent["moe.gate_up"].shape[1], rows.shape[1]
    copies = {
        name: np.tile(parent[name], (1, num_replicas, 1, 1)) for name in ("moe.gate_up", "moe.down")
    }
    router = np.repeat(rows, num_shards, axis=1).astype(parent["moe.router"].dtype)
    return parent | copies | {"moe.router": router}


def replicated_config(parent: ModelConfig, num_replicas: int) -> ModelConfig:
    """The shape of `replicated`."""
    return dataclasses.replace(parent, num_experts=num_replicas * parent.num_experts)


def as_float32(leaves: Mapping[str, np.ndarray]) -> Leaves:
    """Leaves converted to float32."""
    return {name: np.asarray(leaf, jnp.float32) for name, leaf in leaves.items()}
