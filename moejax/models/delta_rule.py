"""The gated delta rule (Yang et al., arXiv:2412.06464) and the convolution before it, in float32.

A value head keeps a matrix S, here [key dim, value dim] (the transpose of the paper's). A token
with key k, value v, log-decay g and write strength beta changes it, and its query reads it after:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T      (eq. 10)
    o_t = S_t^T q_t

Axes: B batch, T tokens, H value heads, K key heads (H = K R; consecutive value heads share one),
N chunks of C tokens. A token that is not active (padding, or a row that is done) writes nothing and
lets nothing decay; what it reads means nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK_LENGTH = 64
# A GPU would multiply float32 by its shorter TF32. Here errors of one token live on in the state.
PRECISION = jax.lax.Precision.HIGHEST


class Tokens(NamedTuple):
    """Inputs of T tokens to the delta rule."""

    q: jax.Array  # float32[B, T, K, key dim], scaled
    k: jax.Array  # float32[B, T, K, key dim], of length one
    v: jax.Array  # float32[B, T, H, value dim]
    log_decay: jax.Array  # float32[B, T, H], g, at most 0
    beta: jax.Array  # float32[B, T, H], in 0..1


def delta_rule(tokens: Tokens, active: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
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
    out, state = _one_token(Tokens(*(array[:, 0] for array in tokens)), state)
    return out[:, None], state


def _one_token(token: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
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


def _by_chunks(tokens: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
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


def causal_convolution(
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
