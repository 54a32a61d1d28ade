"""Decode layers: one token per sequence in few launches, on a GPU in half precision.

The operations between the products of a layer are small: XLA's kernels for it take longer to start
than to run. Here a residual sum goes into the launch of the norm that follows it, and one launch
takes queries, keys and values from their product to attention and the cache.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from moejax.models.config import ModelConfig
from moejax.models.kv_cache import KVCache, cache_shape
from moejax.weights import linear as ops
from pallas_kernels import qkv_to_cache, residual_norm
from pallas_kernels.target import Choice, Target


def choose_token_step(config: ModelConfig, dtype: jnp.dtype, kernels: ops.Kernels) -> Choice:
    """Chooses norms, rotation and cache writes of a decode step; see `linear.choose_part`.

    Where one kernel takes queries, keys and values to the cache depends on attention
    (`choose_cache_writes`); layers by a delta rule and latent attention write for themselves.
    """

    def choose(target: Target) -> Choice:
        x = jax.ShapeDtypeStruct((1, config.model_dim), dtype)
        found = [residual_norm.OPERATION.choose(x, target=target)]
        if is_plain(config):
            found.append(choose_cache_writes(config, dtype, target))
        reasons = dict.fromkeys(choice.refusals["triton"] for choice in found if choice.refusals)
        return Choice("xla", {"triton": "; ".join(reasons)}) if reasons else Choice("triton", {})

    return ops.choose_part("norms and writes", str(dtype), kernels, choose)


def is_plain(config: ModelConfig) -> bool:
    """Whether `qkv_to_cache` supports the model's attention.

    Else the layers mix by `Transformer.mix`, whatever serves attention.
    """
    gated = config.attention_gate or config.zero_centred_norm
    turned = config.rotary_dim != config.head_dim or config.interleaved_rope
    return config.latent is None and not gated and not turned


def choose_cache_writes(config: ModelConfig, dtype: jnp.dtype, target: Target) -> Choice:
    """Chooses the implementation that splits a qkv product into queries and cache writes."""
    qkv = jax.ShapeDtypeStruct((1, config.qkv_dim), dtype)
    keys = jax.ShapeDtypeStruct(cache_shape(config, 1, 1), dtype)
    return qkv_to_cache.OPERATION.choose(qkv, keys, target=target)


@functools.partial(jax.jit, static_argnames="eps")
def queries_and_cache(
    qkv: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None,
    *,
    eps: float,
) -> tuple[jax.Array, KVCache]:
    """Rotated queries [B, H, C], and the cache with the tokens; jitted as `norm_of_sum`."""
    q, keys, values = qkv_to_cache.qkv_to_cache(
        qkv, cache.keys, cache.values, layer=layer, positions=positions, cos=cos, sin=sin,
        norms=None if scales is None else qkv_to_cache.HeadNorms(*scales, eps),
        implementation="triton",
    )  # fmt: skip
    return q, dataclasses.replace(cache, keys=keys, values=values)
