"""MiLo: alternates codes and low-rank compensators (Algorithm 1); MiLo+ goes beyond it.

With bit planes every width B has its own compensators: its codes approximate W - U_B V_B, and the
codes of all widths are chosen jointly. The narrowest width lacks most and has the highest rank.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.quantization.factors import factor_grid, quantize_factor, zero_factor
from moejax.quantization.grid import Codes, Grid, dequantize
from moejax.quantization.hqq import hqq
from moejax.quantization.least_squares import least_squares
from moejax.quantization.rtn import rtn

OVERSAMPLE = 8  # columns of the sketch beyond the rank that is wanted


def _sketch(matrix: jax.Array, max_rank: int) -> jax.Array:
    """Random rows of unit length that `_subspace_svd` of a matrix [..., N, K] starts from.

    float32[..., min(max_rank + OVERSAMPLE, N, K), K], the same in every call.
    """
    *lead, num_rows, num_inputs = matrix.shape
    width = min(max_rank + OVERSAMPLE, num_rows, num_inputs)
    rows = jax.random.normal(jax.random.key(0), (width, num_inputs))
    rows = jnp.broadcast_to(rows, (*lead, width, num_inputs))
    return rows / _norms(rows)


def _subspace_svd(
    matrix: jax.Array, basis: jax.Array, iterations: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Approximate leading singular triplets (Halko, Martinsson and Tropp 2011, algorithm 4.4).

    Args:
      matrix: float32[..., N, K].
      basis: float32[..., R, K], rows of `_sketch` or near the leading right singular vectors.
      iterations: int32, of A^T A on the basis before the final projection.

    Returns:
      float32[..., N, R] with orthonormal columns, and float32[..., R, K], rows orthogonal, as long
      as their singular values, which descend. Their product is the projection of the matrix on the
      columns. Directions that the matrix does not have are zero; values below a thousandth of the
      largest drown in float32.
    """
    matmul = functools.partial(jnp.matmul, precision="highest")  # TF32 loses the smaller values

    def iterate(_: jax.Array, basis: jax.Array) -> jax.Array:
        left = _orthonormal(matmul(matrix, _turned(basis)))
        return _turned(_orthonormal(_turned(matmul(_turned(left), matrix))))

    basis = jax.lax.fori_loop(0, iterations, iterate, basis)
    # The second pass mends what the first leaves of a badly conditioned product.
    left = _orthonormal(_orthonormal(matmul(matrix, _turned(basis))))
    right = matmul(_turned(left), matrix)
    _, rotation = jnp.linalg.eigh(matmul(right, _turned(right)))
    rotation = rotation[..., ::-1]
    return matmul(left, rotation), matmul(_turned(rotation), right)


def _balanced(u: jax.Array, v: jax.Array, max_rank: int) -> tuple[jax.Array, jax.Array]:
    """Leading components of `_subspace_svd`, singular values split evenly (MiLo eq. 12)."""
    u, v = u[..., :max_rank], v[..., :max_rank, :]
    sigma = _norms(v)
    root = jnp.sqrt(sigma)
    v = v / jnp.where(sigma > 0, root, 1.0)
    return u * _turned(root), v


def _orthonormal(columns: jax.Array) -> jax.Array:
    """Orthonormalises columns float32[..., N, R], unless they are nearly dependent (Cholesky QR).

    A shift keeps dependent columns from failing: they come back shorter, zeros as zeros
    (Fukaya et al. 2020). QR of LAPACK and cuSOLVER is ten times slower for tall matrices.
    """
    gram = jnp.matmul(_turned(columns), columns, precision="highest")
    trace = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    shift = trace * 1e-6 + jnp.finfo(jnp.float32).tiny
    eye = jnp.eye(gram.shape[-1], dtype=jnp.float32).reshape(
        (1,) * (gram.ndim - 2) + gram.shape[-2:]
    )
    factor = jnp.linalg.cholesky(gram + shift * eye, symmetrize_input=False)
    # The small inverse and a product: solving for the tall columns is slow on CPU and GPU alike.
    eye = jnp.broadcast_to(eye, factor.shape)
    inverse = jax.lax.linalg.triangular_solve(factor, eye, left_side=True, lower=True)
    return jnp.matmul(columns, _turned(inverse), precision="highest")


