"""Grouped-query attention over layer-stacked weights."""

import dataclasses
import functools
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from moejax import ops
from moejax.cache import KVCache, cache_shape
from moejax.models.config import ModelConfig
from moejax.models.norm import stacked_norm
from moejax.models.parameter import stacked_parameter
from moejax.models.rope import rotate
from moejax.ops import Index
from pallas_kernels import decode_attention
from pallas_kernels.target import Choice, Target

AttentionVia = Literal["xla", "cudnn"]  # of the tokens of a chunk to one another
CachedVia = Literal["xla", "kernel"]  # of one new token of each sequence to the cache

CUDNN_MAX_HEAD_DIM = 128


def default_attention_via(config: ModelConfig, dtype: jnp.dtype, platform: str) -> AttentionVia:
    """What serves causal attention on `platform`: cuDNN for half precision on a GPU, else XLA.

    `jax.nn.dot_product_attention` never picks cuDNN by itself.
    """
    half = dtype in (jnp.bfloat16, jnp.float16)
    served = config.head_dim % 8 == 0 and config.head_dim <= CUDNN_MAX_HEAD_DIM
    return "cudnn" if platform == "gpu" and half and served else "xla"


def choose_cached(
    config: ModelConfig, dtype: jnp.dtype, target: Target, asked: CachedVia | None = None
) -> Choice:
    """What serves attention of one new token to the cache, and why the kernel does not if so.

    Args:
      config: of the model.
      dtype: of the activations and the cache.
      target: where the program runs.
      asked: None for the kernel where it can.

    Returns:
      "triton", the kernel, or "xla".

    Raises:
      ValueError: the kernel was asked for and refuses.
    """
    if asked == "xla":
        return Choice("xla", {})
    q = jax.ShapeDtypeStruct((1, config.num_heads, config.head_dim), dtype)
    keys = jax.ShapeDtypeStruct(cache_shape(config, 1, 1), dtype)
    chosen = decode_attention.choose(q, keys, target)
    if chosen.implementation == "triton":
        return chosen
    if asked == "kernel":
        raise ValueError(f"attention of decode by the kernel: {chosen.refusals['triton']}")
    return Choice("xla", chosen.refusals)


def cached_form(choice: Choice) -> CachedVia:
    """What `ChunkSpec` says of a choice."""
    return "kernel" if choice.implementation == "triton" else "xla"


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sliding_window: int | None,
    via: AttentionVia,
) -> jax.Array:
    """Each token attends to itself and to those before it, within the window.

    Args:
      q: [B, T, H, C].
      k: [B, T, K, C], H a multiple of K.
      v: [B, T, K, C].
      sliding_window: tokens that a query sees, itself included; None: all.
      via: which implementation runs.

    Returns:
      [B, T, H, C] in `q.dtype`.
    """
    window = None if sliding_window is None else (sliding_window - 1, 0)
    with jax.numpy_dtype_promotion("standard"):  # it mixes weak and strong types inside
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=window, implementation=via
        )


