"""Contract of decode attention: cases, values, tolerances, THE check.

Expectations are float64 numpy, one head at a time; the tolerance follows from the dtype.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_attention import Latent

UNIT_ROUNDOFF = 2.0**-24  # of float32, in which scores and sums are
# Half the distance from 1 to the next number.
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# Tolerance of a sequence's result in the Euclidean norm: roundings of weights and result.
NORM_ERROR = {"bfloat16": 3e-3, "float16": 3e-3 / 8}


class Shape(NamedTuple):
    """Axes of the operation, and what is looked at."""

    batch: int
    num_heads: int
    num_kv: int
    head_dim: int
    length: int  # S
    kv_length: int
    window: int | None = None
    layers: int = 2
    more_dim: int = 0  # of a second part of queries and keys, the first part being the values


# Shapes that a CPU can interpret: real heads, short caches; no length is a multiple of a block.
SHAPES = {
    "qwen3_30b_1": Shape(1, 32, 4, 128, 300, 300),
    "qwen3_30b_4": Shape(4, 32, 4, 128, 100, 90),
    "mixtral_1": Shape(1, 32, 8, 128, 150, 150),
    "mixtral_32": Shape(32, 32, 8, 128, 30, 30, layers=1),
    "demo": Shape(2, 4, 2, 64, 512, 500),
    "window": Shape(3, 8, 2, 64, 200, 200, window=70),
    "window_of_one": Shape(2, 4, 4, 16, 40, 33, window=1),
    "group_of_one": Shape(2, 3, 3, 32, 70, 70),
    "group_of_five": Shape(2, 10, 2, 16, 70, 64),
    "group_of_twenty": Shape(1, 20, 1, 32, 70, 70),
    "one_slot": Shape(2, 4, 2, 16, 8, 1),
    "deepseek_v2_lite_2": Shape(2, 16, 1, 512, 70, 66, more_dim=64),
    "latent": Shape(3, 6, 2, 32, 90, 81, window=40, more_dim=16),
}
GPU_SHAPES = {
    "qwen3_30b_1": Shape(1, 32, 4, 128, 4096, 1024),
    "qwen3_30b_16": Shape(16, 32, 4, 128, 1024, 1024),
    "qwen3_30b_32": Shape(32, 32, 4, 128, 1024, 1000),
    "mixtral_1": Shape(1, 32, 8, 128, 4096, 4096),
    "mixtral_4_window": Shape(4, 32, 8, 128, 2048, 2048, window=1000),
    "mixtral_32": Shape(32, 32, 8, 128, 700, 700),
    "demo": Shape(2, 4, 2, 64, 512, 500, layers=7),
    "wide": Shape(2, 16, 1, 256, 600, 600),
    "group_of_five": Shape(2, 10, 2, 16, 70, 64),
    "group_of_sixty_four": Shape(2, 64, 1, 256, 300, 300),
    "one_slot": Shape(2, 4, 2, 16, 8, 1),
    "qwen3_next_1": Shape(1, 16, 2, 256, 4096, 4096, layers=3),
    "deepseek_v2_lite_1": Shape(1, 16, 1, 512, 4096, 4096, more_dim=64),
    "deepseek_v2_lite_16": Shape(16, 16, 1, 512, 1024, 1000, more_dim=64),
    "latent": Shape(3, 6, 2, 32, 90, 81, window=40, more_dim=16),
}
DTYPES = tuple(ROUNDOFF)


class Operands(NamedTuple):
    """Arguments of `decode_attention`, on the host."""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray | Latent
    layer: int
    positions: np.ndarray


def random_operands(shape: Shape, dtype: str, seed: int, poisoned: bool = True) -> Operands:
    """Fresh operands of the last layer; ragged positions, the first and the last slot among them.

    Scores are of order 2, so that some weights are large and most are small.

    Args:
      shape: axes.
      dtype: of all.
      seed: of the values.
      poisoned: NaN in every layer and slot that the operation may not read.
    """
    rng = np.random.default_rng(seed)
    s = shape

    def normal(*size: int) -> np.ndarray:
        return rng.standard_normal(size, dtype=np.float32).astype(jnp.dtype(dtype))

    positions = rng.integers(0, s.kv_length, s.batch).astype(np.int32)
    positions[0], positions[s.batch // 2] = 0, s.kv_length - 1  # of one sequence: the last
    fill = np.nan if poisoned else 1e4
    widths = (s.head_dim, s.more_dim or s.head_dim)
    caches = tuple(
        np.full((s.layers, s.batch, s.num_kv, s.length, width), fill, jnp.dtype(dtype))
        for width in widths
    )
    for b, position in enumerate(positions):
        first, end = seen_slots(position, s.kv_length, s.window)
        for cache, width in zip(caches, widths, strict=True):
            cache[-1, b, :, first:end] = normal(s.num_kv, end - first, width)

    def queries(width: int) -> np.ndarray:
        drawn = normal(s.batch, s.num_heads, width).astype(np.float32)
        return (2 * drawn).astype(jnp.dtype(dtype))

    keys, values = caches
    q = queries(s.head_dim)
    if s.more_dim:
        return Operands(q, keys, Latent(queries(s.more_dim), values), s.layers - 1, positions)
    return Operands(q, keys, values, s.layers - 1, positions)


def parts_of(operands: Operands, shape: Shape, b: int, h: int) -> tuple[np.ndarray, ...]:
    """float64 q [C (+ P)], k [S, C (+ P)] and v [S, C] of a head's seen slots."""
    first, end = seen_slots(operands.positions[b], shape.kv_length, shape.window)
    where = (operands.layer, b, h // (shape.num_heads // shape.num_kv), slice(first, end))
    q, k = operands.q[b, h].astype(np.float64), operands.keys[where].astype(np.float64)
    if not isinstance(operands.values, Latent):
        return q, k, operands.values[where].astype(np.float64)
    more_q, more_k = operands.values.q[b, h], operands.values.keys[where]
    whole = [np.concatenate(pair, axis=-1) for pair in ((q, more_q), (k, more_k))]
    return *(a.astype(np.float64) for a in whole), k


def seen_slots(position: int, kv_length: int, window: int | None) -> tuple[int, int]:
    """The first slot that a token sees, and the end."""
    first = 0 if window is None else max(0, int(position) - window + 1)
    return first, min(int(position) + 1, kv_length)


def expected_and_tolerance(operands: Operands, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """float64[B, H, C] of the formula, and how far a right kernel's value may be from it.

    A score is a float32 sum of C products, off by some 4 sqrt(C) u sum |q k|, which changes a
    weight by that share, and the sum of weights too; weights are rounded to the dtype, summed in
    float32, and the result is rounded to the dtype.
    """
    dtype = operands.q.dtype.name
    expected = np.zeros(operands.q.shape)
    tolerance = np.zeros(operands.q.shape)
    for b, h in np.ndindex(expected.shape[:2]):
        q, k, v = parts_of(operands, shape, b, h)
        q = q / np.sqrt(len(q))
        scores = k @ q
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        expected[b, h] = weights @ v
        score_error = 4 * np.sqrt(len(q)) * (np.abs(k) @ np.abs(q)) + 8 * np.abs(scores)
        share = ROUNDOFF[dtype] + UNIT_ROUNDOFF * (2 * score_error.max() + 4 * np.sqrt(len(k)) + 16)
        tolerance[b, h] = share * (weights @ np.abs(v))
    tolerance += ROUNDOFF[dtype] * (np.abs(expected) + tolerance)
    return expected, tolerance + float(jnp.finfo(dtype).smallest_subnormal)


def violation(found: Any, operands: Operands, shape: Shape) -> str | None:
    """THE check: why `found` is not the operation's value, or None."""
    expected, tolerance = expected_and_tolerance(operands, shape)
    if found.shape != expected.shape or found.dtype != operands.q.dtype:
        return f"{found.dtype}{found.shape} in place of {operands.q.dtype}{expected.shape}"
    error = np.abs(np.asarray(found).astype(np.float64) - expected)
    outside = ~(error <= tolerance)  # NaN is outside
    if outside.any():
        excess = np.where(outside, np.nan_to_num(error / tolerance, nan=np.inf), 0)
        worst = np.unravel_index(excess.argmax(), excess.shape)
        return (
            f"{outside.sum()} of {outside.size} values are out of tolerance, the worst at {worst}: "
            f"{error[worst]:.3g} from {expected[worst]:.3g}, allowed {tolerance[worst]:.3g}"
        )
    norms = [np.linalg.norm(e) / np.linalg.norm(x) for e, x in zip(error, expected, strict=True)]
    if max(norms) > NORM_ERROR[operands.q.dtype.name]:
        return f"sequence {np.argmax(norms)} is {max(norms):.3g} of its norm off"
    return None
