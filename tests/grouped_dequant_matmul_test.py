"""The contract of MoE layers with packed weights: reference, interpreted, compiled on a GPU."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import grouped_dequant_matmul as package
from pallas_kernels import launch
from pallas_kernels.grouped_dequant_matmul import mosaic
from pallas_kernels.grouped_dequant_matmul.tiles import TritonTiles
from pallas_kernels.mosaic_decode import launch_blocks
from pallas_kernels.packed import PackedMatrices, plain
from pallas_kernels.target import SIMULATED, Target, current_target
from tests import packed_operands, slow
from tests.dequant_matmul_test import CAPABILITIES, compiled_quickly, leave_a_program_out
from tests.grouped_dequant_matmul_cases import CASES, NOT_INTERPRETED, WHOLE, full, reduced
from tests.grouped_dequant_matmul_contract import (
    BROKEN,
    LEAVES_A_PART_OUT,
    Operands,
    layer_violation,
    product_by_product,
    random_operands,
    violation,
)
from tests.host_test_case import HostTestCase
from tests.kernel_shapes import LAYERS
from tests.packed_operands import seed
from tests.poisoned_outputs import after_nan

KERNELS = package.OPERATION.names[:-1]
HOST_CASES = CASES | reduced(LAYERS)
DEVICE_CASES = HOST_CASES | full(LAYERS)
# Mosaic's kernels are not compiled but carried out by numpy, in a second or two each.
INTERPRETED = sorted(
    (kernel, name)
    for kernel, name in itertools.product(KERNELS, HOST_CASES)
    if kernel == "mosaic" or name not in NOT_INTERPRETED
)
# One cheap case of each kind and width; all run on a device.
FAST = (
    ("mosaic", "whole_int3_by_row"),
    ("mosaic", "whole_int4_int2_and_skipped"), ("mosaic", "whole_int8"),
    ("mosaic", "whole_apart_and_int2"), ("triton", "apart_and_int2"),
    ("mosaic", "whole_low_rank_and_plain"),
    ("mosaic", "whole_mxfp4_short_rows"),
    ("triton", "int8"),
    ("triton", "int4_int2_and_skipped"), ("triton", "plain"), ("triton", "prefill_long_groups"),
)  # fmt: skip
FAST_REFERENCE = (
    "int2_gate_up_int4_down", "int3_by_row", "int4_int2_and_skipped", "int8", "low_rank",
    "apart_and_int2", "all_is_skipped", "one_expert_owns_all_rows", "plain",
    "prefill_all_but_one_row_skipped",
)  # fmt: skip


def program(**how: Any) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Hidden values and the layer's; traced anew, so that a kernel may be tampered with."""
    return compiled_quickly(lambda operands: product_by_product(operands, **how), **how)


def layer(**how: Any) -> Callable[..., jax.Array]:
    """The public call of both."""

    def call(operands: Operands) -> jax.Array:
        assignments = package.Assignments(operands.tier, operands.slot, operands.weight)
        products = package.moe_products(
            operands.x, assignments, operands.gate_up, operands.down,
            gate_up_low_rank=operands.gate_up_low_rank, down_low_rank=operands.down_low_rank,
            **how,
        )  # fmt: skip
        active = (operands.tier >= 0) & (operands.tier < len(operands.down))
        return package.combine(products, active, operands.weight, operands.x.dtype)

    return compiled_quickly(call, **how)


def refusal(kernel: str, operands: Operands, target: Target) -> str | None:
    terms = [*operands.gate_up_low_rank, *operands.down_low_rank]
    width = operands.tier.shape[1]
    return package.OPERATION.refusal(
        kernel, operands.x, width, operands.gate_up, operands.down, terms, True, target=target
    )


def rounded_once(weights: PackedMatrices, dtype: Any) -> PackedMatrices:
    """The values of all slots in x's dtype."""
    slots = range(weights.num_slots)
    values = np.stack([packed_operands.values(weights, slot) for slot in slots])
    return plain(jnp.asarray(values.astype(dtype)))


