"""The contract of products with packed weights: reference, interpreted, compiled on a GPU."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.models.shapes import SHAPES as MODELS
from pallas_kernels import dequant_matmul as package
from pallas_kernels import launch
from pallas_kernels.dequant_matmul import low_rank, mosaic
from pallas_kernels.mosaic_decode import launch_blocks
from pallas_kernels.packed import plain
from pallas_kernels.target import SIMULATED, Target, current_target
from tests import gpu_programs, packed_operands, slow
from tests.dequant_matmul_contract import (
    BROKEN,
    CASES,
    NOT_INTERPRETED,
    WHOLE,
    WIDTHS,
    Case,
    Operands,
    every_form,
    full,
    random_operands,
    reduced,
    violation,
)
from tests.host_test_case import HostTestCase
from tests.model_products import DENSE_SHAPES, products_of
from tests.packed_operands import Form, Terms, seed
from tests.poisoned_outputs import after_nan

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
HOPPER = Target("gpu", (9, 0))
KERNELS = package.OPERATION.names[:-1]
HOST_CASES = CASES | reduced(DENSE_SHAPES)
DEVICE_CASES = HOST_CASES | every_form() | full(DENSE_SHAPES)
DEVICE_CASES["more_than_a_round"] = Case(Form(4), rows=1000, outputs=5120, inputs=1280)
# Mosaic's kernels are not compiled but carried out by numpy, in less than a second each.
INTERPRETED = sorted(
    (kernel, name)
    for kernel, name in itertools.product(KERNELS, HOST_CASES)
    if kernel == "mosaic" or name not in NOT_INTERPRETED
)

# A case of each width and kind; the others run where slow tests do.
FAST = (
    "int2grow_float", "int3g128_float", "int4grow_symmetric", "int8grow_float", "low_rank_plain",
    "plain_bfloat16", "rows_of_a_router",
    "whole_every_code_int2", "whole_every_code_int3", "whole_every_code_int4",
    "whole_every_code_int8", "whole_every_code_apart_int3", "whole_every_code_apart_int4",
    "every_code_apart_int4", "every_code_mxfp4", "whole_apart_int4_shared",
    "whole_plain_bfloat16", "whole_low_rank_32", "low_rank_large_33_rows",
    "low_rank_large_blocks",
    "int4g128_33_rows", "whole_half_block_int4", "whole_half_block_int3",
)  # fmt: skip


def compiled_quickly(call: Callable[..., Any], interpret: bool = False, **how: Any) -> Any:
    """Jitted; where interpreted, without optimisation: most of a small kernel's time is XLA's."""
    del how
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(call, compiler_options=options if interpret else None)


def program(case: Case, **how: Any) -> Callable[..., jax.Array]:
    """Traced anew for each program, so that a kernel may be tampered with; the slot is an array."""

    def call(x: jax.Array, weights: Any, slot: jax.Array, low_rank: Any) -> jax.Array:
        dtype = None if case.out_dtype is None else jnp.dtype(case.out_dtype)
        return package.dequant_matmul(
            x, weights, slot=slot, low_rank=low_rank, out_dtype=dtype, **how
        )

    return compiled_quickly(call, **how)


def run(operands: Operands, case: Case, **how: Any) -> jax.Array:
    return program(case, **how)(*operands)


class KernelTestCase(parameterized.TestCase):
    """Skips, saying so, what a kernel refuses; Triton may refuse no case of the contract."""

    def skip_what_is_refused(self, kernel: str, operands: Operands, target: Target) -> None:
        x, weights, _, low_rank = operands
        if reason := package.OPERATION.refusal(kernel, x, weights, low_rank, target=target):
            self.assertNotEqual(kernel, "triton", reason)
            self.skipTest(f"{kernel} refuses: {reason}")

    def interpreted(self, kernel: str, operands: Operands, case: Case) -> jax.Array:
        self.skip_what_is_refused(kernel, operands, SIMULATED)
        return run(operands, case, implementation=kernel, interpret=True)


class ContractTest(HostTestCase, KernelTestCase):
    """On the host; the interpreter fills outputs with NaN, so what is not written shows."""

    @slow.where(lambda name: "whole" in name or name not in FAST)
    @parameterized.parameters(sorted(HOST_CASES))
    def test_the_reference_has_the_value_of_float64(self, name):
        case = HOST_CASES[name]
        operands = random_operands(case, seed(name))
        found = run(operands, case, implementation="reference")
        self.assertIsNone(violation(found, operands, case))

    @slow.where(lambda name: name not in FAST)
    @parameterized.parameters(INTERPRETED)
    def test_a_kernel_has_the_value_of_float64(self, kernel, name):
        case = HOST_CASES[name]
        operands = random_operands(case, seed(kernel + name))
        found = self.interpreted(kernel, operands, case)
        self.assertIsNone(violation(found, operands, case))

    @pytest.mark.slow
    def test_few_programs_add_several_tiles_of_large_ranks(self):
        case = CASES["low_rank_large_blocks"]._replace(rows=3)
        operands = random_operands(case, seed(self.id()))
        with mock.patch.object(low_rank, "U_PROGRAMS", 14):  # two parts of the blocks
            found = self.interpreted("triton", operands, case)
        self.assertIsNone(violation(found, operands, case))

    @slow.repeats()
    @parameterized.parameters(*KERNELS)
    def test_the_same_bits_every_time(self, kernel):
        case = CASES["whole_int3g128_float" if kernel == "mosaic" else "int3g128_float"]
        operands = random_operands(case, seed(self.id()))
        first, second = (
            np.asarray(self.interpreted(kernel, operands, case)).tobytes() for _ in range(2)
        )
        self.assertEqual(first, second)

    @slow.repeats()
    @parameterized.parameters(("reference", 40, 288), ("triton", 40, 288), ("mosaic", 48, 512))
    def test_zero_rows_yield_zero(self, name, outputs, inputs):
        case = Case(Form(3), rows=2, outputs=outputs, inputs=inputs)
        operands = random_operands(case, seed(self.id()))
        operands.x[1] = 0
        how = {} if name == "reference" else {"interpret": True}
        found = run(operands, case, implementation=name, **how)
        np.testing.assert_array_equal(np.asarray(found[1]).astype(np.float32), 0)
        self.assertIsNone(violation(found, operands, case))

    @slow.repeats()
    @parameterized.parameters((2, 300), (3, 300), (4, 300), (8, 300), (3, 36))
    def test_rows_of_no_whole_words_are_right_or_refused(self, bits, inputs):
        case = Case(Form(bits, 32), inputs=inputs)
        operands = random_operands(case, seed(self.id()))
        found = run(operands, case, implementation="reference")
        self.assertIsNone(violation(found, operands, case))
        reason = package.OPERATION.refusal(
            "triton", operands.x, operands.weights, (), target=HOPPER
        )
        if reason is not None:
            self.assertIn(str(inputs), reason)
            return
        found = self.interpreted("triton", operands, case)
        self.assertIsNone(violation(found, operands, case))


class ContractCoverageTest(parameterized.TestCase):
    """The cases meet what STYLE.md and the layout ask of them."""

    def test_every_code_is_at_every_place(self):
        for name in (f"{kind}every_code_int{bits}" for kind in ("", "whole_") for bits in WIDTHS):
            case = CASES[name if name in WHOLE else f"{name}_4_rows"]
            num_codes = 2**case.form.bits
            codes = (np.arange(case.outputs)[:, None] + np.arange(case.inputs)) % num_codes
            for place in codes.T:
                self.assertLen(set(place.tolist()), num_codes)

    @parameterized.parameters(sorted(MODELS))
    def test_every_packed_matrix_of_every_named_model_is_met(self, name):
        config = MODELS[name]
        products = products_of(config)
        self.assertIn("attention.o_proj", products)
        self.assertEqual("shared.down" in products, config.shared_dim > 0)
        on_devices = {(case.inputs, case.outputs) for case in DEVICE_CASES.values()}
        for leaf, shape in products.items():
            self.assertIn(shape, on_devices, leaf)
            [case] = reduced({leaf: shape}).values()
            self.assertIn(case, HOST_CASES.values(), leaf)


def leave_a_program_out(
    call: Callable[..., Any], axis: int, *body: Any, grid: tuple[int, ...], **how: Any
) -> Any:
    """A launch of one program too few along an axis of its grid."""
    axis %= len(grid)
    fewer = tuple(max(1, size - (i == axis)) for i, size in enumerate(grid))
    return call(*body, grid=fewer, **how)


class CheckTest(HostTestCase):
    """The check that accepts a right kernel refuses every broken one."""

    @slow.repeats()
    @parameterized.parameters(list(BROKEN))
    def test_a_broken_operation_fails(self, broken):
        wrong, name = BROKEN[broken]
        case = CASES[name]
        operands = random_operands(case, seed(broken))
        found = run(operands, case, implementation="reference")
        self.assertIsNone(violation(found, operands, case))
        found = run(wrong(operands), case, implementation="reference")
        for rounds_weights in (False, True):
            self.assertIsNotNone(violation(found, operands, case, rounds_weights))

    def test_weights_rounded_to_bfloat16_fail(self):
        case = CASES["int4g32_symmetric"]
        operands = random_operands(case, seed(self.id()))
        rounded = np.asarray(operands.weights.scales).astype(jnp.bfloat16).astype(np.float32)
        weights = dataclasses.replace(operands.weights, scales=rounded)
        found = run(operands._replace(weights=weights), case, implementation="reference")
        self.assertIsNotNone(violation(found, operands, case))

    def test_a_kernel_that_leaves_outputs_unwritten_fails(self):
        case = Case(Form(3), outputs=200, inputs=256)
        operands = random_operands(case, seed(self.id()))
        broken = functools.partial(leave_a_program_out, launch.triton_call, 0)
        with mock.patch.object(launch, "triton_call", broken):
            found = run(operands, case, implementation="triton", interpret=True)
        self.assertIn("nan from", violation(found, operands, case))

    def test_a_simulated_kernel_that_leaves_outputs_unwritten_fails(self):
        case = CASES["whole_int4g128_integer"]
        operands = random_operands(case, seed(self.id()))
        launched = launch_blocks.simulator.run_blocks

        def one_fewer(body: Any, num_blocks: int, *rest: Any) -> None:
            launched(body, num_blocks - 1, *rest)

        with mock.patch.object(launch_blocks.simulator, "run_blocks", one_fewer):
            found = run(operands, case, implementation="mosaic", interpret=True).block_until_ready()
        self.assertIn("nan from", violation(found, operands, case))

    @parameterized.parameters("int4g32_symmetric", "whole_int3g128_float", "whole_int8g32_float")
    def test_weights_rounded_once_pass_where_a_kernel_rounds_them(self, name):
        case = CASES[name]._replace(out_dtype="float32")
        operands = random_operands(case, seed(self.id()))
        values = packed_operands.values(operands.weights, case.slot).astype(case.dtype)
        rounded = operands._replace(weights=plain(jnp.asarray(values[None])), slot=np.int32(0))
        found = run(rounded, case, implementation="reference")
        self.assertIsNone(violation(found, operands, case, rounds_weights=True))
        self.assertIsNotNone(violation(found, operands, case))
        twice = values.astype(jnp.float8_e4m3fn).astype(case.dtype)
        rounded = operands._replace(weights=plain(jnp.asarray(twice[None])), slot=np.int32(0))
        found = run(rounded, case, implementation="reference")
        self.assertIsNotNone(violation(found, operands, case, rounds_weights=True))

    def test_one_value_that_is_nan_or_off_fails(self):
        case = CASES["int3g128_float"]
        operands = random_operands(case, seed(self.id()))
        found = run(operands, case, implementation="reference")
        self.assertIsNotNone(violation(found.at[0, 3].set(jnp.nan), operands, case))
        self.assertIsNotNone(violation(found.at[0, 3].add(0.05), operands, case))
        self.assertIsNotNone(violation(found.astype(jnp.float32), operands, case))
        self.assertIsNotNone(violation(found[:, :4], operands, case))


class ChoiceTest(parameterized.TestCase):
    case = Case(Form(3), terms=(Terms(Form(3), (1, 2, 3), 3),))

    def test_kernels_refuse_nothing_of_the_contract(self):
        """Triton's takes all on every GPU, Mosaic's all that is whole."""
        gpus = [("triton", Target("gpu", capability)) for capability in CAPABILITIES]
        for name, case in HOST_CASES.items():
            x, weights, _, low_rank = random_operands(case, seed(name))
            for kernel, target in (*gpus, *[("mosaic", SIMULATED)] * (name in WHOLE)):
                reason = package.OPERATION.refusal(kernel, x, weights, low_rank, target=target)
                self.assertIsNone(reason, f"{kernel} {name}")

    @parameterized.product(rank=(16, 64, 512, 1024), rows=(1, 16, 64))
    def test_the_fast_kernel_takes_terms_of_every_rank(self, rank, rows):
        """MiLo's ranks, at its attention; versions aside, which say nothing of ranks."""
        weights = gpu_programs.shapes_of_matrices(Form(3), 32, 4096, 4096)
        terms = gpu_programs.shapes_of_terms(Form(3), weights, rank)
        x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
        with mock.patch.object(jax, "__version_info__", (0, 11, 2)):
            choice = package.OPERATION.choose(x, weights, (terms,), target=HOPPER)
        self.assertEqual(choice.implementation, "mosaic", choice.describe())

    def test_what_does_not_fit_is_refused(self):
        operands = random_operands(self.case, seed(self.id()))
        with self.assertRaisesRegex(ValueError, r"x is \(3, 800, 1\), expected \[M, 800\]"):
            run(operands._replace(x=operands.x[..., None]), self.case)
        terms = dataclasses.replace(operands.low_rank[0], first_row=20)
        with self.assertRaisesRegex(ValueError, "rows 20..60 of 40"):
            run(operands._replace(low_rank=(terms,)), self.case)


