"""Contract of the qkv split into queries and cache: cases, THE check.

Expectations are float64 numpy; unwritten slots must keep their bits.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

UNIT_ROUNDOFF = 2.0**-24  # of float32
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # half the distance from 1 to the next number
DTYPES = tuple(ROUNDOFF)


class Shape(NamedTuple):
    """Axes of the operation, and whether heads are normed."""

    batch: int
    num_heads: int
    num_kv: int
    head_dim: int
    length: int  # S
    has_norms: bool = True
    eps: float = 1e-6
    layers: int = 2


SHAPES = {
    "qwen3_30b_1": Shape(1, 32, 4, 128, 20),
    "qwen3_30b_5": Shape(5, 32, 4, 128, 9),
    "mixtral_1": Shape(1, 32, 8, 128, 20, has_norms=False),
    "mixtral_3": Shape(3, 32, 8, 128, 7, has_norms=False, layers=3),
    "demo": Shape(2, 4, 2, 64, 30),
    "group_of_one": Shape(4, 3, 3, 16, 5, eps=1e-2),
    "one_kv": Shape(3, 5, 1, 32, 6, has_norms=False, layers=1),
    "widest": Shape(2, 2, 1, 256, 3),
}
GPU_SHAPES = SHAPES | {
    "qwen3_30b_64": Shape(64, 32, 4, 128, 300, layers=3),
    "mixtral_64": Shape(64, 32, 8, 128, 100, has_norms=False),
}


class Operands(NamedTuple):
    """Arguments of `qkv_to_cache`, on the host."""

    qkv: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    layer: int
    positions: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    q_scales: np.ndarray | None
    k_scales: np.ndarray | None


def random_operands(shape: Shape, dtype: str, seed: int) -> Operands:
    """Operands of the last layer; others' scales are NaN, two of many rows miss the cache."""
    rng = np.random.default_rng(seed)
    s, kind = shape, jnp.dtype(dtype)
    size = (s.layers, s.batch, s.num_kv, s.length, s.head_dim)
    keys, values = (rng.standard_normal(size, dtype=np.float32).astype(kind) for _ in range(2))
    qkv = 3 * rng.standard_normal((s.batch, (s.num_heads + 2 * s.num_kv) * s.head_dim))
    positions = rng.integers(0, s.length, s.batch).astype(np.int32)
    if s.batch > 2:
        positions[:3] = 0, s.length, -1
    angles = rng.uniform(0, 7, (s.batch, s.head_dim // 2)).astype(np.float32)
    scales: list[Any] = [None, None]
    if s.has_norms:
        scales = [np.full((s.layers, s.head_dim), np.nan, kind) for _ in range(2)]
        for of in scales:
            of[-1] = 1 + 0.5 * rng.standard_normal(s.head_dim)
    return Operands(
        qkv.astype(kind), keys, values, s.layers - 1, positions, np.cos(angles), np.sin(angles),
        *scales,
    )  # fmt: skip


def expected_and_tolerance(
    x: np.ndarray, scales: np.ndarray | None, of: Operands, shape: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """float64[B, h, C] of the turned heads x, and how far a right value may be from it.

    A norm is float32 and rounded twice to the dtype, a turn is float32 and rounded once.
    """
    short, least = ROUNDOFF[of.qkv.dtype.name], float(jnp.finfo(of.qkv.dtype).smallest_subnormal)
    x = x.astype(np.float64)
    share = np.float64(0)
    if scales is not None:
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        x = x / np.sqrt(mean_square + shape.eps) * scales[of.layer].astype(np.float64)
        share = (1 + short) ** 2 * (1 + UNIT_ROUNDOFF * (np.log2(2 * shape.head_dim) + 12)) - 1
    first, second = np.split(x, 2, axis=-1)
    cos, sin = (angle.astype(np.float64)[:, None] for angle in (of.cos, of.sin))
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    first, second, cos, sin = (np.abs(part) for part in (first, second, cos, sin))
    terms = np.concatenate([first * cos + second * sin, second * cos + first * sin], axis=-1)
    tolerance = terms * (share + 3 * UNIT_ROUNDOFF) + 4 * least
    return expected, tolerance + short * (np.abs(expected) + tolerance)


def violation(found: Any, of: Operands, shape: Shape) -> str | None:
    """THE check: why `found` is not the operation's value, or None."""
    s = shape
    sizes = ((s.batch, s.num_heads, s.head_dim), of.keys.shape, of.keys.shape)
    for array, size in zip(found, sizes, strict=True):
        if array.shape != size or array.dtype != of.qkv.dtype:
            return f"{array.dtype}{array.shape} in place of {of.qkv.dtype}{size}"
    q, keys, values = (np.asarray(array) for array in found)
    heads = of.qkv.reshape(s.batch, -1, s.head_dim)
    of_q, of_k, of_v = np.split(heads, [s.num_heads, s.num_heads + s.num_kv], axis=1)
    expected, tolerance = expected_and_tolerance(of_q, of.q_scales, of, shape)
    if (outside := ~(np.abs(q.astype(np.float64) - expected) <= tolerance)).any():
        at = tuple(np.argwhere(outside)[0])
        return f"q{at} is {q[at]}, not {expected[at]}"
    expected, tolerance = expected_and_tolerance(of_k, of.k_scales, of, shape)
    kept_keys, kept_values = of.keys.copy(), of.values.copy()
    for b, position in enumerate(of.positions):
        if 0 <= position < s.length:
            new = keys[of.layer, b, :, position]
            if not (np.abs(new.astype(np.float64) - expected[b]) <= tolerance[b]).all():
                return f"the key of sequence {b} is {new}, not {expected[b]}"
            kept_keys[of.layer, b, :, position] = new
            kept_values[of.layer, b, :, position] = of_v[b]
    for name, now, kept in (("keys", keys, kept_keys), ("values", values, kept_values)):
        if now.tobytes() != kept.tobytes():
            at = tuple(np.argwhere(now.view(np.int16) != kept.view(np.int16))[0])
            return f"{name}{at} are {now[at]}, not {kept[at]}"
    return None
