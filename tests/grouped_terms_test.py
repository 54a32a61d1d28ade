"""Low-rank terms of many tokens, which Triton adds to another kernel's products.

That kernel, Mosaic's for many rows, is carried out by numpy.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import grouped_dequant_matmul as package
from pallas_kernels import launch
from pallas_kernels.gating import SWIGLU
from pallas_kernels.grouped_dequant_matmul import api, reference, triton
from pallas_kernels.mosaic_prefill import grouped
from pallas_kernels.target import SIMULATED
from tests import gpu_programs, packed_operands
from tests.grouped_dequant_matmul_cases import CASES, INT3, WITH_TERMS
from tests.grouped_dequant_matmul_contract import Case, Tier, layer_violation, random_operands
from tests.grouped_turns_test import H100, emulated, given, in_turns
from tests.packed_operands import Terms, seed

_TERMS = (Terms(INT3, (3, 2, 0), max_rank=3),)
MANY = {
    "several_tiers": CASES["prefill_tiers_and_terms"],
    # Pairs are not sorted, and what is given is whole though the tiles would split K.
    "few_pairs": Case(
        (WITH_TERMS._replace(down_terms=_TERMS),), tokens=40, width=1, expert_dim=1024
    ),
    # Thin products in parts, which are added before programs read them.
    "parts_of_k": Case(
        (Tier(INT3, INT3, gate_up_terms=_TERMS),), tokens=140, model_dim=1024, skipped=0.3
    ),
    "down_alone": Case((Tier(INT3, INT3, down_terms=_TERMS),), tokens=140, dtype="float16"),
}


class TermsTest(parameterized.TestCase):
    @parameterized.parameters(*MANY)
    @pytest.mark.slow
    def test_they_are_added_to_what_the_kernel_of_many_rows_gives(self, name):
        operands = random_operands(MANY[name], seed(name))
        terms = jax.tree.map(jnp.asarray, (operands.gate_up_low_rank, operands.down_low_rank))
        blocks, sorts = [], []

        def call(x, pairs, ups, downs, turn=None):
            up, down = (of[turn.number : turn.number + 1] if turn else of for of in terms)
            of = api._Layer(x, pairs, (ups, up), (downs, down), None, turn)
            return api._by("mosaic")(of, gating=SWIGLU, target=SIMULATED)

        def recorded(own: Any, *args: Any) -> jax.Array:
            blocks.append(own.num_thread_blocks)
            sorts.append(np.asarray(own.runs.order))
            return emulated(own, *args)

        with mock.patch.object(grouped._Call, "_launch", recorded):
            whole = call(*given(operands))
            self.assertEqual({*blocks}, {SIMULATED.num_processors})
            blocks.clear()
            sorts.clear()
            found = in_turns(operands, call)
        self.assertEqual({*blocks}, {SIMULATED.num_processors - 16})
        for order in sorts:  # tokens are copied once for all turns
            np.testing.assert_array_equal(order, sorts[0])
        ran = (operands.tier >= 0) & (operands.tier < len(operands.down))
        np.testing.assert_array_equal(found[:, ran], whole[:, ran])
        y = package.combine(whole, jnp.asarray(ran), operands.weight, operands.x.dtype)
        self.assertIsNone(layer_violation(y, operands))
        for leaf in ("gate_up_low_rank", "down_low_rank"):
            if any(getattr(operands, leaf)):
                without = operands._replace(**{leaf: [()] * len(operands.gate_up)})
                self.assertIsNotNone(layer_violation(y, without))

    @parameterized.parameters("several_tiers", "few_pairs")
    @pytest.mark.slow
    def test_matrices_are_not_read_where_products_are_given(self, name):
        operands = random_operands(MANY[name], seed(name))
        x, pairs, ups, _ = given(operands)
        terms = jax.tree.map(jnp.asarray, (operands.gate_up_low_rank, operands.down_low_rank))
        broken = [
            dataclasses.replace(of, words=jnp.zeros_like(of.words), scales=nan_like(of.scales))
            for of in ups
        ]
        exact = reference.product_reference(x, pairs, ups, terms[0], None, SIMULATED, gating=SWIGLU)
        sums = np.full((*pairs.slot.shape, ups[0].num_outputs), np.nan, np.float32)
        for at in np.argwhere((operands.tier >= 0) & (operands.tier < len(ups))):
            tier, slot = operands.tier[*at], operands.slot[*at]
            matrix = packed_operands.dense(operands.gate_up[tier], slot, ())
            sums[*at] = matrix @ np.asarray(operands.x[at[0]], np.float64)
        found = triton.product_triton(
            x, pairs, broken, terms[0], None, SIMULATED, gating=SWIGLU, products=jnp.asarray(sums)
        )
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(exact, np.float32), rtol=0.02, atol=0.02
        )

    def test_parts_of_thin_products_do_not_depend_on_slots(self):
        """Slots are where experts are; a result's bits must not tell."""
        shapes = []
        for slots in (3, 200):
            program = gpu_programs.layer(
                (packed_operands.Form(3),), 512, width=2, model_dim=4096, expert_dim=14336,
                slots=slots, rank=16,
            )  # fmt: skip
            with mock.patch.object(launch, "triton_call", wraps=launch.triton_call) as call:
                traced = functools.partial(program.function, target=H100)
                jax.eval_shape(traced, *program.operands)
            every = [of.kwargs for of in call.call_args_list]
            shapes.append([of["out_shape"].shape for of in every if "_thin_" in of["name"]])
        self.assertEqual(shapes[0], shapes[1])
        self.assertGreater(shapes[0][0][0], 1)

    def test_terms_are_no_reason_against_the_kernel_of_many_rows(self):
        program = gpu_programs.layer(
            (packed_operands.Form(3),), 512, width=2, model_dim=4096, expert_dim=14336, rank=16
        )
        x, _, ups, downs, (up_terms, down_terms), *_ = program.operands
        refusal = functools.partial(package.OPERATION.refusal, "mosaic", x, 2, ups, downs)
        self.assertEqual(
            refusal([*up_terms, *down_terms], True, target=H100), refusal([], True, target=H100)
        )


def nan_like(scales: jax.Array | None) -> jax.Array | None:
    return None if scales is None else jnp.full_like(scales, jnp.nan)
