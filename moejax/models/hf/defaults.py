"""Defaults of fields that a config.json omits, as in transformers' class of the family.

A field that is there and null is no default: transformers refuses most nulls, and takes
`num_key_value_heads` and `head_dim` from the other sizes. "deepseek", for which transformers has no
class, takes the defaults of the code beside DeepSeek-MoE-16B.
"""

from collections.abc import Mapping
from typing import Any

_SHARED: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN: dict[str, Any] = _SHARED | {
    "vocab_size": 151936, "hidden_size": 2048, "max_position_embeddings": 32768,
    "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = _SHARED | {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008,
    "moe_intermediate_size": 1407, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "attention_bias": False, "first_k_dense_replace": 0, "norm_topk_prob": False,
    "num_experts_per_tok": None,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
_GLM: dict[str, Any] = _SHARED | {
    "rms_norm_eps": 1e-5, "attention_bias": False, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
    "full_attention_interval": 4, "layer_types": None, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": _SHARED | {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": None, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "max_position_embeddings": 131072, "sliding_window": None,
        "eos_token_id": 2,
    },
    "olmoe": _SHARED | {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": None,
        "head_dim": None, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "attention_bias": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        "eos_token_id": 50279,
    },
    "qwen3_moe": _QWEN | {
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": None, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": False, "use_sliding_window": False,
        "sliding_window": 4096,
    },
    "qwen3_next": _QWEN | _DELTA | {
        "intermediate_size": 5632, "num_hidden_layers": 48, "num_experts": 512,
        "num_experts_per_tok": 10, "norm_topk_prob": True,
    },
    "qwen3_5_moe": _SHARED | _DELTA | {
        "vocab_size": 248320, "hidden_size": 2048, "max_position_embeddings": 32768,
        "attention_bias": False, "num_hidden_layers": 40, "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "deepseek": _DEEPSEEK | {
        "num_hidden_layers": 30, "num_key_value_heads": 32, "n_shared_experts": None,
        "moe_layer_freq": 1, "scoring_func": "softmax", "eos_token_id": 100001,
    },
    "deepseek_v2": _DEEPSEEK | _LATENT | {
        "num_hidden_layers": 32, "num_key_value_heads": None, "n_routed_experts": 64,
        "n_shared_experts": 2, "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None,
        "topk_method": "greedy", "mlp_bias": False, "eos_token_id": 2,
    },
    "deepseek_v3": _DEEPSEEK | _LATENT | {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "max_position_embeddings": 4096,
        "rope_interleave": True, "eos_token_id": 1,
    },
    "glm4_moe": _GLM | {
        "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": None, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
        "use_qk_norm": False, "partial_rotary_factor": 0.5, "max_position_embeddings": 131072,
    },
    "glm4_moe_lite": _GLM | _LATENT | {
        "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
        "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
        "num_key_value_heads": 20, "n_routed_experts": 64, "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "mlp_layer_types": None, "rope_interleave": True,
        "max_position_embeddings": 202752, "eos_token_id": 1,
    },
    "gpt_oss": _SHARED | {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5,
        "rope_theta": 1.5e5, "max_position_embeddings": 131072, "sliding_window": 128,
        "layer_types": None, "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    },
}  # fmt: skip
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of one number
_ROPE = ("rope_theta", "partial_rotary_factor")  # which may be inside an object: `shared` reads it


def with_defaults(family: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Completes the fields of a config.json, except for rope."""
    given = {*fields, *_ROPE}
    if given.intersection(_NUM_EXPERTS):
        given.update(_NUM_EXPERTS)
    missing = {name: value for name, value in DEFAULTS[family].items() if name not in given}
    return {**fields, **missing}


def default_eos_id(fields: Mapping[str, Any], vocab_size: int) -> int | None:
    """Default token that ends answers in a config.json's family, or None."""
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in DEFAULTS:
        return None
    eos = DEFAULTS[family].get("eos_token_id")
    return eos if eos is not None and eos < vocab_size else None
