"""Fields of a config.json that all families have, read and written."""

from collections.abc import Mapping
from typing import Any

from moejax.models.config import MOST_EXPERTS, MOST_LAYERS, ModelConfig
from moejax.models.hf.fields import flag, integer, number
from moejax.models.hf.rope import rope_fields, rope_scaling, rope_theta

# Names of one number; a file may have the first beside its family's own.
_NUM_EXPERTS = ("num_local_experts", "num_experts")


def read_shared(family: str, fields: Mapping[str, Any], *num_experts: str) -> dict[str, Any]:
    """Arguments of `ModelConfig` that are read alike, a head's default width among them.

    Args:
      num_experts: further names of the number of experts.
    """
    num_heads, model_dim = (
        integer(fields, name) for name in ("num_attention_heads", "hidden_size")
    )
    return {
        "family": family,
        "vocab_size": integer(fields, "vocab_size"),
        "model_dim": model_dim,
        "num_layers": integer(fields, "num_hidden_layers", most=MOST_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": integer(fields, "num_key_value_heads", default=num_heads),
        "head_dim": model_dim // num_heads,
        "num_experts": integer(fields, *_NUM_EXPERTS, *num_experts, most=MOST_EXPERTS),
        "experts_per_token": integer(fields, "num_experts_per_tok"),
        "norm_eps": number(fields, "rms_norm_eps"),
        "rope_theta": rope_theta(family, fields),
        "rope_scaling": rope_scaling(fields),
        "max_positions": integer(fields, "max_position_embeddings"),
        "tied_embeddings": flag(fields, "tie_word_embeddings"),
    }


def write_shared(config: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json, without those that name the family and the experts."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_experts_per_tok": config.experts_per_token,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        **rope_fields(config),
    }
