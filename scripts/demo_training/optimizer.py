"""Learning rate, and which update rule each leaf gets."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from moejax.models.config import ModelConfig, weight_shapes


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Hyper-parameters; `weight_decay` is multiplied by the learning rate."""

    name: Literal["muon", "adamw"]
    learning_rate: float  # of matrices under Muon, of everything under AdamW
    adam_learning_rate: float  # under Muon: of embeddings, norms, biases and routers
    weight_decay: float  # on matrices
    adam_b2: float
    max_grad_norm: float
    warmup_steps: int
    decay_fraction: float  # last part of the run, in which the rate falls to zero
    total_steps: int


def decay_progress(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """0 until the decay begins, then linearly to 1 at the last step; float32 scalar."""
    length = max(1.0, config.decay_fraction * config.total_steps)
    begin = config.total_steps - length
    return jnp.clip((step.astype(jnp.float32) - begin) / length, 0.0, 1.0)


def rate_factor(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Warm-up, stable, linear decay to zero (Hu et al. 2024, section 4); float32 scalar."""
    warmup = jnp.minimum(1.0, (step.astype(jnp.float32) + 1.0) / max(1, config.warmup_steps))
    return warmup * (1.0 - decay_progress(config, step))


def matrix_views(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes in which the optimiser sees the leaves: the last two axes are one matrix each.

    Fused leaves are taken apart: one matrix a head in `qkv_proj`, gate and up apart.
    """
    c = config
    views = weight_shapes(c)
    heads = c.num_heads + 2 * c.num_kv_heads
    views["attention.qkv_proj"] = (c.num_layers, heads, c.head_dim, c.model_dim)
    for name, width in (("moe.gate_up", c.expert_dim), ("mlp.gate_up", c.mlp_dim)):
        if name in views:
            views[name] = (*views[name][:-2], 2, width, c.model_dim)
    return views


def is_matrix(name: str) -> bool:
    """Whether Muon takes the leaf; embeddings, head, routers, norms and biases go to Adam."""
    return name.endswith(("_proj", "gate_up", "down"))


def make_optimizer(config: OptimizerConfig, model: ModelConfig) -> optax.GradientTransformation:
    """Muon (Jordan 2024; scaled as Liu et al. 2025, section 2.2) with AdamW, or AdamW alone.

    The transformation works on flat weight dicts of `matrix_views` shapes.
    """

    def scaled(rate: float) -> optax.Schedule:
        return lambda step: rate * rate_factor(config, jnp.asarray(step))

    def matrices(params: dict[str, jax.Array]) -> dict[str, bool]:
        return {name: is_matrix(name) for name in params}

    clip = optax.clip_by_global_norm(config.max_grad_norm)
    if config.name == "adamw":
        return optax.chain(
            clip,
            optax.adamw(
                scaled(config.learning_rate),
                b1=0.9,
                b2=config.adam_b2,
                weight_decay=config.weight_decay,
                mask=matrices,
            ),
        )
    rows_to_outputs = contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
    dimensions = {
        name: rows_to_outputs if is_matrix(name) else None for name in matrix_views(model)
    }
    return optax.chain(
        clip,
        contrib.muon(
            scaled(config.learning_rate),
            weight_decay=config.weight_decay,
            adam_b2=config.adam_b2,
            adam_learning_rate=scaled(config.adam_learning_rate),
            muon_weight_dimension_numbers=dimensions,
            consistent_rms=0.2,
        ),
    )


def to_views(weights: dict[str, jax.Array], model: ModelConfig) -> dict[str, jax.Array]:
    """Flat weights in `matrix_views` shapes."""
    return {name: weights[name].reshape(shape) for name, shape in matrix_views(model).items()}


def from_views(views: dict[str, jax.Array], model: ModelConfig) -> dict[str, jax.Array]:
    """The inverse of `to_views`."""
    return {name: views[name].reshape(shape) for name, shape in weight_shapes(model).items()}


def num_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model."""
    return sum(math.prod(shape) for shape in weight_shapes(model).values())
