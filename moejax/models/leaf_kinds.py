"""Kinds of weight leaves: which are packed together, and which never."""

import types
from collections.abc import Mapping

from moejax.models.config import ModelConfig

# Kinds in the order of a report; "kept" and "norm" are never packed.
KINDS = ("attention", "experts", "shared_experts", "mlp", "router", "embed", "head", "kept", "norm")
NEVER_PACKED = ("kept", "norm")

# Kind of every leaf but norms, biases, convolutions and decays.
KIND_OF_LEAF: Mapping[str, str] = types.MappingProxyType({
    # Mixers of tokens: attention or a delta rule.
    "attention.qkv_proj": "attention",
    "attention.q_proj": "attention",
    "attention.q_a": "attention",
    "attention.q_b": "attention",
    "attention.kv_a": "attention",
    "attention.o_proj": "attention",
    "delta.qkvz_proj": "attention",
    "delta.o_proj": "attention",
    # At decode queries meet its transpose and what is attended to its other rows: neither is a
    # product with rows of outputs, which is how codes lie.
    "attention.kv_b": "kept",
    # Two rows a head, and decays are powers of what they give.
    "delta.ba_proj": "kept",
    "shared.gate": "kept",  # one row
    "moe.gate_up": "experts",
    "moe.down": "experts",
    "shared.gate_up": "shared_experts",
    "shared.down": "shared_experts",
    "mlp.gate_up": "mlp",
    "mlp.down": "mlp",
    "moe.router": "router",
    "embed": "embed",
    "head": "head",
})  # fmt: skip


def leaves_of(*kinds: str) -> tuple[str, ...]:
    """Leaves of some kinds, over all families."""
    return tuple(leaf for leaf, kind in KIND_OF_LEAF.items() if kind in kinds)


EXPERT_LEAVES = leaves_of("experts")
EXPERT_BIASES = ("moe.gate_up_bias", "moe.down_bias")  # on the device wherever the experts are
VOCABULARY_LEAVES = leaves_of("embed", "head")  # [V, D]


def kind_of(leaf: str) -> str:
    """Kind of a leaf, one of `KINDS`; "norm" covers norms, biases, convolutions and decays."""
    return KIND_OF_LEAF.get(leaf, "norm")


def layers_of(config: ModelConfig, leaf: str) -> tuple[int, ...]:
    """Layers that the entries along a stacked leaf's first axis belong to.

    Args:
      leaf: a name in `weight_shapes(config)` that is stacked over layers.
    """
    module, _, name = leaf.partition(".")
    if module in ("moe", "shared"):
        return config.moe_layers
    if module == "mlp":
        return config.dense_layers
    if module == "delta":
        assert config.delta_net is not None
        return config.delta_net.layers
    if module == "attention" and name != "norm":
        return config.attention_layers
    return tuple(range(config.num_layers))
