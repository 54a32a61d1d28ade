"""Public call of decode attention, and its operation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention import triton
from pallas_kernels.decode_attention.reference import Latent, decode_attention_reference
from pallas_kernels.decode_attention.tiles import MIN_BLOCK, AttentionTiles
from pallas_kernels.op import Implementation, Operation, not_half

Operand = jax.Array | jax.ShapeDtypeStruct


def _abstract(
    q: jax.Array, keys: jax.Array, values: jax.Array | Latent, *_: Any, **__: Any
) -> tuple[jax.Array, jax.Array, int]:
    return q, keys, values.q.shape[2] if isinstance(values, Latent) else 0


def _shared_refusals(q: Operand, keys: Operand, more_dim: int) -> list[str]:
    del more_dim
    reasons = not_half(("q is", q.dtype), ("the cache is", keys.dtype))
    if not reasons and q.dtype != keys.dtype:
        reasons.append(f"q is {q.dtype}, the cache {keys.dtype}")
    return reasons


# A choice is for q [B, H, C], keys [L, B, K, S, C], whose values are like them, and P of `Latent`;
# P is 0 where there are values.
OPERATION = Operation(
    "decode_attention",
    kernels=(Implementation("triton", triton.refusal, triton.decode_attention_triton),),
    reference=decode_attention_reference,
    abstract=_abstract,
    shared_refusals=_shared_refusals,
)


def decode_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array | Latent,
    *,
    layer: int | jax.Array,
    positions: jax.Array,
    kv_length: int,
    window: int | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    pages: jax.Array | None = None,
    implementation: str | None = None,
    tiles: AttentionTiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q k / sqrt(C)) v over slots 0..position (Vaswani et al. 2017, eq. 1), grouped heads.

    Query head h reads kv head h K / H. Slot s holds position s; the newest token's keys and values
    are in the cache already. Scores, softmax and sums are float32; the kernel rounds the weights to
    the cache's dtype for their product with the values, as FlashAttention does. The result is
    the same bits every time.

    Args:
      q: [B, H, C] in bfloat16 or float16 (the reference takes float32 too).
      keys: [L, B, K, S, C], whole: it is indexed inside the kernel, nothing is copied. Slots beyond
        a position, or before its window, are never read: they may hold anything.
      values: like keys; or a `Latent`, whose scores are added and whose values are the keys.
      layer: int or int32[] in 0..L - 1; an array lets all layers share a trace.
      positions: int32[B], the newest token's; one of S or more sees all `kv_length` slots that the
        window leaves, and where that is none the result is NaN.
      kv_length: slots looked at, at most S (of n pages, n S); static.
      window: tokens that a query sees, itself included; None: all. Static.
      scale: factor on the scores; None: 1 / sqrt(C), with a latent 1 / sqrt(C + P). Static.
      sinks: [L, H], a logit a head that joins the softmax and attends to nothing; None: none.
      pages: int32[B, n]: slot s is slot s % S of page `pages[b, s // S]` of keys and values, whose
        second axis is the pages'; None: it is the sequences'.

    Returns:
      [B, H, C] in `q.dtype`.

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    _check(q, keys, values, positions, kv_length, window, pages)
    more_dim = values.q.shape[2] if isinstance(values, Latent) else 0
    scale = float(q.shape[2] + more_dim) ** -0.5 if scale is None else scale
    if sinks is not None and sinks.shape != (keys.shape[0], q.shape[1]):
        expected = [keys.shape[0], q.shape[1]]
        raise ValueError(f"decode_attention: sinks are {list(sinks.shape)}, expected {expected}")
    return OPERATION(
        q, keys, values, jnp.asarray(layer, jnp.int32), positions, sinks, pages,
        kv_length=kv_length, window=window, scale=scale, implementation=implementation,
        tiles=tiles, interpret=interpret,
    )  # fmt: skip


def _check(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array | Latent,
    positions: jax.Array,
    kv_length: int,
    window: int | None,
    pages: jax.Array | None,
) -> None:
    if q.ndim != 3 or keys.ndim != 5:
        raise ValueError(f"q is {q.shape} and keys {keys.shape}, not [B, H, C], [L, B, K, S, C]")
    batch, num_heads, head_dim = q.shape
    _, cache_batch, num_kv, length, cache_dim = keys.shape
    reasons = []
    if pages is not None:
        reasons += page_misfits(pages, batch, length)
        cache_batch, length = batch, length * pages.shape[-1]
    if (cache_batch, cache_dim) != (batch, head_dim) or num_heads % num_kv:
        reasons.append(f"q is {q.shape}, keys {keys.shape}: B or C differ, or K does not divide H")
    if isinstance(values, Latent):
        reasons += _latent_misfits(q, keys, values)
    elif (keys.shape, keys.dtype) != (values.shape, values.dtype):
        reasons.append(f"keys {keys.dtype}{keys.shape}, values {values.dtype}{values.shape} differ")
    if positions.shape != (batch,) or positions.dtype != jnp.int32:
        reasons.append(f"positions are {positions.dtype}{positions.shape}, not int32[{batch}]")
    if not 1 <= kv_length <= length:
        reasons.append(f"kv_length {kv_length} is not in 1..{length}")
    if window is not None and window < 1:
        reasons.append(f"window {window} is not positive")
    if reasons:
        raise ValueError("decode_attention: " + "; ".join(reasons))


def page_misfits(pages: jax.Array, batch: int, size: int) -> list[str]:
    """Reasons why a table does not name pages of `size` slots for so many sequences."""
    reasons = []
    if pages.ndim != 2 or len(pages) != batch or pages.dtype != jnp.int32:
        reasons.append(f"pages are {pages.dtype}{pages.shape}, not int32[{batch}, n]")
    if size < MIN_BLOCK or size & (size - 1):
        reasons.append(f"pages of {size} slots: no power of two of at least {MIN_BLOCK}")
    return reasons


def _latent_misfits(q: jax.Array, keys: jax.Array, of: Latent) -> list[str]:
    width = of.q.shape[-1]
    fits = of.q.shape == (*q.shape[:2], width) and of.q.dtype == q.dtype
    if fits and of.keys.shape == (*keys.shape[:4], width) and of.keys.dtype == keys.dtype:
        return []
    return [
        f"latent parts {of.q.dtype}{of.q.shape} and {of.keys.dtype}{of.keys.shape} do not go with "
        f"q {q.dtype}{q.shape} and keys {keys.dtype}{keys.shape}"
    ]