def _turned(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _norms(rows: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(rows), axis=-1, keepdims=True))


# Quantizes weights - u v: (float32[..., N, K], float32[..., N, R], float32[..., R, K], grid).
Solver = Callable[[jax.Array, jax.Array, jax.Array, Grid], Codes]
BASES: dict[str, Callable[[jax.Array, Grid], Codes]] = {
    "hqq": hqq,
    "rtn": rtn,
    # Signs matter to symmetric grids alone: their error on the demo is .178 with, .193 without.
    "least_squares": functools.partial(least_squares, signed=True),
}
WINDOW = 3  # passes that eq. 15 averages over
FIRST_ITERATIONS = 3  # of the decomposition that starts from random rows
# How far U V moves towards the error's decomposition in a refitting pass. Codes ignore small moves,
# so that overshooting saves passes: 1.1 lowers the error by 0.3 to 0.6 % on the demo's matrices,
# and raises it by as much if the rank is half of the width; 1.5 raises it by 14 % there (INT3,
# groups of 64).
STEP = 1.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiloSettings:
    """Static settings of `milo`; the defaults are the paper's."""

    max_rank: int  # components that the results have room for, at most N and K
    max_passes: int = 20
    tolerance: float = 1e-4  # share by which the mean error of three passes must fall (eq. 15)
    base: str = "hqq"  # quantizer of W - U V, one of `BASES`
    solver: Solver | None = None  # in place of `base`, such as a kernel that never writes W - U V
    # Quantizes the factors in every pass and fits the codes to the remainder, as milo+ does, by
    # base "least_squares". Without it they are returned unquantized, and the caller's rounding adds
    # to the error.
    refit: bool = False
    factor_bits: int = 3  # if `refit`
    rank_divisor: int = 0  # see `width_ranks`


