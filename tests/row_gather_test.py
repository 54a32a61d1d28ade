"""The contract of the row gather: reference, interpreted, compiled without a GPU and on one.

A row is right bit for bit or wrong.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.experts import pinned_memory
from moejax.weights import linear
from pallas_kernels import op
from pallas_kernels.row_gather import gather_rows, triton
from tests import gpu_targets, slow
from tests.host_test_case import HostTestCase
from tests.kernel_contract import one_program_fewer, tampered

H100 = gpu_targets.GPUS["H100"]
CASES = {  # rows, width, ids
    "one": (1, 1, (0,)),
    "odd": (9, 37, (8, 0, 3, 3)),
    "many": (50, 200, tuple(range(49, -1, -1)) * 2),
    "wide": (6, 4096, (5, 1)),
    "beyond_the_ends": (7, 64, (-1, 7, 2**31 - 1, -(2**31), 6)),
}
GPU_CASES = CASES | {"qwen3_30b_chunk": (151_936, 2048, tuple(range(0, 151_936, 75)))}


def operands(name: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    num_rows, width, ids = GPU_CASES[name]
    rng = np.random.default_rng(len(name))
    matrix = rng.standard_normal((num_rows, width), np.float32).astype(jnp.dtype(dtype))
    return matrix, np.asarray(ids, np.int32)


def is_right(found: jax.Array, matrix: np.ndarray, rows: np.ndarray) -> bool:
    expected = matrix[np.clip(rows, 0, len(matrix) - 1)]
    found = np.asarray(found)
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def in_memory(array: np.ndarray, kind: str) -> jax.Array:
    device = jax.devices()[0]
    return jax.device_put(array, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))


def interpreted(matrix: np.ndarray, rows: np.ndarray) -> jax.Array:
    """Traced anew at each call, so that the kernel may be tampered with."""
    return jax.jit(functools.partial(gather_rows, implementation="triton", interpret=True))(
        matrix, rows
    )


class ContractTest(HostTestCase):
    @slow.repeats(lambda name, dtype: (name, dtype)[dtype == "bfloat16"])
    @parameterized.product(name=sorted(CASES), dtype=("bfloat16", "float16", "float32"))
    def test_rows_are_those_of_numpy(self, name, dtype):
        matrix, rows = operands(name, dtype)
        reference = functools.partial(gather_rows, implementation="reference")
        for run in (interpreted, reference):
            self.assertTrue(is_right(run(jnp.asarray(matrix), jnp.asarray(rows)), matrix, rows))

    def test_embeddings_in_host_memory(self):
        matrix, rows = operands("many", "bfloat16")
        take = jax.jit(functools.partial(linear.take_rows, dtype=jnp.dtype(jnp.bfloat16)))
        found = take(in_memory(matrix, "pinned_host"), rows.reshape(4, -1))
        self.assertEqual(found.shape, (4, 25, 200))
        self.assertTrue(is_right(found.reshape(100, 200), matrix, rows))

    def test_programs_know_that_a_copy_is_in_host_memory(self):
        """Else they would gather from it as if it were on the device, which XLA refuses."""
        matrix, rows = operands("many", "bfloat16")
        spaces = []

        def take(matrix: jax.Array, rows: jax.Array) -> jax.Array:
            spaces.append(jax.typeof(matrix).memory_space)
            return linear.take_rows(matrix, rows, matrix.dtype)

        with mock.patch.object(pinned_memory, "_is_pinned", lambda device: True):
            copy = jax.device_put(matrix, pinned_memory.host_place(jax.devices()[0]))
        self.assertTrue(is_right(jax.jit(take)(copy, rows), matrix, rows))
        self.assertEqual(spaces, [jax.memory.Space.Host])

    def test_a_broken_kernel_fails(self):
        matrix, rows = operands("odd", "float32")
        broken = tampered(interpreted, triton.launch, "triton_call", one_program_fewer)
        self.assertFalse(is_right(broken(matrix, rows), matrix, rows))

    @parameterized.parameters(
        (np.zeros(3, np.float32), np.zeros(1, np.int32), r"matrix: float32\[3\], not \[R, W\]"),
        (np.zeros((3, 2), np.float32), np.zeros(1, np.int64), "rows: int64"),
        (np.zeros((3, 2), np.float32), np.zeros(0, np.int32), r"rows: int32\[0\]"),
    )
    def test_operands_that_do_not_fit(self, matrix, rows, said):
        with self.assertRaisesRegex(ValueError, said):
            gather_rows(matrix, rows)

    def test_one_launch_and_nothing_else(self):
        matrix = jax.ShapeDtypeStruct((151_936, 2048), "bfloat16")
        ids = jax.ShapeDtypeStruct((64,), "int32")
        with (
            mock.patch.object(op, "current_target", lambda: H100.target),
            gpu_targets.described(H100),
        ):
            traced = jax.jit(gather_rows).trace(matrix, ids)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        self.assertEqual(text.count("stablehlo."), 1)
        self.assertIn("row_gather_bfloat16_2048", text)


@pytest.mark.gpu
class DeviceTest(parameterized.TestCase):
    """The kernel compiled, the matrix in pinned host memory."""

    @parameterized.product(name=sorted(GPU_CASES), kind=("pinned_host", "device"))
    def test_rows_are_those_of_numpy(self, name, kind):
        matrix, rows = operands(name, "bfloat16")
        run = jax.jit(functools.partial(gather_rows, implementation="triton"))
        placed = in_memory(matrix, kind), in_memory(rows, "device")
        self.assertTrue(is_right(run(*placed), matrix, rows))
        memory = run.lower(*placed).compile().memory_analysis()
        self.assertEqual(memory.temp_size_in_bytes + memory.host_temp_size_in_bytes, 0)
