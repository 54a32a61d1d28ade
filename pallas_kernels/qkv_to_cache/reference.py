"""Qkv split in plain jnp; never optimised."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class HeadNorms(NamedTuple):
    """Root-mean-square norms over each query and key head (Qwen3)."""

    q_scales: jax.Array  # [L, C]
    k_scales: jax.Array  # [L, C]
    eps: float  # added to the mean square; static


def qkv_to_cache_reference(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    norms: HeadNorms | None,
    pages: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `api.qkv_to_cache` in plain JAX."""
    batch, (num_kv, length, head_dim) = len(qkv), keys.shape[2:]
    heads = qkv.reshape(batch, -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv
    q, k, v = jnp.split(heads, [num_heads, num_heads + num_kv], axis=1)
    if norms is not None:
        q = _normed(q, norms.q_scales[layer], norms.eps)
        k = _normed(k, norms.k_scales[layer], norms.eps)
    q, k = _turned(q, cos, sin), _turned(k, cos, sin)
    places = jnp.where(positions < 0, length, positions)  # a negative index would count backwards
    rows = jnp.arange(batch, dtype=jnp.int32)
    if pages is not None:
        places = jnp.where(positions < 0, length * pages.shape[1], positions)
        found = pages.at[rows, places // length]
        rows, places = found.get(mode="fill", fill_value=keys.shape[1]), places % length
    keys = keys.at[layer, rows, :, places].set(k, mode="drop")
    return q, keys, values.at[layer, rows, :, places].set(v, mode="drop")


def _normed(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
    return normed * scale[None, None]


def _turned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
