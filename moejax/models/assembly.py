"""Builds a Transformer from a flat dict of weights, and runs it on whole sequences."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.attention import AttentionImpl, causal_attention
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.experts import ResidentExperts, routing_record
from moejax.models.layer_index import LayerIndex
from moejax.models.moe import ExpertImpl
from moejax.models.routing import Routing
from moejax.models.transformer import Transformer
from moejax.weights import linear as ops
from moejax.weights.qtensor import Weight


def forward(
    model: Transformer,
    tokens: jax.Array,
    *,
    experts: ExpertImpl = "dense",
    attention: AttentionImpl = "xla",
) -> tuple[jax.Array, Routing]:
    """Runs whole sequences without a cache, differentiably: for training and analysis.

    Args:
      tokens: int32[B, T].

    Returns:
      The last layer's output [B, T, D], before the last norm (`project_to_vocab` follows), and the
      routing with a leading axis of M sparse layers: probabilities float32[M, N, E], weights
      float32[M, N, A], ids int32[M, N, A], N = B T.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    mask = jnp.ones(tokens.shape, bool)

    def attend(index: LayerIndex, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        del index
        c = model.config
        return causal_attention(q, k, v, c.sliding_window, attention, c.score_scale)

    run = ResidentExperts(model.moe, experts, routing_record)
    hidden, _, routings = model.layers(tokens, positions, mask, attend, run)
    return hidden, routings


def model_definition(
    config: ModelConfig, kernels: ops.Kernels = ops.NO_KERNELS, *, holds_experts: bool = True
) -> nnx.GraphDef[Transformer]:
    """Builds the graph of a Transformer without weights; allocates nothing.

    Args:
      holds_experts: False where its experts come from elsewhere (`Experts`).
    """

    def build() -> Transformer:
        return Transformer(config, rngs=nnx.Rngs(0), kernels=kernels, holds_experts=holds_experts)

    abstract = nnx.eval_shape(build)
    return nnx.split(abstract)[0]


def merge_weights(
    definition: nnx.GraphDef[Transformer], weights: Mapping[str, Weight]
) -> Transformer:
    """Builds a Transformer from a flat dict of weights, inside a jitted function.

    Args:
      definition: from `model_definition`.
      weights: named and shaped as `weight_shapes`; matrices may be packed.
    """
    leaves: dict[Any, Any] = {
        tuple(name.split(".")): nnx.Param(leaf) for name, leaf in weights.items()
    }
    return nnx.merge(definition, nnx.from_flat_state(leaves))


def flat_weights(model: Transformer) -> dict[str, jax.Array]:
    """Plain weights of a model as a flat dict, in the order of `weight_shapes`."""
    flat = {
        ".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))
    }
    return {name: flat[name] for name in weight_shapes(model.config)}
