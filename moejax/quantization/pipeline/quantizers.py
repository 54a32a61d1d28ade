"""Quantizers of one stack of matrices: a compiled program per shape and scheme."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.quantization.autoround import autoround
from moejax.quantization.factors import factor_grid, quantize_factor
from moejax.quantization.gptq import GptqSettings, gptq
from moejax.quantization.grid import Codes, Grid, dequantize
from moejax.quantization.hqq import hqq, kernel_hqq, kernel_refusal
from moejax.quantization.least_squares import least_squares
from moejax.quantization.milo import BASES, Factors, MiloSettings, milo
from moejax.quantization.pipeline.recipe import CALIBRATED, COMPENSATED, Scheme
from moejax.weights.qtensor import QTensor, from_codes

# Bits that replace a matrix's surging INT3 factors (MiLo 4.2), whose codes lose more than this
# share of what the compensator gains.
SAFE_FACTOR_BITS = 8
_MAX_GAIN_LOST = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Static facts of a stack's quantization; one compiled program for each."""

    scheme: Scheme  # resolved; its rank is of no account here
    max_rank: int  # of the stack's compensators; 0: none
    passes: int  # cap of MiLo's iteration
    use_kernel: bool = False  # solve HQQ by the GPU kernel where that serves the shape

    @property
    def grid(self) -> Grid:
        """Grid of the codes."""
        return self.scheme.grid

    def _by_kernel(self, weights: jax.Array) -> bool:
        """Whether the GPU kernel solves HQQ's part of such weights."""
        return self.use_kernel and kernel_refusal(weights, self.grid) is None

    @property
    def _surges(self) -> bool:
        """Whether factors may lose so much that they are kept in more bits."""
        compensated = self.scheme.method in COMPENSATED and self.max_rank > 0
        return compensated and self.scheme.factor_bits < SAFE_FACTOR_BITS


class Calibration(NamedTuple):
    """Inputs of a stack for calibrated methods: Hessians and token counts."""

    hessians: jax.Array  # float32[C, K, K]
    num_tokens: jax.Array  # int32[C]


class _StackFactors(NamedTuple):
    """Compensators of a stack; rows beyond a matrix's rank are zero."""

    u: jax.Array | QTensor  # [C, R, N], U transposed
    v: jax.Array | QTensor  # [C, R, K]


Compensators = tuple[_StackFactors | None, ...]  # None for widths without


class QuantizedStack(NamedTuple):
    """A stack of C quantized matrices."""

    tensor: QTensor  # [C, N, K], without compensators
    factors: Compensators  # of each of the grid's `widths`
    safe_factors: Compensators  # in `SAFE_FACTOR_BITS`, for the matrices that surged
    surged: jax.Array  # bool[C]
    starved: jax.Array  # bool[C]: saw too little text, and took the fallback
    is_storable: jax.Array  # bool[C]: scales and zeros are finite in the scheme's type
    lost: tuple[jax.Array, ...]  # float32[C] of each of the grid's `widths`, sum of squared errors
    whole: jax.Array  # float32[C], sum of squared weights


class _Solution(NamedTuple):
    """Codes, and the factors they may have been fitted to."""

    codes: Codes
    factors: Compensators
    lost: tuple[jax.Array, ...]  # float32[C] of each width, with these factors
    bare: tuple[jax.Array, ...]  # the same without factors
    # The same with unquantized ones; None where codes are fitted to factors.
    free_lost: tuple[jax.Array, ...] | None


def kernel_remarks(matrices: Iterable[tuple[tuple[int, ...], Scheme]]) -> list[str]:
    """Remarks, one per reason why the GPU kernel refuses HQQ solves of shapes and schemes."""
    reasons: dict[str, int] = defaultdict(int)
    for shape, scheme in matrices:
        if scheme.method in ("hqq", "milo"):
            weights = jax.ShapeDtypeStruct(shape, jnp.float32)
            if reason := kernel_refusal(weights, scheme.grid):
                reasons[reason] += 1
    return [
        f"{count} matrices were solved without the HQQ kernel, which refuses: {reason}"
        for reason, count in reasons.items()
    ]


