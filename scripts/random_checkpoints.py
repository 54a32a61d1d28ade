"""Random checkpoints of a given size, with the experts of Qwen3-30B-A3B."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from moejax.checkpoints import save_hf_checkpoint
from moejax.models.config import ModelConfig, weight_shapes

NUM_LAYERS = 4


def config_of_size(gib: float) -> ModelConfig:
    """A Qwen3-MoE of about `gib` GiB in bfloat16: few layers of many experts."""
    expert_bytes = 3 * 768 * 2048 * 2
    return ModelConfig(
        family="qwen3_moe",
        vocab_size=32768,
        model_dim=2048,
        num_layers=NUM_LAYERS,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        num_experts=max(8, round(gib * 2**30 / expert_bytes / NUM_LAYERS)),
        experts_per_token=8,
        expert_dim=768,
        mlp_dim=6144,
        moe_layers=tuple(range(NUM_LAYERS)),
        norm_topk_prob=True,
        norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=4096,
        tied_embeddings=True,
        qk_norm=True,
        attention_bias=False,
        sliding_window=None,
    )


def write_random(directory: Path, gib: float, *, alike: bool = False) -> None:
    """A Hugging Face directory in bfloat16.

    Args:
      directory: is made.
      gib: of the files.
      alike: all layers and experts have the same numbers, which are drawn sooner; the files are as
        large.
    """
    config = config_of_size(gib)
    # Random bits, so that Orbax's compression finds what it finds in trained weights: little.
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        own = shape[-2:] if alike and len(shape) > 2 else shape
        drawn = rng.integers(0x3C00, 0x3F80, own, np.uint16).view(jnp.bfloat16)
        return np.broadcast_to(drawn, shape)

    weights = {leaf: draw(shape) for leaf, shape in weight_shapes(config).items()}
    save_hf_checkpoint(directory, config, weights, dtype=jnp.bfloat16)
