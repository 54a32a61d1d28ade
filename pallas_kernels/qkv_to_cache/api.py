"""Public call of the qkv split, and its operation."""

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention.api import page_misfits
from pallas_kernels.op import Implementation, Operation, not_half
from pallas_kernels.qkv_to_cache import triton
from pallas_kernels.qkv_to_cache.reference import HeadNorms, qkv_to_cache_reference

Operand = jax.Array | jax.ShapeDtypeStruct
Found = tuple[jax.Array, jax.Array, jax.Array]


def _shared_refusals(qkv: Operand, keys: Operand) -> list[str]:
    reasons = not_half(("qkv is", qkv.dtype), ("the cache is", keys.dtype))
    if not reasons and qkv.dtype != keys.dtype:
        reasons.append(f"qkv is {qkv.dtype}, the cache {keys.dtype}")
    return reasons


# A choice is for qkv [B, (H + 2 K) C] and keys [L, B, K, S, C]; values are like keys.
OPERATION = Operation(
    "qkv_to_cache",
    kernels=(Implementation("triton", triton.refusal, triton.qkv_to_cache_triton),),
    reference=qkv_to_cache_reference,
    abstract=lambda qkv, keys, *_: (qkv, keys),
    shared_refusals=_shared_refusals,
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
      layer: int or int32[] in 0..L - 1; an array lets all layers share a trace.
      positions: int32[B], where each token goes; outside 0..S - 1 (of n pages, 0..n S - 1) it is
        dropped.
      cos: float32[B, C / 2], of each token's angles.
      pages: see `decode_attention`.

    Returns:
      Queries [B, H, C], keys and values [L, B, K, S, C], in `qkv.dtype`.

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    _check(qkv, keys, values, positions, cos, sin, norms, pages)
    index = jnp.asarray(layer, jnp.int32)
    operands = (qkv, keys, values, index, positions, cos, sin, norms, pages)
    return OPERATION(*operands, implementation=implementation, interpret=interpret)


def _check(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    norms: HeadNorms | None,
    pages: jax.Array | None,
) -> None:
    if qkv.ndim != 2 or keys.ndim != 5:
        raise ValueError(f"qkv is {qkv.shape}, keys {keys.shape}, not [B, .], [L, B, K, S, C]")
    num_layers, batch, num_kv, length, head_dim = keys.shape
    num_heads, rest = divmod(qkv.shape[1], head_dim)
    reasons = []
    if pages is not None:
        batch = len(qkv)
        reasons += page_misfits(pages, batch, length)
    if len(qkv) != batch or rest or num_heads <= 2 * num_kv or head_dim % 2:
        reasons.append(f"qkv {qkv.shape} and keys {keys.shape}: B or C differ, H is not positive")
    if (keys.shape, keys.dtype) != (values.shape, values.dtype):
        reasons.append(f"keys {keys.dtype}{keys.shape}, values {values.dtype}{values.shape} differ")
    if positions.shape != (batch,) or positions.dtype != jnp.int32:
        reasons.append(f"positions are {positions.dtype}{positions.shape}, not int32[{batch}]")
    half = (batch, head_dim // 2)
    reasons += [
        f"{name} is {of.dtype}{of.shape}, not float32{half}"
        for name, of in (("cos", cos), ("sin", sin))
        if of.shape != half or of.dtype != jnp.float32
    ]
    for name, of in (("q", norms.q_scales), ("k", norms.k_scales)) if norms else ():
        if of.shape != (num_layers, head_dim) or of.dtype != qkv.dtype:
            wanted = f"{qkv.dtype}{(num_layers, head_dim)}"
            reasons.append(f"scales of {name} are {of.dtype}{of.shape}, not {wanted}")
    if reasons:
        raise ValueError("qkv_to_cache: " + "; ".join(reasons))
