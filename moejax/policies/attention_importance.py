"""Importance of tokens by the attention that they receive (DyMoE eq. 1).

Attention kernels do not return their weights, so the scores are computed again, for a block of
queries at a time: the weights of all pairs of a long prompt never exist together.

Axes: B sequences, T queries, S keys, H query heads, K key heads, C head width.
"""

import jax
import jax.numpy as jnp

AGGREGATIONS = ("mean", "sum", "last_query")
# Bytes of scores at a time. A prefill chunk's own attention takes ten times as much; smaller
# blocks are more turns of a loop.
BLOCK_BYTES = 64 * 2**20


def attention_received(
    q: jax.Array,
    k: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    *,
    aggregation: str = "mean",
    sliding_window: int | None = None,
    scale: float | None = None,
    block: int | None = None,
) -> jax.Array:
    """Computes s_i = 1/H sum_h a_i^(h) of eq. 1, for every key.

    a_i^(h), the paper's attention score of token i in head h, is the mean attention to token i of
    the queries that see it. A plain "sum" favours early tokens, which more queries see;
    "last_query" is the attention of a sequence's last active query alone.

    Args:
      q: [B, T, H, C], rotated.
      k: [B, S, K, C], rotated, of positions 0..S - 1; H is a multiple of K.
      positions: int32[B, T], of the queries; a query sees keys up to its own position.
      active: bool[B, T], queries that are no padding.
      aggregation: "mean", "sum" or "last_query".
      sliding_window: keys that a query sees, itself included; None: all.
      scale: factor on the scores; None: 1 / sqrt(C).
      block: queries at a time; None: as many as keep their weights under `BLOCK_BYTES`.

    Returns:
      float32[B, S]; 0 for keys that no active query sees. Scores and softmax are float32.

    Raises:
      ValueError: an unknown aggregation.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation={aggregation!r} must be one of {', '.join(AGGREGATIONS)}")
    batch, length, num_heads, _ = q.shape
    num_keys = k.shape[1]
    if aggregation == "last_query":
        place = jnp.where(active, positions, -1)
        last = jnp.argmax(place, axis=1)[:, None]
        q = jnp.take_along_axis(q, last[:, :, None, None], axis=1)
        positions = jnp.take_along_axis(positions, last, axis=1)
        active = jnp.take_along_axis(active, last, axis=1)
        length = 1
    if block is None:
        block = max(1, BLOCK_BYTES // _scores_nbytes(batch, num_heads, num_keys))
    block = min(block, length)
    num_blocks = -(-length // block)
    padding = num_blocks * block - length

    def blocks(x: jax.Array) -> jax.Array:
        widths = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
        padded = jnp.pad(x, widths)  # of `active` with False
        return jnp.moveaxis(padded.reshape(batch, num_blocks, block, *x.shape[2:]), 1, 0)

    def add(
        sums: tuple[jax.Array, jax.Array], queries: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        found = _of_block(*queries, k, sliding_window, scale)
        return (sums[0] + found[0], sums[1] + found[1]), None

    zeros = jnp.zeros((batch, num_keys), jnp.float32)
    queries = blocks(q), blocks(positions), blocks(active)
    (received, seen), _ = jax.lax.scan(add, (zeros, zeros), queries)
    if aggregation == "mean":
        received = received / jnp.maximum(seen, 1)
    return received


def importance_nbytes(
    *,
    batch: int,
    length: int,
    num_keys: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,  # C
    itemsize: int,  # bytes of a number of queries and keys
    platform: str,  # "gpu" or "cpu"
) -> int:
    """Bound on the workspace of `attention_received`, for any S up to `num_keys`.

    It counts the scores of a block, the queries cut into blocks (the last one padded), transposed
    keys, the mask, and the sums; on a CPU scores and their powers apart. Compiled for an H100
    without one (jax 0.11.2, 2026-11-22), chunks of 64 to 1024 tokens over keys of 1024 to 32768 of
    Qwen3-30B and Mixtral shapes took 0.71 to 0.87 of this.
    """
    row = _scores_nbytes(batch, num_heads, num_keys)
    scores = min(length * row, max(BLOCK_BYTES, row))
    apart = 2 if platform == "cpu" else 1
    queries = 2 * batch * length * num_heads * head_dim * itemsize
    keys = batch * num_keys * num_kv_heads * head_dim * itemsize
    sums = 4 * 4 * batch * num_keys
    return apart * scores + scores // (4 * num_heads) + queries + keys + sums


def _scores_nbytes(batch: int, num_heads: int, num_keys: int) -> int:
    """Bytes of float32 scores of one query per sequence."""
    return 4 * batch * num_heads * num_keys


def _of_block(
    q: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    k: jax.Array,
    sliding_window: int | None,
    scale: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Sums a block of queries: head-mean attention to each key and count of viewers, [B, S]."""
    batch, block, num_heads, head_dim = q.shape
    num_keys, num_kv = k.shape[1:3]
    grouped = q.reshape(batch, block, num_kv, num_heads // num_kv, head_dim)
    scores = jnp.einsum("btkgc,bskc->bkgts", grouped, k, preferred_element_type=jnp.float32)
    key = jax.lax.iota(positions.dtype, num_keys)[None, None]
    sees = (key <= positions[:, :, None]) & active[:, :, None]
    if sliding_window is not None:
        sees &= key > positions[:, :, None] - sliding_window
    visible = sees[:, None, None]
    scale = head_dim**-0.5 if scale is None else scale
    scores = jnp.where(visible, scores * scale, -jnp.inf)
    # Written out: a query that sees nothing has a row of -inf, of which softmax makes NaN.
    largest = jnp.max(scores, axis=-1, keepdims=True)
    powers = jnp.exp(scores - jnp.where(largest > -jnp.inf, largest, 0.0))
    total = jnp.sum(powers, axis=-1, keepdims=True)
    shares = powers / jnp.where(total > 0, total, 1.0)
    return jnp.sum(shares, axis=(1, 2, 3)) / num_heads, jnp.sum(sees, axis=1, dtype=jnp.float32)
