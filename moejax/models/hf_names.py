"""Which Hugging Face tensor fills which part of which weight leaf; the name tables of each family.

Experts are stored under two spellings. Published checkpoints hold one tensor an expert and
projection (`mlp.experts.3.gate_proj.weight`; Mixtral: `block_sparse_moe.experts.3.w1.weight`);
transformers 5 may also write its own fused form (`mlp.experts.gate_up_proj`, [E, 2F, D]).
"""

import dataclasses
import re
from collections.abc import Collection, Iterator

import numpy as np

from moejax.models.config import ModelConfig

_DENSE = ("gate_proj", "up_proj", "down_proj")
_EXPERT_PROJECTIONS = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": _DENSE}
_MOE_MODULE = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
# Buffers that transformers recomputes and that old checkpoints hold nevertheless.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclasses.dataclass(frozen=True)
class Placement:
    """One tensor of a checkpoint: it fills `weights[leaf][index][start : start + shape[0]]`."""

    name: str
    leaf: str
    index: tuple[int, ...]  # leading positions: layer, then expert
    start: int  # first row
    shape: tuple[int, ...]

    def rows(self, part: np.ndarray) -> np.ndarray:
        """The rows of `part`, which is `weights[leaf][index]`, that the tensor fills; a view."""
        return part[self.start : self.start + self.shape[0]]


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How a checkpoint names its experts."""

    moe_module: str  # "mlp" | "block_sparse_moe"
    fused: bool  # one tensor for all experts of a layer


def published_spelling(family: str) -> Spelling:
    """That of the checkpoints of the model's makers, which every reader knows."""
    return Spelling(moe_module=_MOE_MODULE[family], fused=False)


def find_spelling(family: str, names: Collection[str]) -> Spelling:
    """That of a checkpoint with tensors of these `names`."""
    modules = {
        module
        for module in ("mlp", "block_sparse_moe")
        if any(f".{module}.experts." in name for name in names)
    }
    published = _MOE_MODULE[family]
    return Spelling(
        moe_module="mlp" if modules == {"mlp"} else published,
        fused=any(name.endswith(".experts.gate_up_proj") for name in names),
    )


def is_ignored(name: str) -> bool:
    """True for a tensor that no model needs."""
    return _IGNORED.search(name) is not None


def placements(config: ModelConfig, spelling: Spelling) -> Iterator[Placement]:
    """Every tensor of a checkpoint, layer by layer; together they fill every leaf exactly once."""
    c = config
    yield Placement("model.embed_tokens.weight", "embed", (), 0, (c.vocab_size, c.model_dim))
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}"
        yield Placement(
            f"{prefix}.input_layernorm.weight", "attention.norm", (layer,), 0, (c.model_dim,)
        )
        yield from _attention(c, layer)
        yield Placement(
            f"{prefix}.post_attention_layernorm.weight", "mlp_norm", (layer,), 0, (c.model_dim,)
        )
        if layer in c.moe_layers:
            moe_prefix = f"{prefix}.{spelling.moe_module}"
            yield from _experts(c, spelling, c.moe_layers.index(layer), moe_prefix)
        else:
            at = (c.dense_layers.index(layer),)
            yield from _gated_mlp(f"{prefix}.mlp", "mlp", at, _DENSE, c.mlp_dim, c.model_dim)
    yield Placement("model.norm.weight", "final_norm", (), 0, (c.model_dim,))
    if not c.tied_embeddings:
        yield Placement("lm_head.weight", "head", (), 0, (c.vocab_size, c.model_dim))


def _attention(c: ModelConfig, layer: int) -> Iterator[Placement]:
    """Queries, keys and values one below the other in `qkv_proj`; norms and biases if any."""
    prefix = f"model.layers.{layer}.self_attn"
    at = (layer,)
    query_dim, kv_dim = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    rows = {"q": (0, query_dim), "k": (query_dim, kv_dim), "v": (query_dim + kv_dim, kv_dim)}
    for x, (start, size) in rows.items():
        shape = (size, c.model_dim)
        yield Placement(f"{prefix}.{x}_proj.weight", "attention.qkv_proj", at, start, shape)
        if c.attention_bias:
            yield Placement(f"{prefix}.{x}_proj.bias", "attention.qkv_bias", at, start, (size,))
    yield Placement(f"{prefix}.o_proj.weight", "attention.o_proj", at, 0, (c.model_dim, query_dim))
    if c.attention_bias:
        yield Placement(f"{prefix}.o_proj.bias", "attention.o_bias", at, 0, (c.model_dim,))
    if c.qk_norm:
        for x in ("q_norm", "k_norm"):
            yield Placement(f"{prefix}.{x}.weight", f"attention.{x}", at, 0, (c.head_dim,))


def _experts(c: ModelConfig, spelling: Spelling, i: int, prefix: str) -> Iterator[Placement]:
    """Router and experts of the `i`-th sparse layer."""
    router = (c.num_experts, c.model_dim)
    yield Placement(f"{prefix}.gate.weight", "moe.router", (i,), 0, router)
    if spelling.fused:
        gate_up = (c.num_experts, 2 * c.expert_dim, c.model_dim)
        down = (c.num_experts, c.model_dim, c.expert_dim)
        yield Placement(f"{prefix}.experts.gate_up_proj", "moe.gate_up", (i,), 0, gate_up)
        yield Placement(f"{prefix}.experts.down_proj", "moe.down", (i,), 0, down)
        return
    for expert in range(c.num_experts):
        yield from _gated_mlp(
            f"{prefix}.experts.{expert}",
            "moe",
            (i, expert),
            _EXPERT_PROJECTIONS[c.family],
            c.expert_dim,
            c.model_dim,
        )


def _gated_mlp(
    prefix: str,
    leaf: str,
    index: tuple[int, ...],
    projections: tuple[str, str, str],
    width: int,
    model_dim: int,
) -> Iterator[Placement]:
    """Gate above up in `gate_up`, and down."""
    gate, up, down = (f"{prefix}.{projection}.weight" for projection in projections)
    yield Placement(gate, f"{leaf}.gate_up", index, 0, (width, model_dim))
    yield Placement(up, f"{leaf}.gate_up", index, width, (width, model_dim))
    yield Placement(down, f"{leaf}.down", index, 0, (model_dim, width))