def width_ranks(rank: Any, num_widths: int, divisor: int) -> list[Any]:
    """Ranks of the compensators of each width of a grid, the widest first.

    Args:
      rank: int or int32[...], that of the narrowest width, the last one.
      divisor: a wider width has the rank of the next narrower one divided by it, rounded down; 0:
        none.
    """
    ranks = [rank]
    for _ in range(num_widths - 1):
        ranks.append(ranks[-1] // divisor if divisor else 0 * rank)
    return ranks[::-1]


class Factors(NamedTuple):
    """Factors U and V; if they were quantized, also the codes of U transposed and V."""

    u: jax.Array  # float32[..., N, R], zero beyond the matrix's rank
    v: jax.Array  # float32[..., R, K], zero beyond the matrix's rank
    u_codes: Codes | None  # [..., R, N]
    v_codes: Codes | None  # [..., R, K]


class _MiloResult(NamedTuple):
    """Best pass of each matrix."""

    codes: Codes
    factors: tuple[Factors, ...]  # of each of the grid's `widths`
    errors: jax.Array  # float32[..., max_passes], eq. 14 of each pass, 0 for those that did not run
    passes: jax.Array  # int32[...], how many ran


class _Pass(NamedTuple):
    """Result of one pass."""

    codes: Codes
    factors: tuple[Factors, ...]
    bases: tuple[jax.Array, ...]  # float32[..., R, K], what the next decompositions start from
    error: jax.Array  # float32[...]


class _State(NamedTuple):
    done: jax.Array  # int32, passes
    last: _Pass
    best: _Pass
    errors: jax.Array
    passes: jax.Array
    active: jax.Array  # bool[...]


@functools.partial(jax.jit, static_argnames=("grid", "settings"))
def milo(
    weights: jax.Array, grid: Grid, settings: MiloSettings, rank: jax.Array | int
) -> _MiloResult:
    """Fits W ~ s (q - z) + U V: codes of W - U V, then U V of the rest (Algorithm 1).

    Every pass fits scales to W - U V again. A matrix stops by eq. 15, over two full windows, so
    after pass 4 at the earliest; others go on. The best pass is returned, for eq. 15 also stops at
    a rise.

    Args:
      weights: float32[..., N, K], finite.
      grid: one with planes takes the paper's settings.
      rank: int32[...], components of each matrix, at most `settings.max_rank`, which N and K bound;
        with planes those of the narrowest width.
    """
    rank = jnp.broadcast_to(jnp.asarray(rank, jnp.int32), weights.shape[:-2])
    run = _refit_pass if settings.refit else _paper_pass
    first = _first(weights, grid, settings)
    errors = jnp.zeros((*rank.shape, settings.max_passes), jnp.float32)
    start = _State(
        jnp.int32(0), first, first, errors, jnp.zeros_like(rank), jnp.ones(rank.shape, bool)
    )

    def again(state: _State) -> jax.Array:
        return (state.done < settings.max_passes) & jnp.any(state.active)

    def body(state: _State) -> _State:
        iterations = jnp.where(state.done == 0, FIRST_ITERATIONS, 1)
        found = run(weights, grid, settings, rank, state.last, iterations)
        better = state.active & (found.error < state.best.error)
        best = jax.tree.map(functools.partial(_chosen, better), found, state.best)
        column = jnp.where(state.active, found.error, 0.0)
        errors = state.errors.at[..., state.done].set(column)
        passes = state.passes + state.active.astype(jnp.int32)
        active = state.active & ~_settled(errors, state.done, settings.tolerance)
        return _State(state.done + 1, found, best, errors, passes, active)

    end = jax.lax.while_loop(again, body, start)
    return _MiloResult(end.best.codes, end.best.factors, end.errors, end.passes)


def _paper_pass(
    weights: jax.Array, grid: Grid, settings: MiloSettings, rank: jax.Array, last: _Pass,
    iterations: jax.Array,
) -> _Pass:  # fmt: skip
    """Runs one pass of Algorithm 1: eq. 4-9, then eq. 10-12 and 14 for each width."""
    codes = _solve(weights, last.factors, grid, settings)
    ranks = width_ranks(rank, len(grid.widths), settings.rank_divisor)
    factors, bases, error = [], [], jnp.zeros(rank.shape, jnp.float32)
    parts = zip(grid.widths, ranks, last.factors, last.bases, strict=True)
    for width, own, old, basis in parts:
        missed = weights - dequantize(codes, grid, width)
        # One width after the other, by a sum with nothing: a CPU that runs LAPACK for two at once
        # may wait for ever (jax 0.10.2).
        missed = missed + 0.0 * error[..., None, None]
        u, v, found = _decompose(missed, basis, own, iterations, old.u.shape[-1])
        factors.append(Factors(u, v, None, None))
        bases.append(found)
        error = error + width.share * _norm(missed - _product(u, v)) ** 2
    return _Pass(codes, tuple(factors), tuple(bases), jnp.sqrt(error))


def _refit_pass(
    weights: jax.Array, grid: Grid, settings: MiloSettings, rank: jax.Array, last: _Pass,
    iterations: jax.Array,
) -> _Pass:  # fmt: skip
    """Runs one pass that ends with the codes: factors, their codes, then W's.

    The error of quantizing the factors is part of W - U V when that is quantized, so that it costs
    as much as any other weight.
    """
    (old,), (basis,) = last.factors, last.bases
    product = _product(old.u, old.v)
    missed = weights - dequantize(last.codes, grid) - product
    target = product + STEP * missed
    u, v, basis = _decompose(target, basis, rank, iterations, settings.max_rank)
    factors = _quantized(u, v, settings)
    codes = _solve(weights, (factors,), grid, settings)
    missed = weights - dequantize(codes, grid) - _product(factors.u, factors.v)
    return _Pass(codes, (factors,), (basis,), _norm(missed))


def _first(weights: jax.Array, grid: Grid, settings: MiloSettings) -> _Pass:
    """Empty factors, and their codes if the first pass begins with the codes' error.

    They are known without computing: XLA would fold a quantizer of constants for minutes.
    """
    ranks = width_ranks(settings.max_rank, len(grid.widths), settings.rank_divisor)
    factors = [_zeros(weights, rank, settings) for rank in ranks]
    if settings.refit:
        codes = _solve(weights, [_zeros(weights, 0, settings)], grid, settings)
    else:  # of the right shapes; every pass finds its own
        codes = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(rtn, weights, grid)
        )
    bases = tuple(_sketch(weights, rank) for rank in ranks)
    return _Pass(codes, tuple(factors), bases, jnp.full(weights.shape[:-2], jnp.inf, jnp.float32))


