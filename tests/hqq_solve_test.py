"""The contract of the HQQ kernel: interpreted on a CPU, compiled on a GPU.

The numpy solve is the hqq library's loop, formula by formula. Rounding in float32 turns a tie here
and there the other way, which moves that group's zero: such codes may differ, if they are few.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.quantization.grid import Codes, Grid
from moejax.quantization.hqq import kernel_hqq, kernel_refusal
from pallas_kernels import hqq_solve as package
from pallas_kernels.hqq_solve import api, settings, triton
from pallas_kernels.target import SIMULATED, Target
from tests import gpu_targets, slow
from tests.gpu_targets import leaf
from tests.host_test_case import HostTestCase

TURING = Target("gpu", (7, 5))
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
    odd_groups: bool = False  # constant ones, zeros, one of a tiny range, one outlier

    @property
    def form(self) -> dict[str, int]:
        return {"bits": self.bits, "group_size": self.group_size}


CASES = {
    "int3_narrow": Case(),  # nothing is shrunk: the short loop
    "int3_wide": Case(spread=1.0),  # every program takes the long loop
    "int2_g32_mixed": Case(shape=(64, 128), bits=2, group_size=32, spread=0.03),
    "int4_g128_matrices": Case(shape=(2, 1, 24, 256), bits=4, group_size=128, spread=0.2),
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


def all_steps(case: Case) -> jax.Array:
    return jnp.full(case.shape[:-2], settings.MAX_STEPS, jnp.int32)


def interpreted(operands: Operands, case: Case, **how: object) -> package.HqqSolution:
    """Traced anew at each call, so that a kernel may be tampered with."""
    weights, low_rank = operands
    return jax.jit(
        lambda weights, low_rank: package.hqq_solve(
            weights, **case.form, low_rank=low_rank, steps=all_steps(case), interpret=True, **how
        )
    )(weights, low_rank)


def compiled(operands: Operands, case: Case) -> package.HqqSolution:
    def run(weights: jax.Array, low_rank: tuple[jax.Array, jax.Array] | None):
        return package.hqq_solve(weights, **case.form, low_rank=low_rank, steps=all_steps(case))

    return jax.jit(run)(*operands)


class ContractTest(HostTestCase):
    """On the host; the interpreter fills outputs with NaN, so what is not written shows."""

    @slow.repeats(lambda name: CASES[name].rank > 0)
    @parameterized.parameters(sorted(CASES))
    def test_value_is_that_of_float64(self, name):
        case = CASES[name]
        operands = random_operands(case, seed=len(name))
        self.assertIsNone(violation(interpreted(operands, case), operands, case))


def unrounded(place: jax.Array, top: float) -> jax.Array:
    return jnp.clip(place, 0.0, top)


def half_off(place: jax.Array, top: float) -> jax.Array:
    return jnp.clip(jnp.floor(place), 0.0, top)


class BrokenKernelTest(HostTestCase):
    @slow.repeats()
    @parameterized.parameters(
        ("_nearest", unrounded, "int3_narrow"),
        ("_nearest", half_off, "int3_wide"),
        ("MIN_RANGE", 0.0, "odd_groups"),
        ("MAX_INVERSE_SCALE", 5.0, "int3_narrow"),
    )
    def test_fails(self, name, replacement, case_name):
        case = CASES[case_name]
        operands = random_operands(case, seed=3)
        with mock.patch.object(triton, name, replacement):
            self.assertIsNotNone(violation(interpreted(operands, case), operands, case))

    def test_the_short_loop_fails_where_errors_are_large(self):
        case = CASES["int3_wide"]
        operands = random_operands(case, seed=4)
        with mock.patch.object(triton, "HARMLESS_ERROR", 1e9):
            self.assertIsNotNone(violation(interpreted(operands, case), operands, case))


class StopTest(HostTestCase):
    @parameterized.parameters(
        ([5.0, 4.0, 3.0, 2.0], 4),
        ([5.0, 5.0, 3.0, 2.0], 2),
        ([5.0, 4.0, 4.5, 3.0], 3),
        ([5.0, 4.0, 3.0, 3.0], 4),
        ([5.0, 4.0, 4.0, 0.0], 3),
    )
    def test_steps_until_an_error_has_not_fallen(self, errors, expected):
        both = jnp.array([errors, [9.0, 8.0, 7.0, 6.0]])
        np.testing.assert_array_equal(package.steps_until_stop(both), [expected, 4])

    def test_each_matrix_stops_by_itself(self):
        case = Case(shape=(2, 8, 64))
        operands = random_operands(case, seed=6)
        operands.weights[1] *= 20  # takes longer
        expected = solve_float64(operands, case, steps=None)
        taken = [np.count_nonzero(errors) for errors in expected.errors]
        self.assertLess(min(taken), 20)
        self.assertNotEqual(*taken)
        found = jax.jit(lambda w: package.hqq_solve(w, **case.form, interpret=True))(
            operands.weights
        )
        np.testing.assert_array_equal(found.codes, expected.codes)
        np.testing.assert_allclose(found.zeros, expected.zeros, rtol=0, atol=1e-5)
        self.assertEqual([np.count_nonzero(errors) for errors in found.errors], taken)


def interpreted_solver(weights: jax.Array, u: jax.Array, v: jax.Array, grid: Grid) -> Codes:
    return kernel_hqq(weights, u, v, grid, interpret=True)


class SolverTest(HostTestCase):
    """The kernel as `moejax.quantization` takes it."""

    grid = Grid(bits=3, group_size=64, zero_kind="float")

    def test_codes_are_those_of_weights_less_the_product(self):
        case = CASES["low_rank"]
        operands = random_operands(case, seed=8)
        found = jax.jit(interpreted_solver, static_argnums=3)(
            operands.weights, *operands.low_rank, self.grid
        )
        expected = solve_float64(operands, case, steps=None)
        equal = np.asarray(found.codes) == expected.codes
        self.assertGreaterEqual(equal.mean(), SHARE_OF_EQUAL_CODES)
        np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-6)

    def test_other_grids_are_refused(self):
        refusal = functools.partial(kernel_refusal, target=SIMULATED)
        weights = jax.ShapeDtypeStruct((4, 100), jnp.float32)
        self.assertIsNone(refusal(jax.ShapeDtypeStruct((4, 128), jnp.float32), self.grid))
        self.assertIn("K=100 is no multiple", refusal(weights, self.grid))
        symmetric = dataclasses.replace(self.grid, zero_kind="symmetric")
        self.assertIn("'symmetric'", refusal(weights, symmetric))
        with self.assertRaisesRegex(ValueError, "zero_kind is 'symmetric'"):
            kernel_hqq(weights, weights, weights, symmetric)


class RefusalTest(parameterized.TestCase):
    @parameterized.parameters(sorted(CASES))
    def test_nothing_to_refuse_since_ampere(self, name):
        weights, low_rank = random_operands(CASES[name], seed=7)
        for target in (SIMULATED, *(gpu.target for gpu in gpu_targets.GPUS.values())):
            reason = package.refusal(weights, low_rank, **CASES[name].form, target=target)
            self.assertIsNone(reason)

    def test_every_reason_is_listed(self):
        low_rank = leaf(4, 3, dtype="float16"), leaf(2, 100, dtype="float32")
        found = package.refusal(leaf(4, 100, dtype="int32"), low_rank, 9, 64, TURING)
        for part in ("sm_80", "K=100 is", "bits 9", "weights are int32", "u has sh", "u is f"):
            self.assertIn(part, found)
        found = package.refusal(leaf(4, 128, dtype="float32"), None, 3, 48, SIMULATED)
        self.assertEqual(found, "group_size 48 is none of 32, 64, 128")

    def test_a_call_that_is_refused_is_an_error(self):
        cpu = mock.patch.object(api, "current_target", return_value=Target("cpu", None))
        with cpu, self.assertRaisesRegex(ValueError, "^hqq_solve refuses: it runs on .* is cpu$"):
            package.hqq_solve(jnp.zeros((4, 128)), bits=3, group_size=64)


class LoweringTest(parameterized.TestCase):
    """The program for CUDA, made without a GPU."""

    @parameterized.parameters(sorted(REAL_CASES))
    def test_one_launch_reads_the_weights(self, name):
        case = REAL_CASES[name]
        *lead, num_rows, num_inputs = case.shape
        weights = jax.ShapeDtypeStruct(case.shape, case.dtype)
        low_rank = None
        if case.rank:
            low_rank = (
                jax.ShapeDtypeStruct((*lead, num_rows, case.rank), jnp.float32),
                jax.ShapeDtypeStruct((*lead, case.rank, num_inputs), jnp.float32),
            )

        def run(weights: jax.Array, low_rank: tuple[jax.Array, jax.Array] | None):
            return package.hqq_solve(weights, **case.form, low_rank=low_rank, steps=all_steps(case))

        gpu = gpu_targets.GPUS["H100"]
        hopper = mock.patch.object(api, "current_target", return_value=gpu.target)
        with gpu_targets.described(gpu), hopper:
            lowered = jax.jit(run).trace(weights, low_rank).lower(lowering_platforms=("cuda",))
        lines = lowered.as_text().splitlines()
        calls = [line for line in lines if "stablehlo.custom_call" in line]
        self.assertLen(calls, 1)
        self.assertIn(f"hqq_solve_int{case.bits}_g{case.group_size}_r{case.rank}_", calls[0])
        whole = rf"\b{num_rows}x{num_inputs}x"
        around = [line for line in lines if line not in calls and re.search(whole, line)]
        operations = {found for line in around for found in re.findall(r"stablehlo\.(\w+)", line)}
        self.assertLessEqual(operations, {"reshape"})


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    """The kernel compiled."""

    @parameterized.parameters(sorted(GPU_CASES))
    def test_value_is_that_of_float64(self, name):
        case = GPU_CASES[name]
        operands = random_operands(case, seed=len(name))
        found = compiled(operands, case)
        self.assertIsNone(violation(found, operands, case))
        again = compiled(operands, case)
        jax.tree.map(np.testing.assert_array_equal, found, again)
