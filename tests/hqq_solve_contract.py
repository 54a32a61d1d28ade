"""Contract of every HQQ solve: cases, the solve in float64 numpy, THE check.

The numpy solve is the hqq library's loop, formula by formula. Rounding in float32 turns a tie here
and there the other way, which moves that group's zero: such codes may differ, if they are few.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.hqq_solve.settings import SolveSettings

SHARE_OF_EQUAL_CODES = 0.9999
MAY_DIFFER = 2  # of a small case


class Case(NamedTuple):
    """One solve; `spread` is the standard deviation of most weights."""

    shape: tuple[int, ...] = (32, 128)
    bits: int = 3
    group_size: int = 64
    spread: float = 0.02
    rank: int = 0
    dtype: str = "float32"
    round_start: bool = False
    odd_groups: bool = False  # constant ones, zeros, one of a tiny range, one outlier

    @property
    def settings(self) -> SolveSettings:
        return SolveSettings(
            bits=self.bits,
            group_size=self.group_size,
            max_steps=20,
            norm=0.7,
            beta=10.0,
            round_start=self.round_start,
        )


CASES = {
    "int3_narrow": Case(),  # nothing is shrunk: the short loop
    "int3_wide": Case(spread=1.0),  # every program takes the long loop
    "int2_g32_mixed": Case(shape=(64, 128), bits=2, group_size=32, spread=0.03),
    "int4_g128_matrices": Case(
        shape=(2, 1, 24, 256), bits=4, group_size=128, spread=0.2, round_start=True
    ),
    "int8_bf16": Case(shape=(8, 64), bits=8, spread=0.05, dtype="bfloat16"),
    "low_rank": Case(rank=5, shape=(2, 16, 128), spread=0.3),
    "odd_groups": Case(shape=(5, 256), spread=0.1, odd_groups=True),
}
REAL_CASES = {
    "mixtral_gate": Case(shape=(14336, 4096), rank=32),
    "mixtral_down": Case(shape=(4096, 14336), spread=0.2, rank=16, dtype="bfloat16"),
    "qwen3_30b": Case(shape=(4, 768, 2048), spread=0.05, rank=16),
}
# Rows are cut to what float64 on the host solves in seconds; they are all alike to the kernel.
GPU_CASES = CASES | {
    name: case._replace(shape=(*case.shape[:-2], case.shape[-2] // 16, case.shape[-1]))
    for name, case in REAL_CASES.items()
}


class Operands(NamedTuple):
    """On the host; the factors are None without a rank."""

    weights: np.ndarray
    low_rank: tuple[np.ndarray, np.ndarray] | None


def random_operands(case: Case, seed: int) -> Operands:
    """Student-t weights (5 degrees of freedom), columns of log-normal scale."""
    rng = np.random.default_rng(seed)
    *lead, num_rows, num_inputs = case.shape
    weights = rng.standard_t(5, case.shape) * np.exp(0.5 * rng.standard_normal(num_inputs))
    weights = np.float32(case.spread * weights)
    if case.odd_groups:
        g = case.group_size
        weights[0, :g], weights[1, :g], weights[2, :g] = 0, 0.3, -1000.0
        weights[3, :g] = 0.3 + 1e-5 * rng.random(g, np.float32)
        weights[4, 7] = 50.0
    low_rank = None
    if case.rank:
        u = rng.standard_normal((*lead, num_rows, case.rank), np.float32)
        v = rng.standard_normal((*lead, case.rank, num_inputs), np.float32)
        low_rank = u * np.float32(case.spread / 4), v
    return Operands(weights.astype(jnp.dtype(case.dtype)), low_rank)


class Solution(NamedTuple):
    """In float64; errors are the means before each step, all of them taken."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    errors: np.ndarray


def solve_float64(operands: Operands, case: Case, steps: int | None = 20) -> Solution:
    """One matrix or more; `steps=None` stops each matrix by the library's rule."""
    w = operands.weights.astype(np.float64)
    if operands.low_rank is not None:
        u, v = operands.low_rank
        w = w - u.astype(np.float64) @ v.astype(np.float64)
    matrices = w.reshape(-1, *w.shape[-2:])
    solved = [_solve_matrix(matrix, case, steps) for matrix in matrices]
    lead = w.shape[:-2]
    return Solution(*(np.stack(x).reshape(*lead, *x[0].shape) for x in zip(*solved, strict=True)))


def _solve_matrix(w: np.ndarray, case: Case, steps: int | None) -> tuple[np.ndarray, ...]:
    groups = w.reshape(len(w), -1, case.group_size)
    top = 2**case.bits - 1
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    inverse = np.ones_like(low)
    np.divide(top, high - low, out=inverse, where=high - low > 1e-4)
    inverse = np.minimum(inverse, 2e4)
    zero = -low * inverse
    if case.round_start:
        zero = np.round(zero)
    errors, best = np.zeros(20), np.inf
    for i in range(20 if steps is None else steps):
        codes = np.clip(np.round(groups * inverse + zero), 0, top)
        error = groups - (codes - zero) / inverse
        size = np.abs(error)
        power = np.zeros_like(size)
        np.power(size, 0.7 - 1, out=power, where=size > 0)
        kept = np.sign(error) * np.maximum(size - power / 10, 0)
        zero = np.mean(codes - (groups - kept) * inverse, axis=2, keepdims=True)
        errors[i] = size.mean()
        if steps is None and not errors[i] < best:
            break
        best = min(best, errors[i])
    codes = np.clip(np.round(groups * inverse + zero), 0, top)
    return codes.reshape(w.shape), 1 / inverse[..., 0], zero[..., 0], errors


def violation(found: Any, operands: Operands, case: Case) -> str | None:
    """THE check: why `found` is not the solve's value, or None.

    In groups without a code that differs, zeros are within 1e-5, and 1e-6 of their size, but for as
    few as codes may differ; all scales are within 1e-6 of theirs, mean errors within 1e-5.
    """
    expected = solve_float64(operands, case)
    codes, scales, zeros, errors = (np.asarray(x) for x in found[:4])
    if codes.shape != operands.weights.shape or codes.dtype != np.uint8:
        return f"codes are {codes.dtype}{codes.shape}"
    if zeros.shape != expected.zeros.shape or scales.shape != zeros.shape:
        return f"scales and zeros are {scales.shape} and {zeros.shape}"
    equal = codes == expected.codes
    num_different = equal.size - np.count_nonzero(equal)
    if num_different > _may_differ(equal.size):
        return f"{num_different} of {equal.size} codes differ"
    if not np.all(np.abs(scales - expected.scales) <= 1e-6 * expected.scales):
        return "scales are out of tolerance"
    if not np.isfinite(zeros).all():
        return "zeros are not finite"
    # A code that went the other way in an early step may have come back.
    whole = equal.reshape(*zeros.shape, case.group_size).all(axis=-1)
    off = np.abs(zeros - expected.zeros) - (1e-5 + 1e-6 * np.abs(expected.zeros))
    outside = whole & (off > 0)
    if np.count_nonzero(outside) > _may_differ(zeros.size):
        return f"{outside.sum()} zeros are out of tolerance, by up to {off[outside].max():.3g}"
    if not np.all(np.abs(errors - expected.errors) <= 1e-5 * expected.errors + 1e-9):
        return f"mean errors are {errors}, expected {expected.errors}"
    return None


def _may_differ(size: int) -> float:
    return max(MAY_DIFFER, (1 - SHARE_OF_EQUAL_CODES) * size)