def _zeros(weights: jax.Array, rank: int, settings: MiloSettings) -> Factors:
    """Factors of zeros, with codes if passes quantize them."""
    *lead, num_rows, num_inputs = weights.shape
    u = jnp.zeros((*lead, num_rows, rank), jnp.float32)
    v = jnp.zeros((*lead, rank, num_inputs), jnp.float32)
    if not settings.refit:
        return Factors(u, v, None, None)
    shapes = ((*lead, rank, num_rows), v.shape)
    return Factors(u, v, *(zero_factor(shape, settings.factor_bits) for shape in shapes))


def _solve(
    weights: jax.Array, factors: Sequence[Factors], grid: Grid, settings: MiloSettings
) -> Codes:
    if settings.solver is not None:
        (own,) = factors
        return settings.solver(weights, own.u, own.v, grid)
    first, *others = (weights - _product(own.u, own.v) for own in factors)
    return hqq(first, grid, narrower=others) if others else BASES[settings.base](first, grid)


def _decompose(
    matrix: jax.Array, basis: jax.Array, rank: jax.Array, iterations: jax.Array, max_rank: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes U and V, truncated to each rank, and the next basis."""
    if max_rank == 0:
        return matrix[..., :, :0], matrix[..., :0, :], basis
    columns, rows = _subspace_svd(matrix, basis, iterations)
    u, v = _balanced(columns, rows, max_rank)
    shape = (*rank.shape, max_rank)
    used = jax.lax.broadcasted_iota(jnp.int32, shape, rank.ndim) < rank[..., None]
    return jnp.where(used[..., None, :], u, 0.0), jnp.where(used[..., :, None], v, 0.0), rows


def _quantized(u: jax.Array, v: jax.Array, settings: MiloSettings) -> Factors:
    parts, values = [], []
    for part in (jnp.swapaxes(u, -1, -2), v):
        codes = quantize_factor(part, settings.factor_bits, fitted=True)
        parts.append(codes)
        values.append(dequantize(codes, factor_grid(settings.factor_bits, part.shape[-1])))
    return Factors(jnp.swapaxes(values[0], -1, -2), values[1], parts[0], parts[1])


def _product(u: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.matmul(u, v, precision="highest")


def _norm(matrix: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(matrix), axis=(-2, -1)))


def _chosen(mask: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(mask.reshape(mask.shape + (1,) * (new.ndim - mask.ndim)), new, old)


def _settled(errors: jax.Array, count: jax.Array, tolerance: float) -> jax.Array:
    """Stop rule, eq. 15, after pass `count` (from 0): the fall between two windows.

    Both windows share two errors: the fall is a third of what separates the outer ones.
    """
    last = jax.lax.dynamic_index_in_dim(errors, count, axis=-1, keepdims=False)
    before = [
        jax.lax.dynamic_index_in_dim(errors, jnp.maximum(count - i, 0), axis=-1, keepdims=False)
        for i in range(1, WINDOW + 1)
    ]
    fall = before[-1] - last
    return (count >= WINDOW) & (fall < tolerance * sum(before[1:], before[0]))
