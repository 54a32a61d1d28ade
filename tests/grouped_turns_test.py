"""A layer in several calls, each of its own matrices, is what one call for all of them is."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import grouped_dequant_matmul as package
from pallas_kernels.gating import SWIGLU
from pallas_kernels.grouped_dequant_matmul import Turn, mosaic
from pallas_kernels.mosaic_prefill import grouped
from pallas_kernels.packed import dequantize
from pallas_kernels.target import Target
from tests.grouped_dequant_matmul_cases import CASES
from tests.grouped_dequant_matmul_contract import Operands, random_operands
from tests.packed_operands import seed

H100 = Target("gpu", (9, 0), 132)


def emulated(
    self: Any, tier: int, weights: Any, tiles: Any, runs: Any, rows: Any, out: Any, before: Any
) -> jax.Array:
    """The kernel of many rows in numpy, item by item and row by row."""
    del tiles
    found = np.full(out.shape, np.nan, np.float32)
    if before is not None:
        found[:] = before
    order, table, first_block = map(np.asarray, runs)
    (first, after), row_tiles = first_block[tier : tier + 2], 2
    for index in range((after - first) * row_tiles):
        band, length = table[first + index // row_tiles, 3:]
        inside = index - (band - first) * row_tiles
        slot, start, end, _, _ = table[band + inside % length]
        columns = np.array_split(np.arange(out.shape[1]), row_tiles)[inside // length]
        matrix = np.asarray(dequantize(weights, jnp.int32(slot)), np.float32)
        for place in range(start, end):
            sums = matrix @ np.asarray(rows[place], np.float32)
            if self.paired:
                gate, up = np.split(sums, 2)
                sums = gate / (1 + np.exp(-gate)) * up
            found[order[place], columns] = sums[columns]
    return jnp.asarray(found).astype(out.dtype)


def given(operands: Operands, tiers: Any = slice(None)) -> tuple[Any, ...]:
    pairs = package.Assignments(*map(jnp.asarray, (operands.tier, operands.slot, operands.weight)))
    stacks = jax.tree.map(jnp.asarray, (operands.gate_up[tiers], operands.down[tiers]))
    return jnp.asarray(operands.x), pairs, *stacks


def in_turns(operands: Operands, call: Any) -> jax.Array:
    """All tiers, one call each."""
    found, count = None, len(operands.gate_up)
    slots = max(of.words.shape[0] for of in operands.gate_up)
    for number in range(count):
        turn = Turn(jnp.int32(number), found, count, slots, spared=16)
        found = call(*given(operands, slice(number, number + 1)), turn)
    return found


class TurnsTest(parameterized.TestCase):
    def check(self, operands: Operands, found: jax.Array, whole: jax.Array) -> None:
        ran = (operands.tier >= 0) & (operands.tier < len(operands.gate_up))
        self.assertGreater(len(set(operands.tier[ran])), 1)
        np.testing.assert_array_equal(found[:, ran], whole[:, ran])
        self.assertFalse(np.isnan(found[:, ran]).any())

    @parameterized.parameters(("reference", {}), ("triton", {"interpret": True}))
    @pytest.mark.slow
    def test_calls_give_what_one_gives(self, implementation, how):
        operands = random_operands(CASES["int4_int2_and_skipped"], seed(self.id()))

        def call(x, pairs, ups, downs, turn=None):
            return package.moe_products(
                x, pairs, ups, downs, turn=turn, implementation=implementation, **how
            )

        self.check(operands, in_turns(operands, call), call(*given(operands)))

    @pytest.mark.slow
    def test_the_kernel_of_many_rows_sorts_once_for_all_calls(self):
        operands = random_operands(CASES["prefill_mxfp4"], seed(self.id()))
        sorts, blocks = [], []

        def call(x, pairs, ups, downs, turn=None):
            of_each = (ups, [()] * len(ups)), (downs, [()] * len(downs))
            self.assertTrue(mosaic.has_many_rows(pairs, of_each, None, H100))
            return mosaic.layer_mosaic(x, pairs, of_each, None, H100, None, SWIGLU, turn)

        def recorded(own: Any, *args: Any) -> jax.Array:
            sorts.append(np.asarray(own.runs.order))
            blocks.append(own.num_thread_blocks)
            return emulated(own, *args)

        with mock.patch.object(grouped._Call, "_launch", recorded):
            whole = call(*given(operands))
            self.assertEqual({*blocks}, {132})
            sorts.clear()
            blocks.clear()
            found = in_turns(operands, call)
        self.assertEqual({*blocks}, {116})
        for order in sorts:
            np.testing.assert_array_equal(order, sorts[0])
        self.check(operands, found, whole)
        reference = package.moe_products(*given(operands), implementation="reference")
        ran = (operands.tier >= 0) & (operands.tier < len(operands.gate_up))
        np.testing.assert_allclose(found[:, ran], reference[:, ran], rtol=0.05, atol=0.05)
