"""MoE layers of real models."""

# name -> D, F, A.
SHAPES: dict[str, tuple[int, int, int]] = {
    "qwen3_30b_a3b": (2048, 768, 8),
    "mixtral_8x7b": (4096, 14336, 2),
    "deepseek_v2_lite": (2048, 1408, 6),  # and DeepSeek-MoE-16B
    "qwen3_next_80b_a3b": (2048, 512, 10),
}
