"""Tiny models of every kind of layer, as fields in which each differs from `random_checkpoints`."""

import dataclasses
from typing import Any

from moejax.models.config import DeltaConfig, LatentConfig, ModelConfig, RopeScaling, RouterRule
from pallas_kernels.gating import Gating
from tests.random_checkpoints import TINY

# Standard attention; shared experts; the first layer dense.
SHARED: dict[str, Any] = {
    "family": "deepseek", "num_kv_heads": 4, "qk_norm": False, "moe_layers": (1, 2),
    "num_layers": 3, "norm_topk_prob": False, "shared_dim": 64,
}  # fmt: skip
# With latent attention, queries through their own latent, and YaRN.
LATENT: dict[str, Any] = {
    **SHARED, "family": "deepseek_v2", "head_dim": 24, "interleaved_rope": True,
    "latent": LatentConfig(kv_rank=32, query_rank=48, nope_dim=16, rope_dim=8, value_dim=16),
    "rope_scaling": RopeScaling(
        kind="yarn", factor=4.0, original_positions=64, mscale=1.0, mscale_all_dim=0.7
    ),
}  # fmt: skip
# One layer of four attends, with gates and a part of each head rotated.
DELTA: dict[str, Any] = {
    "family": "qwen3_next", "rope_dim": 4, "attention_gate": True, "zero_centred_norm": True,
    "moe_layers": (0, 1, 2, 3), "num_layers": 4, "shared_dim": 32, "shared_gate": True,
    "delta_net": DeltaConfig(
        layers=(0, 1, 2), num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16,
        conv_width=4,
    ),
}  # fmt: skip
# DeepSeek-V3's router: sigmoids, and a bias that decides who is chosen, within the best groups.
SIGMOID: dict[str, Any] = {
    **LATENT, "family": "deepseek_v3", "norm_topk_prob": True, "num_experts": 8,
    "router": RouterRule(
        scoring="sigmoid", scale=2.5, num_groups=4, top_groups=2, group_score="top2", has_bias=True
    ),
}  # fmt: skip
# OLMoE: queries and keys are normalised over all heads together; nothing is shared.
JOINT: dict[str, Any] = {
    "family": "olmoe", "joint_qk_norm": True, "attention_bias": True, "moe_layers": (0, 1, 2),
    "norm_topk_prob": False,
}  # fmt: skip
# GLM-4.5: DeepSeek-V3's router, biases but on outputs, half of a head rotated; no groups.
BIASED: dict[str, Any] = {
    **SHARED, "family": "glm4_moe", "num_kv_heads": 2, "qk_norm": True, "norm_topk_prob": True,
    "attention_bias": True, "output_bias": False, "rope_dim": 8,
    "router": RouterRule(scoring="sigmoid", scale=1.5, group_score="top2", has_bias=True),
}  # fmt: skip
# Qwen3.5: rows of a delta rule's projections lie by part, not by head.
BY_PART: dict[str, Any] = {
    **DELTA, "family": "qwen3_5_moe",
    "delta_net": dataclasses.replace(DELTA["delta_net"], rows_by_head=False),
}  # fmt: skip
# GLM-4.7-Flash: DeepSeek-V3's attention and router, without groups of experts.
LITE: dict[str, Any] = {
    **SIGMOID, "family": "glm4_moe_lite",
    "router": dataclasses.replace(SIGMOID["router"], num_groups=1, top_groups=1),
}  # fmt: skip
# gpt-oss: sinks, windows in some layers; biases of attention, router and experts; clamped gates.
SINKS: dict[str, Any] = {
    "family": "gpt_oss", "moe_layers": (0, 1, 2), "qk_norm": False, "attention_bias": True,
    "sliding_window": 7, "window_layers": (0, 2), "attention_sinks": True, "expert_bias": True,
    "router": RouterRule(has_logit_bias=True),
    "gating": Gating(alpha=1.702, limit=7.0, up_offset=1.0),
}  # fmt: skip
KINDS = {
    "shared": SHARED, "latent": LATENT, "delta": DELTA, "sigmoid": SIGMOID, "joint": JOINT,
    "biased": BIASED, "by_part": BY_PART, "lite": LITE, "sinks": SINKS,
}  # fmt: skip


def config_of(name: str, **changes: Any) -> ModelConfig:
    """One of `KINDS`, perhaps with other fields."""
    return ModelConfig(**{**TINY, **KINDS[name], **changes})
