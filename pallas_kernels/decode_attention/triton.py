"""The Pallas-Triton implementation: one launch, or two where kv heads do not fill the device.

A program holds the G query heads of one kv head, padded to the 16 rows of a matrix instruction, and
walks blocks of slots with the online softmax (Milakov and Gimelshein 2018; FlashAttention-2, Dao
2023, section 3.1). With splits it takes every n-th block, and a second launch adds the parts up
(Flash-Decoding, Dao et al. 2023). Keys and values are read where they lie in the cache; what may
not be seen is not read: blocks outside a sequence's slots are skipped, in the last one loads are
masked.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.decode_attention.reference import Latent
from pallas_kernels.decode_attention.tiles import BLOCK, AttentionTiles, default_tiles
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton.elements import iota, power_above, quotient, remainder

Ref = Any
Operand = jax.Array | jax.ShapeDtypeStruct
MIN_ROWS = 16  # of a matrix product
MAX_GROUP = 64  # query heads a kv head; their sums are held in registers
MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 512  # of keys that are values too
COMBINE_WARPS = 4


def refusal(q: Operand, keys: Operand, more_dim: int, target: Target) -> str | None:
    """Reason why this implementation refuses, or None."""
    reasons = [platform_refusal(target)]
    head_dim, group = q.shape[2], q.shape[1] // keys.shape[2]
    most = MAX_LATENT_DIM if more_dim else MAX_HEAD_DIM
    for name, width in (("C", head_dim), ("P", more_dim)):
        if (width or name == "C") and (width & (width - 1) or not MIN_ROWS <= width <= most):
            reasons.append(f"{name}={width} is no power of two in {MIN_ROWS}..{most}")
    if group > MAX_GROUP:
        reasons.append(f"{group} query heads a kv head, more than {MAX_GROUP}")
    return "; ".join(filter(None, reasons)) or None


def _rows(group: int) -> int:
    """Rows of a matrix product that hold the query heads of a kv head."""
    return max(MIN_ROWS, power_above(group))


def _seen(position: jax.Array, kv_length: int, window: int | None) -> tuple[Any, jax.Array]:
    """Slots first .. end of a token at `position`."""
    first = 0 if window is None else jnp.maximum(position - (window - 1), 0)
    return first, jnp.minimum(position, kv_length - 1) + 1


def _blocks(first: Any, end: jax.Array, block: int) -> tuple[Any, jax.Array]:
    """The first block with seen slots, and how many there are; 0 where no slot is seen."""
    first_block = quotient(first, block)
    count = quotient(jnp.maximum(end, 0) + (block - 1), block) - first_block
    return first_block, jnp.where(first < end, count, 0)


def _attend_body(
    q_ref: Ref, keys_ref: Ref, *refs: Ref, is_latent: bool, has_sinks: bool, has_pages: bool,
    kv_length: int, window: int | None, scale: float, tiles: AttentionTiles,
) -> None:  # fmt: skip
    """Program (b K + k, s): the heads of a kv head over every n-th block of slots from the s-th.

    `refs`: the values, or the second parts of queries and keys; layer, positions, sinks, pages,
    outputs.
    """
    more_refs, values_ref = (refs[:2], keys_ref) if is_latent else ((), refs[0])
    layer_ref, positions_ref, *out_refs = refs[1 + is_latent :]
    sinks_ref = out_refs.pop(0) if has_sinks else None
    pages_ref = out_refs.pop(0) if has_pages else None
    num_kv, page_size, head_dim = keys_ref.shape[2:]
    group, block = q_ref.shape[1] // num_kv, tiles.block
    rows = _rows(group)
    b, kv_head = quotient(pl.program_id(0), num_kv), remainder(pl.program_id(0), num_kv)
    split, layer = pl.program_id(1), layer_ref[()]
    first, end = _seen(positions_ref[b], kv_length, window)
    first_block, count = _blocks(first, end, block)
    count = quotient(jnp.maximum(count - split, 0) + (tiles.splits - 1), tiles.splits)
    columns, heads = iota(head_dim)[None, :], iota(rows)
    # Rows beyond the group repeat its last head.
    own = kv_head * group + jnp.minimum(heads, group - 1)
    q = q_ref[b, own[:, None], columns]
    more = [ref[b, own[:, None], iota(ref.shape[2])[None, :]] for ref in more_refs[:1]]
    to_log2 = scale * math.log2(math.e)

    def load(ref: Ref, page: jax.Array, slots: jax.Array, seen: jax.Array) -> jax.Array:
        width = ref.shape[4]
        mask = jnp.broadcast_to(seen[:, None], (block, width))
        where = (layer, page, kv_head, slots[:, None], iota(width)[None, :])
        return pltriton.load(ref.at[where], mask=mask, other=0.0)

    def step(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, top, total = state
        start = (first_block + split + i * tiles.splits) * block
        slots, page = start + iota(block), b
        seen = (slots >= first) & (slots < end)
        if pages_ref is not None:  # which holds the whole block
            page = pages_ref[b, quotient(start, page_size)]
            slots = remainder(start, page_size) + iota(block)
        k = load(keys_ref, page, slots, seen)
        v = k if is_latent else load(values_ref, page, slots, seen)
        products = pltriton.dot(q, k.T)
        for part in more:
            products += pltriton.dot(part, load(more_refs[1], page, slots, seen).T)
        scores = jnp.where(seen[None, :], products * to_log2, -jnp.inf)
        # Every block that is visited has a seen slot, so that the new maximum is finite.
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        acc = acc * shrink[:, None] + pltriton.dot(weights.astype(v.dtype), v)
        return acc, new_top, total * shrink + jnp.sum(weights, axis=1)

    state = (
        jnp.zeros((rows, head_dim), jnp.float32),
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    acc, top, total = jax.lax.fori_loop(jnp.int32(0), count, step, state)
    head, written = kv_head * group + heads, heads < group
    if tiles.splits == 1:
        if sinks_ref is not None:
            sink = sinks_ref[layer, own].astype(jnp.float32) * math.log2(math.e)
            new_top = jnp.maximum(top, sink)
            shrink = jnp.exp2(top - new_top)
            acc, total = acc * shrink[:, None], total * shrink + jnp.exp2(sink - new_top)
        out_ref = out_refs[0]
        mask = jnp.broadcast_to(written[:, None], acc.shape)
        out = (acc / total[:, None]).astype(out_ref.dtype)
        pltriton.store(out_ref.at[b, head[:, None], columns], out, mask=mask)
        return
    parts_ref, tops_ref, totals_ref = out_refs
    written &= count > 0  # nobody reads the part of a program without a block
    mask = jnp.broadcast_to(written[:, None], acc.shape)
    pltriton.store(parts_ref.at[b, head[:, None], split, columns], acc, mask=mask)
    pltriton.store(tops_ref.at[b, head, split], top, mask=written)
    pltriton.store(totals_ref.at[b, head, split], total, mask=written)


def _combine_body(
    parts_ref: Ref, tops_ref: Ref, totals_ref: Ref, positions_ref: Ref, *refs: Ref,
    kv_length: int, window: int | None, tiles: AttentionTiles,
) -> None:  # fmt: skip
    """Program (b, h): the sum of a head's parts, each scaled to the largest score of all."""
    b, head, out_ref = pl.program_id(0), pl.program_id(1), refs[-1]
    head_dim, parts = out_ref.shape[2], iota(tiles.splits)
    _, count = _blocks(*_seen(positions_ref[b], kv_length, window), tiles.block)
    live = parts < count
    tops = pltriton.load(tops_ref.at[b, head, parts], mask=live, other=-jnp.inf)
    totals = pltriton.load(totals_ref.at[b, head, parts], mask=live, other=0.0)
    mask = jnp.broadcast_to(live[:, None], (tiles.splits, head_dim))
    columns = iota(head_dim)
    acc = pltriton.load(parts_ref.at[b, head, parts[:, None], columns[None, :]], mask=mask, other=0)
    top = jnp.max(tops)
    if len(refs) == 1:
        scales = jnp.exp2(tops - top)
        total = jnp.sum(totals * scales)
    else:
        layer_ref, sinks_ref = refs[:2]
        sink = sinks_ref[layer_ref[()], head].astype(jnp.float32) * math.log2(math.e)
        top = jnp.maximum(top, sink)
        scales = jnp.exp2(tops - top)
        total = jnp.sum(totals * scales) + jnp.exp2(sink - top)
    out = jnp.sum(acc * scales[:, None], axis=0) / total
    out_ref[b, head, columns] = out.astype(out_ref.dtype)


