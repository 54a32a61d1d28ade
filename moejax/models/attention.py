"""Grouped-query attention over layer-stacked weights."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.config import ModelConfig
from moejax.models.kv_cache import KVCache, cache_shape
from moejax.models.layer_index import LayerIndex
from moejax.models.rope import Angles, rotate
from moejax.models.stacked import StackedModule, stacked_norm
from moejax.weights.linear import Index
from pallas_kernels import chunk_attention, decode_attention
from pallas_kernels.decode_attention import Latent
from pallas_kernels.op import REFERENCE
from pallas_kernels.target import Choice, Target

AttentionImpl = Literal["xla", "cudnn"]  # of the tokens of a chunk to one another
CachedAttentionImpl = Literal["xla", "kernel"]  # of new tokens to the cache

CUDNN_MAX_HEAD_DIM = 128
TILED = 16  # tokens of the shortest chunk, which a choice is for; others may run by another kernel


def default_attention_impl(config: ModelConfig, dtype: jnp.dtype, platform: str) -> AttentionImpl:
    """Causal attention on `platform`: cuDNN for half precision on a GPU, else XLA.

    `jax.nn.dot_product_attention` never picks cuDNN by itself, and through it cuDNN takes no sinks.
    """
    half = dtype in (jnp.bfloat16, jnp.float16)
    one_width = config.head_dim == config.value_dim and not config.attention_sinks
    served = one_width and config.head_dim % 8 == 0 and config.head_dim <= CUDNN_MAX_HEAD_DIM
    return "cudnn" if platform == "gpu" and half and served else "xla"


def choose_cached(config: ModelConfig, dtype: jnp.dtype, target: Target) -> Choice:
    """Chooses decode attention over the cache: a kernel, or "xla" with the kernels' refusals."""
    *lead, key_dim = cache_shape(config, 1, 1)
    width, more_dim = config.head_dim, 0
    if config.latent:  # absorbed: latents are keys and values
        width, more_dim = config.latent.kv_rank, key_dim
    q = jax.ShapeDtypeStruct((1, config.num_heads, width), dtype)
    keys = jax.ShapeDtypeStruct((*lead, width), dtype)
    chosen = decode_attention.OPERATION.choose(q, keys, more_dim, target=target)
    return _kernel_or_xla(chosen)


def choose_chunked(config: ModelConfig, dtype: jnp.dtype, target: Target) -> Choice:
    """Chooses attention of prompts to the cache, as `choose_cached` does that of decode."""
    keys = jax.ShapeDtypeStruct(cache_shape(config, 1, TILED), dtype)
    q = jax.ShapeDtypeStruct((1, TILED, config.num_heads, config.head_dim), dtype)
    chosen = chunk_attention.OPERATION.choose(q, keys, config.cached_dims[1], target=target)
    return _kernel_or_xla(chosen)


def stores_scores(config: ModelConfig, itemsize: int, target: Target) -> bool:
    """Whether attention of prompts takes memory for scores on a device: the kernel does not.

    Args:
      itemsize: bytes of a number of the activations.
      target: the device; a GPU of no stated capability is taken for one that has the kernels.
    """
    return choose_chunked(config, *_planned(itemsize, target)).implementation == "xla"


def copies_cache(config: ModelConfig, itemsize: int, target: Target) -> bool:
    """Whether a decode step takes memory for cached keys and values; arguments as before."""
    return choose_cached(config, *_planned(itemsize, target)).implementation == "xla"


def _planned(itemsize: int, target: Target) -> tuple[jnp.dtype, Target]:
    if target.platform == "gpu" and target.capability is None:
        target = target._replace(capability=(9, 0))
    return jnp.dtype("bfloat16" if itemsize == 2 else "float32"), target


def _kernel_or_xla(chosen: Choice) -> Choice:
    return chosen if chosen.implementation != REFERENCE else Choice("xla", chosen.refusals)


def cached_impl(choice: Choice) -> CachedAttentionImpl:
    """Translates a choice to the value of `ChunkSpec.cached`."""
    return "xla" if choice.implementation == "xla" else "kernel"


