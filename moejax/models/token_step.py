"""One new token of each sequence through all layers by few launches, on a GPU in half precision.

What lies between the products of a layer is small: XLA's kernels for it take longer to start than
to run. Here a residual sum goes into the launch of the norm that follows it, and one launch
takes queries, keys and values from their product to attention and the cache.
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from moejax import ops
from moejax.cache import KVCache, cache_shape
from moejax.models.attention import token_attention
from moejax.models.config import ModelConfig
from moejax.models.moe import Routing
from moejax.models.norm import norm_of_sum
from moejax.models.rope import rotary_angles
from pallas_kernels import qkv_to_cache, residual_norm
from pallas_kernels.target import Choice

if TYPE_CHECKING:
    from moejax.models.run_experts import RunExperts
    from moejax.models.transformer import ChunkSpec, Transformer


def choose_token_step(config: ModelConfig, dtype: jnp.dtype, kernels: ops.Kernels) -> Choice:
    """What serves norms, rotation and cache writes of a token, and why the kernels do not if so.

    Args:
      config: of the model.
      dtype: of the activations and the cache.
      kernels: which may serve; a reference that is asked for is XLA's here.

    Returns:
      "triton", both kernels, or "xla".
    """
    if kernels.implementation == ops.REFERENCE:
        return Choice("xla", {})
    if kernels.target is None:
        return Choice("xla", {"triton": "no target was named"})
    x = jax.ShapeDtypeStruct((1, config.model_dim), dtype)
    qkv = jax.ShapeDtypeStruct((1, config.qkv_dim), dtype)
    keys = jax.ShapeDtypeStruct(cache_shape(config, 1, 1), dtype)
    found = (
        residual_norm.choose(x, kernels.target),
        qkv_to_cache.choose(qkv, keys, kernels.target),
    )
    reasons = dict.fromkeys(choice.refusals["triton"] for choice in found if choice.refusals)
    return Choice("xla", {"triton": "; ".join(reasons)}) if reasons else Choice("triton", {})


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
    return q, KVCache(keys, values)


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
    c, attention = model.config, model.attention
    scales = (attention.q_norm[...], attention.k_norm[...]) if c.qk_norm else None
    cos, sin = (of[:, 0] for of in rotary_angles(positions, c.head_dim, c.rope_theta))
    x = ops.take_rows(model.embed[...], tokens[:, 0], model.dtype)
    delta: jax.Array | None = None  # what the layer before adds to x
    routings = []
    for layer in range(c.num_layers):
        index = jnp.int32(layer)
        x, normed = norm_of_sum(x, delta, attention.norm[...], index, eps=c.norm_eps)
        qkv = attention.product(normed[:, None], layer)[:, 0]
        q, cache = queries_and_cache(
            qkv, cache, index, positions[:, 0], cos, sin, scales, eps=c.norm_eps
        )
        attended = token_attention(
            q[:, None], cache.keys, cache.values, index, positions,
            kv_length=spec.kv_length, sliding_window=c.sliding_window,
        )  # fmt: skip
        delta = attention.output(attended, layer)[:, 0]
        x, normed = norm_of_sum(x, delta, model.mlp_norm[...], index, eps=c.norm_eps)
        out, routing = model.mlp_block(
            x[:, None], layer, token_mask, spec.experts, run, normed=normed
        )
        delta = out[:, 0]
        if routing is not None:
            routings.append(routing)
    hidden = x if delta is None else x + delta
    return cache, hidden[:, None], routings
