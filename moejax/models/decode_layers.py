"""One new token of each sequence through all layers by few launches, on a GPU in half precision.

What lies between the products of a layer is small: XLA's kernels for it take longer to start than
to run. Here a residual sum goes into the launch of the norm that follows it, and one launch
takes queries, keys and values from their product to attention and the cache.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from moejax.models.attention import Attention, WritingAttention, token_attention
from moejax.models.config import ModelConfig
from moejax.models.kv_cache import KVCache, cache_shape
from moejax.models.layer_index import Place, places
from moejax.models.norm import norm_of_sum
from moejax.models.rope import Angles, model_angles
from moejax.models.routing import Routing
from moejax.weights import linear as ops
from pallas_kernels import qkv_to_cache, residual_norm
from pallas_kernels.target import Choice, Target

if TYPE_CHECKING:
    from moejax.models.run_experts import RunExperts
    from moejax.models.transformer import ChunkSpec, Transformer


def choose_token_step(config: ModelConfig, dtype: jnp.dtype, kernels: ops.Kernels) -> Choice:
    """What serves norms, rotation and cache writes of a token, and why the kernels do not if so.

    Where one kernel takes queries, keys and values to the cache depends on attention
    (`choose_cache_writes`); layers by a delta rule and latent attention write for themselves.

    Args:
      config: of the model.
      dtype: of the activations and the cache.
      kernels: which may serve; a reference that is asked for is XLA's here.

    Returns:
      "triton", all that the model needs, or "xla".
    """
    if kernels.implementation == ops.REFERENCE:
        return Choice("xla", {})
    if kernels.target is None:
        return Choice("xla", {"triton": "no target was named"})
    x = jax.ShapeDtypeStruct((1, config.model_dim), dtype)
    found = [residual_norm.OPERATION.choose(x, target=kernels.target)]
    if is_plain(config):
        found.append(choose_cache_writes(config, dtype, kernels.target))
    reasons = dict.fromkeys(choice.refusals["triton"] for choice in found if choice.refusals)
    return Choice("xla", {"triton": "; ".join(reasons)}) if reasons else Choice("triton", {})


def is_plain(config: ModelConfig) -> bool:
    """Whether attention is of the form that `qkv_to_cache` takes to the cache.

    Else the layers mix by `Transformer.mix`, whatever serves attention.
    """
    gated = config.attention_gate or config.zero_centred_norm
    turned = config.rotary_dim != config.head_dim or config.interleaved_rope
    return config.latent is None and not gated and not turned


def choose_cache_writes(config: ModelConfig, dtype: jnp.dtype, target: Target) -> Choice:
    """What takes queries, keys and values from their product to attention and the cache.

    Args:
      config: of a model whose attention is plain.
      dtype: of the activations and the cache.
      target: where the program runs.
    """
    qkv = jax.ShapeDtypeStruct((1, config.qkv_dim), dtype)
    keys = jax.ShapeDtypeStruct(cache_shape(config, 1, 1), dtype)
    return qkv_to_cache.OPERATION.choose(qkv, keys, target=target)


def serves_token_step(config: ModelConfig, dtype: jnp.dtype, kernels: ops.Kernels) -> bool:
    """Whether `token_layers` may run; arguments as of `choose_token_step`."""
    return choose_token_step(config, dtype, kernels).implementation == "triton"


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


def token_layers(
    model: "Transformer",
    tokens: jax.Array,
    positions: jax.Array,
    token_mask: jax.Array,
    cache: KVCache,
    spec: "ChunkSpec",
    run: "RunExperts | None",
) -> tuple[KVCache, jax.Array, list[Routing]]:
    """`Transformer.routed` of one token a sequence where `choose_token_step` says "triton"."""
    c = model.config
    angles = model_angles(c, positions)
    x = ops.take_rows(model.embed[...], tokens[:, 0], model.dtype)
    delta: jax.Array | None = None  # what the layer before adds to x
    attend = model.attention_of(cache, positions, spec, None, token_mask)
    norm = functools.partial(norm_of_sum, eps=c.norm_eps, zero_centred=c.zero_centred_norm)
    routings = []
    for place in places(c):
        index = jnp.int32(place.layer)
        x, normed = norm(x, delta, model.attention.norm[...], index)
        if is_plain(c) and not place.is_delta:
            delta = _attended(model, normed, place, positions, angles, spec, attend)
        else:
            delta = model.mix(normed[:, None], place, angles, token_mask, attend)[:, 0]
        x, normed = norm(x, delta, model.mlp_norm[...], index)
        out, routing = model.mlp_block(
            x[:, None], place, token_mask, spec.experts, run, normed=normed
        )
        delta = out[:, 0]
        if routing is not None:
            routings.append(routing)
    hidden = x if delta is None else x + delta
    return attend.cache, hidden[:, None], routings


def _attended(
    model: "Transformer",
    normed: jax.Array,
    place: Place,
    positions: jax.Array,
    angles: Angles,
    spec: "ChunkSpec",
    attend: WritingAttention,
) -> jax.Array:
    """What attention adds to [B, D], the tokens going to the cache in one launch."""
    c, attention, index = model.config, model.attention, jnp.int32(place.mixer)
    assert isinstance(attention, Attention)
    scales = (attention.q_norm[...], attention.k_norm[...]) if c.qk_norm else None
    cos, sin = (of[:, 0] for of in angles)
    qkv = attention.product(normed[:, None], place.mixer)[:, 0]
    q, attend.cache = queries_and_cache(
        qkv, attend.cache, index, positions[:, 0], cos, sin, scales, eps=c.norm_eps
    )
    attended = token_attention(
        q[:, None], attend.cache.keys, attend.cache.values, index, positions,
        kv_length=spec.kv_length, sliding_window=c.sliding_window, scale=c.score_scale,
    )  # fmt: skip
    return attention.output(attended, place.mixer)[:, 0]
