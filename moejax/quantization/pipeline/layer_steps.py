"""Compiled steps of one layer over some sequences, and sums of x x^T of its inputs.

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

from moejax.models.attention import Attention, AttentionImpl, causal_attention
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.delta_net import DeltaNet
from moejax.models.dense_mlp import DenseMlp, SharedExpert
from moejax.models.expert_products import block_size, gated
from moejax.models.latent_attention import LatentAttention
from moejax.models.layer_index import LayerIndex, layer_indices
from moejax.models.leaf_kinds import kind_of
from moejax.models.moe import ExpertImpl, Routing, SparseMoe, route
from moejax.models.rope import model_angles
from moejax.models.stacked import rms_norm
from moejax.quantization.hessian import add_outer_products
from moejax.weights.qtensor import RecordedInput

Weights = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]  # of x x^T by leaf; a trace replaces them

# Whose inputs are the same for all of a layer's tokens; those of experts are `expert_step`'s.
_WATCHED_KINDS = ("attention", "shared_experts", "mlp", "router")


def one_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """The configuration of one layer as a model of its own."""
    delta = config.delta_net
    if delta is not None:
        is_delta = layer in delta.layers
        delta = dataclasses.replace(delta, layers=(0,)) if is_delta else None
    moe_layers = (0,) if layer in config.moe_layers else ()
    return dataclasses.replace(
        config, num_layers=1, moe_layers=moe_layers, delta_net=delta, window_layers=None,
        sliding_window=config.window_of(layer),
    )  # fmt: skip


def watched_leaves(config: ModelConfig) -> dict[str, int]:
    """Leaves of one layer (`one_layer`) whose inputs are summed, and K of each."""
    shapes = weight_shapes(config)
    return {leaf: shapes[leaf][-1] for leaf in shapes if kind_of(leaf) in _WATCHED_KINDS}


@functools.partial(jax.jit, static_argnames=("config", "experts", "attention"))
def layer_step(
    weights: Weights,
    x: jax.Array,
    config: ModelConfig,
    experts: ExpertImpl,
    attention: AttentionImpl,
) -> jax.Array:
    """Runs the whole layer, [B, T, D] to [B, T, D], like `Transformer.layers`."""
    x = x + _mixed(weights, x, config, attention)
    flat = _mlp_input(weights, x, config)
    if not config.moe_layers:
        return x + _module(DenseMlp, "mlp.", weights, config)(flat, 0).reshape(x.shape)
    mask = jnp.ones(len(flat), bool)
    moe = _module(SparseMoe, "moe.", weights, config)
    out = moe(flat, moe.route(flat, 0), 0, mask, experts)
    if config.shared_dim:
        out = out + _module(SharedExpert, "shared.", weights, config)(flat, 0)
    return x + out.reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="totals")
def attention_step(
    weights: Weights,
    x: jax.Array,
    totals: Sums,
    config: ModelConfig,
    attention: AttentionImpl,
) -> tuple[jax.Array, Sums]:
    """Runs the first half of the layer on x [B, T, D], attention or a delta rule.

    Returns [B, T, D] after it, and the sums of x x^T by leaf, `totals` (donated) with its inputs.
    """
    sums = dict(totals)
    x = x + _mixed(weights, x, config, attention, sums)
    return x, sums


@functools.partial(jax.jit, static_argnames="config", donate_argnames=("totals", "counts"))
def mlp_step(
    weights: Weights,
    x: jax.Array,
    totals: Sums,
    counts: jax.Array,
    config: ModelConfig,
) -> tuple[Sums, jax.Array]:
    """Sums the inputs of the MLP's matrices but the experts', and counts experts' tokens.

    `x` is [B, T, D] after attention; `totals`, by leaf, and `counts`, int32[E], are donated.
    """
    flat, sums = _mlp_input(weights, x, config), dict(totals)
    if not config.moe_layers:
        _module(DenseMlp, "mlp.", weights, config, sums)(flat, 0)
        return sums, counts
    ids = _module(SparseMoe, "moe.", weights, config, sums).route(flat, 0).ids
    if config.shared_dim:
        _module(SharedExpert, "shared.", weights, config, sums)(flat, 0)
    return sums, counts + jnp.bincount(ids.reshape(-1), length=config.num_experts)


@functools.partial(jax.jit, static_argnames=("config", "leaf"), donate_argnames="totals")
def expert_step(
    weights: Weights,
    x: jax.Array,
    totals: jax.Array,
    first: jax.Array,
    config: ModelConfig,
    leaf: str,
) -> jax.Array:
    """Sums the inputs of experts from `first` on, over the tokens routed to each.

    Assignments are sorted by expert and processed in blocks of one expert.

    Args:
      x: [B, T, D] after attention.
      totals: float32[e, K, K], sums of x x^T; donated.
      leaf: "moe.gate_up" (K = D) or "moe.down" (K = F).
    """
    flat = _mlp_input(weights, x, config)
    ids = _routing(weights, flat, config).ids
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
                products = jnp.einsum("nd,fd->nf", inputs, gate_up)
                if config.expert_bias:
                    products = products + weights["moe.gate_up_bias"][first + i][None]
                inputs = gated(products, config.gating)
                # Of rows that are none a bias would make some.
                inputs = jnp.where((within + j * size < count)[:, None], inputs, 0)
            return add_outer_products(total, inputs)

        total = jax.lax.fori_loop(0, -(-count // size), block, totals[i])
        return totals.at[i].set(total)

    return jax.lax.fori_loop(0, len(totals), expert, totals)


def _add_inputs(sums: Sums, leaf: str, inputs: jax.Array) -> None:
    """Adds the inputs, rows [..., K], of a leaf's matrix to its sum."""
    sums[leaf] = add_outer_products(sums[leaf], inputs.reshape(-1, inputs.shape[-1]))


