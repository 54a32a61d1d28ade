"""Pallas-Triton implementation: one launch, a warp per head.

All programs do the same, and which of queries, keys and values they hold is a mask of their stores:
a few values a thread cost less than branches would.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.qkv_to_cache.reference import HeadNorms
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton.elements import iota, quotient, remainder

Ref = Any
Operand = jax.Array | jax.ShapeDtypeStruct
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
NUM_WARPS = 1


def refusal(qkv: Operand, keys: Operand, target: Target) -> str | None:
    """Reason why this implementation refuses, or None."""
    del qkv
    reasons, head_dim = [platform_refusal(target)], keys.shape[4]
    if head_dim & (head_dim - 1) or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        reasons.append(f"C={head_dim} is no power of two in {MIN_HEAD_DIM}..{MAX_HEAD_DIM}")
    return "; ".join(filter(None, reasons)) or None


def _body(
    layer_ref: Ref, positions_ref: Ref, qkv_ref: Ref, cos_ref: Ref, sin_ref: Ref, *refs: Ref,
    eps: float | None, has_pages: bool,
) -> None:  # fmt: skip
    """Program (b, h) runs head h of sequence b; `refs`: scales, pages, the cache, the outputs."""
    q_ref, keys_ref, values_ref = refs[-3:]
    num_heads, (num_kv, length, head_dim) = q_ref.shape[1], keys_ref.shape[2:]
    b, head, half = pl.program_id(0), pl.program_id(1), head_dim // 2
    columns, layer, position = iota(half), layer_ref[()], positions_ref[b]
    parts = [qkv_ref[b, head * head_dim + start + columns] for start in (0, half)]
    is_q, is_v = head < num_heads, head >= num_heads + num_kv
    first, second = (part.astype(jnp.float32) for part in parts)
    if eps is not None:
        inverse_rms = jax.lax.rsqrt(jnp.sum(first * first + second * second) / head_dim + eps)

        def normed(x: jax.Array, start: int) -> jax.Array:
            of_q, of_k = (ref[layer, start + columns].astype(jnp.float32) for ref in refs[:2])
            rounded = (x * inverse_rms).astype(qkv_ref.dtype).astype(jnp.float32)
            return (rounded * jnp.where(is_q, of_q, of_k)).astype(qkv_ref.dtype).astype(jnp.float32)

        first, second = normed(first, 0), normed(second, half)
    cos, sin = cos_ref[b, columns], sin_ref[b, columns]
    turned = (first * cos - second * sin, second * cos + first * sin)
    pages_ref = refs[-6] if has_pages else None
    num_slots = length * (1 if pages_ref is None else pages_ref.shape[1])
    fits = (position >= 0) & (position < num_slots)
    slot, page = jnp.clip(position, 0, num_slots - 1), b  # masked addresses stay in bounds
    if pages_ref is not None:
        page, slot = pages_ref[b, quotient(slot, length)], remainder(slot, length)
    q_head = jnp.minimum(head, num_heads - 1)
    k_head = jnp.clip(head - num_heads, 0, num_kv - 1)
    v_head = jnp.maximum(head - num_heads - num_kv, 0)
    for start, plain, new in zip((0, half), parts, turned, strict=True):
        new, at = new.astype(q_ref.dtype), start + columns
        for ref, where, value, written in (
            (q_ref, (b, q_head, at), new, is_q),
            (keys_ref, (layer, page, k_head, slot, at), new, fits & ~is_q & ~is_v),
            (values_ref, (layer, page, v_head, slot, at), plain, fits & is_v),
        ):
            pltriton.store(ref.at[where], value, mask=jnp.broadcast_to(written, (half,)))


def qkv_to_cache_triton(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    norms: HeadNorms | None,
    pages: jax.Array | None = None,
    *,
    target: Target,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `api.qkv_to_cache` by Triton; one launch."""
    batch, num_kv, head_dim = len(qkv), keys.shape[2], keys.shape[4]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv
    scales = () if norms is None else (norms.q_scales, norms.k_scales)
    operands = (layer, positions, qkv, cos, sin, *scales, *(() if pages is None else (pages,)))
    cache = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    q, keys, values = launch.triton_call(
        functools.partial(_body, eps=norms.eps if norms else None, has_pages=pages is not None),
        name=f"qkv_to_cache_{qkv.dtype.name}_{num_heads}_{num_kv}x{head_dim}{'n' * bool(norms)}"
        + "_pages" * (pages is not None),
        grid=(batch, num_heads + 2 * num_kv),
        out_shape=[jax.ShapeDtypeStruct((batch, num_heads, head_dim), qkv.dtype), cache, cache],
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=target.simulated,
        aliases={len(operands): 1, len(operands) + 1: 2},
    )(*operands, keys, values)
    return q, keys, values
