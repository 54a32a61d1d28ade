"""The plan of a layer over several tiers by one kernel: equal to the engine's rules, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.ledger import EVENTS
from pallas_kernels import residency_plan, tiered_plan
from pallas_kernels.target import Target
from tests import slow
from tests import tiered_plan_contract as contract
from tests.tiered_plan_contract import CASES


class ContractTest(parameterized.TestCase):
    @parameterized.parameters(*CASES)
    def test_the_kernel_decides_as_the_rules_do(self, case):
        for seed in range(2 if slow.asked() else 1):
            tables, _, placed = contract.check(
                CASES[case], seed, implementation="triton", interpret=True
            )
            events = [np.asarray(one.events).sum((0, 1)) for one in tables]
            names = dict(zip(EVENTS, np.sum(events, axis=0), strict=True))
            self.assertGreater(names["hits"], 0)
            still = case in ("one_of_all", "fixed") or CASES[case].rule == "held"
            if not still:  # something moves within a step
                self.assertGreater(min(names["admitted"], names["evictions"]), 0)
            unasked = {0} if case == "held_in_the_second" else set()
            every = set(range(-1, len(tables)))
            self.assertEqual(set(np.unique(placed.tier)), every - unasked)

    @parameterized.parameters(*CASES)
    def test_the_reference_does_too(self, case):
        contract.check(CASES[case], 3, implementation="reference")


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    @parameterized.parameters(*CASES)
    def test_the_compiled_kernel_decides_as_the_rules_do(self, case):
        for seed in range(2):
            contract.check(CASES[case], seed, implementation="triton")


class ApiTest(parameterized.TestCase):
    def operands(self, gate: int = 4):
        tables = residency_plan.Tables(
            jnp.full((2, 8 + 9), -1, jnp.int32), jnp.int32(1),
            jnp.zeros((2, len(EVENTS)), jnp.int32), jnp.zeros((2, 2)),
        )  # fmt: skip
        tier = tiered_plan.Tier(tables, jnp.zeros((2, 8), jnp.int32))
        pairs, weights = jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2))
        asked = tiered_plan.Asked(pairs, tiered_plan.Wishes(pairs, pairs > 0), weights)
        return [tier], jnp.zeros((2, gate)), 0, asked, jnp.ones(1, bool)

    def place(self, *operands, form=None, **how):
        form = form or tiered_plan.Form(1, False, False)
        return tiered_plan.place(*operands, forms=[form], columns=contract.COLUMNS, **how)

    def test_what_does_not_fit_is_named(self):
        with self.assertRaisesRegex(ValueError, "gate is float32.*of 1 tiers"):
            self.place(*self.operands(gate=5))
        with self.assertRaisesRegex(ValueError, "tier 0 is not full: it has 3 slots"):
            self.place(*self.operands(), form=tiered_plan.Form(1, True, True))
        (tier,), *rest = self.operands(gate=5)
        with self.assertRaisesRegex(ValueError, "tier 1 is fixed: the first one may be"):
            forms = [tiered_plan.Form(1, False, False), tiered_plan.Form(1, False, False, 0, True)]
            tiered_plan.place([tier, tier], *rest, forms=forms, columns=contract.COLUMNS)
        with self.assertRaisesRegex(ValueError, "it has slots or streams"):
            self.place(*self.operands(), form=tiered_plan.Form(1, False, False, 2))
        (tier,), *rest = self.operands()
        tables = tier.tables._replace(table=jnp.full((2, 8), -1, jnp.int32))
        with self.assertRaisesRegex(ValueError, "streams 1 experts, fewer than"):
            form = tiered_plan.Form(1, False, False, 1)
            self.place([tier._replace(tables=tables)], *rest, form=form)
        with self.assertRaisesRegex(ValueError, "none of triton, reference"):
            self.place(*self.operands(), implementation="mosaic")

    def test_refusals(self):
        gpu = Target("gpu", (9, 0))
        self.assertIsNone(tiered_plan.refusal("triton", 128, 8, 2, gpu))
        self.assertRegex(tiered_plan.refusal("triton", 128, 8, 5, gpu), "5 tiers")
        self.assertRegex(tiered_plan.refusal("triton", 1024, 300, 1, gpu), "1024 experts.*300")
        self.assertIsNotNone(tiered_plan.refusal("triton", 8, 8, 1, Target("cpu", None)))
        self.assertIsNone(tiered_plan.refusal("reference", 1024, 300, 9))

    def test_nothing_else_is_written(self):
        operands = self.operands()
        tables, gate, placed = jax.jit(
            lambda: self.place(*operands, implementation="triton", interpret=True)
        )()
        self.assertEqual(int(tables[0].events[1].sum()), 0)
        np.testing.assert_array_equal(tables[0].table[1], operands[0][0].tables.table[1])
        np.testing.assert_array_equal(gate, 0)
        self.assertGreaterEqual(int(placed.slot.min()), 0)


if __name__ == "__main__":
    absltest.main()
