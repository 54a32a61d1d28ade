"""Public call of decode attention, and its operation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention import triton
from pallas_kernels.decode_attention.reference import Latent, decode_attention_reference
from pallas_kernels.decode_attention.tiles import MIN_BLOCK, AttentionTiles
from pallas_kernels.op import Implementation, Operation, check_operands, not_as_cache, refuse


def _abstract(
    q: jax.Array, keys: jax.Array, values: jax.Array | Latent, *_: Any, **__: Any
) -> tuple[jax.Array, jax.Array, int]:
    return q, keys, values.q.shape[2] if isinstance(values, Latent) else 0


# A choice is for q [B, H, C], keys [L, B, K, S, C], whose values are like them, and P of `Latent`;
# P is 0 where there are values.
OPERATION = Operation(
    "decode_attention",
    kernels=(Implementation("triton", triton.refusal, triton.decode_attention_triton),),
    reference=decode_attention_reference,
    abstract=_abstract,
    shared_refusals=lambda q, keys, more_dim: not_as_cache("q", q, keys),
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
    """
    _check(q, keys, values, positions, kv_length, window, sinks, pages)
    more_dim = values.q.shape[2] if isinstance(values, Latent) else 0
    scale = float(q.shape[2] + more_dim) ** -0.5 if scale is None else scale
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
    sinks: jax.Array | None,
    pages: jax.Array | None,
) -> None:
    # The sequences' own slots, or pages of all of them.
    cache = "kv[L, B, K, S, C]" if pages is None else "kv[L, pages, K, S, C]"
    if isinstance(values, Latent):
        latent = cache.replace("C]", "P]")
        others = {"latent q": (values.q, "q[B, H, P]"), "latent keys": (values.keys, latent)}
    else:
        others = {"values": (values, cache)}
    axes = check_operands("decode_attention", {
        "q": (q, "q[B, H, C]"), "keys": (keys, cache), "positions": (positions, "int32[B]"),
        "sinks": (sinks, ".[L, H]"), "pages": (pages, "int32[B, n]"), **others,
    })  # fmt: skip
    reasons = [] if pages is None else page_misfits(axes["S"])
    length = axes["S"] * axes.get("n", 1)
    if axes["H"] % axes["K"]:
        reasons.append(f"q is {q.shape}, keys {keys.shape}: K does not divide H")
    if not 1 <= kv_length <= length:
        reasons.append(f"kv_length {kv_length} is not in 1..{length}")
    if window is not None and window < 1:
        reasons.append(f"window {window} is not positive")
    refuse("decode_attention", reasons)


def page_misfits(size: int) -> list[str]:
    """Reasons why pages cannot have `size` slots."""
    if size < MIN_BLOCK or size & (size - 1):
        return [f"pages of {size} slots: no power of two of at least {MIN_BLOCK}"]
    return []
