"""Chunk attention in plain jnp and float32; never optimised."""

import jax
import jax.numpy as jnp


def chunk_attention_reference(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    kv_length: int,
    window: int | None,
    scale: float,
) -> jax.Array:
    """Computes `api.chunk_attention` in plain JAX."""
    batch, length, num_heads, head_dim = q.shape
    num_kv = keys.shape[2]
    grouped = q.reshape(batch, length, num_kv, num_heads // num_kv, head_dim).astype(jnp.float32)
    tokens = jnp.arange(length, dtype=jnp.int32)[None, :]
    live = tokens < lengths[:, None]  # [B, T]
    positions = (starts[:, None] + tokens)[:, :, None]
    slots = jnp.arange(kv_length, dtype=jnp.int32)[None, None, :]
    seen = (slots <= positions) & live[:, :, None]
    if window is not None:
        seen &= slots > positions - window

    def read(cache: jax.Array) -> jax.Array:
        found = cache[layer, :, :, :kv_length].astype(jnp.float32)
        return jnp.where(jnp.any(seen, axis=1)[:, None, :, None], found, 0.0)  # 0 times NaN is NaN

    scores = jnp.einsum("btkgc,bksc->bkgts", grouped, read(keys)) * scale
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        sink = sinks[layer].astype(jnp.float32).reshape(1, num_kv, -1, 1, 1)
        scores = jnp.append(scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1)), axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :kv_length]
    weights = jnp.where(live[:, None, None, :, None], weights, 0.0)
    attended = jnp.einsum("bkgts,bksc->btkgc", weights, read(values))
    return attended.reshape(*q.shape[:3], -1).astype(q.dtype)
