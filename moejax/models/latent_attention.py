"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Two ways to the same result. Expanded: keys and values of every head are computed from the latents
(eq. 10 and 11 of the paper), then attention is ordinary. Absorbed (its section 2.1.2): the key
projection is applied to the queries instead, and the value projection to the attention output;
heads then share the latents as keys and values, and the cache is never expanded.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.attention import (
    AttentionFn,
    CachedAttention,
    causal_attention,
    token_attention,
    visible_slots,
)
from moejax.models.config import LatentConfig
from moejax.models.layer_index import LayerIndex
from moejax.models.rope import Angles, rotate
from moejax.models.stacked import StackedModule, stacked_norm
from moejax.weights import linear as ops
from pallas_kernels.decode_attention import Latent
from pallas_kernels.target import Choice

# Epsilon of latents' norms, not `ModelConfig.norm_eps`: transformers and the published code
# leave theirs at the default.
LATENT_NORM_EPS = 1e-6
# Bytes of float32 scores at a time; a longer chunk is run in blocks of queries.
SCORE_BYTES = 256 * 2**20
# Bytes of expanded keys and values for a later chunk of a prompt.
EXPANDED_BYTES = 2**30
# Why no kernel multiplies by `kv_b` where queries are absorbed.
ABSORBED = "one token's heads take its rows apart, which is no product with rows of outputs"
PLAIN = Choice(ops.PLAIN, {})


class _Queries(NamedTuple):
    """Queries of a layer's tokens, in their rotated and unrotated parts."""

    nope: jax.Array  # [B, T, H, nope_dim], not rotated
    rope: jax.Array  # [B, T, H, P], rotated


class _Latents(NamedTuple):
    """Rotated key and latent of a layer's tokens: shared by all heads, and cached."""

    key: jax.Array  # [B, S, P], rotated
    latent: jax.Array  # [B, S, R], normed


def _is_expanded(
    of: LatentConfig, num_heads: int, *, batch: int, length: int, slots: int, itemsize: int
) -> bool:
    """Whether T queries per sequence attend to S cache slots by expanded keys and values.

    With widths n, P and v of a head and latents of R a query takes n + P + v products a slot, with
    its absorbed form 2R + P; to expand a slot, or to absorb a query, takes R (n + v). For
    DeepSeek-V2-Lite (128, 64, 128; 512) that is 320, 1088 and 131072: from 171 queries on expanding
    is less for any S. It takes memory for S slots of all heads, which absorbing does not.
    """
    both = of.nope_dim + of.value_dim
    saved = length * slots * (2 * of.kv_rank - both)
    spent = (slots - length) * of.kv_rank * both
    # The product of `kv_b`, and keys beside their rotated part.
    nbytes = batch * slots * num_heads * (both + of.nope_dim + of.rope_dim) * itemsize
    return length > 1 and saved >= spent and nbytes <= EXPANDED_BYTES


def _expanded_attention(
    q: jax.Array,  # [B, T, H, C]
    k: jax.Array,  # [B, S, H, C]
    v: jax.Array,  # [B, S, H, V], of another width than keys
    positions: jax.Array,
    window: int | None,
    scale: float,
) -> jax.Array:
    """Queries at `positions` attend to keys of positions 0..S - 1.

    Returns:
      [B, T, H, V] in `v.dtype`; scores and softmax are float32.
    """

    def attend(q: jax.Array, positions: jax.Array) -> jax.Array:
        scores = jnp.einsum("bthc,bshc->bhts", q, k, preferred_element_type=jnp.float32)
        shares = _shares(scores * scale, positions, window).astype(v.dtype)
        return jnp.einsum("bhts,bshv->bthv", shares, v)

    return _in_blocks(attend, k.shape[1], q, positions)


def _absorbed_attention(
    queries: _Queries,  # with `nope` absorbed: [B, T, H, R]
    seen: _Latents,
    positions: jax.Array,
    window: int | None,
    scale: float,
) -> jax.Array:
    """Attends like `_expanded_attention`, with latents in place of keys and values.

    Returns:
      [B, T, H, R], mixed latents, in their dtype; scores and softmax are float32.
    """

    def attend(nope: jax.Array, rope: jax.Array, positions: jax.Array) -> jax.Array:
        wide = jnp.float32
        by_latent = jnp.einsum("bthr,bsr->bhts", nope, seen.latent, preferred_element_type=wide)
        by_place = jnp.einsum("bthp,bsp->bhts", rope, seen.key, preferred_element_type=wide)
        shares = _shares((by_latent + by_place) * scale, positions, window)
        return jnp.einsum("bhts,bsr->bthr", shares.astype(seen.latent.dtype), seen.latent)

    return _in_blocks(attend, seen.latent.shape[1], queries.nope, queries.rope, positions)


