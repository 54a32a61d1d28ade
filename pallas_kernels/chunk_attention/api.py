"""Public call of chunk attention, and its operation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chunk_attention import mosaic, triton
from pallas_kernels.chunk_attention.reference import chunk_attention_reference
from pallas_kernels.chunk_attention.tiles import ChunkTiles
from pallas_kernels.op import Implementation, Operation, check_operands, not_as_cache, refuse

Operand = jax.Array | jax.ShapeDtypeStruct


def _abstract(
    q: jax.Array, keys: jax.Array, values: jax.Array, *_: Any, **__: Any
) -> tuple[jax.Array, jax.Array, int]:
    return q, keys, values.shape[-1]


def _shared_refusals(q: Operand, keys: Operand, value_dim: int) -> list[str]:
    reasons = not_as_cache("q", q, keys)
    if keys.shape[4] != value_dim:
        reasons.append(f"keys of {keys.shape[4]} and values of {value_dim} numbers, as of latents")
    return reasons


# A choice is for q [B, T, H, C], keys [L, B, K, S, C] and the width of values.
OPERATION = Operation(
    "chunk_attention",
    kernels=(
        Implementation("mosaic", mosaic.refusal, mosaic.chunk_attention_mosaic),
        Implementation("triton", triton.refusal, triton.chunk_attention_triton),
    ),
    reference=chunk_attention_reference,
    abstract=_abstract,
    shared_refusals=_shared_refusals,
)


def chunk_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    layer: int | jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    kv_length: int,
    window: int | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
    tiles: ChunkTiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q k / sqrt(C)) v over slots 0..position (Vaswani et al. 2017, eq. 1), grouped heads.

    Query head h reads kv head h K / H. Slot s holds position s; the chunk's own keys and values are
    in the cache already. Token t of a sequence stands at position `starts` + t. Scores, softmax and
    sums are float32; the kernel rounds the weights to the cache's dtype for their product with the
    values, as FlashAttention does, and takes no memory for scores. The result is the same bits
    every time.

    Args:
      q: [B, T, H, C] in bfloat16 or float16 (the reference takes float32 too).
      keys: [L, B, K, S, C], whole: it is indexed inside the kernel, nothing is copied. Slots beyond
        a sequence's last token, or before the first one's window, may hold any finite number;
        Triton never reads them, Mosaic multiplies those in a block's rest by 0.
      starts: int32[B], positions of the chunk's first tokens.
      lengths: int32[B], tokens of each sequence in the chunk, 0..T; others are padding, and what
        they attend to is 0. `starts + lengths` are at most `kv_length`.
      kv_length: slots looked at, at most S; static. The kernel's time does not depend on it.
      window: tokens that a query sees, itself included; None: all. Static.
      scale: positive factor on the scores; None: 1 / sqrt(C). Static.
      sinks: [L, H], logits that join each head's softmax and attend to nothing; None: there are
        none.

    Returns:
      [B, T, H, C] in `q.dtype`.
    """
    scale = float(q.shape[-1]) ** -0.5 if scale is None else scale
    axes = check_operands("chunk_attention", {
        "q": (q, "q[B, T, H, C]"), "keys": (keys, "kv[L, B, K, S, C]"),
        "values": (values, "kv[L, B, K, S, C]"), "starts": (starts, "int32[B]"),
        "lengths": (lengths, "int32[B]"), "sinks": (sinks, ".[L, H]"),
    })  # fmt: skip
    reasons = []
    if axes["H"] % axes["K"]:
        reasons.append(f"q is {q.shape}, keys {keys.shape}: K does not divide H")
    if not 1 <= kv_length <= axes["S"]:
        reasons.append(f"kv_length {kv_length} is not in 1..{axes['S']}")
    if window is not None and window < 1:
        reasons.append(f"window {window} is not positive")
    if scale <= 0:
        reasons.append(f"scale {scale} is not positive")
    refuse("chunk_attention", reasons)
    return OPERATION(
        q, keys, values, jnp.asarray(layer, jnp.int32), starts, lengths, sinks,
        kv_length=kv_length, window=window, scale=scale, implementation=implementation,
        tiles=tiles, interpret=interpret,
    )  # fmt: skip