def causal_attention(
    q: jax.Array,  # [B, T, H, C]
    k: jax.Array,  # [B, T, K, C], H a multiple of K
    v: jax.Array,  # [B, T, K, C]
    sliding_window: int | None,
    impl: AttentionImpl,
    scale: float | None = None,
    sinks: jax.Array | None = None,  # [H], see `cached_attention`, which then serves
) -> jax.Array:
    """Attends from each token to itself and earlier ones, within the window.

    Returns:
      [B, T, H, C] in `q.dtype`.
    """
    if sinks is not None:
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
        keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
        return cached_attention(q, keys, values, positions, sliding_window, scale, sinks)
    window = None if sliding_window is None else (sliding_window - 1, 0)
    with jax.numpy_dtype_promotion("standard"):  # it mixes weak and strong types inside
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=window, implementation=impl, scale=scale
        )


def cached_attention(
    q: jax.Array,  # [B, T, H, C]
    keys: jax.Array,  # [B, K, S, C]
    values: jax.Array,  # [B, K, S, C]
    positions: jax.Array,  # int32[B, T] or int32[1, T]
    sliding_window: int | None,  # tokens that a query sees, itself included; None: all
    scale: float | None = None,  # factor on the scores; None: 1 / sqrt(C)
    # [H], logits that join each head's softmax and attend to nothing; None: there are none
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends from queries at `positions` to slots 0..position (slot s holds position s).

    Written out because the cache keeps heads before slots, the order in which a head's keys are
    contiguous; `jax.nn.dot_product_attention` wants slots before heads and would transpose.

    Returns:
      [B, T, H, C] in `q.dtype`; scores and softmax are float32.
    """
    batch, length, num_heads, head_dim = q.shape
    num_kv = keys.shape[1]
    grouped = q.reshape(batch, length, num_kv, num_heads // num_kv, head_dim)
    scores = jnp.einsum("btkgc,bksc->bkgts", grouped, keys, preferred_element_type=jnp.float32)
    visible = visible_slots(positions, keys.shape[2], sliding_window)
    scale = head_dim**-0.5 if scale is None else scale
    scores = jnp.where(visible[:, None, None], scores * scale, -jnp.inf)
    if sinks is None:
        probabilities = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.astype(jnp.float32).reshape(1, num_kv, -1, 1, 1)
        largest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
        powers = jnp.exp(scores - largest)
        total = jnp.sum(powers, axis=-1, keepdims=True) + jnp.exp(sink - largest)
        probabilities = powers / total
    attended = jnp.einsum("bkgts,bksc->btkgc", probabilities.astype(q.dtype), values)
    return attended.reshape(q.shape).astype(q.dtype)


def visible_slots(positions: jax.Array, num_slots: int, sliding_window: int | None) -> jax.Array:
    """Mask bool[B, T, S] of cache slots that queries at `positions` int32[B, T] see."""
    slots = jnp.arange(num_slots, dtype=positions.dtype)[None, None, :]
    visible = slots <= positions[:, :, None]
    if sliding_window is not None:
        visible &= slots > positions[:, :, None] - sliding_window
    return visible


_by_kernel = functools.partial(jax.jit, static_argnames=("kv_length", "window", "scale"))


# Jitted, with the layer an operand: all layers share a trace and the kernels.
@_by_kernel
def token_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array | Latent, *, positions: jax.Array, **how: Any
) -> jax.Array:
    """Runs `decode_attention` for one token per sequence by the kernel: [B, 1, H, C].

    Args:
      q: [B, 1, H, C].
      positions: int32[B, 1].
      **how: the other arguments of `decode_attention`.
    """
    return decode_attention.decode_attention(
        q[:, 0], keys, values, positions=positions[:, 0], implementation="triton", **how
    )[:, None]


@_by_kernel
def _prompt_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, *, positions: jax.Array,
    token_mask: jax.Array, **how: Any,
) -> jax.Array:  # fmt: skip
    """Runs `chunk_attention` for consecutive tokens: [B, T, H, C], 0 for padding.

    Args:
      positions: int32[B, T].
      token_mask: bool[B, T], False for the padding after a sequence's tokens.
      **how: the other arguments of `chunk_attention`.
    """
    lengths = jnp.sum(token_mask, axis=1, dtype=jnp.int32)
    return chunk_attention.chunk_attention(
        q, keys, values, starts=positions[:, 0], lengths=lengths, **how
    )


class Attended(NamedTuple):
    """Queries and keys of a layer's attention, from which a policy weighs tokens."""

    q: jax.Array  # [B, T, H, C], rotated
    keys: jax.Array  # [B, S, K, C], rotated, of positions 0..S - 1
    positions: jax.Array  # int32[B, T], of the queries
    token_mask: jax.Array  # bool[B, T], False for padding
    window: int | None = None  # tokens that a query sees, itself included; None: all
    sinks: jax.Array | None = None  # [H], see `cached_attention`
    axis: str = ""  # of a mesh whose devices have other heads; "": these are all


Total = Callable[[jax.Array], jax.Array]  # adds what each device of a mesh has, [B, T, D]


class AttentionFn(Protocol):
    """Attends from a layer's new tokens to the keys that its implementation provides."""

    def __call__(self, index: LayerIndex, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Attends: rotated q [B, T, H, C] to k and v [B, T, K, C] gives [B, T, H, C]."""
        ...


@dataclasses.dataclass
class CachedAttention:
    """Attention of new tokens to the cache, which it also writes."""

    cache: KVCache  # with the tokens of the layers so far
    positions: jax.Array  # int32[B, T]
    read_positions: jax.Array  # the same, 0 for padding and rows that rest: they read one slot
    # the same; behind the last slot for rows that rest where pages are another's
    write_positions: jax.Array
    kv_length: int | None  # slots that are looked at; None: the tokens see one another alone
    impl: AttentionImpl  # implementation among the new tokens
    cached: CachedAttentionImpl  # implementation of attention to the cache
    scale: float | None  # factor on the scores; None: 1 / sqrt(C)
    # [U, H] of all layers that attend, see `cached_attention`; None: there are none
    sinks: jax.Array | None
    is_observed: bool  # whether `attended` is kept
    token_mask: jax.Array  # bool[B, T], False for padding
    is_for_cpu: bool = False  # see `KVCache.write_chunk`
    # fewer slots than `kv_length`, rising, among which the positions choose
    kv_lengths: tuple[int, ...] = ()
    attended: Attended | None = None  # of the newest layer, until it is taken

    def __call__(self, index: LayerIndex, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Runs a layer's attention, as `AttentionFn`."""
        self.write(index, k, v)
        if self.is_observed:
            seen = k
            if self.kv_length is not None:
                seen = self.cache.read(index.mixer, self.kv_length)[0].swapaxes(1, 2)
            self.keep(q, seen, index)
        sinks = None if self.sinks is None else self.sinks[index.mixer]
        if self.kv_length is None:
            return causal_attention(q, k, v, index.window, self.impl, self.scale, sinks)
        if self.cached == "kernel":
            cache = self.cache
            how: dict[str, Any] = {
                "layer": jnp.int32(index.mixer), "kv_length": self.kv_length,
                "window": index.window, "scale": self.scale, "sinks": self.sinks,
            }  # fmt: skip
            if q.shape[1] == 1:
                return token_attention(
                    q, cache.keys, cache.values, positions=self.read_positions, pages=cache.table,
                    **how,
                )  # fmt: skip
            return _prompt_attention(
                q, cache.keys, cache.values, positions=self.positions, token_mask=self.token_mask,
                **how,
            )  # fmt: skip

        def attended(kv_length: int) -> jax.Array:
            keys, values = self.cache.read(index.mixer, kv_length)
            return cached_attention(
                q, keys, values, self.positions, index.window, self.scale, sinks
            )

        return self.over_slots(attended)

    def over_slots(self, attended: Callable[[int], jax.Array]) -> jax.Array:
        """Calls `attended` with the fewest slots that hold the positions.

        Attention that is observed always gets `kv_length` of them.
        """
        assert self.kv_length is not None
        if not self.kv_lengths or self.is_observed:
            return attended(self.kv_length)
        lengths = jnp.asarray(self.kv_lengths, self.positions.dtype)
        index = jnp.sum(jnp.max(self.read_positions) >= lengths, dtype=jnp.int32)
        every = (*self.kv_lengths, self.kv_length)
        return jax.lax.switch(index, [functools.partial(attended, length) for length in every])

    def write(self, index: LayerIndex, k: jax.Array, v: jax.Array) -> None:
        """Writes keys and values of a layer's new tokens, two [B, T, K, ...], to the cache."""
        if k.shape[1] == 1:
            self.cache = self.cache.write_token(index.mixer, k, v, self.write_positions[:, 0])
        else:
            self.cache = self.cache.write_chunk(
                index.mixer, k, v, self.positions[0, 0], is_for_cpu=self.is_for_cpu
            )

    def keep(self, q: jax.Array, keys: jax.Array, index: LayerIndex) -> None:
        """Keeps q [B, T, H, C] and keys [B, S, K, C] for `take_attended` if they are observed."""
        if self.is_observed:
            sinks = None if self.sinks is None else self.sinks[index.mixer]
            self.attended = Attended(q, keys, self.positions, self.token_mask, index.window, sinks)

    def take_attended(self) -> Attended | None:
        """Returns what the layers since the last call attended to; None if none did."""
        attended, self.attended = self.attended, None
        return attended


class Heads(NamedTuple):
    """Queries, keys, values and output gate of a layer's tokens."""

    q: jax.Array  # [B, T, H, C], rotated
    k: jax.Array  # [B, T, K, C], rotated
    v: jax.Array  # [B, T, K, C]
    gate: jax.Array | None  # [B, T, H, C], before the sigmoid; where outputs have one


class Attention(StackedModule):
    """Projections, biases and head norms of all U layers that attend.

    `norm`, [L, D], is that before the mixing of every layer, whatever it mixes by.
    """

    part = "attention"
    norm: nnx.Param[jax.Array]
    q_norm: nnx.Param[jax.Array]
    k_norm: nnx.Param[jax.Array]
    qkv_bias: nnx.Param[jax.Array]
    o_bias: nnx.Param[jax.Array]
    sinks: nnx.Param[jax.Array]

    def __call__(
        self,
        normed: jax.Array,
        index: LayerIndex,
        angles: Angles,
        attend: AttentionFn,
        total: Total | None = None,
    ) -> jax.Array:
        """Mixes tokens: [B, T, D] to the layer's addition to the residual stream, [B, T, D]."""
        q, k, v, gate = self.project(normed, index.mixer, *angles)
        return self.output(attend(index, q, k, v), index.mixer, gate, total)

    def project(self, normed: jax.Array, layer: Index, cos: jax.Array, sin: jax.Array) -> Heads:
        """Projects normed tokens [B, T, D] to queries, keys and values.

        Args:
          cos: float32[B, T, R / 2].
          sin: float32[B, T, R / 2].
        """
        c, gate = self.config, None
        qkv = self.product(normed, layer).reshape(*normed.shape[:2], -1, c.head_dim)
        num_queries = (2 if c.attention_gate else 1) * c.num_heads
        q, k, v = jnp.split(qkv, [num_queries, num_queries + c.num_kv_heads], axis=2)
        if c.attention_gate:
            pairs = q.reshape(*q.shape[:2], c.num_heads, 2, c.head_dim)
            q, gate = pairs[:, :, :, 0], pairs[:, :, :, 1]
        if c.qk_norm:
            q = self._head_norm(q, self.q_norm[...], layer)
            k = self._head_norm(k, self.k_norm[...], layer)
        interleaved = c.interleaved_rope
        q, k = (rotate(x, cos, sin, interleaved=interleaved) for x in (q, k))
        return Heads(q, k, v, gate)

    def _head_norm(self, x: jax.Array, scales: jax.Array, layer: Index) -> jax.Array:
        c = self.config
        normed = stacked_norm(
            x.reshape(*x.shape[:2], -1, scales.shape[1]), scales, layer, c.norm_eps, self.kernels,
            zero_centred=c.zero_centred_norm,
        )  # fmt: skip
        return normed.reshape(x.shape)

    def product(self, normed: jax.Array, layer: Index) -> jax.Array:
        """Applies the fused projection: [B, T, D] to [B, T, (H + 2K) C], not rotated."""
        qkv = self.linear(normed, "qkv_proj", layer)
        if self.config.attention_bias:
            qkv = qkv + self.qkv_bias[layer][None, None]
        return qkv

    def output(
        self,
        attended: jax.Array,
        layer: Index,
        gate: jax.Array | None = None,
        total: Total | None = None,
    ) -> jax.Array:
        """Projects [B, T, H, C] to [B, T, D], after a gate's sigmoid where there is one.

        `total`: adds what the devices of a mesh have, of other heads each; None: all are here.
        """
        if gate is not None:
            attended = attended * jax.nn.sigmoid(gate)
        flat = attended.reshape(*attended.shape[:2], -1)
        parts = jnp.dtype(jnp.float32) if total else None
        out = self.linear(flat, "o_proj", layer, parts)
        if total:
            out = total(out)
        if self.config.attention_bias and self.config.output_bias:
            out = out + self.o_bias[layer][None, None]
        return out
