"""Tiers of a MoE layer that are rows of a host store: kernels read them in place."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels.grouped_dequant_matmul.shapes import SHAPES
from pallas_kernels.host_rows import in_host_memory, rows_on_device
from pallas_kernels.target import SIMULATED, current_target
from tests.dequant_matmul_test import HOPPER
from tests.grouped_dequant_matmul_cases import CASES, full
from tests.grouped_dequant_matmul_contract import Operands, random_operands, violation
from tests.grouped_dequant_matmul_test import KERNELS, KernelTestCase, layer, program, refusal
from tests.host_test_case import HostTestCase
from tests.packed_operands import seed

DEVICE_CASES = {name: case for name, case in (CASES | full(SHAPES)).items() if len(case.tiers) > 1}
HAS_HOST_OPERANDS = jax.__version_info__ >= (0, 11, 2)  # the interpreters take them


def with_tiers_on_host(operands: Operands, device: jax.Device, tiers: tuple[int, ...]) -> Operands:
    """The operands on a device, the matrices of some tiers in its pinned host memory."""
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    placed = jax.device_put(operands, device)

    def moved(stacks: list[Any]) -> list[Any]:
        return [jax.device_put(s, host) if i in tiers else s for i, s in enumerate(stacks)]

    return placed._replace(gate_up=moved(placed.gate_up), down=moved(placed.down))


class RowsTest(HostTestCase, KernelTestCase):
    @parameterized.product(kind=("device", "pinned_host"), shape=((), (5,), (2, 3)))
    def test_rows_are_those_of_numpy(self, kind, shape):
        rng = np.random.default_rng(len(shape))
        array = rng.integers(0, 2**32, (7, 4, 3), np.uint32)
        rows = rng.integers(0, 7, shape).astype(np.int32)
        place = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0], memory_kind=kind)
        found = jax.jit(rows_on_device)(jax.device_put(array, place), rows)
        np.testing.assert_array_equal(found, array[rows])

    @parameterized.parameters("device", "pinned_host")
    def test_where_an_array_lies(self, kind):
        place = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0], memory_kind=kind)
        array = jax.device_put(np.zeros((2, 3), np.float32), place)
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
        found = [in_host_memory(array), in_host_memory(shape)]
        jax.jit(lambda traced: found.append(in_host_memory(traced)))(array)
        self.assertEqual(found, [kind == "pinned_host"] * 3)
        self.assertFalse(in_host_memory(jax.ShapeDtypeStruct((2, 3), np.float32)))

    def test_many_rows_of_host_memory_take_another_kernel(self):
        operands = random_operands(CASES["whole_prefill_tiers"], seed(self.id()))
        placed = with_tiers_on_host(operands, jax.devices("cpu")[0], (1,))
        said = "its kernel for many rows takes no rows of host memory"
        self.assertNotIn(said, refusal("mosaic", operands, HOPPER) or "")
        self.assertIn(said, refusal("mosaic", placed, HOPPER))
        self.assertIsNone(refusal("triton", placed, HOPPER))


class HostContractTest(HostTestCase, KernelTestCase):
    @parameterized.product(
        name=("int4_int2_and_skipped", "prefill_tiers_and_terms"), tiers=((0,), (0, 1, 2))
    )
    def test_the_reference_reads_host_rows(self, name, tiers):
        operands = random_operands(CASES[name], seed(self.id()))
        placed = with_tiers_on_host(operands, jax.devices("cpu")[0], tiers)
        self.assertIsNone(violation(*program(implementation="reference")(placed), operands))

    @parameterized.parameters("triton", "mosaic")
    @pytest.mark.skipif(
        not HAS_HOST_OPERANDS,
        reason="before jax 0.11.2 the interpreter takes no operand in host memory",
    )
    def test_an_interpreted_kernel_reads_host_rows(self, kernel):
        whole = "whole_" if kernel == "mosaic" else ""
        operands = random_operands(CASES[f"{whole}int4_int2_and_skipped"], seed(self.id()))
        placed = with_tiers_on_host(operands, jax.devices("cpu")[0], (1,))
        self.skip_what_is_refused(kernel, operands, SIMULATED)
        found = program(implementation=kernel, interpret=True)(placed)
        self.assertIsNone(violation(*found, operands))


@pytest.mark.gpu
class DeviceHostRowsTest(KernelTestCase):
    """Compiled, the rows in pinned host memory."""

    @parameterized.parameters(
        (kernel, name, tiers)
        for kernel, name in itertools.product(KERNELS, sorted(DEVICE_CASES))
        for tiers in ((1,), tuple(range(len(DEVICE_CASES[name].tiers))))
    )
    def test_the_bits_are_those_of_rows_on_the_device(self, kernel, name, tiers):
        operands = random_operands(DEVICE_CASES[name], seed(kernel + name))
        device = jax.devices()[0]
        placed, on_device = with_tiers_on_host(operands, device, tiers), jax.device_put(operands)
        self.skip_what_is_refused(kernel, placed, current_target())
        run = program(implementation=kernel)
        found, expected = (jax.device_get(run(of)) for of in (placed, on_device))
        self.assertIsNone(violation(*found, operands))
        jax.tree.map(lambda a, b: self.assertEqual(a.tobytes(), b.tobytes()), found, expected)

    @parameterized.parameters(*KERNELS)
    def test_no_copy_of_the_rows_is_made(self, kernel):
        operands = random_operands(CASES["whole_int4_int2_and_skipped"], seed(kernel))
        terms = [*operands.gate_up_low_rank, *operands.down_low_rank]
        self.assertFalse(any(terms))
        if reason := refusal(kernel, operands, current_target()):
            self.skipTest(f"{kernel} refuses: {reason}")
        placed = with_tiers_on_host(operands, jax.devices()[0], (0, 1))
        compiled = jax.jit(layer(implementation=kernel)).lower(placed).compile()
        memory = compiled.memory_analysis()
        rows = jax.tree.leaves((operands.gate_up, operands.down))
        smallest = min(leaf.nbytes for leaf in rows if leaf.dtype == jnp.uint32)
        self.assertLess(memory.temp_size_in_bytes + memory.host_temp_size_in_bytes, smallest)
        self.assertEqual(memory.host_argument_size_in_bytes, sum(leaf.nbytes for leaf in rows))


if __name__ == "__main__":
    absltest.main()
