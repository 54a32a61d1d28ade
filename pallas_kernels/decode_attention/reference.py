"""The operation in plain jnp and float32; never optimised."""

import jax
import jax.numpy as jnp


def decode_attention_reference(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    positions: jax.Array,
    kv_length: int,
    window: int | None,
) -> jax.Array:
    """See `api.decode_attention`."""
    batch, num_heads, head_dim = q.shape
    num_kv = keys.shape[2]
    grouped = q.reshape(batch, num_kv, num_heads // num_kv, head_dim).astype(jnp.float32)
    slots = jnp.arange(kv_length, dtype=jnp.int32)[None, :]
    seen = slots <= positions[:, None]
    if window is not None:
        seen &= slots > positions[:, None] - window
    k, v = (cache[layer, :, :, :kv_length].astype(jnp.float32) for cache in (keys, values))
    v = jnp.where(seen[:, None, :, None], v, 0.0)  # 0 times NaN is NaN
    scores = jnp.einsum("bkgc,bksc->bkgs", grouped, k) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgs,bksc->bkgc", weights, v).reshape(q.shape).astype(q.dtype)
