"""Gated DeltaNet (Yang et al., arXiv:2412.06464): layers with a state in place of a cache."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.attention import AttentionFn, CachedAttention
from moejax.models.config import ModelConfig
from moejax.models.delta_rule import Tokens, causal_convolution, delta_rule
from moejax.models.kv_cache import KVCache
from moejax.models.layer_index import LayerIndex
from moejax.models.parameter import StackedModule, stacked_parameter
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from pallas_kernels import delta_step as kernel
from pallas_kernels.target import Choice

NORM_FLOOR = 1e-6  # added to the squares of queries and keys, whatever the model's norms add


class Projected(NamedTuple):
    """Projections of a layer's tokens; each of K key heads has R value heads."""

    mixed: jax.Array  # [B, T, channels], the convolution's inputs: queries, keys, values
    gate: jax.Array  # [B, T, H, value dim], z, before the silu
    beta: jax.Array  # float32[B, T, H], before the sigmoid
    decay: jax.Array  # float32[B, T, H], a, before bias and softplus


def choose_delta_step(config: ModelConfig, dtype: jnp.dtype, kernels: ops.Kernels) -> Choice:
    """Chooses the delta rule's implementation in a decode step; see `linear.choose_part`."""
    of = config.delta_net
    assert of is not None
    size = (1, 1, of.num_value_heads, of.key_dim, of.value_dim)
    states = jax.ShapeDtypeStruct(size, jnp.float32)
    tails = jax.ShapeDtypeStruct((1, 1, of.conv_width - 1, of.conv_dim), dtype)
    return ops.choose_part(
        "delta rule", str(dtype), kernels,
        lambda target: kernel.OPERATION.choose(states, tails, target=target),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames="eps")
def states_in_place(
    projection: kernel.Projection,
    cache: KVCache,
    weights: kernel.DeltaWeights,
    layer: jax.Array,
    active: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, KVCache]:
    """Advances states by a token: [B, H value dim] and the cache; jitted for all layers."""
    assert cache.states is not None and cache.tails is not None
    opened, states, tails = kernel.delta_step(
        projection, cache.states, cache.tails, weights, layer=layer, active=active, eps=eps,
        floor=NORM_FLOOR, implementation="triton",
    )  # fmt: skip
    return opened, dataclasses.replace(cache, states=states, tails=tails)


