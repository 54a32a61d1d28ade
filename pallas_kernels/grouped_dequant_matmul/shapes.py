"""MoE layers of real models."""

# name -> D, F, A.
SHAPES: dict[str, tuple[int, int, int]] = {
    "qwen3_30b_a3b": (2048, 768, 8),
    "mixtral_8x7b": (4096, 14336, 2),
}