def _shares(scores: jax.Array, positions: jax.Array, window: int | None) -> jax.Array:
    """Attention weights float32[B, H, T, S]: the softmax over the slots each query sees."""
    visible = visible_slots(positions, scores.shape[-1], window)
    return jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)


def _in_blocks(attend: Callable[..., jax.Array], num_slots: int, *of: jax.Array) -> jax.Array:
    """Runs `attend` on arrays [B, T, ...] in blocks of T; the first is [B, T, H, ...]."""
    batch, length, num_heads = of[0].shape[:3]
    scores = 4 * batch * num_heads * length * num_slots
    num_blocks = min(length, -(-scores // SCORE_BYTES))
    if num_blocks <= 1:
        return attend(*of)
    block = -(-length // num_blocks)
    num_blocks = -(-length // block)

    def blocks(x: jax.Array) -> jax.Array:
        widths = [(0, 0), (0, num_blocks * block - length)] + [(0, 0)] * (x.ndim - 2)
        padded = jnp.pad(x, widths)  # positions with 0: they see the first slot
        return jnp.moveaxis(padded.reshape(batch, num_blocks, block, *x.shape[2:]), 1, 0)

    found = jax.lax.map(lambda part: attend(*part), tuple(map(blocks, of)))
    joined = jnp.moveaxis(found, 0, 1)
    return joined.reshape(batch, num_blocks * block, *joined.shape[3:])[:, :length]


class LatentAttention(StackedModule):
    """Projections of all layers; see `config.LatentConfig` for the widths.

    `norm`, [L, D], precedes the mixing of every layer.
    """

    part = "attention"
    norm: nnx.Param[jax.Array]
    q_a_norm: nnx.Param[jax.Array]
    kv_a_norm: nnx.Param[jax.Array]
    kv_b: nnx.Param[jax.Array]

    @property
    def _widths(self) -> LatentConfig:
        """Widths of latents and of the parts of a head."""
        assert self.config.latent is not None
        return self.config.latent

    def __call__(
        self, normed: jax.Array, index: LayerIndex, angles: Angles, attend: AttentionFn
    ) -> jax.Array:
        """Mixes tokens: [B, T, D] to the layer's addition to the residual stream, [B, T, D]."""
        layer = index.mixer
        queries = self._queries(normed, layer, *angles)
        new = self._latents(normed, layer, *angles)
        if isinstance(attend, CachedAttention):
            attended = self._with_cache(queries, new, index, attend)
        else:
            attended = self._by(attend, index, *self._expand(queries, new, layer))
        flat = attended.reshape(*attended.shape[:2], -1)
        return self.linear(flat, "o_proj", layer)

    def _queries(
        self, normed: jax.Array, layer: ops.Index, cos: jax.Array, sin: jax.Array
    ) -> _Queries:
        """Projects [B, T, D] to queries, directly or through a latent (eq. 12 to 15)."""
        c = self.config
        if self._widths.query_rank is None:
            q = self.linear(normed, "q_proj", layer)
        else:
            narrow = self.linear(normed, "q_a", layer)
            narrow = self._latent_norm(narrow, self.q_a_norm[...], layer)
            q = self.linear(narrow, "q_b", layer)
        q = q.reshape(*q.shape[:2], c.num_heads, c.head_dim)
        nope, rope = jnp.split(q, [self._widths.nope_dim], axis=-1)
        return _Queries(nope, rotate(rope, cos, sin, interleaved=c.interleaved_rope))

    def _latents(
        self, normed: jax.Array, layer: ops.Index, cos: jax.Array, sin: jax.Array
    ) -> _Latents:
        """Projects [B, T, D] to the shared key and latent (eq. 9 and 15)."""
        both = self.linear(normed, "kv_a", layer, always_kernel=True)
        latent, key = jnp.split(both, [self._widths.kv_rank], axis=-1)
        interleaved = self.config.interleaved_rope
        key = rotate(key[:, :, None], cos, sin, interleaved=interleaved)[:, :, 0]
        return _Latents(key, self._latent_norm(latent, self.kv_a_norm[...], layer))

    def _latent_norm(self, x: jax.Array, scales: jax.Array, layer: ops.Index) -> jax.Array:
        return stacked_norm(x, scales, layer, LATENT_NORM_EPS, self.kernels)

    def _expand(
        self, queries: _Queries, seen: _Latents, layer: ops.Index
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Expands queries [B, T, H, C], keys [B, S, H, C] and values [B, S, H, V] of every head."""
        c = self.config
        both = self.linear(seen.latent, "kv_b", layer)
        both = both.reshape(*both.shape[:2], c.num_heads, -1)
        nope, values = jnp.split(both, [self._widths.nope_dim], axis=-1)
        shared = jnp.broadcast_to(seen.key[:, :, None], (*nope.shape[:3], self._widths.rope_dim))
        keys = jnp.concatenate([nope, shared], axis=-1)
        return jnp.concatenate(queries, axis=-1), keys, values

    def _by(
        self, attend: AttentionFn, index: LayerIndex, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> jax.Array:
        """Calls an `AttentionFn`, padding queries, keys and values with zeros to one width."""
        width, value_dim = max(q.shape[-1], v.shape[-1]), v.shape[-1]
        q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) for x in (q, k, v))
        return attend(index, q, k, v)[..., :value_dim]

    def _with_cache(
        self, queries: _Queries, new: _Latents, index: LayerIndex, attend: CachedAttention
    ) -> jax.Array:
        """Writes the tokens to the cache and attends: [B, T, H, V]."""
        c, layer = self.config, index.mixer
        attend.write(index, new.key[:, :, None], new.latent[:, :, None])
        if attend.kv_length is not None and attend.cached == "kernel" and new.key.shape[1] == 1:
            return self._token(queries, index, attend, attend.kv_length)
        if attend.kv_length is not None:
            return attend.over_slots(
                lambda slots: self._over_slots(queries, new.key.dtype, index, attend, slots)
            )
        q, k, v = self._expand(queries, new, layer)
        attend.keep(q, k, index)
        if attend.impl == "cudnn":
            return causal_attention(q, k, v, index.window, attend.impl, c.score_scale)
        return _expanded_attention(q, k, v, attend.positions, index.window, c.score_scale)

    def _over_slots(
        self,
        queries: _Queries,
        dtype: jnp.dtype,
        index: LayerIndex,
        attend: CachedAttention,
        slots: int,
    ) -> jax.Array:
        """Attends to the first slots of the cache: [B, T, H, V]."""
        c = self.config
        read = attend.cache.read(index.mixer, slots)
        seen = _Latents(*(part[:, 0].astype(dtype) for part in read))
        batch, length = queries.nope.shape[:2]
        if not _is_expanded(
            self._widths, c.num_heads, batch=batch, length=length, slots=slots,
            itemsize=dtype.itemsize,
        ):  # fmt: skip
            return self._absorbed(queries, seen, index, attend)
        q, k, v = self._expand(queries, seen, index.mixer)
        attend.keep(q, k, index)
        return _expanded_attention(q, k, v, attend.positions, index.window, c.score_scale)

    def _token(
        self, queries: _Queries, index: LayerIndex, attend: CachedAttention, kv_length: int
    ) -> jax.Array:
        """Attends from one token per sequence by the kernel, reading cached latents in place."""
        to_keys, to_values = self._to_heads(index.mixer, queries.nope.dtype)
        cache, c = attend.cache, self.config
        mixed = token_attention(
            jnp.einsum("bthn,hnr->bthr", queries.nope, to_keys), cache.values,
            Latent(queries.rope[:, 0], cache.keys), layer=jnp.int32(index.mixer),
            positions=attend.read_positions, kv_length=kv_length, window=index.window,
            scale=c.score_scale, pages=cache.table,
        )  # fmt: skip
        return jnp.einsum("bthr,hvr->bthv", mixed, to_values)

    def _to_heads(self, layer: ops.Index, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Projections from a latent to keys and values of heads: [H, nope, R] and [H, V, R]."""
        packed = ops.packing(self.kv_b[...]) is not None
        absorbed = Choice(ops.DEQUANTIZED, {"every kernel": ABSORBED}) if packed else PLAIN
        ops.record_product("attention.kv_b", absorbed, self.kv_b[...])
        kv_b = ops.matrix(self.kv_b[...], (layer,), dtype)
        kv_b = kv_b.reshape(self.config.num_heads, -1, self._widths.kv_rank)
        to_keys, to_values = jnp.split(kv_b, [self._widths.nope_dim], axis=1)
        return to_keys, to_values

    def _absorbed(
        self, queries: _Queries, seen: _Latents, index: LayerIndex, attend: CachedAttention
    ) -> jax.Array:
        c = self.config
        to_keys, to_values = self._to_heads(index.mixer, seen.latent.dtype)
        absorbed = jnp.einsum("bthn,hnr->bthr", queries.nope, to_keys)
        if attend.is_observed:  # one key for all heads, of another width but the same scores
            q = jnp.concatenate([absorbed, queries.rope], axis=-1)
            keys = jnp.concatenate([seen.latent, seen.key], axis=-1)
            attend.keep(q, keys[:, :, None], index)
        mixed = _absorbed_attention(
            _Queries(absorbed, queries.rope), seen, attend.positions, index.window, c.score_scale
        )
        return jnp.einsum("bthr,hvr->bthv", mixed, to_values)
