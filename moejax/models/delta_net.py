"""Gated DeltaNet (Yang et al., arXiv:2412.06464): layers with a state in place of a cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax import ops
from moejax.models.attention import Attend, WritingAttention
from moejax.models.config import ModelConfig
from moejax.models.delta_rule import Tokens, causal_convolution, delta_rule
from moejax.models.parameter import stacked_parameter
from moejax.models.places import Place
from moejax.ops import Index

NORM_FLOOR = 1e-6  # added to the squares of queries and keys, whatever the model's norms add


class Projected(NamedTuple):
    """What a layer's tokens are projected to; R value heads of each of K key heads."""

    mixed: jax.Array  # [B, T, channels], the convolution's inputs: queries, keys, values
    gate: jax.Array  # [B, T, H, value dim], z, before the silu
    beta: jax.Array  # float32[B, T, H], before the sigmoid
    decay: jax.Array  # float32[B, T, H], a, before bias and softplus


class DeltaNet(nnx.Module):
    """The G layers by a delta rule; see `parts.DeltaNet` for the widths.

    A state and the convolution's last inputs go from chunk to chunk in the cache of a
    `WritingAttention`. Any other attention means whole sequences: both start at zero.
    """

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
        self, normed: jax.Array, place: Place, token_mask: jax.Array, attend: Attend
    ) -> jax.Array:
        """[B, T, D] to what the layer adds to the stream, [B, T, D].

        Args:
          normed: [B, T, D].
          place: of the layer.
          token_mask: bool[B, T], False for padding, which comes after a row's tokens; it leaves
            state and tail as they are.
          attend: a `WritingAttention` has the cache.
        """
        layer = place.mixer
        projected = self.project(normed, layer)
        cached = attend if isinstance(attend, WritingAttention) else None
        state, tail = cached.cache.state_of(layer) if cached else self._fresh(normed)
        mixed, tail = causal_convolution(projected.mixed, tail, self.conv[...][layer], token_mask)
        tokens = self.tokens(jax.nn.silu(mixed), projected, layer)
        read, state = delta_rule(tokens, token_mask, state)
        if cached:
            cached.cache = cached.cache.with_state(layer, state, tail)
        return self.output(read, projected.gate, layer)

    def project(self, normed: jax.Array, layer: Index) -> Projected:
        """[B, T, D]; the rows of a key head lie together: q, k, R values, R gates; R of b and a."""
        of, lead = self.of, normed.shape[:2]
        shared, repeats = of.num_key_heads, of.num_value_heads // of.num_key_heads
        rows = ops.linear(normed, self.qkvz_proj[...], layer, kernels=self.kernels)
        ends = [of.key_dim, 2 * of.key_dim, 2 * of.key_dim + repeats * of.value_dim]
        q, k, v, z = jnp.split(rows.reshape(*lead, shared, -1), ends, axis=3)
        mixed = jnp.concatenate([part.reshape(*lead, -1) for part in (q, k, v)], axis=-1)
        wide = jnp.dtype(jnp.float32)
        ba = ops.linear(normed, self.ba_proj[...], layer, wide, self.kernels, steady=True)
        b, a = jnp.split(ba.reshape(*lead, shared, 2 * repeats), 2, axis=3)
        gate = z.reshape(*lead, of.num_value_heads, of.value_dim)
        return Projected(mixed, gate, b.reshape(*lead, -1), a.reshape(*lead, -1))

    def tokens(self, mixed: jax.Array, projected: Projected, layer: Index) -> Tokens:
        """Of float32[B, T, channels] after convolution and silu (section 3.4)."""
        of, lead = self.of, mixed.shape[:2]
        q, k, v = jnp.split(mixed, [of.key_width, 2 * of.key_width], axis=-1)
        q, k = (_unit(x.reshape(*lead, of.num_key_heads, of.key_dim)) for x in (q, k))
        v = v.reshape(*lead, of.num_value_heads, of.value_dim)
        step = jax.nn.softplus(projected.decay + self.dt_bias[...][layer][None, None])
        log_decay = -jnp.exp(self.a_log[...][layer])[None, None] * step
        return Tokens(q * of.key_dim**-0.5, k, v, log_decay, jax.nn.sigmoid(projected.beta))

    def output(self, read: jax.Array, gate: jax.Array, layer: Index) -> jax.Array:
        """float32[B, T, H, value dim] through norm, gate and projection to [B, T, D].

        The norm multiplies by its weight, not by one more, whatever the model's others do.
        """
        squares = jnp.mean(jnp.square(read), axis=-1, keepdims=True)
        scale = self.norm[...][layer].astype(jnp.float32)[None, None, None]
        normed = read * jax.lax.rsqrt(squares + self.config.norm_eps) * scale
        opened = normed * jax.nn.silu(gate.astype(jnp.float32))
        flat = opened.reshape(*opened.shape[:2], -1).astype(gate.dtype)
        return ops.linear(flat, self.o_proj[...], layer, kernels=self.kernels)

    def _fresh(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """State and tail before the first token of each sequence of [B, T, D]."""
        of, batch = self.of, x.shape[0]
        state = jnp.zeros((batch, of.num_value_heads, of.key_dim, of.value_dim), jnp.float32)
        return state, jnp.zeros((batch, of.conv_width - 1, of.conv_dim), x.dtype)


def _unit(x: jax.Array) -> jax.Array:
    """Each head at length one."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_FLOOR)
