"""config.json of DeepSeek's families, and of GLM's with its router, to `ModelConfig`, and back.

"deepseek" is DeepSeek-MoE-16B (standard attention), for which transformers has no class: it is read
as the code beside its checkpoint reads it. "deepseek_v2" and "deepseek_v3" follow transformers
where the code beside their checkpoints differs:
  * V2 never divides the chosen weights by their sum, whatever `norm_topk_prob` says;
  * YaRN scales cosines and sines by its default where one of `mscale` and `mscale_all_dim` is 0.
"glm4_moe_lite" (GLM-4.7-Flash) is DeepSeek-V3 with dense layers named one by one. "glm4_moe"
(GLM-4.5, 4.7) has V3's router and experts beside standard attention.
"""

from collections.abc import Mapping
from typing import Any

from moejax.errors import MoejaxError
from moejax.models.config import LatentConfig, ModelConfig, RouterRule
from moejax.models.hf.fields import flag, integer, number
from moejax.models.hf.shared import KINDS, read_shared, rope_fields, rotated_dims, unsupported

ARCHITECTURES = {
    "deepseek": "DeepseekForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
_SIGMOID = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")

_DENSE, _SPARSE = "dense", "sparse"  # in `mlp_layer_types`

# How V3 and V2 choose experts: of all, or of the best groups.
_GREEDY, _BY_GROUPS, _BY_GROUPS_AND_BIAS = "greedy", "group_limited_greedy", "noaux_tc"


def model_config(family: str, fields: Mapping[str, Any]) -> ModelConfig:
    """Builds a `ModelConfig` from the config.json of one of `ARCHITECTURES`."""
    if reasons := _unsupported(family, fields):
        raise MoejaxError("not supported: " + "; ".join(reasons))
    given, is_glm = read_shared(family, fields, "n_routed_experts"), family == "glm4_moe"
    expert_dim = integer(fields, "moe_intermediate_size")
    latent = _latent(fields) if family in _LATENT else None
    shared = fields.get("n_shared_experts")
    num_shared = 0 if shared in (None, 0) else integer(fields, "n_shared_experts")
    if latent is not None:
        given["head_dim"] = latent.nope_dim + latent.rope_dim
    elif is_glm:
        given["head_dim"] = integer(fields, "head_dim", default=given["head_dim"])
    is_interleaved = flag(fields, "rope_interleave")  # checked where it changes nothing, too
    return ModelConfig(
        **given,
        expert_dim=expert_dim,
        mlp_dim=integer(fields, "intermediate_size"),
        moe_layers=_sparse_layers(family, fields, given["num_layers"]),
        norm_topk_prob=_normalises(family, fields),
        qk_norm=is_glm and flag(fields, "use_qk_norm"),
        attention_bias=flag(fields, "attention_bias"),
        rope_dim=rotated_dims(family, fields, given["head_dim"]) if is_glm else None,
        output_bias=not is_glm,
        interleaved_rope=family == "deepseek_v2" or (is_interleaved and family in _LATENT),
        latent=latent,
        shared_dim=num_shared * expert_dim,
        router=_router(family, fields),
    )


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json that add to, or replace, those of every family."""
    c, rule = config, config.router
    first = min(c.moe_layers, default=c.num_layers)
    every = (n for n in range(1, c.num_layers) if c.moe_layers == _layers(first, n, c.num_layers))
    frequency = next(every, 1)
    fields: dict[str, Any] = {
        "intermediate_size": c.mlp_dim,
        "moe_intermediate_size": c.expert_dim,
        "n_routed_experts": c.num_experts,
        "n_shared_experts": c.shared_dim // c.expert_dim or None,
        "norm_topk_prob": c.norm_topk_prob,
        "scoring_func": rule.scoring,
        "attention_bias": c.attention_bias,
    }
    if c.family == "glm4_moe_lite":
        sparse = set(c.moe_layers)
        kinds = [_SPARSE if layer in sparse else _DENSE for layer in range(c.num_layers)]
        fields["mlp_layer_types"] = kinds
    else:
        fields |= {"first_k_dense_replace": first, "moe_layer_freq": frequency}
    if c.family == "glm4_moe":
        rotated = {"partial_rotary_factor": c.rotary_dim / c.head_dim}
        fields |= {"head_dim": c.head_dim, "use_qk_norm": c.qk_norm, **rope_fields(c, **rotated)}
    if c.latent is not None:
        fields |= {
            "q_lora_rank": c.latent.query_rank,
            "kv_lora_rank": c.latent.kv_rank,
            "qk_nope_head_dim": c.latent.nope_dim,
            "qk_rope_head_dim": c.latent.rope_dim,
            "v_head_dim": c.latent.value_dim,
        }
    if c.family != "deepseek":
        fields |= {
            "routed_scaling_factor": rule.scale,
            "n_group": rule.num_groups,
            "topk_group": rule.top_groups,
            "topk_method": _BY_GROUPS if rule.num_groups > 1 else _GREEDY,
        }
    if c.family in _SIGMOID:
        fields["topk_method"] = _BY_GROUPS_AND_BIAS
    if c.family in _SIGMOID and c.latent is not None:
        fields["rope_interleave"] = c.interleaved_rope
    return fields


def _unsupported(family: str, fields: Mapping[str, Any]) -> list[str]:
    """Every reason why the model cannot run as it does in transformers."""
    ropes = ("default",) if family == "deepseek" else KINDS
    reasons = unsupported(fields, ropes=ropes, partial=family == "glm4_moe")
    scoring = "sigmoid" if family in _SIGMOID else "softmax"
    if (asked := fields.get("scoring_func")) not in (None, scoring):
        reasons.append(f"scoring_func {asked!r}, only {scoring!r} is")
    biases = ("mlp_bias",) if family == "glm4_moe" else ("attention_bias", "mlp_bias")
    reasons += [f"{name} true" for name in biases if flag(fields, name)]
    heads, keys = (fields.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if family == "deepseek":
        model_dim = integer(fields, "hidden_size")
        if model_dim % integer(fields, "num_attention_heads"):
            reasons.append(f"hidden_size {model_dim} is no multiple of {heads} heads")
        return reasons
    if family in _LATENT and keys not in (None, heads):
        reasons.append(f"num_key_value_heads {keys} of {heads} heads, which share a latent")
    if (frequency := fields.get("moe_layer_freq")) not in (None, 1):
        reasons.append(f"moe_layer_freq {frequency}")
    methods = (_GREEDY, _BY_GROUPS) if family == "deepseek_v2" else (_BY_GROUPS_AND_BIAS, None)
    if (method := fields.get("topk_method")) not in methods:
        reasons.append(f"topk_method {method!r}")
    if not fields.get("n_shared_experts"):
        reasons.append(f"n_shared_experts {fields.get('n_shared_experts')}")
    return reasons


def _latent(fields: Mapping[str, Any]) -> LatentConfig:
    has_latent_queries = fields["q_lora_rank"] is not None
    return LatentConfig(
        kv_rank=integer(fields, "kv_lora_rank"),
        query_rank=integer(fields, "q_lora_rank") if has_latent_queries else None,
        nope_dim=integer(fields, "qk_nope_head_dim"),
        rope_dim=integer(fields, "qk_rope_head_dim"),
        value_dim=integer(fields, "v_head_dim"),
    )


def _normalises(family: str, fields: Mapping[str, Any]) -> bool:
    """Whether chosen weights are normalised; DeepSeekMoE leaves a single one, V3 does not."""
    asked = flag(fields, "norm_topk_prob")  # read of V2 too: a wrong type is refused
    if family == "deepseek" and integer(fields, "num_experts_per_tok") == 1:
        return False
    return asked and family != "deepseek_v2"


def _router(family: str, fields: Mapping[str, Any]) -> RouterRule:
    if family == "deepseek":
        return RouterRule()
    scale = number(fields, "routed_scaling_factor")
    if family == "deepseek_v2" and fields["topk_method"] == _GREEDY:
        return RouterRule(scale=scale)
    num_groups, top_groups = (integer(fields, name) for name in ("n_group", "topk_group"))
    if family == "deepseek_v2":
        return RouterRule(scale=scale, num_groups=num_groups, top_groups=top_groups)
    return RouterRule(
        scoring="sigmoid", scale=scale, num_groups=num_groups, top_groups=top_groups,
        group_score="top2", has_bias=True,
    )  # fmt: skip


def _sparse_layers(family: str, fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Sparse layers: those after the dense ones; for "deepseek" every `moe_layer_freq`-th."""
    if family == "glm4_moe_lite":
        return _named_sparse(fields, num_layers)
    first = _first_sparse(fields)
    every = integer(fields, "moe_layer_freq") if family == "deepseek" else 1
    return _layers(first, every, num_layers)


def _first_sparse(fields: Mapping[str, Any]) -> int:
    first = fields["first_k_dense_replace"]
    is_zero = type(first) is int and first == 0
    return 0 if is_zero else integer(fields, "first_k_dense_replace")


def _named_sparse(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Sparse layers of `mlp_layer_types`, without it all but the first.

    `first_k_dense_replace` of published files, which transformers does not read, must agree.
    """
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        kinds = [_DENSE] + [_SPARSE] * (num_layers - 1)
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or any(kind not in (_DENSE, _SPARSE) for kind in kinds):
        raise MoejaxError(
            f"mlp_layer_types is {kinds!r}, expected {num_layers} times {_DENSE!r} or {_SPARSE!r}"
        )
    found = tuple(layer for layer, kind in enumerate(kinds) if kind == _SPARSE)
    if fields.get("first_k_dense_replace") is None:
        return found
    first = _first_sparse(fields)
    if found != tuple(range(first, num_layers)):
        raise MoejaxError(
            f"first_k_dense_replace {first} but mlp_layer_types has the sparse layers {found}; "
            "remove the wrong one"
        )
    return found


def _layers(first: int, every: int, num_layers: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(first, num_layers) if layer % every == 0)
