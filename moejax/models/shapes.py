"""Named real shapes, for plans and benchmarks without a checkpoint."""

import dataclasses

from moejax.errors import MoejaxError
from moejax.models.config import (
    PLAIN_ROUTER,
    DeltaConfig,
    LatentConfig,
    ModelConfig,
    RopeScaling,
    RouterRule,
)
from pallas_kernels.gating import Gating

QWEN3_30B_A3B = ModelConfig(
    family="qwen3_moe",
    vocab_size=151936,
    model_dim=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    expert_dim=768,
    mlp_dim=6144,
    moe_layers=tuple(range(48)),
    norm_topk_prob=True,
    norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=40960,
    qk_norm=True,
)

MIXTRAL_8X7B = ModelConfig(
    family="mixtral",
    vocab_size=32000,
    model_dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_experts=8,
    experts_per_token=2,
    expert_dim=14336,
    mlp_dim=14336,
    moe_layers=tuple(range(32)),
    norm_topk_prob=True,
    norm_eps=1e-5,
    rope_theta=1e6,
    max_positions=32768,
)

DEEPSEEK_MOE_16B = ModelConfig(
    family="deepseek",
    vocab_size=102400,
    model_dim=2048,
    num_layers=28,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    num_experts=64,
    experts_per_token=6,
    expert_dim=1408,
    mlp_dim=10944,
    moe_layers=tuple(range(1, 28)),
    norm_topk_prob=False,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=4096,
    shared_dim=2 * 1408,
)

DEEPSEEK_V2_LITE = dataclasses.replace(
    DEEPSEEK_MOE_16B,
    family="deepseek_v2",
    num_layers=27,
    head_dim=192,
    moe_layers=tuple(range(1, 27)),
    max_positions=163840,
    interleaved_rope=True,
    rope_scaling=RopeScaling(
        kind="yarn", factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707
    ),
    latent=LatentConfig(kv_rank=512, query_rank=None, nope_dim=128, rope_dim=64, value_dim=128),
)


def _delta_rule(
    num_layers: int, *, num_value_heads: int = 32, rows_by_head: bool = False
) -> DeltaConfig:
    """The delta rule of Qwen3-Next and Qwen3.5: every fourth layer attends."""
    return DeltaConfig(
        layers=tuple(layer for layer in range(num_layers) if layer % 4 != 3), num_key_heads=16,
        num_value_heads=num_value_heads, key_dim=128, value_dim=128, conv_width=4,
        rows_by_head=rows_by_head,
    )  # fmt: skip


QWEN3_NEXT_80B_A3B = ModelConfig(
    family="qwen3_next",
    vocab_size=151936,
    model_dim=2048,
    num_layers=48,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    num_experts=512,
    experts_per_token=10,
    expert_dim=512,
    mlp_dim=5120,
    moe_layers=tuple(range(48)),
    norm_topk_prob=True,
    norm_eps=1e-6,
    rope_theta=1e7,
    max_positions=262144,
    qk_norm=True,
    rope_dim=64,
    attention_gate=True,
    zero_centred_norm=True,
    delta_net=_delta_rule(48, rows_by_head=True),
    shared_dim=512,
    shared_gate=True,
)

OLMOE_1B_7B = ModelConfig(
    family="olmoe",
    vocab_size=50304,
    model_dim=2048,
    num_layers=16,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    num_experts=64,
    experts_per_token=8,
    expert_dim=1024,
    mlp_dim=1024,
    moe_layers=tuple(range(16)),
    norm_topk_prob=False,
    norm_eps=1e-5,
    rope_theta=1e4,
    max_positions=4096,
    qk_norm=True,
    joint_qk_norm=True,
)

GLM_4_5_AIR = ModelConfig(
    family="glm4_moe",
    vocab_size=151552,
    model_dim=4096,
    num_layers=46,
    num_heads=96,
    num_kv_heads=8,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    expert_dim=1408,
    mlp_dim=10944,
    moe_layers=tuple(range(1, 46)),
    norm_topk_prob=True,
    norm_eps=1e-5,
    rope_theta=1e6,
    max_positions=131072,
    attention_bias=True,
    output_bias=False,
    rope_dim=64,
    shared_dim=1408,
    router=RouterRule(scoring="sigmoid", group_score="top2", has_bias=True),
)

