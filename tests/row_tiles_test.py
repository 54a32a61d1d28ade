"""Which tiles serve few plain outputs, and that others would; values are the contract's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels.dequant_matmul.tiles import RowTiles, TritonTiles, triton_tiles
from pallas_kernels.packed import plain
from tests import dequant_matmul_test
from tests.dequant_matmul_contract import CASES, Case, Operands, random_operands
from tests.dequant_matmul_test import HOPPER
from tests.host_test_case import HostTestCase
from tests.packed_operands import seed


def run(operands: Operands, case: Case, **how: Any) -> jax.Array:
    """By Triton's kernel, interpreted."""
    return dequant_matmul_test.run(operands, case, implementation="triton", interpret=True, **how)


class ValueTest(HostTestCase):
    def test_a_whole_row_is_the_same_in_any_company(self):
        case = CASES["rows_of_several_a_program"]
        operands = random_operands(case, seed(self.id()))
        together = run(operands, case)
        alone = operands._replace(x=operands.x[4:5])
        found = run(alone, case._replace(rows=1))
        np.testing.assert_array_equal(found[0], together[4])


class TilesTest(parameterized.TestCase):
    """By rule; nothing is launched."""

    @parameterized.parameters(
        ((1, 128, 2048), RowTiles(1, 1, 2)),
        ((32, 512, 2048), RowTiles(2, 4, 8)),
        ((5, 8, 4096), RowTiles(2, 1, 4)),
        ((3, 64, 7168), RowTiles(2, 1, 8)),
        ((33, 128, 2048), None),
        ((1, 1024, 2048), None),
        ((1, 128, 8193), None),
    )
    def test_few_plain_rows_are_whole(self, shape, expected):
        rows, outputs, inputs = shape
        weights = plain(jax.ShapeDtypeStruct((3, outputs, inputs), jnp.bfloat16))
        found = triton_tiles(rows, weights, HOPPER)
        if expected is None:
            self.assertIsInstance(found, TritonTiles)
            return
        self.assertEqual(found, expected)
        self.assertIsInstance(triton_tiles(rows, weights, HOPPER, has_terms=True), TritonTiles)
