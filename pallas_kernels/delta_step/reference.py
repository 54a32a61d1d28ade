"""Delta step in plain jnp, float32; never optimised."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaWeights:
    """Weights of all G layers beside their projections."""

    conv: jax.Array  # [G, channels, 1, W]; the last tap is the token's own
    dt_bias: jax.Array  # float32[G, H]
    a_log: jax.Array  # float32[G, H]
    norm: jax.Array  # [G, value dim]


class Projection(NamedTuple):
    """Projected tokens; K key heads of R value heads each, H = K R."""

    # [B, K (2 key dim + 2 R value dim)]; by head: per key head q, k, R values, R gates. Else those
    # of all heads: queries, keys, values, gates.
    rows: jax.Array
    # float32[B, K 2 R]; by head: per key head R times b, then R times a. Else all b, then all a.
    b_and_a: jax.Array


class Widths(NamedTuple):
    """Axes of the operation, from its operands."""

    num_keys: int  # K
    repeats: int  # R
    key_dim: int
    value_dim: int

    @property
    def stride(self) -> int:
        """Numbers of a key head in a row."""
        return 2 * self.key_dim + 2 * self.repeats * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, all keys, all values."""
        return self.num_keys * (2 * self.key_dim + self.repeats * self.value_dim)


def widths_of(projection: Projection, states: jax.Array) -> Widths:
    """Widths of operands that fit: K from a row's width, which has a gate per value."""
    num_heads, key_dim, value_dim = states.shape[2:]
    num_keys = (projection.rows.shape[1] - 2 * num_heads * value_dim) // (2 * key_dim)
    return Widths(num_keys, num_heads // max(1, num_keys), key_dim, value_dim)


def delta_step_reference(
    projection: Projection,
    states: jax.Array,
    tails: jax.Array,
    weights: DeltaWeights,
    layer: jax.Array,
    active: jax.Array,
    *,
    eps: float,
    floor: float,
    rows_by_head: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `api.delta_step` in plain JAX."""
    of = widths_of(projection, states)
    batch, wide = len(projection.rows), jnp.float32
    if rows_by_head:
        heads = projection.rows.reshape(batch, of.num_keys, of.stride)
        ends = [of.key_dim, 2 * of.key_dim, 2 * of.key_dim + of.repeats * of.value_dim]
        *parts, gate = jnp.split(heads, ends, axis=2)
        x = jnp.concatenate([part.reshape(batch, -1) for part in parts], axis=1)
    else:
        x, gate = jnp.split(projection.rows, [of.channels], axis=1)
    inputs = jnp.concatenate([tails[layer], x[:, None]], axis=1)  # [B, W, channels]
    taps = weights.conv[layer][:, 0].astype(wide).T  # [W, channels]
    mixed = jax.nn.silu(jnp.sum(inputs.astype(wide) * taps[None], axis=1))
    tail = jnp.where(active[:, None, None], inputs[:, 1:], inputs[:, :-1])
    key_width = of.num_keys * of.key_dim
    q, k, v = jnp.split(mixed, [key_width, 2 * key_width], axis=1)

    def of_each_value_head(x: jax.Array) -> jax.Array:  # [B, H, key dim], at length one
        x = x.reshape(batch, of.num_keys, of.key_dim)
        x = x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=2, keepdims=True) + floor)
        return jnp.repeat(x, of.repeats, axis=1)

    q, k = of_each_value_head(q) * of.key_dim**-0.5, of_each_value_head(k)
    v = v.reshape(batch, -1, of.value_dim)
    groups = of.num_keys if rows_by_head else 1
    b, a = jnp.split(projection.b_and_a.reshape(batch, groups, -1), 2, axis=2)
    mask = active[:, None]
    step = jax.nn.softplus(a.reshape(batch, -1) + weights.dt_bias[layer][None])
    decay = jnp.where(mask, jnp.exp(-jnp.exp(weights.a_log[layer])[None] * step), 1.0)
    beta = jnp.where(mask, jax.nn.sigmoid(b.reshape(batch, -1)), 0.0)
    state = decay[..., None, None] * states[layer]
    written = beta[..., None] * (v - jnp.sum(k[..., None] * state, axis=2))
    state = state + k[..., None] * written[:, :, None]
    state = jnp.where(mask[..., None, None], state, states[layer])  # also where adding 0 is none
    read = jnp.sum(q[..., None] * state, axis=2)
    normed = read * jax.lax.rsqrt(jnp.mean(jnp.square(read), axis=2, keepdims=True) + eps)
    normed = normed * weights.norm[layer].astype(wide)[None, None]
    opened = normed * jax.nn.silu(gate.reshape(batch, -1, of.value_dim).astype(wide))
    return (
        opened.reshape(batch, -1).astype(projection.rows.dtype),
        states.at[layer].set(state),
        tails.at[layer].set(tail),
    )
