"""Named real shapes, for plans and benchmarks without a checkpoint."""

from moejax.models.config import ModelConfig

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

SHAPES = {"Qwen3-30B-A3B": QWEN3_30B_A3B, "Mixtral-8x7B": MIXTRAL_8X7B}