class KernelTestCase(parameterized.TestCase):
    """Skips, saying so, what a kernel refuses; Triton may refuse no case of the contract."""

    def skip_what_is_refused(self, kernel: str, operands: Operands, target: Target) -> None:
        if reason := refusal(kernel, operands, target):
            self.assertNotEqual(kernel, "triton", reason)
            self.skipTest(f"{kernel} refuses: {reason}")

    def interpreted(
        self, kernel: str, operands: Operands, make: Callable[..., Any] = program
    ) -> Any:
        self.skip_what_is_refused(kernel, operands, SIMULATED)
        return make(implementation=kernel, interpret=True)(operands)


class ContractTest(HostTestCase, KernelTestCase):
    """On the host; the interpreter fills outputs with NaN, so what is not written shows."""

    @slow.where(lambda name: name not in FAST_REFERENCE)
    @parameterized.parameters(sorted(HOST_CASES))
    def test_the_reference_has_the_values_of_float64(self, name):
        operands = random_operands(HOST_CASES[name], seed(name))
        found = program(implementation="reference")(operands)
        self.assertIsNone(violation(*found, operands))

    @slow.where(lambda kernel, name: (kernel, name) not in FAST)
    @parameterized.parameters(INTERPRETED)
    def test_a_kernel_has_the_values_of_float64(self, kernel, name):
        operands = random_operands(HOST_CASES[name], seed(kernel + name))
        found = self.interpreted(kernel, operands)
        self.assertIsNone(violation(*found, operands))

    @parameterized.parameters("mxfp4_and_int2", "int4_int2_and_skipped", "low_rank")
    @pytest.mark.slow
    def test_tiles_that_split_k_have_the_values_of_float64(self, name):
        operands = random_operands(CASES[name], seed(self.id()))
        tiles = TritonTiles(block_m=8, block_n=16, step=256, split_k=2, num_warps=1, num_stages=3)
        run = program(implementation="triton", interpret=True, tiles=tiles)
        self.assertIsNone(violation(*run(operands), operands))

    @slow.repeats()
    @parameterized.parameters(
        ("reference", "int4_int2_and_skipped"),
        ("reference", "prefill"),
        ("triton", "int4_int2_and_skipped"),
        ("triton", "prefill"),
        ("mosaic", "whole_int4_int2_and_skipped"),
    )
    def test_the_layer_has_the_value_of_float64_every_time(self, kernel, name):
        operands = random_operands(CASES[name], seed(self.id()))
        found, again = (self.interpreted(kernel, operands, layer) for _ in range(2))
        self.assertIsNone(layer_violation(found, operands))
        self.assertEqual(np.asarray(found).tobytes(), np.asarray(again).tobytes())

    @slow.where(lambda kernel: kernel == "triton")
    @parameterized.parameters("reference", *KERNELS)
    def test_tiers_are_prefixes_of_one_pool(self, kernel):
        """A tier of two bits reads the first planes of the tier of four."""
        operands = random_operands(CASES["whole_two_prefixes"], seed(self.id()))
        low = (dataclasses.replace(operands.gate_up[0], bits=2, refinements=()),
               dataclasses.replace(operands.down[0], bits=2, refinements=()))  # fmt: skip
        tier = np.asarray([[0, 1], [1, 0], [1, 1], [0, -1]], np.int32)
        operands = operands._replace(
            tier=tier, weight=np.where(tier < 0, np.float32(np.nan), operands.weight),
            gate_up=[operands.gate_up[0], low[0]], down=[operands.down[0], low[1]],
            gate_up_low_rank=[(), ()], down_low_rank=[(), ()],
        )  # fmt: skip
        self.assertIsNone(violation(*self.interpreted(kernel, operands), operands))

    @slow.repeats()
    @parameterized.parameters("reference", *KERNELS)
    def test_a_token_without_an_expert_yields_zero(self, kernel):
        whole = "whole_" if kernel == "mosaic" else ""
        name = f"{whole}a_token_whose_experts_are_all_skipped"
        operands = random_operands(CASES[name], seed(self.id()))
        hidden, y = self.interpreted(kernel, operands)
        for skipped in (hidden[1], y[1], hidden[2, 0]):
            np.testing.assert_array_equal(np.asarray(skipped).astype(np.float32), 0)