@functools.partial(jax.jit, static_argnames="program")
def quantize_stack(
    weights: jax.Array,
    # int32[C], of the compensators of the narrowest width, at most `program.max_rank`
    ranks: jax.Array,
    calibration: Calibration | None,  # None for methods that need none
    program: Program,
) -> QuantizedStack:
    """Quantizes and packs C matrices, float32[C, N, K], and measures the error."""
    method = program.scheme.method
    starved = surged = jnp.zeros(weights.shape[0], bool)
    factors: Compensators = (None,) * len(program.grid.widths)
    safe_factors = factors
    if method in CALIBRATED:
        assert calibration is not None
        codes, starved = _calibrated(weights, calibration, program)
    elif method in COMPENSATED and program.max_rank:
        codes, factors, safe_factors, surged = _compensated(weights, ranks, program)
    else:
        codes = _plain(weights, program)
    tensor = from_codes(*codes, **dataclasses.asdict(program.scheme.kind))
    widths = program.scheme.planes[::-1] or (program.scheme.bits,)
    values = [tensor.prefix(bits).dequantize() for bits in widths]
    for i, (own, safe) in enumerate(zip(factors, safe_factors, strict=True)):
        if own is not None:
            product = _product(own)
            if safe is not None:
                product = jnp.where(surged[:, None, None], _product(safe), product)
            values[i] += product
    return QuantizedStack(
        tensor=tensor,
        factors=factors,
        safe_factors=safe_factors,
        surged=surged,
        starved=starved,
        is_storable=_is_storable(tensor),
        lost=tuple(_squares(weights - approximation) for approximation in values),
        whole=_squares(weights),
    )


def _plain(weights: jax.Array, program: Program) -> Codes:
    """Quantizes without calibration or compensators; without ranks, MiLo is its base."""
    method = program.scheme.method
    if method in ("hqq", "milo"):
        if program._by_kernel(weights):
            num_matrices, num_rows, num_inputs = weights.shape
            u = jnp.zeros((num_matrices, num_rows, 0), jnp.float32)
            return kernel_hqq(weights, u, jnp.zeros((num_matrices, 0, num_inputs)), program.grid)
        return hqq(weights, program.grid)
    if method == "least_squares":
        return least_squares(weights, program.grid)
    return BASES[{"milo+": "least_squares"}.get(method, method)](weights, program.grid)


def _calibrated(
    weights: jax.Array, calibration: Calibration, program: Program
) -> tuple[Codes, jax.Array]:
    """Quantizes with calibration: codes, starved matrices."""
    grid = program.grid
    if program.scheme.method == "autoround":
        codes = jax.vmap(lambda w, h: autoround(w, h, grid))(weights, calibration.hessians)
        return codes, calibration.num_tokens == 0
    settings = GptqSettings(act_order=program.scheme.act_order)
    found = jax.vmap(lambda w, h, n: gptq(w, h, grid, settings, num_tokens=n))(
        weights, calibration.hessians, calibration.num_tokens
    )
    return found.codes, found.starved


def _compensated(
    weights: jax.Array, ranks: jax.Array, program: Program
) -> tuple[Codes, Compensators, Compensators, jax.Array]:
    """Quantizes with compensators: codes, factors, wider factors and who needs them."""
    solution = _solve(weights, ranks, program, program.scheme.factor_bits)
    if not program._surges:
        nothing = jnp.zeros(weights.shape[0], bool)
        return solution.codes, solution.factors, (None,) * len(solution.factors), nothing
    surged = (ranks > 0) & _has_surged(weights, solution, program)

    # Solved again, since codes may be fitted to their factors, but only where it happened at all.
    def solve() -> tuple[Codes, Compensators]:
        found = _solve(weights, ranks, program, SAFE_FACTOR_BITS)
        return found.codes, found.factors

    def nothing_to_solve() -> tuple[Codes, Compensators]:
        zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype)  # noqa: E731
        found: tuple[Codes, Compensators] = jax.tree.map(zeros, jax.eval_shape(solve))
        return found

    safe_codes, safe_factors = jax.lax.cond(jnp.any(surged), solve, nothing_to_solve)
    pairs = zip(safe_codes, solution.codes, strict=True)
    codes = Codes(*(jnp.where(surged[:, None, None], *pair) for pair in pairs))
    return codes, solution.factors, safe_factors, surged