def cached_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    sliding_window: int | None,
) -> jax.Array:
    """Queries at `positions` attend to cache slots 0..position (slot s holds position s).

    Written out because the cache keeps heads before slots, the order in which a head's keys are
    contiguous; `jax.nn.dot_product_attention` wants slots before heads and would transpose.

    Args:
      q: [B, T, H, C].
      keys: [B, K, S, C].
      values: [B, K, S, C].
      positions: int32[B, T].
      sliding_window: tokens that a query sees, itself included; None: all.

    Returns:
      [B, T, H, C] in `q.dtype`; scores and softmax are float32.
    """
    batch, length, num_heads, head_dim = q.shape
    num_kv = keys.shape[1]
    grouped = q.reshape(batch, length, num_kv, num_heads // num_kv, head_dim)
    scores = jnp.einsum("btkgc,bksc->bkgts", grouped, keys, preferred_element_type=jnp.float32)
    slots = jnp.arange(keys.shape[2], dtype=positions.dtype)[None, None, :]
    visible = slots <= positions[:, :, None]
    if sliding_window is not None:
        visible &= slots > positions[:, :, None] - sliding_window
    scores = jnp.where(visible[:, None, None], scores * (head_dim**-0.5), -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    attended = jnp.einsum("bkgts,bksc->btkgc", probabilities, values)
    return attended.reshape(q.shape).astype(q.dtype)


@functools.partial(jax.jit, static_argnames=("kv_length", "sliding_window"))
def token_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    positions: jax.Array,
    *,
    kv_length: int,
    sliding_window: int | None,
) -> jax.Array:
    """`cached_attention` of one token of each sequence by the kernel, which reads the cache whole.

    Jitted, with the layer an operand: all layers share a trace and the kernels.

    Args:
      q: [B, 1, H, C] in bfloat16 or float16.
      keys: [L, B, K, S, C] of all layers.
      values: [L, B, K, S, C].
      layer: int32[].
      positions: int32[B, 1].
      kv_length: slots that may be looked at; those beyond a position are not.
      sliding_window: tokens that a query sees, itself included; None: all.

    Returns:
      [B, 1, H, C] in `q.dtype`.
    """
    attended = decode_attention.decode_attention(
        q[:, 0], keys, values, layer=layer, positions=positions[:, 0], kv_length=kv_length,
        window=sliding_window, implementation="triton",
    )  # fmt: skip
    return attended[:, None]


class WatchAttention(Protocol):
    """Sees what the queries of a chunk attend to, for a policy that weighs tokens by it."""

    def __call__(
        self,
        layer: Index,
        q: jax.Array,
        keys: jax.Array,
        positions: jax.Array,
        token_mask: jax.Array,
    ) -> None:
        """Before the layer's experts run.

        Args:
          layer: among all layers.
          q: [B, T, H, C], rotated.
          keys: [B, S, K, C], rotated, of positions 0..S - 1.
          positions: int32[B, T], of the queries.
          token_mask: bool[B, T], False for padding.
        """


@dataclasses.dataclass
class WritingAttention:
    """Attention of new tokens to themselves and to a cache, into which it writes them.

    Attributes:
      cache: with the tokens of the layers so far.
      positions: int32[B, T].
      kv_length: slots that are looked at; None: the tokens see one another alone.
      window: see `causal_attention`.
      via: of the tokens to one another.
      cached: of one token of each sequence to the cache.
      watch: who sees queries and keys; None: nobody.
      token_mask: bool[B, T], False for padding; with `watch` alone.
    """

    cache: KVCache
    positions: jax.Array
    kv_length: int | None
    window: int | None
    via: AttentionVia
    cached: CachedVia
    watch: WatchAttention | None = None
    token_mask: jax.Array | None = None

    def __call__(self, layer: Index, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """[B, T, H, C]; see `Transformer.layers`."""
        positions, is_token = self.positions, q.shape[1] == 1
        if is_token:
            self.cache = self.cache.write_token(layer, k, v, positions[:, 0])
        else:
            self.cache = self.cache.write_chunk(layer, k, v, positions[0, 0])
        self._show(layer, q, k)
        if self.kv_length is None:
            return causal_attention(q, k, v, self.window, self.via)
        if self.cached == "kernel" and is_token:
            return token_attention(
                q, self.cache.keys, self.cache.values, jnp.int32(layer), positions,
                kv_length=self.kv_length, sliding_window=self.window,
            )  # fmt: skip
        keys, values = self.cache.read(layer, self.kv_length)
        return cached_attention(q, keys, values, positions, self.window)

    def _show(self, layer: Index, q: jax.Array, k: jax.Array) -> None:
        """To who watches."""
        if self.watch is None:
            return
        assert self.token_mask is not None
        if self.kv_length is not None:
            k = self.cache.read(layer, self.kv_length)[0].swapaxes(1, 2)
        self.watch(layer, q, k, self.positions, self.token_mask)


class Attention(nnx.Module):
    """Projections, biases and head norms of all L layers."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
        kernels: ops.Kernels = ops.NO_KERNELS,
    ):
        self.config = config
        self.kernels = kernels
        self.norm = stacked_parameter("attention.norm", config, rngs, dtype)
        self.qkv_proj = stacked_parameter("attention.qkv_proj", config, rngs, dtype)
        self.o_proj = stacked_parameter("attention.o_proj", config, rngs, dtype)
        if config.qk_norm:
            self.q_norm = stacked_parameter("attention.q_norm", config, rngs, dtype)
            self.k_norm = stacked_parameter("attention.k_norm", config, rngs, dtype)
        if config.attention_bias:
            self.qkv_bias = stacked_parameter("attention.qkv_bias", config, rngs, dtype)
            self.o_bias = stacked_parameter("attention.o_bias", config, rngs, dtype)

    def project(
        self, x: jax.Array, layer: Index, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normed input to rotated queries [B, T, H, C], keys and values [B, T, K, C].

        Args:
          x: [B, T, D], the residual stream.
          layer: which layer.
          cos: float32[B, T, C / 2].
          sin: float32[B, T, C / 2].
        """
        c = self.config
        normed = stacked_norm(x, self.norm[...], layer, c.norm_eps, self.kernels)
        qkv = self.product(normed, layer)
        qkv = qkv.reshape(*x.shape[:2], -1, c.head_dim)
        q, k, v = jnp.split(qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
        if c.qk_norm:
            q = stacked_norm(q, self.q_norm[...], layer, c.norm_eps, self.kernels)
            k = stacked_norm(k, self.k_norm[...], layer, c.norm_eps, self.kernels)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def product(self, normed: jax.Array, layer: Index) -> jax.Array:
        """[B, T, D] to queries, keys and values [B, T, (H + 2K) C] as they are projected."""
        qkv = ops.linear(normed, self.qkv_proj[...], layer, kernels=self.kernels)
        if self.config.attention_bias:
            qkv = qkv + self.qkv_bias[layer][None, None]
        return qkv

    def output(self, attended: jax.Array, layer: Index) -> jax.Array:
        """[B, T, H, C] to [B, T, D]."""
        flat = attended.reshape(*attended.shape[:2], -1)
        out = ops.linear(flat, self.o_proj[...], layer, kernels=self.kernels)
        if self.config.attention_bias:
            out = out + self.o_bias[layer][None, None]
        return out