@pytest.mark.gpu
class DeviceContractTest(KernelTestCase):
    """The kernels compiled; results lie where NaN was, so no element is left unwritten.

    `poisoned_outputs` says how, and `test_results_lie_where_nan_was` that it works.
    """

    @parameterized.product(kernel=KERNELS, name=sorted(DEVICE_CASES))
    def test_value_is_that_of_float64(self, kernel, name):
        case = DEVICE_CASES[name]
        operands = random_operands(case, seed(kernel + name))
        self.skip_what_is_refused(kernel, operands, current_target())
        compiled = program(case, implementation=kernel)
        on_device = jax.device_put(operands)
        again = np.array(compiled(*on_device))
        found = np.asarray(after_nan(lambda: compiled(*on_device))[0])
        rounds_weights = kernel == "mosaic" and not mosaic._streams(operands.x, None)
        self.assertIsNone(violation(found, operands, case, rounds_weights))
        self.assertEqual(found.tobytes(), again.tobytes())

    def test_results_lie_where_nan_was(self):
        landed = []
        for name in sorted(CASES)[:4]:
            case = CASES[name]
            compiled = program(case, implementation="reference")
            on_device = jax.device_put(random_operands(case, seed(name)))
            landed.append(after_nan(lambda: compiled(*on_device))[1])  # noqa: B023
        self.assertTrue(any(landed), landed)

    @parameterized.product(kernel=KERNELS, broken=list(BROKEN))
    def test_a_broken_kernel_fails(self, kernel, broken):
        wrong, name = BROKEN[broken]
        case = CASES[name]
        operands = random_operands(case, seed(kernel + broken))
        self.skip_what_is_refused(kernel, operands, current_target())
        found = run(wrong(operands), case, implementation=kernel)
        rounds_weights = kernel == "mosaic" and not mosaic._streams(operands.x, None)
        self.assertIsNotNone(violation(found, operands, case, rounds_weights))
