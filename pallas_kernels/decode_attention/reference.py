"""Decode attention in plain jnp and float32; never optimised."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.chunk_attention.reference import chunk_attention_reference


class Latent(NamedTuple):
    """Second part of queries and keys, if the keys are the values as well.

    DeepSeek-V2's latent attention (arXiv:2405.04434, section 2.1) has this form when the queries
    absorb the key projection: keys are latents, this part is the rotated one.
    """

    q: jax.Array  # [B, H, P]
    keys: jax.Array  # [L, B, K, S, P]


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
    """Computes `api.decode_attention` in plain JAX: chunks of one token."""

    def read(cache: jax.Array) -> jax.Array:
        if pages is None:
            return cache[layer][None]
        found = cache[layer, pages].swapaxes(1, 2)
        return found.reshape(1, len(pages), cache.shape[2], -1, cache.shape[4])

    k = read(keys)
    v = k if isinstance(values, Latent) else read(values)
    if isinstance(values, Latent):
        q, k = (jnp.concatenate(of, axis=-1) for of in ((q, values.q), (k, read(values.keys))))
    sinks = None if sinks is None else sinks[layer][None]
    one = jnp.ones_like(positions)
    found = chunk_attention_reference(
        q[:, None], k, v, jnp.int32(0), positions, one, sinks, kv_length, window, scale
    )
    return found[:, 0]
