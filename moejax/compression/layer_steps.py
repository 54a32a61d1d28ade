"""Compiled steps of one layer over some sequences, and sums of x x^T of what its matrices read.

All take the weights of one layer, named as in `weight_shapes` without the layers' axis, and
`config` of that one layer (`one_layer`), so that all layers of a kind share one program.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.attention import Attention, AttentionVia, causal_attention
from moejax.models.config import ModelConfig
from moejax.models.dense_mlp import DenseMlp
from moejax.models.expert_products import block_size, swiglu
from moejax.models.moe import ExpertsVia, SparseMoe
from moejax.models.norm import rms_norm
from moejax.models.rope import model_angles
from moejax.models.routing import route
from moejax.quantization.hessian import add_outer_products

Weights = Mapping[str, jax.Array]


def one_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """The configuration of one layer as a model of its own."""
    moe_layers = (0,) if layer in config.moe_layers else ()
    return dataclasses.replace(config, num_layers=1, moe_layers=moe_layers)


@functools.partial(jax.jit, static_argnames=("config", "experts", "attention"))
def layer_step(
    weights: Weights,
    x: jax.Array,
    config: ModelConfig,
    experts: ExpertsVia,
    attention: AttentionVia,
) -> jax.Array:
    """The whole layer: [B, T, D] to [B, T, D], as `Transformer.layers` runs it."""
    x, _, _ = _attention(weights, x, config, attention)
    flat = _mlp_input(weights, x, config)
    if config.moe_layers:
        mask = jnp.ones(len(flat), bool)
        out, _ = _module(SparseMoe, "moe.", weights, config)(flat, 0, mask, experts)
    else:
        out = _module(DenseMlp, "mlp.", weights, config)(flat, 0)
    return x + out.reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="totals")
def attention_step(
    weights: Weights,
    x: jax.Array,
    totals: dict[str, jax.Array],
    config: ModelConfig,
    attention: AttentionVia,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The first half of the layer.

    Args:
      weights: of the layer.
      x: [B, T, D], the residual stream.
      totals: sums of x x^T by leaf; donated.
      config: of the layer.
      attention: which implementation runs.

    Returns:
      [B, T, D] behind attention, and the sums.
    """
    x, normed, attended = _attention(weights, x, config, attention)
    for leaf, inputs in (("attention.qkv_proj", normed), ("attention.o_proj", attended)):
        totals = {**totals, leaf: _add(totals[leaf], inputs)}
    return x, totals


@functools.partial(jax.jit, static_argnames="config", donate_argnames=("totals", "counts"))
def mlp_step(
    weights: Weights,
    x: jax.Array,
    totals: dict[str, jax.Array],
    counts: jax.Array,
    config: ModelConfig,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """What the MLP's matrices read, the experts' excepted, and how many tokens each expert gets.

    Args:
      weights: of the layer.
      x: [B, T, D] behind attention.
      totals: sums of x x^T by leaf; donated.
      counts: int32[E]; donated.
      config: of the layer.
    """
    flat = _mlp_input(weights, x, config)
    if config.moe_layers:
        totals = {**totals, "moe.router": _add(totals["moe.router"], flat)}
        ids = route(flat, weights["moe.router"], config).ids
        return totals, counts + jnp.bincount(ids.reshape(-1), length=config.num_experts)
    hidden = swiglu(jnp.einsum("nd,fd->nf", flat, weights["mlp.gate_up"]))
    for leaf, inputs in (("mlp.gate_up", flat), ("mlp.down", hidden)):
        totals = {**totals, leaf: _add(totals[leaf], inputs)}
    return totals, counts


@functools.partial(jax.jit, static_argnames=("config", "leaf"), donate_argnames="totals")
def expert_step(
    weights: Weights,
    x: jax.Array,
    totals: jax.Array,
    first: jax.Array,
    config: ModelConfig,
    leaf: str,
) -> jax.Array:
    """What experts `first`.. read, each of the tokens that are routed to it.

    Assignments are sorted by expert; an expert's are taken in blocks, as many as it has.

    Args:
      weights: of the layer.
      x: [B, T, D] behind attention.
      totals: float32[e, K, K], sums of x x^T; donated.
      first: int32[].
      config: of the layer.
      leaf: "moe.gate_up" (K = D) or "moe.down" (K = F).
    """
    flat = _mlp_input(weights, x, config)
    ids = route(flat, weights["moe.router"], config).ids
    num_rows, width = ids.size, ids.shape[1]
    size = block_size(num_rows, config.num_experts)
    order = jnp.argsort(ids.reshape(-1), stable=True).astype(jnp.int32)
    token = jnp.pad(order // width, (0, size))
    counts = jnp.bincount(ids.reshape(-1), length=config.num_experts)
    starts = jnp.cumsum(counts) - counts
    within = jnp.arange(size, dtype=jnp.int32)

    def expert(i: jax.Array, totals: jax.Array) -> jax.Array:
        start, count = starts[first + i], counts[first + i]

        def block(j: jax.Array, total: jax.Array) -> jax.Array:
            rows = jax.lax.dynamic_slice_in_dim(token, start + j * size, size)
            inputs = jnp.where((within + j * size < count)[:, None], flat[rows], 0)
            if leaf == "moe.down":
                gate_up = weights["moe.gate_up"][first + i]
                inputs = swiglu(jnp.einsum("nd,fd->nf", inputs, gate_up))
            return add_outer_products(total, inputs)

        total = jax.lax.fori_loop(0, -(-count // size), block, totals[i])
        return totals.at[i].set(total)

    return jax.lax.fori_loop(0, len(totals), expert, totals)


def _attention(
    weights: Weights, x: jax.Array, config: ModelConfig, via: AttentionVia
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[B, T, D] behind attention, and what qkv_proj [B, T, D] and o_proj [B, T, H C] read."""
    module = _module(Attention, "attention.", weights, config)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    normed = rms_norm(x, weights["attention.norm"], config.norm_eps)
    q, k, v, gate = module.project(normed, 0, *model_angles(config, positions))
    attended = causal_attention(q, k, v, config.sliding_window, via, config.score_scale)
    behind = x + module.output(attended, 0, gate)
    return behind, normed, attended.reshape(*x.shape[:2], -1)


def _mlp_input(weights: Weights, x: jax.Array, config: ModelConfig) -> jax.Array:
    """[B T, D], normed."""
    return rms_norm(x, weights["mlp_norm"], config.norm_eps).reshape(-1, config.model_dim)


def _add(total: jax.Array, inputs: jax.Array) -> jax.Array:
    return add_outer_products(total, inputs.reshape(-1, inputs.shape[-1]))


def _module(kind: Any, prefix: str, weights: Weights, config: ModelConfig) -> Any:
    """A module of `moejax.models` around the layer's weights."""
    leaves: dict[Any, Any] = {
        (name.removeprefix(prefix),): nnx.Param(weight[None])
        for name, weight in weights.items()
        if name.startswith(prefix)
    }
    return nnx.merge(_definition(kind, config), nnx.from_flat_state(leaves))


@functools.cache
def _definition(kind: Any, config: ModelConfig) -> nnx.GraphDef:
    abstract = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0), dtype=jnp.float32))
    return nnx.split(abstract)[0]