def decode_attention_triton(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array | Latent,
    layer: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None = None,
    pages: jax.Array | None = None,
    *,
    kv_length: int,
    window: int | None,
    scale: float,
    target: Target,
    tiles: AttentionTiles | None = None,
) -> jax.Array:
    """Computes `api.decode_attention` by Triton; one launch of one split, else two."""
    batch, num_heads, head_dim = q.shape
    num_kv, is_latent = keys.shape[2], isinstance(values, Latent)
    others = tuple(values) if isinstance(values, Latent) else (values,)
    more_dim = others[0].shape[2] if is_latent else 0
    tiles = tiles or default_tiles(
        batch * num_kv, _rows(num_heads // num_kv), kv_length, head_dim, q.dtype.itemsize, target,
        more_dim=more_dim, page=BLOCK if pages is None else keys.shape[3],
    )  # fmt: skip
    tiles.check()
    if pages is not None and tiles.block > keys.shape[3]:
        raise ValueError(f"tiles {tiles.describe()} do not divide pages of {keys.shape[3]} slots")
    static: dict[str, Any] = {"kv_length": kv_length, "window": window, "tiles": tiles}
    width = f"{head_dim}+{more_dim}" if is_latent else str(head_dim)
    out_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    part = (batch, num_heads, tiles.splits)
    parts = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*part, head_dim), part, part)]
    attend = launch.triton_call(
        functools.partial(
            _attend_body,
            is_latent=is_latent,
            has_sinks=sinks is not None,
            has_pages=pages is not None,
            scale=scale,
            **static,
        ),
        name=f"decode_attention_{q.dtype.name}_{num_heads // num_kv}x{width}_{tiles.describe()}"
        + "_pages" * (pages is not None),
        grid=(batch * num_kv, tiles.splits),
        out_shape=[out_shape] if tiles.splits == 1 else parts,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=target.simulated,
    )
    more = [operand for operand in (sinks, pages) if operand is not None]
    found = attend(q, keys, *others, layer, positions, *more)
    if tiles.splits == 1:
        return found[0]
    return launch.triton_call(
        functools.partial(_combine_body, **static),
        name=f"decode_attention_combine_{q.dtype.name}_{head_dim}x{tiles.splits}",
        grid=(batch, num_heads),
        out_shape=out_shape,
        num_warps=COMBINE_WARPS,
        num_stages=1,
        interpret=target.simulated,
    )(*found, positions, *(() if sinks is None else (layer, sinks)))
