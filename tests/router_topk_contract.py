"""Contract of softmax and top-k: cases, values, THE check.

Expectations are float64 numpy; the choice is that of `jax.lax.top_k` of the probabilities found.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

UNIT_ROUNDOFF = 2.0**-24  # of float32
TINY = float(np.finfo(np.float32).tiny)  # below it, a GPU may take zero


class Shape(NamedTuple):
    """Axes of the operation, and what is done with the weights."""

    num_tokens: int
    num_experts: int
    chosen: int
    normalise: bool = True
    deviation: float = 2.0  # of the logits


SHAPES = {
    "qwen3_30b_1": Shape(1, 128, 8),
    "qwen3_30b_16": Shape(16, 128, 8, deviation=8.0),
    "mixtral_1": Shape(1, 8, 2),
    "mixtral_4": Shape(4, 8, 2),
    "demo": Shape(3, 32, 4, normalise=False),
    "odd": Shape(7, 60, 5),
    "odd_raw": Shape(5, 97, 6, normalise=False),
    "all_chosen": Shape(3, 12, 12),
    "one_of_one": Shape(2, 1, 1),
    "one_of_many": Shape(3, 65, 1),
    "most": Shape(2, 1024, 32),
    "far_apart": Shape(6, 64, 8, deviation=60.0),
}
GPU_SHAPES = SHAPES | {
    "qwen3_30b_2048": Shape(2048, 128, 8),
    "mixtral_1000": Shape(1000, 8, 2),
    "many_rows": Shape(70001, 16, 2),
}


def random_logits(shape: Shape, seed: int) -> np.ndarray:
    """float32[N, E]; every other row has equal logits, among them the largest and the smallest."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((shape.num_tokens, shape.num_experts), dtype=np.float32)
    logits *= np.float32(shape.deviation)
    coarse = np.round(logits[::2])
    largest = coarse.max(axis=1, keepdims=True)
    logits[::2] = np.where(rng.random(coarse.shape) < 0.1, largest, coarse)
    return logits


def expected_and_share(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64[N, E] of the softmax, and how far, as a share of it, a right value may be.

    The difference from the largest logit is rounded once, which changes its exponential by that
    much; exponential and division are good to 2 units in the last place (4 roundoffs) each,
    and a sum of E terms in a tree to log2 E roundoffs, plus its terms' own.
    """
    wide = logits.astype(np.float64)
    below = wide - wide.max(axis=1, keepdims=True)
    exps = np.exp(below)
    expected = exps / exps.sum(axis=1, keepdims=True)
    own = np.abs(below) + 4
    of_sum = (expected * own).sum(axis=1, keepdims=True) + np.log2(2 * logits.shape[1])
    return expected, UNIT_ROUNDOFF * (own + of_sum + 4)


def violation(found: Any, logits: np.ndarray, shape: Shape) -> str | None:
    """THE check: why `found` is not the operation's value of finite logits, or None."""
    num_tokens, num_experts, k = shape[:3]
    sizes = ((num_tokens, num_experts), (num_tokens, k), (num_tokens, k))
    for of, size, dtype in zip(found, sizes, ("float32", "float32", "int32"), strict=True):
        if of.shape != size or of.dtype != dtype:
            return f"{of.dtype}{of.shape} in place of {dtype}{size}"
    p, weights, ids = (np.asarray(of) for of in found)
    expected, share = expected_and_share(logits)
    outside = ~(np.abs(p.astype(np.float64) - expected) <= share * expected + TINY)  # NaN is
    if outside.any():
        row, expert = np.argwhere(outside)[0]
        return f"p[{row}, {expert}] is {p[row, expert]}, not {expected[row, expert]}"
    if (wrong := ids != chosen_of(p, k)).any():
        row = int(np.argwhere(wrong)[0, 0])
        return f"row {row} chose {ids[row]}, not {chosen_of(p, k)[row]}"
    raw = np.take_along_axis(p, ids, axis=1).astype(np.float64)
    if not shape.normalise:
        return None if (weights == raw).all() else "the weights are not the probabilities"
    wanted = raw / raw.sum(axis=1, keepdims=True)
    # The sum is rounded k - 1 times, the quotient is good to 2 units in the last place.
    off = ~(np.abs(weights - wanted) <= UNIT_ROUNDOFF * (k + 4) * wanted + TINY)
    if off.any():
        row, place = np.argwhere(off)[0]
        return f"weight {place} of row {row} is {weights[row, place]}, not {wanted[row, place]}"
    return None


def chosen_of(probabilities: np.ndarray, k: int) -> np.ndarray:
    """int32[N, k] of `jax.lax.top_k` on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(jax.lax.top_k(jnp.asarray(probabilities), k)[1])
