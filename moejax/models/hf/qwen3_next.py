"""config.json of Qwen3-Next and of Qwen3.5's decoder to `ModelConfig`, and back.

The published files are transformers 4's: `full_attention_interval` says which layers attend, and
`rope_theta` and `partial_rotary_factor` stand at the top. Transformers 5 writes `layer_types` and
`rope_parameters`. Where both are there, `layer_types` counts, as it does in transformers. All
layers of Qwen3.5 are sparse, their chosen weights are normalised, and the three positions of a
token of text are one, whatever `mrope_section` says.
"""

from collections.abc import Mapping
from typing import Any

from moejax.errors import MoejaxError
from moejax.models.config import DeltaConfig, ModelConfig
from moejax.models.hf.fields import flag, integer, sparse_layers
from moejax.models.hf.shared import read_shared, rope_fields, rotated_dims, unsupported

_ATTENTION, _DELTA = "full_attention", "linear_attention"


def model_config(family: str, fields: Mapping[str, Any]) -> ModelConfig:
    """Builds a `ModelConfig` from the fields of a config.json in either spelling."""
    reasons = unsupported(fields, partial=True)
    if flag(fields, "use_sliding_window"):  # transformers would not look at it either
        reasons.append("use_sliding_window, which Qwen3-Next has no layers for")
    if reasons:
        raise MoejaxError("not supported: " + "; ".join(reasons))
    shared, is_next = read_shared(family, fields), family == "qwen3_next"
    head_dim, expert_dim = (integer(fields, name) for name in ("head_dim", "moe_intermediate_size"))
    num_layers = shared["num_layers"]
    num_kv_heads = integer(fields, "num_key_value_heads")  # a null is none
    return ModelConfig(
        **shared | {"head_dim": head_dim, "num_kv_heads": num_kv_heads},
        expert_dim=expert_dim,
        mlp_dim=integer(fields, "intermediate_size") if is_next else expert_dim,
        moe_layers=sparse_layers(fields, num_layers) if is_next else tuple(range(num_layers)),
        norm_topk_prob=flag(fields, "norm_topk_prob") if is_next else True,
        qk_norm=True,
        attention_bias=flag(fields, "attention_bias"),
        rope_dim=rotated_dims(family, fields, head_dim),
        attention_gate=True,
        zero_centred_norm=True,
        delta_net=_delta_net(fields, num_layers, rows_by_head=is_next),
        shared_dim=integer(fields, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json that add to, or replace, those of every family."""
    c, rotated = config, config.rotary_dim / config.head_dim
    fields = {
        "num_experts": c.num_experts,
        "moe_intermediate_size": c.expert_dim,
        "shared_expert_intermediate_size": c.shared_dim,
        "attention_bias": c.attention_bias,
        "use_sliding_window": False,
        "partial_rotary_factor": rotated,
        **rope_fields(c, partial_rotary_factor=rotated),
        "layer_types": [
            _ATTENTION if layer in c.attention_layers else _DELTA for layer in range(c.num_layers)
        ],
    }
    if c.family == "qwen3_next":
        fields |= {
            "intermediate_size": c.mlp_dim,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(c.dense_layers),
            "norm_topk_prob": c.norm_topk_prob,
        }
    if c.delta_net is not None:
        fields |= {
            "linear_num_key_heads": c.delta_net.num_key_heads,
            "linear_num_value_heads": c.delta_net.num_value_heads,
            "linear_key_head_dim": c.delta_net.key_dim,
            "linear_value_head_dim": c.delta_net.value_dim,
            "linear_conv_kernel_dim": c.delta_net.conv_width,
        }
    return fields


def _delta_net(
    fields: Mapping[str, Any], num_layers: int, *, rows_by_head: bool
) -> DeltaConfig | None:
    """Delta rule layers; None if all layers attend."""
    layers = tuple(i for i, kind in enumerate(_layer_types(fields, num_layers)) if kind == _DELTA)
    if not layers:
        return None
    return DeltaConfig(
        layers=layers,
        num_key_heads=integer(fields, "linear_num_key_heads"),
        num_value_heads=integer(fields, "linear_num_value_heads"),
        key_dim=integer(fields, "linear_key_head_dim"),
        value_dim=integer(fields, "linear_value_head_dim"),
        conv_width=integer(fields, "linear_conv_kernel_dim"),
        rows_by_head=rows_by_head,
    )


def _layer_types(fields: Mapping[str, Any], num_layers: int) -> list[str]:
    """Mixer of each layer: attention or delta rule."""
    kinds = fields.get("layer_types")
    if kinds is None:
        interval = integer(fields, "full_attention_interval")
        return [_DELTA if (i + 1) % interval else _ATTENTION for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise MoejaxError(f"layer_types is {kinds!r}, expected a list of {num_layers}")
    others = [kind for kind in kinds if kind not in (_ATTENTION, _DELTA)]
    if others:
        raise MoejaxError(f"not supported: layer_types with {others[0]!r}")
    return kinds
