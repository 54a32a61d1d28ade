"""Shapes that are measured without a checkpoint: the real ones, and one that tries a command."""

import dataclasses

from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.models.parts import PLAIN_ROUTER
from moejax.models.shapes import SHAPES

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
    return dataclasses.replace(
        config, num_layers=num_layers, moe_layers=moe_layers, delta_net=delta
    )


def one_layer_of(config: ModelConfig, num_experts: int) -> ModelConfig:
    """A sparse layer of few experts as wide as the model's, for what asks for experts alone."""
    return dataclasses.replace(
        config, num_layers=1, moe_layers=(0,), num_experts=num_experts, delta_net=None,
        experts_per_token=min(config.experts_per_token, num_experts), router=PLAIN_ROUTER,
    )  # fmt: skip