GLM_4_7 = dataclasses.replace(
    GLM_4_5_AIR,
    model_dim=5120,
    num_layers=92,
    num_experts=160,
    expert_dim=1536,
    mlp_dim=12288,
    moe_layers=tuple(range(3, 92)),
    max_positions=202752,
    qk_norm=True,
    shared_dim=1536,
    router=dataclasses.replace(GLM_4_5_AIR.router, scale=2.5),
)

GLM_4_7_FLASH = dataclasses.replace(
    GLM_4_5_AIR,
    family="glm4_moe_lite",
    vocab_size=154880,
    model_dim=2048,
    num_layers=47,
    num_heads=20,
    num_kv_heads=20,
    head_dim=256,
    num_experts=64,
    experts_per_token=4,
    expert_dim=1536,
    mlp_dim=10240,
    moe_layers=tuple(range(1, 47)),
    max_positions=202752,
    attention_bias=False,
    output_bias=True,
    rope_dim=None,
    interleaved_rope=True,
    latent=LatentConfig(kv_rank=512, query_rank=768, nope_dim=192, rope_dim=64, value_dim=256),
    shared_dim=1536,
    router=dataclasses.replace(GLM_4_5_AIR.router, scale=1.8),
)

QWEN3_6_35B_A3B = dataclasses.replace(
    QWEN3_NEXT_80B_A3B,
    family="qwen3_5_moe",
    vocab_size=248320,
    num_layers=40,
    num_experts=256,
    experts_per_token=8,
    mlp_dim=512,
    moe_layers=tuple(range(40)),
    delta_net=_delta_rule(40),
)

QWEN3_5_122B_A10B = dataclasses.replace(
    QWEN3_6_35B_A3B,
    model_dim=3072,
    num_layers=48,
    num_heads=32,
    expert_dim=1024,
    mlp_dim=1024,
    shared_dim=1024,
    moe_layers=tuple(range(48)),
    delta_net=_delta_rule(48, num_value_heads=64),
)

QWEN3_5_397B_A17B = dataclasses.replace(
    QWEN3_5_122B_A10B,
    model_dim=4096,
    num_layers=60,
    num_experts=512,
    experts_per_token=10,
    moe_layers=tuple(range(60)),
    delta_net=_delta_rule(60, num_value_heads=64),
)

GPT_OSS_20B = ModelConfig(
    family="gpt_oss",
    vocab_size=201088,
    model_dim=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    num_experts=32,
    experts_per_token=4,
    expert_dim=2880,
    mlp_dim=2880,
    moe_layers=tuple(range(24)),
    norm_topk_prob=True,
    norm_eps=1e-5,
    rope_theta=1.5e5,
    max_positions=131072,
    attention_bias=True,
    sliding_window=128,
    window_layers=tuple(range(0, 24, 2)),
    attention_sinks=True,
    rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_positions=4096, truncate=False),
    router=RouterRule(has_logit_bias=True),
    gating=Gating(alpha=1.702, limit=7.0, up_offset=1.0),
    expert_bias=True,
)

GPT_OSS_120B = dataclasses.replace(
    GPT_OSS_20B,
    num_layers=36,
    num_experts=128,
    moe_layers=tuple(range(36)),
    window_layers=tuple(range(0, 36, 2)),
)

SHAPES = {
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "DeepSeek-MoE-16B": DEEPSEEK_MOE_16B,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "Qwen3-Next-80B-A3B": QWEN3_NEXT_80B_A3B,
    "Qwen3.6-35B-A3B": QWEN3_6_35B_A3B,
    "Qwen3.5-122B-A10B": QWEN3_5_122B_A10B,
    "Qwen3.5-397B-A17B": QWEN3_5_397B_A17B,
    "OLMoE-1B-7B": OLMOE_1B_7B,
    "GLM-4.5-Air": GLM_4_5_AIR,
    "GLM-4.7": GLM_4_7,
    "GLM-4.7-Flash": GLM_4_7_FLASH,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
}
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


def one_layer_of(config: ModelConfig, num_experts: int) -> ModelConfig:
    """A sparse layer of few experts, as wide as the model's, for tests of experts alone."""
    return dataclasses.replace(
        config, num_layers=1, moe_layers=(0,), num_experts=num_experts, delta_net=None,
        window_layers=None,
        experts_per_token=min(config.experts_per_token, num_experts), router=PLAIN_ROUTER,
    )  # fmt: skip
