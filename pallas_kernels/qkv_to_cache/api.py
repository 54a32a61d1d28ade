"""Public call of the qkv split, and its operation."""

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention.api import page_misfits
from pallas_kernels.op import Implementation, Operation, check_operands, not_as_cache, refuse
from pallas_kernels.qkv_to_cache import triton
from pallas_kernels.qkv_to_cache.reference import HeadNorms, qkv_to_cache_reference

Found = tuple[jax.Array, jax.Array, jax.Array]


# A choice is for qkv [B, (H + 2 K) C] and keys [L, B, K, S, C]; values are like keys.
OPERATION = Operation(
    "qkv_to_cache",
    kernels=(Implementation("triton", triton.refusal, triton.qkv_to_cache_triton),),
    reference=qkv_to_cache_reference,
    abstract=lambda qkv, keys, *_: (qkv, keys),
    shared_refusals=lambda qkv, keys: not_as_cache("qkv", qkv, keys),
)


def qkv_to_cache(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    layer: int | jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    norms: HeadNorms | None = None,
    pages: jax.Array | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Found:
    """Norms (optionally) and rotates queries and keys; writes keys and values to the cache.

    A head x of queries or keys becomes (a cos - b sin, b cos + a sin) with (a, b) the halves of x /
    rms(x) * scale, or of x (Su et al. 2021, eq. 15; Zhang and Sennrich 2019, eq. 4). Norms and
    rotations are float32; a norm is rounded before and after its scale multiplies it, as Hugging
    Face does.

    Args:
      qkv: [B, (H + 2 K) C] in bfloat16 or float16 (the reference takes float32 too): the heads of
        queries, of keys, of values.
      keys: [L, B, K, S, C] in `qkv.dtype`, whole. The kernel writes it in place where the caller's
        program may (it is donated); else XLA copies it.
      positions: int32[B], where each token goes; outside 0..S - 1 (of n pages, 0..n S - 1) it is
        dropped.
      cos: float32[B, C / 2], of each token's angles.
      pages: see `decode_attention`.

    Returns:
      Queries [B, H, C], keys and values [L, B, K, S, C], in `qkv.dtype`.
    """
    q_scales, k_scales = (norms.q_scales, norms.k_scales) if norms else (None, None)
    cache = "x[L, B, K, S, C]" if pages is None else "x[L, pages, K, S, C]"
    half = keys.shape[-1] // 2
    axes = check_operands("qkv_to_cache", {
        "qkv": (qkv, "x[B, .]"), "keys": (keys, cache), "values": (values, cache),
        "positions": (positions, "int32[B]"), "cos": (cos, "float32[B, C / 2]"),
        "sin": (sin, "float32[B, C / 2]"), "scales of q": (q_scales, "x[L, C]"),
        "scales of k": (k_scales, "x[L, C]"), "pages": (pages, "int32[B, n]"),
    }, **{"C / 2": half})  # fmt: skip
    num_heads, rest = divmod(qkv.shape[1], axes["C"])
    reasons = [] if pages is None else page_misfits(axes["S"])
    if rest or num_heads <= 2 * axes["K"] or axes["C"] % 2:
        reasons.append(f"qkv {qkv.shape} and keys {keys.shape}: C is odd, or H is not positive")
    refuse("qkv_to_cache", reasons)
    index = jnp.asarray(layer, jnp.int32)
    operands = (qkv, keys, values, index, positions, cos, sin, norms, pages)
    return OPERATION(*operands, implementation=implementation, interpret=interpret)