class DeltaNet(StackedModule):
    """The G layers by a delta rule; see `config.DeltaNet` for the widths.

    A state and the convolution's last inputs go from chunk to chunk in the cache of a
    `CachedAttention`. Any other attention means whole sequences: both start at zero.
    """

    part = "delta"

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
        kernels: ops.Kernels = ops.NO_KERNELS,
    ):
        assert config.delta_net is not None
        self.config = config
        self.of = config.delta_net
        self.kernels = kernels
        self.qkvz_proj = stacked_parameter("delta.qkvz_proj", config, rngs, dtype)
        self.ba_proj = stacked_parameter("delta.ba_proj", config, rngs, dtype)
        self.conv = stacked_parameter("delta.conv", config, rngs, dtype)
        self.dt_bias = stacked_parameter("delta.dt_bias", config, rngs, dtype)
        self.a_log = stacked_parameter("delta.a_log", config, rngs, dtype)
        self.norm = stacked_parameter("delta.norm", config, rngs, dtype)
        self.o_proj = stacked_parameter("delta.o_proj", config, rngs, dtype)

    def __call__(
        self, normed: jax.Array, index: LayerIndex, token_mask: jax.Array, attend: AttentionFn
    ) -> jax.Array:
        """Mixes tokens: [B, T, D] to the layer's addition to the residual stream, [B, T, D].

        Args:
          normed: [B, T, D].
          token_mask: bool[B, T], False for padding, which comes after a row's tokens; it leaves
            state and tail as they are.
        """
        layer = index.mixer
        cached = attend if isinstance(attend, CachedAttention) else None
        if cached and normed.shape[1] == 1:
            chosen = choose_delta_step(self.config, normed.dtype, self.kernels)
            if chosen.implementation == "triton":
                return self._token(normed, layer, token_mask, cached)
        projected = self.project(*self._products(normed, layer))
        state, tail = cached.cache.state_of(layer) if cached else self._fresh(normed)
        mixed, tail = causal_convolution(projected.mixed, tail, self.conv[...][layer], token_mask)
        tokens = self.tokens(jax.nn.silu(mixed), projected, layer)
        read, state = delta_rule(tokens, token_mask, state)
        if cached:
            cached.cache = cached.cache.with_state(layer, state, tail)
        return self.output(read, projected.gate, layer)

    def _token(
        self, normed: jax.Array, layer: Index, token_mask: jax.Array, cached: CachedAttention
    ) -> jax.Array:
        """Runs `__call__` on [B, 1, D], updating states and tails in place."""
        rows, b_and_a = self._products(normed, layer)
        weights = kernel.DeltaWeights(
            self.conv[...], self.dt_bias[...], self.a_log[...], self.norm[...]
        )
        opened, cached.cache = states_in_place(
            kernel.Projection(rows[:, 0], b_and_a[:, 0]), cached.cache, weights, jnp.int32(layer),
            token_mask[:, 0], eps=self.config.norm_eps,
        )  # fmt: skip
        return self.linear(opened[:, None], "o_proj", layer)

    def _products(self, normed: jax.Array, layer: Index) -> tuple[jax.Array, jax.Array]:
        """Projects [B, T, D] to queries, keys, values and gates, and to float32 b and a."""
        rows = self.linear(normed, "qkvz_proj", layer)
        wide = jnp.dtype(jnp.float32)
        ba = self.linear(normed, "ba_proj", layer, wide, always_kernel=True)
        return rows, ba

    def project(self, rows: jax.Array, ba: jax.Array) -> Projected:
        """Splits projected rows [B, T, .]: per key head q, k, R values, R gates, R of b and a."""
        of, lead = self.of, rows.shape[:2]
        shared, repeats = of.num_key_heads, of.num_value_heads // of.num_key_heads
        ends = [of.key_dim, 2 * of.key_dim, 2 * of.key_dim + repeats * of.value_dim]
        q, k, v, z = jnp.split(rows.reshape(*lead, shared, -1), ends, axis=3)
        mixed = jnp.concatenate([part.reshape(*lead, -1) for part in (q, k, v)], axis=-1)
        b, a = jnp.split(ba.reshape(*lead, shared, 2 * repeats), 2, axis=3)
        gate = z.reshape(*lead, of.num_value_heads, of.value_dim)
        return Projected(mixed, gate, b.reshape(*lead, -1), a.reshape(*lead, -1))

    def tokens(self, mixed: jax.Array, projected: Projected, layer: Index) -> Tokens:
        """Splits float32[B, T, channels] after convolution and silu (section 3.4)."""
        of, lead = self.of, mixed.shape[:2]
        q, k, v = jnp.split(mixed, [of.key_width, 2 * of.key_width], axis=-1)
        q, k = (_unit(x.reshape(*lead, of.num_key_heads, of.key_dim)) for x in (q, k))
        v = v.reshape(*lead, of.num_value_heads, of.value_dim)
        step = jax.nn.softplus(projected.decay + self.dt_bias[...][layer][None, None])
        log_decay = -jnp.exp(self.a_log[...][layer])[None, None] * step
        return Tokens(q * of.key_dim**-0.5, k, v, log_decay, jax.nn.sigmoid(projected.beta))

    def output(self, read: jax.Array, gate: jax.Array, layer: Index) -> jax.Array:
        """Norm, gate and projection: float32[B, T, H, value dim] to [B, T, D].

        The norm multiplies by its weight, not by one more, whatever the model's others do.
        """
        squares = jnp.mean(jnp.square(read), axis=-1, keepdims=True)
        scale = self.norm[...][layer].astype(jnp.float32)[None, None, None]
        normed = read * jax.lax.rsqrt(squares + self.config.norm_eps) * scale
        opened = normed * jax.nn.silu(gate.astype(jnp.float32))
        flat = opened.reshape(*opened.shape[:2], -1).astype(gate.dtype)
        return self.linear(flat, "o_proj", layer)

    def _fresh(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Zero state and tail for each sequence of [B, T, D]."""
        of, batch = self.of, x.shape[0]
        state = jnp.zeros((batch, of.num_value_heads, of.key_dim, of.value_dim), jnp.float32)
        return state, jnp.zeros((batch, of.conv_width - 1, of.conv_dim), x.dtype)


def _unit(x: jax.Array) -> jax.Array:
    """Normalises each head to length one."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_FLOOR)
