"""The Pallas-Triton implementation: one launch, a program a tile of queries of a kv head.

A row of a tile is a token and one of the G query heads of the kv head, so that all heads of the
group share what is read, and a tile spans few positions. A program walks blocks of slots with the
online softmax (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023, section 3.1): first the
blocks in which windows begin, then those that every row sees whole, without a mask, then those with
the rows' own positions. Blocks that no row sees are skipped. Keys and values are read where they
lie in the cache.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.chunk_attention.tiles import ChunkTiles, default_tiles
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton.elements import iota, quotient, remainder

Ref = Any
Operand = jax.Array | jax.ShapeDtypeStruct
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
# Score of a slot that a row does not see. It is finite, because a row may see nothing of a block
# that others need: its weights there are then 1, and the first slot that it sees shrinks them to 0.
UNSEEN = -1e30


def refusal(q: Operand, keys: Operand, value_dim: int, target: Target) -> str | None:
    """Reason why this implementation refuses, or None."""
    del keys, value_dim
    reasons, head_dim = [platform_refusal(target)], q.shape[3]
    if head_dim & (head_dim - 1) or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        reasons.append(f"C={head_dim} is no power of two in {MIN_HEAD_DIM}..{MAX_HEAD_DIM}")
    return "; ".join(filter(None, reasons)) or None


def _clipped(x: Any, low: Any, high: Any) -> Any:
    return jnp.minimum(jnp.maximum(x, low), high)


def _body(
    q_ref: Ref, keys_ref: Ref, values_ref: Ref, layer_ref: Ref, starts_ref: Ref, lengths_ref: Ref,
    *refs: Ref, kv_length: int, window: int | None, scale: float, tiles: ChunkTiles,
) -> None:  # fmt: skip
    """Program (i, b K + k): the i-th tile from the end, of a kv head of a sequence.

    `refs`: sinks, if there are any; the output.
    """
    *sinks, out_ref = refs
    num_kv, head_dim = keys_ref.shape[2], keys_ref.shape[4]
    length, group = q_ref.shape[1], q_ref.shape[2] // num_kv
    rows, block = tiles.rows, tiles.block
    b, kv_head = quotient(pl.program_id(1), num_kv), remainder(pl.program_id(1), num_kv)
    layer, start, live = layer_ref[()], starts_ref[b], lengths_ref[b]
    # Later tokens see more slots: what takes longest begins first.
    first_row = (pl.num_programs(0) - 1 - pl.program_id(0)) * rows
    row = first_row + iota(rows)
    token = quotient(row, group)
    head = kv_head * group + row - token * group
    # Padding repeats the last token; what comes of it is not kept.
    last_live = jnp.maximum(live - 1, 0)
    own = jnp.minimum(token, last_live)
    columns = iota(head_dim)[None, :]
    q = q_ref[b, own[:, None], head[:, None], columns]
    position = start + own

    first = start + quotient(first_row, group)
    last = start + jnp.minimum(quotient(first_row + (rows - 1), group), last_live)
    begin = jnp.int32(0) if window is None else jnp.maximum(first - (window - 1), 0)
    end = jnp.minimum(last + 1, kv_length)
    lowest = quotient(begin, block)
    highest = jnp.where(first < start + live, quotient(end + (block - 1), block), lowest)
    whole_end = _clipped(quotient(jnp.minimum(first + 1, end), block), lowest, highest)
    whole = lowest
    if window is not None:
        whole = quotient(jnp.maximum(last - (window - 1), 0) + (block - 1), block)
        whole = _clipped(whole, lowest, whole_end)
    to_log2 = scale * math.log2(math.e)

    def load(ref: Ref, slots: jax.Array, seen: jax.Array | None) -> jax.Array:
        where = ref.at[layer, b, kv_head, slots[:, None], columns]
        if seen is None:
            return pltriton.load(where)
        return pltriton.load(where, mask=jnp.broadcast_to(seen, (block, head_dim)), other=0.0)

    def step(i: jax.Array, state: tuple[jax.Array, ...], is_masked: bool) -> tuple[jax.Array, ...]:
        acc, top, total = state
        slots = i * block + iota(block)
        read = ((slots >= begin) & (slots < end))[:, None] if is_masked else None
        products = pltriton.dot(q, load(keys_ref, slots, read).T)
        if is_masked:
            seen = slots[None, :] <= jnp.minimum(position, kv_length - 1)[:, None]
            if window is not None:
                seen &= slots[None, :] > (position - window)[:, None]
            scores = jnp.where(seen, products * to_log2, UNSEEN)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores - new_top[:, None])
        else:  # the factor becomes part of one fused operation
            new_top = jnp.maximum(top, jnp.max(products, axis=1) * to_log2)
            weights = jnp.exp2(products * to_log2 - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        v = load(values_ref, slots, read)
        acc = acc * shrink[:, None] + pltriton.dot(weights.astype(v.dtype), v)
        return acc, new_top, total * shrink + jnp.sum(weights, axis=1)

    # A sink is a score that was seen before, of a slot whose value is zero.
    top, total = jnp.full((rows,), -jnp.inf, jnp.float32), jnp.zeros((rows,), jnp.float32)
    if sinks:
        top = sinks[0][layer, head].astype(jnp.float32) * math.log2(math.e)
        total = jnp.ones_like(total)
    state = (jnp.zeros((rows, head_dim), jnp.float32), top, total)
    masked: Callable[..., Any] = functools.partial(step, is_masked=True)
    if window is not None:
        state = jax.lax.fori_loop(lowest, whole, masked, state)
    state = jax.lax.fori_loop(whole, whole_end, functools.partial(step, is_masked=False), state)
    acc, _, total = jax.lax.fori_loop(whole_end, highest, masked, state)
    out = jnp.where((token < live)[:, None], acc / total[:, None], 0.0).astype(out_ref.dtype)
    written = jnp.broadcast_to((token < length)[:, None], out.shape)
    pltriton.store(out_ref.at[b, token[:, None], head[:, None], columns], out, mask=written)


def chunk_attention_triton(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None = None,
    *,
    kv_length: int,
    window: int | None,
    scale: float,
    target: Target,
    tiles: ChunkTiles | None = None,
) -> jax.Array:
    """Computes `api.chunk_attention` by Triton, in one launch."""
    batch, length, num_heads, head_dim = q.shape
    num_kv = keys.shape[2]
    num_rows = length * (num_heads // num_kv)
    tiles = tiles or default_tiles(num_rows, head_dim, q.dtype.itemsize, target)
    tiles.check()
    return launch.triton_call(
        functools.partial(
            _body, kv_length=kv_length, window=window, scale=scale, tiles=tiles
        ),
        name=f"chunk_attention_{q.dtype.name}_{num_heads // num_kv}x{head_dim}_{tiles.describe()}",
        grid=(-(-num_rows // tiles.rows), batch * num_kv),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=target.simulated,
    )(q, keys, values, layer, starts, lengths, *(() if sinks is None else (sinks,)))  # fmt: skip
