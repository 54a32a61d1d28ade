"""Shapes that are measured without a checkpoint: the real ones, and one that tries a command."""

import dataclasses

from moejax.models.config import ModelConfig
from moejax.models.shapes import SHAPES

TINY = dataclasses.replace(
    SHAPES["Qwen3-30B-A3B"], vocab_size=512, model_dim=64, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, num_experts=8, experts_per_token=2, expert_dim=64,
    moe_layers=(0, 1),
)  # fmt: skip
CONFIGS = {**SHAPES, "tiny": TINY}


def with_layers(config: ModelConfig, num_layers: int) -> ModelConfig:
    """A model of sparse layers alone with the first of them; 0: all."""
    if not num_layers:
        return config
    return dataclasses.replace(config, num_layers=num_layers, moe_layers=tuple(range(num_layers)))
