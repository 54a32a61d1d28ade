"""config.json of gpt-oss to `ModelConfig`, and back.

Layers that `layer_types` calls "sliding_attention" have the window; left out, every second one has,
the first included. Without any rope fields the model has YaRN, as in transformers.
"""

from collections.abc import Mapping
from typing import Any

from moejax.errors import MoejaxError
from moejax.models.config import MOST_EXPERTS, MOST_LAYERS, ModelConfig, RouterRule
from moejax.models.hf.fields import ROPES, flag, integer, number
from moejax.models.hf.rope import rope_scaling, rope_theta, unsupported
from pallas_kernels.gating import Gating

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULT_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def model_config(family: str, fields: Mapping[str, Any]) -> ModelConfig:
    """Builds a `ModelConfig` from the fields of a config.json in either spelling.

    Raises:
      MoejaxError: a field is missing or wrong, or asks for something that is not supported.
    """
    if all(fields.get(name) is None for name in ROPES):
        fields = {**fields, "rope_parameters": _DEFAULT_ROPE}
    if reasons := unsupported(fields):
        raise MoejaxError("not supported: " + "; ".join(reasons))
    num_layers = integer(fields, "num_hidden_layers", most=MOST_LAYERS)
    num_heads = integer(fields, "num_attention_heads")
    model_dim, expert_dim = (integer(fields, n) for n in ("hidden_size", "intermediate_size"))
    window, window_layers = _windows(fields, num_layers)
    return ModelConfig(
        family=family,
        vocab_size=integer(fields, "vocab_size"),
        model_dim=model_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(fields, "num_key_value_heads", default=num_heads),
        head_dim=integer(fields, "head_dim"),
        num_experts=integer(fields, "num_local_experts", "num_experts", most=MOST_EXPERTS),
        experts_per_token=integer(fields, "num_experts_per_tok"),
        expert_dim=expert_dim,
        mlp_dim=expert_dim,
        moe_layers=tuple(range(num_layers)),
        norm_topk_prob=True,
        norm_eps=number(fields, "rms_norm_eps"),
        rope_theta=rope_theta(family, fields),
        rope_scaling=rope_scaling(fields),
        max_positions=integer(fields, "max_position_embeddings"),
        tied_embeddings=flag(fields, "tie_word_embeddings"),
        qk_norm=False,
        attention_bias=flag(fields, "attention_bias"),
        sliding_window=window,
        window_layers=window_layers,
        attention_sinks=True,
        router=RouterRule(has_logit_bias=True),
        gating=Gating(
            alpha=number(fields, "swiglu_alpha"),
            limit=number(fields, "swiglu_limit"),
            up_offset=1.0,
        ),
        expert_bias=True,
    )


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json that add to, or replace, those of every family."""
    kinds = (config.window_of(layer) for layer in range(config.num_layers))
    return {
        "intermediate_size": config.expert_dim,
        "attention_bias": config.attention_bias,
        "layer_types": [_FULL if window is None else _SLIDING for window in kinds],
        "swiglu_alpha": config.gating.alpha,
        "swiglu_limit": config.gating.limit,
    }


def _windows(
    fields: Mapping[str, Any], num_layers: int
) -> tuple[int | None, tuple[int, ...] | None]:
    """Width of the window, and the layers that have it; None for none, and for all layers."""
    kinds = fields["layer_types"]
    if kinds is None:
        kinds = [_FULL if layer % 2 else _SLIDING for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise MoejaxError(f"layer_types is {kinds!r}, expected a list of {num_layers}")
    if others := [kind for kind in kinds if kind not in (_FULL, _SLIDING)]:
        raise MoejaxError(f"not supported: layer_types with {others[0]!r}")
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)
    if not layers:
        return None, None
    window = integer(fields, "sliding_window")
    return window, None if len(layers) == num_layers else layers
