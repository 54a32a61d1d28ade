"""Named real shapes, for plans and benchmarks without a checkpoint.

Each is read from the fields in which its published config.json differs from its family's defaults.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.models.hf.config import model_config

_QWEN3_NEXT = {"rope_theta": 1e7, "max_position_embeddings": 262144}
_QWEN3_5 = _QWEN3_NEXT | {
    "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
    "num_attention_heads": 32, "linear_num_value_heads": 64,
}  # fmt: skip
_GLM = {"head_dim": 128, "rope_theta": 1e6, "attention_bias": True}
_QWEN3 = {
    "head_dim": 128, "norm_topk_prob": True, "rope_theta": 1e6, "max_position_embeddings": 40960,
}  # fmt: skip
_DEEPSEEK = {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
}  # fmt: skip
_YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip


def _shape(
    family: str, fields: Mapping[str, Any] = MappingProxyType({}), **more: Any
) -> ModelConfig:
    return model_config({"model_type": family, **fields, **more})


SHAPES = {
    "Qwen3-30B-A3B": _shape("qwen3_moe", _QWEN3, num_hidden_layers=48),
    "Qwen3-235B-A22B": _shape(
        "qwen3_moe", _QWEN3, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536,
        num_attention_heads=64, num_hidden_layers=94,
    ),
    "Mixtral-8x7B": _shape("mixtral", max_position_embeddings=32768),
    "DeepSeek-MoE-16B": _shape(
        "deepseek", _DEEPSEEK, num_hidden_layers=28, max_position_embeddings=4096
    ),
    "DeepSeek-V2-Lite": _shape(
        "deepseek_v2", _DEEPSEEK, num_hidden_layers=27, max_position_embeddings=163840,
        q_lora_rank=None, rope_scaling=_YARN,
    ),
    "Qwen3-Next-80B-A3B": _shape("qwen3_next", _QWEN3_NEXT, intermediate_size=5120),
    "Qwen3.6-35B-A3B": _shape("qwen3_5_moe", _QWEN3_NEXT),
    "Qwen3.5-122B-A10B": _shape("qwen3_5_moe", _QWEN3_5, hidden_size=3072, num_hidden_layers=48),
    "Qwen3.5-397B-A17B": _shape(
        "qwen3_5_moe", _QWEN3_5, hidden_size=4096, num_hidden_layers=60, num_experts=512,
        num_experts_per_tok=10,
    ),
    "OLMoE-1B-7B": _shape("olmoe", intermediate_size=1024),
    "GLM-4.5-Air": _shape("glm4_moe", _GLM),
    "GLM-4.7": _shape(
        "glm4_moe", _GLM, hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536,
        num_hidden_layers=92, n_routed_experts=160, routed_scaling_factor=2.5,
        first_k_dense_replace=3, use_qk_norm=True, max_position_embeddings=202752,
    ),
    "GLM-4.7-Flash": _shape("glm4_moe_lite", rope_theta=1e6),
    "gpt-oss-20b": _shape("gpt_oss", num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": _shape("gpt_oss"),
}  # fmt: skip
TINY = dataclasses.replace(
    SHAPES["Qwen3-30B-A3B"], vocab_size=512, model_dim=64, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, num_experts=8, experts_per_token=2, expert_dim=64,
    moe_layers=(0, 1),
)  # fmt: skip
CONFIGS = {**SHAPES, "tiny": TINY}


def with_layers(config: ModelConfig, num_layers: int) -> ModelConfig:
    """A model of the first layers, as they are; 0: of all.

    Raises:
      MoejaxError: it has not so many layers, or the first of them are not sparse.
    """
    if not num_layers:
        return config
    if num_layers > config.num_layers:
        raise MoejaxError(f"{num_layers} layers are more than the {config.num_layers} of the shape")

    def kept(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(layer for layer in layers if layer < num_layers)

    moe_layers, delta = kept(config.moe_layers), config.delta_net
    if not moe_layers:
        raise MoejaxError(f"{num_layers} layers: the first sparse one is {config.moe_layers[:1]}")
    if delta is not None:
        of_those = kept(delta.layers)
        delta = dataclasses.replace(delta, layers=of_those) if of_those else None
    windows, window = config.window_layers, config.sliding_window
    if windows is not None:
        windows = kept(windows) or None
        window = window if windows else None
    return dataclasses.replace(
        config, num_layers=num_layers, moe_layers=moe_layers, delta_net=delta,
        window_layers=windows, sliding_window=window,
    )  # fmt: skip
