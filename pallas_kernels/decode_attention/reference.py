"""Decode attention in plain jnp and float32; never optimised."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Latent(NamedTuple):
    """Second part of queries and keys, if the keys are the values as well.

    DeepSeek-V2's latent attention (arXiv:2405.04434, section 2.1) has this form when the queries
    absorb the key projection: keys are latents, this part is the rotated one.

    Attributes:
      q: [B, H, P].
      keys: [L, B, K, S, P].
    """

    q: jax.Array
    keys: jax.Array


def decode_attention_reference(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array | Latent,
    layer: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None = None,
    pages: jax.Array | None = None,
    *,
    kv_length: int,
    window: int | None,
    scale: float,
) -> jax.Array:
    """Computes `api.decode_attention` in plain JAX."""
    batch, num_heads, head_dim = q.shape
    num_kv = keys.shape[2]
    grouped = q.reshape(batch, num_kv, num_heads // num_kv, head_dim).astype(jnp.float32)
    slots = jnp.arange(kv_length, dtype=jnp.int32)[None, :]
    seen = slots <= positions[:, None]
    if window is not None:
        seen &= slots > positions[:, None] - window

    def read(cache: jax.Array) -> jax.Array:
        if pages is None:
            return cache[layer, :, :, :kv_length].astype(jnp.float32)
        found = cache[layer, pages].swapaxes(1, 2)
        found = found.reshape(batch, num_kv, -1, cache.shape[4])
        return found[:, :, :kv_length].astype(jnp.float32)

    k = read(keys)
    scores = jnp.einsum("bkgc,bksc->bkgs", grouped, k)
    if isinstance(values, Latent):
        more = values.q.reshape(*grouped.shape[:3], -1).astype(jnp.float32)
        scores += jnp.einsum("bkgp,bksp->bkgs", more, read(values.keys))
        v = k
    else:
        v = read(values)
    v = jnp.where(seen[:, None, :, None], v, 0.0)  # 0 times NaN is NaN
    scores = jnp.where(seen[:, None, None], scores * scale, -jnp.inf)
    if sinks is not None:
        sink = sinks[layer].astype(jnp.float32).reshape(1, num_kv, -1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :kv_length]
    return jnp.einsum("bkgs,bksc->bkgc", weights, v).reshape(q.shape).astype(q.dtype)
