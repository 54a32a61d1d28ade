"""Gated DeltaNet (Yang et al., arXiv:2412.06464): layers with a state in place of a cache.

A value head keeps a matrix S, here [key dim, value dim] (the transpose of the paper's), float32. A
token with key k, value v, log-decay g and write strength beta changes it, and its query reads it:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T      (eq. 10)
    o_t = S_t^T q_t

Axes: B batch, T tokens, H value heads, K key heads (H = K R; consecutive value heads share one),
N chunks of C tokens. A token that is not active (padding, or a row that is done) writes nothing and
lets nothing decay; what it reads means nothing.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.attention import AttentionFn, CachedAttention
from moejax.models.config import DeltaConfig, ModelConfig
from moejax.models.kv_cache import KVCache
from moejax.models.layer_index import LayerIndex
from moejax.models.stacked import StackedModule
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from pallas_kernels import delta_step as kernel
from pallas_kernels.target import Choice

CHUNK_LENGTH = 64
# A GPU would multiply float32 by its shorter TF32. Here errors of one token live on in the state.
PRECISION = jax.lax.Precision.HIGHEST


class _DeltaTokens(NamedTuple):
    """Inputs of T tokens to the delta rule."""

    q: jax.Array  # float32[B, T, K, key dim], scaled
    k: jax.Array  # float32[B, T, K, key dim], of length one
    v: jax.Array  # float32[B, T, H, value dim]
    log_decay: jax.Array  # float32[B, T, H], g, at most 0
    beta: jax.Array  # float32[B, T, H], in 0..1


def _delta_rule(
    tokens: _DeltaTokens, active: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Applies the rule to T tokens of each sequence and returns the next state.

    Args:
      active: bool[B, T].
      state: float32[B, H, key dim, value dim], before the first token.

    Returns:
      float32[B, T, H, value dim], what queries read, and the state after the last active token.
    """
    mask = active[:, :, None]
    log_decay = jnp.where(mask, tokens.log_decay, 0.0)
    beta = jnp.where(mask, tokens.beta, 0.0)
    tokens = tokens._replace(log_decay=log_decay, beta=beta)
    if active.shape[1] > 1:
        return _by_chunks(tokens, state)
    out, state = _one_token(_DeltaTokens(*(array[:, 0] for array in tokens)), state)
    return out[:, None], state