def _has_surged(weights: jax.Array, solution: _Solution, program: Program) -> jax.Array:
    """Mask bool[C]: the factors' codes lose most of the narrowest width's gain, or do harm."""
    # Wider widths gain little, and have little rank to lose it, so that harm alone counts.
    wider = zip(solution.lost[:-1], solution.bare[:-1], strict=True)
    harms = functools.reduce(jnp.logical_or, (a > b for a, b in wider), jnp.bool_(False))
    return harms | _narrowest_surged(weights, solution, program)


def _narrowest_surged(weights: jax.Array, solution: _Solution, program: Program) -> jax.Array:
    grid, lost = program.grid, solution.lost[-1]
    bare = _squares(weights - dequantize(_plain(weights, program), grid, grid.widths[-1]))
    if solution.free_lost is None:
        return lost >= bare
    free = solution.free_lost[-1]
    return lost - free > _MAX_GAIN_LOST * jnp.maximum(bare - free, 0.0)


def _solve(weights: jax.Array, ranks: jax.Array, program: Program, factor_bits: int) -> _Solution:
    grid, is_plus = program.grid, program.scheme.method == "milo+"
    settings = MiloSettings(
        max_rank=program.max_rank,
        max_passes=program.passes,
        base="least_squares" if is_plus else "hqq",
        solver=kernel_hqq if not is_plus and program._by_kernel(weights) else None,
        refit=is_plus and factor_bits < 16,
        factor_bits=factor_bits,
        rank_divisor=program.scheme.rank_divisor,
    )
    found = milo(weights, grid, settings, ranks)
    factors, lost, bare, free_lost = [], [], [], []
    for width, own in zip(grid.widths, found.factors, strict=True):
        left = weights - dequantize(found.codes, grid, width)
        packed = _packed(own, factor_bits) if own.u.shape[-1] else None
        factors.append(packed)
        bare.append(_squares(left))
        lost.append(_squares(left if packed is None else left - _product(packed)))
        exact = _StackFactors(jnp.swapaxes(own.u, -1, -2), own.v)
        free_lost.append(_squares(left - _product(exact)))
    free = None if settings.refit else tuple(free_lost)
    return _Solution(found.codes, tuple(factors), tuple(lost), tuple(bare), free)


def _packed(factors: Factors, factor_bits: int) -> _StackFactors:
    """Factors in few bits, or in bfloat16."""
    parts = (jnp.swapaxes(factors.u, -1, -2), factors.v)
    if factor_bits == 16:
        return _StackFactors(*(part.astype(jnp.bfloat16) for part in parts))
    found_codes = (factors.u_codes, factors.v_codes)
    coded = [
        quantize_factor(part, factor_bits) if codes is None else codes
        for part, codes in zip(parts, found_codes, strict=True)
    ]
    return _StackFactors(*map(functools.partial(_pack_factor, factor_bits), coded))


def _pack_factor(factor_bits: int, codes: Codes) -> QTensor:
    grid = factor_grid(factor_bits, codes.codes.shape[-1])
    return from_codes(*codes, bits=factor_bits, group_size=grid.group_size, zero_kind="symmetric")


def _product(factors: _StackFactors) -> jax.Array:
    """Computes U V: float32[C, N, K]."""
    u, v = (
        factor.dequantize() if isinstance(factor, QTensor) else factor.astype(jnp.float32)
        for factor in factors
    )
    return jnp.einsum("crn,crk->cnk", u, v, precision="highest")


def _is_storable(tensor: QTensor) -> jax.Array:
    """Whether scales and zeros are finite: bool[C]."""
    parts = [tensor.scales]
    if tensor.zero_kind == "float":
        assert tensor.zeros is not None
        parts.append(tensor.zeros)
    finite = [jnp.all(jnp.isfinite(part), axis=(-2, -1)) for part in parts]
    return functools.reduce(jnp.logical_and, finite)


def _squares(x: jax.Array) -> jax.Array:
    """Sums squares: float32[C] of [C, N, K]."""
    return jnp.sum(jnp.square(x), axis=(-2, -1))