class CheckTest(HostTestCase):
    """The check that accepts a right kernel refuses every broken one."""

    @slow.repeats()
    @parameterized.parameters(list(BROKEN))
    def test_a_broken_operation_fails(self, broken):
        wrong, name = BROKEN[broken]
        operands = random_operands(CASES[name], seed(broken))
        right = program(implementation="reference")
        self.assertIsNone(violation(*right(operands), operands))
        found = right(wrong(operands))
        for rounds_weights in (False, True):
            self.assertIsNotNone(violation(*found, operands, rounds_weights))

    @slow.repeats()
    @parameterized.product(name=("one_token", "prefill"), launched=("gate_up", "down"))
    def test_a_kernel_that_leaves_outputs_unwritten_fails(self, name, launched):
        several_tiles = CASES[name]._replace(model_dim=160, expert_dim=160)
        operands = random_operands(several_tiles, seed(self.id()))
        call = launch.triton_call

        def change(body: Any, *, name: str, **how: Any) -> Any:
            if launched in name:
                # Along another axis programs may share all there is to do, however few they are.
                return leave_a_program_out(call, 0, body, name=name, **how)
            return call(body, name=name, **how)

        with mock.patch.object(launch, "triton_call", change):
            found = program(implementation="triton", interpret=True)(operands)
        self.assertIn("nan from", violation(*found, operands) or "")

    @parameterized.parameters("gate_up", "down")
    def test_a_simulated_kernel_that_leaves_outputs_unwritten_fails(self, launched):
        operands = random_operands(CASES["whole_one_token"], seed(self.id()))
        run = launch_blocks.simulator.run_blocks
        launches = []

        def one_fewer(body: Any, num_blocks: int, *rest: Any) -> None:
            launches.append(num_blocks)
            fewer = len(launches) == ("gate_up", "down").index(launched) + 1
            run(body, num_blocks - fewer, *rest)

        with mock.patch.object(launch_blocks.simulator, "run_blocks", one_fewer):
            found = jax.device_get(program(implementation="mosaic", interpret=True)(operands))
        self.assertLen(launches, 2)
        self.assertIn("nan from", violation(*found, operands) or "")

    # In float16 the hidden values' rounding hides that of the weights.
    @slow.repeats()
    @parameterized.parameters(("whole_prefill", False), ("whole_prefill_tiers", True))
    def test_weights_rounded_once_pass_where_a_kernel_rounds_them(self, name, seen):
        operands = random_operands(CASES[name], seed(self.id()))
        dtype = operands.x.dtype
        rounded = operands._replace(
            gate_up=[rounded_once(stack, dtype) for stack in operands.gate_up],
            down=[rounded_once(stack, dtype) for stack in operands.down],
        )
        found = program(implementation="reference")(rounded)
        self.assertIsNone(violation(*found, operands, rounds_weights=True))
        self.assertIsNone(layer_violation(found[1], operands, rounds_weights=True))
        self.assertEqual(violation(*found, operands) is not None, seen)

    @pytest.mark.slow
    def test_a_layer_of_which_a_part_is_left_out_fails(self):
        operands = random_operands(CASES["low_rank"], seed(self.id()))
        for broken in LEAVES_A_PART_OUT:
            found = layer(implementation="reference")(BROKEN[broken][0](operands))
            self.assertIsNotNone(layer_violation(found, operands), broken)

    def test_one_hidden_value_that_is_nan_or_off_fails(self):
        operands = random_operands(CASES["low_rank"], seed(self.id()))
        hidden, y = program(implementation="reference")(operands)
        self.assertIsNotNone(violation(hidden.at[0, 1, 3].set(jnp.nan), y, operands))
        self.assertIsNotNone(violation(hidden.at[0, 1, 3].add(0.05), y, operands))
        self.assertIsNotNone(violation(hidden, y.at[2, 3].add(0.05), operands))
        self.assertIsNotNone(layer_violation(y.at[2, 3].add(0.5), operands))
        self.assertIsNotNone(violation(hidden, y[:, :4], operands))
        self.assertIsNotNone(violation(hidden, y.astype(jnp.float32), operands))


