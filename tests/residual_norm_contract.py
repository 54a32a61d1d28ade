"""Contract of a residual sum and its norm: cases, values, THE check.

Expectations are float64 numpy; the norm is that of the sum that was found, whose own rounding is
checked first.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

UNIT_ROUNDOFF = 2.0**-24  # of float32
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # half the distance from 1 to the next number
DTYPES = tuple(ROUNDOFF)


class Shape(NamedTuple):
    """Axes of the operation."""

    num_rows: int
    width: int
    layers: int = 2
    eps: float = 1e-6
    has_delta: bool = True
    zero_centred: bool = False


SHAPES = {
    "qwen3_30b_1": Shape(1, 2048),
    "qwen3_30b_16": Shape(16, 2048, layers=3),
    "mixtral_1": Shape(1, 4096, eps=1e-5),
    "first": Shape(4, 2048, has_delta=False),
    "widest": Shape(2, 8192, layers=1),
    "demo": Shape(3, 256),
    "odd": Shape(5, 200, eps=1e-2),
    "odd_first": Shape(3, 37, has_delta=False),
    "narrow": Shape(2, 1),
    "qwen3_next_1": Shape(1, 2048, zero_centred=True),
    "centred_odd": Shape(5, 200, has_delta=False, zero_centred=True),
}
GPU_SHAPES = SHAPES | {"qwen3_30b_64": Shape(64, 2048, layers=48), "mixtral_64": Shape(64, 4096)}


class Operands(NamedTuple):
    """Arguments of `residual_norm`, on the host."""

    x: np.ndarray
    delta: np.ndarray | None
    scales: np.ndarray
    layer: int


def random_operands(shape: Shape, dtype: str, seed: int) -> Operands:
    """Operands of the last layer; others' scales are NaN, rows differ a thousandfold."""
    rng = np.random.default_rng(seed)
    size = (shape.num_rows, shape.width)
    rows = 10.0 ** rng.uniform(-1.5, 1.5, (shape.num_rows, 1))
    x, delta = (
        (rng.standard_normal(size) * rows * share).astype(jnp.dtype(dtype)) for share in (1, 0.3)
    )
    scales = np.full((shape.layers, shape.width), np.nan, jnp.dtype(dtype))
    scales[-1] = 1 + 0.5 * rng.standard_normal(shape.width)
    return Operands(x, delta if shape.has_delta else None, scales, shape.layers - 1)


def violation(found: Any, of: Operands, shape: Shape) -> str | None:
    """THE check: why `found` is not the operation's value, or None.

    A sum in float32 of two short numbers is rounded once more, which is seen in ties alone. The
    mean of D squares, its root and the quotient are float32; the result is rounded twice, of a
    norm that is centred at zero once, and what is added to one is a float32.
    """
    for array in found:
        if array.shape != of.x.shape or array.dtype != of.x.dtype:
            return f"{array.dtype}{array.shape} in place of {of.x.dtype}{of.x.shape}"
    y, normed = (np.asarray(array).astype(np.float64) for array in found)
    short, least = ROUNDOFF[of.x.dtype.name], float(jnp.finfo(of.x.dtype).smallest_subnormal)
    x = of.x.astype(np.float64)
    exact = x if of.delta is None else x + of.delta.astype(np.float64)
    slack = 0 if of.delta is None else short * (1 + 2.0**-12) * np.abs(exact) + least
    if (outside := ~(np.abs(y - exact) <= slack)).any():
        return f"the sum is {y[outside][0]}, not {exact[outside][0]}"
    scale = of.scales[of.layer].astype(np.float64)
    quotient = y / np.sqrt((y * y).mean(axis=1, keepdims=True) + shape.eps)
    expected = quotient * (1 + scale if shape.zero_centred else scale)
    in_float32 = UNIT_ROUNDOFF * (np.log2(2 * shape.width) + 12)
    times = 1 if shape.zero_centred else 2
    slack = np.abs(expected) * ((1 + short) ** times * (1 + in_float32) - 1)
    slack += np.abs(quotient) * UNIT_ROUNDOFF * (1 + short) * shape.zero_centred
    slack += 2 * least * np.maximum(1, np.abs(scale))
    if (outside := ~(np.abs(normed - expected) <= slack)).any():
        return f"normed is {normed[outside][0]}, not {expected[outside][0]}"
    return None