def _mixed(
    weights: Weights,
    x: jax.Array,
    config: ModelConfig,
    impl: AttentionImpl,
    sums: Sums | None = None,
) -> jax.Array:
    """Residual addition of attention or the delta rule for [B, T, D]."""
    (index,) = layer_indices(config)
    scales, centred = weights["attention.norm"], config.zero_centred_norm
    normed = rms_norm(x, scales, config.norm_eps, zero_centred=centred)

    def attend(index: LayerIndex, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        sinks = weights.get("attention.sinks")
        return causal_attention(q, k, v, index.window, impl, config.score_scale, sinks)

    if index.is_delta:
        mask = jnp.ones(x.shape[:2], bool)
        return _module(DeltaNet, "delta.", weights, config, sums)(normed, index, mask, attend)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    kind = LatentAttention if config.latent else Attention
    module = _module(kind, "attention.", weights, config, sums)
    return module(normed, index, model_angles(config, positions), attend)


def _mlp_input(weights: Weights, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Normed input of the MLP, [B T, D]."""
    centred = config.zero_centred_norm
    normed = rms_norm(x, weights["mlp_norm"], config.norm_eps, zero_centred=centred)
    return normed.reshape(-1, config.model_dim)


def _routing(weights: Weights, flat: jax.Array, config: ModelConfig) -> Routing:
    """Routes normed rows [N, D]."""
    biases = weights.get("moe.router_bias"), weights.get("moe.logit_bias")
    return route(flat, weights["moe.router"], config, *biases)


def _module(
    kind: Any, prefix: str, weights: Weights, config: ModelConfig, sums: Sums | None = None
) -> Any:
    """Builds a module of `moejax.models` on the layer's weights, which record inputs in `sums`."""

    def param(leaf: str) -> Any:
        stacked = weights[leaf][None]
        if sums is None or kind_of(leaf) not in _WATCHED_KINDS:
            return nnx.Param(stacked)
        return nnx.Param(RecordedInput(stacked, functools.partial(_add_inputs, sums, leaf)))

    leaves: dict[Any, Any] = {
        (leaf.removeprefix(prefix),): param(leaf) for leaf in weights if leaf.startswith(prefix)
    }
    return nnx.merge(_definition(kind, config), nnx.from_flat_state(leaves))


@functools.cache
def _definition(kind: Any, config: ModelConfig) -> nnx.GraphDef:
    abstract = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0), dtype=jnp.float32))
    return nnx.split(abstract)[0]