class ChoiceTest(parameterized.TestCase):
    case = CASES["three_tiers_with_terms"]

    def test_kernels_refuse_nothing_of_the_contract(self):
        """Triton's takes all on every GPU, Mosaic's all that is whole."""
        for name, case in HOST_CASES.items():
            operands = random_operands(case, seed(name))
            for capability in CAPABILITIES:
                self.assertIsNone(refusal("triton", operands, Target("gpu", capability)), name)
            reason = refusal("mosaic", operands, SIMULATED) if name in WHOLE else None
            if len(operands.x) > mosaic.MOST_STREAMED and name in WHOLE:
                self.assertIn("no interpret mode", reason)
            else:
                self.assertIsNone(reason, name)

    def test_what_does_not_fit_is_refused(self):
        operands = random_operands(self.case, seed(self.id()))
        run = layer(implementation="reference")
        with self.assertRaisesRegex(ValueError, "x is .* expected"):
            run(operands._replace(x=operands.x[1:]))
        with self.assertRaisesRegex(ValueError, "no tiers"):
            run(operands._replace(gate_up=[], gate_up_low_rank=[]))
        with self.assertRaisesRegex(ValueError, "low-rank terms of 2 tiers, there are 3"):
            run(operands._replace(down_low_rank=operands.down_low_rank[:2]))
        for part in ("tier", "slot", "weight"):
            fewer = operands._replace(**{part: getattr(operands, part)[:, 1:]})
            with self.assertRaises(ValueError, msg=part):
                run(fewer)
        terms = dataclasses.replace(operands.down_low_rank[0][0], first_row=90)
        with self.assertRaisesRegex(ValueError, "rows 90..186 of 96"):
            run(operands._replace(down_low_rank=[(terms,), *operands.down_low_rank[1:]]))


@pytest.mark.gpu
class DeviceContractTest(KernelTestCase):
    """The kernels compiled; results lie where NaN was, so no element is left unwritten.

    `poisoned_outputs` says how; `dequant_matmul_test` shows that it works.
    """

    @parameterized.product(kernel=KERNELS, name=sorted(DEVICE_CASES))
    def test_value_is_that_of_float64(self, kernel, name):
        operands = random_operands(DEVICE_CASES[name], seed(kernel + name))
        self.skip_what_is_refused(kernel, operands, current_target())
        on_device = jax.device_put(operands)
        compiled = program(implementation=kernel)
        again = jax.tree.map(np.array, compiled(on_device))
        found = jax.device_get(after_nan(lambda: compiled(on_device))[0])
        rounds_weights = kernel == "mosaic" and not mosaic._streams(*operands.tier.shape, None)
        self.assertIsNone(violation(*found, operands, rounds_weights))
        jax.tree.map(lambda a, b: self.assertEqual(a.tobytes(), b.tobytes()), found, again)
        if name in CASES:
            y = layer(implementation=kernel)(on_device)
            self.assertIsNone(layer_violation(y, operands, rounds_weights))

    @parameterized.product(kernel=KERNELS, broken=list(BROKEN))
    def test_a_broken_kernel_fails(self, kernel, broken):
        wrong, name = BROKEN[broken]
        operands = random_operands(CASES[name], seed(kernel + broken))
        self.skip_what_is_refused(kernel, operands, current_target())
        found = program(implementation=kernel)(wrong(operands))
        rounds_weights = kernel == "mosaic" and not mosaic._streams(*operands.tier.shape, None)
        self.assertIsNotNone(violation(*found, operands, rounds_weights))
