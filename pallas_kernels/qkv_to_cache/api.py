"""The public call: which implementation runs, and why one is refused."""

import jax
import jax.numpy as jnp

from pallas_kernels.qkv_to_cache import triton
from pallas_kernels.qkv_to_cache.reference import HeadNorms, qkv_to_cache_reference
from pallas_kernels.target import SIMULATED, Choice, Target, current_target

Operand = jax.Array | jax.ShapeDtypeStruct
Found = tuple[jax.Array, jax.Array, jax.Array]
IMPLEMENTATIONS = ("triton", "reference")  # in order of preference; the reference refuses nothing


def refusal(
    implementation: str, qkv: Operand, keys: Operand, target: Target | None = None
) -> str | None:
    """Why an implementation cannot serve operands of these shapes on a target, or None.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      qkv: [B, (H + 2 K) C].
      keys: [L, B, K, S, C]; values are like them.
      target: None for the default device.
    """
    if implementation == "reference":
        return None
    reasons = [
        f"{name} {of.dtype}, not bfloat16 or float16"
        for name, of in (("qkv is", qkv), ("the cache is", keys))
        if of.dtype not in (jnp.bfloat16, jnp.float16)
    ]
    if not reasons and qkv.dtype != keys.dtype:
        reasons.append(f"qkv is {qkv.dtype}, the cache {keys.dtype}")
    if found := triton.refusal(keys, target or current_target()):
        reasons.append(found)
    return "; ".join(reasons) or None


def choose(qkv: Operand, keys: Operand, target: Target | None = None) -> Choice:
    """The kernel, or the reference and why the kernel refuses."""
    reason = refusal("triton", qkv, keys, target)
    return Choice("triton", {}) if reason is None else Choice("reference", {"triton": reason})


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
    implementation: str | None = None,
    interpret: bool = False,
) -> Found:
    """Queries and keys normed (if at all) and rotated; keys and values written to the cache.

    A head x of queries or keys becomes (a cos - b sin, b cos + a sin) with (a, b) the halves of
    x / rms(x) * scale, or of x (Su et al. 2021, eq. 15; Zhang and Sennrich 2019, eq. 4).
    Norms and turns are float32; a norm is rounded before and after its scale multiplies it, as
    Hugging Face does.

    Args:
      qkv: [B, (H + 2 K) C] in bfloat16 or float16 (the reference takes float32 too): the heads of
        queries, of keys, of values.
      keys: [L, B, K, S, C] in `qkv.dtype`, whole. The kernel writes it in place where the caller's
        program may (it is donated); else XLA copies it.
      values: like keys.
      layer: int or int32[] in 0..L - 1; an array lets all layers share a trace.
      positions: int32[B], where each token goes; outside 0..S - 1 it is dropped.
      cos: float32[B, C / 2], of each token's angles.
      sin: like cos.
      norms: of heads; None for none.
      implementation: "triton" or "reference"; None for `choose`'s.
      interpret: runs the kernel on the CPU, for tests.

    Returns:
      Queries [B, H, C], keys and values [L, B, K, S, C], in `qkv.dtype`.

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    _check(qkv, keys, values, positions, cos, sin, norms)
    chosen = implementation or choose(qkv, keys).implementation
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {chosen!r} is none of {', '.join(IMPLEMENTATIONS)}")
    index = jnp.asarray(layer, jnp.int32)
    operands = (qkv, keys, values, index, positions, cos, sin, norms)
    if chosen == "reference":
        return qkv_to_cache_reference(*operands)
    target = SIMULATED if interpret else current_target()
    if reason := refusal(chosen, qkv, keys, target):
        raise ValueError(f"qkv_to_cache by {chosen} refuses: {reason}")
    return triton.qkv_to_cache_triton(*operands, interpret=interpret)


def _check(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    norms: HeadNorms | None,
) -> None:
    if qkv.ndim != 2 or keys.ndim != 5:
        raise ValueError(f"qkv is {qkv.shape}, keys {keys.shape}, not [B, .], [L, B, K, S, C]")
    num_layers, batch, num_kv, _, head_dim = keys.shape
    num_heads, rest = divmod(qkv.shape[1], head_dim)
    reasons = []
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
