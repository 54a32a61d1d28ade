"""config.json of gpt-oss to `ModelConfig`, and back.

Layers that `layer_types` calls "sliding_attention" have the window; left out, every second one has,
the first included. Without any rope fields the model has YaRN, as in transformers.
"""

from collections.abc import Mapping
from typing import Any

from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig, RouterRule
from moejax.models.hf.fields import ROPES, flag, integer, number
from moejax.models.hf.shared import read_shared, unsupported
from pallas_kernels.gating import Gating

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULT_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def model_config(family: str, fields: Mapping[str, Any]) -> ModelConfig:
    """Builds a `ModelConfig` from the fields of a config.json in either spelling."""
    if all(fields.get(name) is None for name in ROPES):
        fields = {**fields, "rope_parameters": _DEFAULT_ROPE}
    if reasons := unsupported(fields):
        raise MoejaxError("not supported: " + "; ".join(reasons))
    shared, expert_dim = read_shared(family, fields), integer(fields, "intermediate_size")
    num_layers = shared["num_layers"]
    window, window_layers = _windows(fields, num_layers)
    return ModelConfig(
        **shared | {"head_dim": integer(fields, "head_dim")},
        expert_dim=expert_dim,
        mlp_dim=expert_dim,
        moe_layers=tuple(range(num_layers)),
        norm_topk_prob=True,
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