def _one_token(token: _DeltaTokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Applies eq. 10 to one token, arrays without T.

    S_t^T q = exp(g) S^T q + (k . q) u, where u is what is written at k: so one sum has all that is
    read of S, and is done before S is written in its place. (A matrix product would have XLA copy
    the layer's state out of the stack first.)
    """
    repeats = state.shape[1] // token.k.shape[1]
    q, k = (jnp.repeat(x, repeats, axis=1) for x in (token.q, token.k))
    decay, beta = jnp.exp(token.log_decay)[..., None], token.beta[..., None]
    both = jnp.stack([k, q], axis=2)  # [B, H, 2, key dim]
    sums = decay[..., None] * jnp.sum(both[..., None] * state[:, :, None], axis=3)
    written = beta * (token.v - sums[:, :, 0])
    read = sums[:, :, 1] + jnp.sum(k * q, axis=2, keepdims=True) * written
    return read, decay[..., None] * state + k[..., None] * written[:, :, None, :]


def _by_chunks(tokens: _DeltaTokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Applies the rule chunk by chunk (section 3.3).

    Without decay it is Yang et al., arXiv:2406.06484, eqs. 8 to 11.

    Within a chunk, with G the sums of g up to each token, what is written at the keys is
    U - W S_0, where the UT transform gives both by one triangular system:

        (I + tril(diag(beta) (K K^T * exp(G_i - G_j)), -1)) [U W] = diag(beta) [V  diag(exp G) K]

    Exponents are at most 0 where they are used. Only the products with S_0 wait for the chunk
    before; the systems of all chunks, [B, N, H, C, C], are solved at once.
    """
    batch, length = tokens.beta.shape[:2]
    num_keys, repeats = tokens.k.shape[2], tokens.v.shape[2] // tokens.k.shape[2]
    size = min(CHUNK_LENGTH, length)
    missing = -length % size

    def cut(array: jax.Array, num_heads: tuple[int, ...]) -> jax.Array:
        """Cuts [B, T, heads, ...] to [N, B, *num_heads, C, ...], padded with zeros."""
        pad = [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2)
        array = jnp.pad(array, pad).reshape(batch, -1, size, *num_heads, *array.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(array, 1, 0), 2, 2 + len(num_heads))

    q, k = (cut(x, (num_keys,)) for x in (tokens.q, tokens.k))  # [N, B, K, C, key dim]
    v, log_decay, beta = (cut(x, (num_keys, repeats)) for x in (tokens.v, *tokens[3:]))
    seen = jnp.tril(jnp.ones((size, size), bool))
    total = _product("nbkrj,ij->nbkri", log_decay, seen.astype(jnp.float32))  # G, by one product
    between = jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf)
    between = jnp.exp(between)  # [N, B, K, R, C, C]
    scores = _product("nbkid,nbkjd->nbkij", q, k)[:, :, :, None] * between
    overlaps = _product("nbkid,nbkjd->nbkij", k, k)[:, :, :, None] * between
    from_start = jnp.exp(total)[..., None]
    keys = jnp.broadcast_to(k[:, :, :, None], (*v.shape[:-1], k.shape[-1]))
    found = jax.lax.linalg.triangular_solve(
        beta[..., None] * overlaps, beta[..., None] * jnp.concatenate([v, from_start * keys], -1),
        left_side=True, lower=True, unit_diagonal=True,
    )  # fmt: skip
    u, w = found[..., : v.shape[-1]], found[..., v.shape[-1] :]
    queries = from_start * q[:, :, :, None]
    to_end = jnp.exp(total[..., -1:] - total)[..., None] * keys
    whole = from_start[..., -1:, :]

    def step(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        u, w, queries, scores, to_end, whole = chunk
        written = u - _product("bkrcd,bkrdv->bkrcv", w, state)
        read = _product("bkrcd,bkrdv->bkrcv", queries, state)
        read += _product("bkrij,bkrjv->bkriv", scores, written)
        return whole * state + _product("bkrcd,bkrcv->bkrdv", to_end, written), read

    heads = state.reshape(batch, num_keys, repeats, *state.shape[2:])
    heads, read = jax.lax.scan(step, heads, (u, w, queries, scores, to_end, whole))
    read = jnp.moveaxis(jnp.moveaxis(read, 0, 1), 4, 2)  # [B, N, C, K, R, value dim]
    read = read.reshape(batch, -1, *tokens.v.shape[2:])[:, :length]
    return read, heads.reshape(state.shape)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision=PRECISION)


def _causal_convolution(
    x: jax.Array, tail: jax.Array, weight: jax.Array, active: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Filters each channel over its last W inputs: y_t = sum_w weight_w x_{t - W + 1 + w}.

    Args:
      x: [B, T, channels].
      tail: [B, W - 1, channels], the inputs before them, the dtype of `x`.
      weight: [channels, 1, W], as `torch.nn.Conv1d` keeps it; the last is of the token itself.
      active: bool[B, T]; the active tokens of a row come before those that are not.

    Returns:
      float32[B, T, channels], and the last W - 1 of the inputs that were active.
    """
    num_tokens, num_kept = x.shape[1], tail.shape[1]
    inputs = jnp.concatenate([tail, x], axis=1)
    taps = weight[:, 0].astype(jnp.float32)  # [channels, W]
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(num_kept + 1):
        seen = inputs[:, tap : tap + num_tokens].astype(jnp.float32)
        total += seen * taps[None, None, :, tap]
    num_active = jnp.sum(active, axis=1, dtype=jnp.int32)
    kept = num_active[:, None] + jnp.arange(num_kept, dtype=jnp.int32)[None]
    return total, jnp.take_along_axis(inputs, kept[:, :, None], axis=1)


NORM_FLOOR = 1e-6  # added to the squares of queries and keys, whatever the model's norms add


class _Projected(NamedTuple):
    """Projections of a layer's tokens; each of K key heads has R value heads."""

    mixed: jax.Array  # [B, T, channels], the convolution's inputs: queries, keys, values
    gate: jax.Array  # [B, T, H, value dim], z, before the silu
    beta: jax.Array  # float32[B, T, H], before the sigmoid
    decay: jax.Array  # float32[B, T, H], a, before bias and softplus


def _choose_delta_step(config: ModelConfig, dtype: jnp.dtype, kernels: ops.Kernels) -> Choice:
    """Chooses the delta rule's implementation in a decode step; see `linear.choose_part`."""
    of = config.delta_net
    assert of is not None
    size = (1, 1, of.num_value_heads, of.key_dim, of.value_dim)
    states = jax.ShapeDtypeStruct(size, jnp.float32)
    tails = jax.ShapeDtypeStruct((1, 1, of.conv_width - 1, of.conv_dim), dtype)
    return ops.choose_part(
        "delta rule", str(dtype), kernels,
        lambda target: kernel.OPERATION.choose(states, tails, target=target),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("eps", "rows_by_head"))
def _states_in_place(
    projection: kernel.Projection,
    cache: KVCache,
    weights: kernel.DeltaWeights,
    layer: jax.Array,
    active: jax.Array,
    *,
    eps: float,
    rows_by_head: bool,
) -> tuple[jax.Array, KVCache]:
    """Advances states by a token: [B, H value dim] and the cache; jitted for all layers."""
    assert cache.states is not None and cache.tails is not None
    opened, states, tails = kernel.delta_step(
        projection, cache.states, cache.tails, weights, layer=layer, active=active, eps=eps,
        floor=NORM_FLOOR, rows_by_head=rows_by_head, implementation="triton",
    )  # fmt: skip
    return opened, cache._replace(states=states, tails=tails)


class DeltaNet(StackedModule):
    """The G layers by a delta rule; see `config.DeltaConfig` for the widths.

    A state and the convolution's last inputs go from chunk to chunk in the cache of a
    `CachedAttention`. Any other attention means whole sequences: both start at zero.
    """

    part = "delta"
    conv: nnx.Param[jax.Array]
    dt_bias: nnx.Param[jax.Array]
    a_log: nnx.Param[jax.Array]
    norm: nnx.Param[jax.Array]

    @property
    def _of(self) -> DeltaConfig:
        """Widths of keys, values and the convolution."""
        assert self.config.delta_net is not None
        return self.config.delta_net

    def __call__(
        self, normed: jax.Array, index: LayerIndex, token_mask: jax.Array, attend: AttentionFn
    ) -> jax.Array:
        """Mixes tokens: [B, T, D] to the layer's addition to the residual stream, [B, T, D].

        Args:
          token_mask: bool[B, T], False for padding, which comes after a row's tokens; it leaves
            state and tail as they are.
        """
        layer = index.mixer
        cached = attend if isinstance(attend, CachedAttention) else None
        if cached and normed.shape[1] == 1:
            chosen = _choose_delta_step(self.config, normed.dtype, self.kernels)
            if chosen.implementation == "triton":
                return self._token(normed, layer, token_mask, cached)
        projected = self._project(*self._products(normed, layer))
        state, tail = cached.cache.state_of(layer) if cached else self._fresh(normed)
        mixed, tail = _causal_convolution(projected.mixed, tail, self.conv[...][layer], token_mask)
        tokens = self._tokens(jax.nn.silu(mixed), projected, layer)
        read, state = _delta_rule(tokens, token_mask, state)
        if cached:
            cached.cache = cached.cache.with_state(layer, state, tail)
        return self._output(read, projected.gate, layer)

    def _token(
        self, normed: jax.Array, layer: Index, token_mask: jax.Array, cached: CachedAttention
    ) -> jax.Array:
        """Runs `__call__` on [B, 1, D], updating states and tails in place."""
        rows, b_and_a = self._products(normed, layer)
        weights = kernel.DeltaWeights(
            self.conv[...], self.dt_bias[...], self.a_log[...], self.norm[...]
        )
        opened, cached.cache = _states_in_place(
            kernel.Projection(rows[:, 0], b_and_a[:, 0]), cached.cache, weights, jnp.int32(layer),
            token_mask[:, 0], eps=self.config.norm_eps, rows_by_head=self._of.rows_by_head,
        )  # fmt: skip
        return self.linear(opened[:, None], "o_proj", layer)

    def _products(self, normed: jax.Array, layer: Index) -> tuple[jax.Array, jax.Array]:
        """Projects [B, T, D] to queries, keys, values and gates, and to float32 b and a."""
        rows = self.linear(normed, "qkvz_proj", layer)
        wide = jnp.dtype(jnp.float32)
        ba = self.linear(normed, "ba_proj", layer, wide, always_kernel=True)
        return rows, ba

    def _project(self, rows: jax.Array, ba: jax.Array) -> _Projected:
        """Splits projected rows [B, T, .]: per key head q, k, R values, R gates, R of b and a."""
        of, lead = self._of, rows.shape[:2]
        if not of.rows_by_head:
            mixed, z = jnp.split(rows, [of.conv_dim], axis=2)
            gate = z.reshape(*lead, of.num_value_heads, of.value_dim)
            return _Projected(mixed, gate, *jnp.split(ba, 2, axis=2))
        shared, repeats = of.num_key_heads, of.num_value_heads // of.num_key_heads
        ends = [of.key_dim, 2 * of.key_dim, 2 * of.key_dim + repeats * of.value_dim]
        q, k, v, z = jnp.split(rows.reshape(*lead, shared, -1), ends, axis=3)
        mixed = jnp.concatenate([part.reshape(*lead, -1) for part in (q, k, v)], axis=-1)
        b, a = jnp.split(ba.reshape(*lead, shared, 2 * repeats), 2, axis=3)
        gate = z.reshape(*lead, of.num_value_heads, of.value_dim)
        return _Projected(mixed, gate, b.reshape(*lead, -1), a.reshape(*lead, -1))

    def _tokens(self, mixed: jax.Array, projected: _Projected, layer: Index) -> _DeltaTokens:
        """Splits float32[B, T, channels] after convolution and silu (section 3.4)."""
        of, lead = self._of, mixed.shape[:2]
        q, k, v = jnp.split(mixed, [of.key_width, 2 * of.key_width], axis=-1)
        q, k = (_unit(x.reshape(*lead, of.num_key_heads, of.key_dim)) for x in (q, k))
        v = v.reshape(*lead, of.num_value_heads, of.value_dim)
        step = jax.nn.softplus(projected.decay + self.dt_bias[...][layer][None, None])
        log_decay = -jnp.exp(self.a_log[...][layer])[None, None] * step
        return _DeltaTokens(q * of.key_dim**-0.5, k, v, log_decay, jax.nn.sigmoid(projected.beta))

    def _output(self, read: jax.Array, gate: jax.Array, layer: Index) -> jax.Array:
        """Norm, gate and projection: float32[B, T, H, value dim] to [B, T, D].

        The norm multiplies by its weight, not by one more, whatever the model's others do.
        """
        squares = jnp.mean(jnp.square(read), axis=-1, keepdims=True)
        scale = self.norm[...][layer].astype(jnp.float32)[None, None, None]
        normed = read * jax.lax.rsqrt(squares + self.config.norm_eps) * scale
        opened = normed * jax.nn.silu(gate.astype(jnp.float32))
        flat = opened.reshape(*opened.shape[:2], -1).astype(gate.dtype)
        return self.linear(flat, "o_proj", layer)

    def _fresh(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Zero state and tail for each sequence of [B, T, D]."""
        of, batch = self._of, x.shape[0]
        state = jnp.zeros((batch, of.num_value_heads, of.key_dim, of.value_dim), jnp.float32)
        return state, jnp.zeros((batch, of.conv_width - 1, of.conv_dim), x.dtype)


def _unit(x: jax.Array) -> jax.Array:
    """Normalises each head to length one."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_FLOOR)
