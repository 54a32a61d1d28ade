"""Named real shapes, for plans and benchmarks without a checkpoint."""

import dataclasses

from moejax.models.config import ModelConfig
from moejax.models.parts import LatentAttention, Yarn

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
    tied_embeddings=False,
    qk_norm=True,
    attention_bias=False,
    sliding_window=None,
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
    tied_embeddings=False,
    qk_norm=False,
    attention_bias=False,
    sliding_window=None,
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
    tied_embeddings=False,
    qk_norm=False,
    attention_bias=False,
    sliding_window=None,
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
    yarn=Yarn(factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707),
    latent=LatentAttention(kv_rank=512, query_rank=None, nope_dim=128, rope_dim=64, value_dim=128),
)

SHAPES = {
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "DeepSeek-MoE-16B": DEEPSEEK_MOE_16B,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
}
