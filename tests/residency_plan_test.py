"""The plan of a layer's experts by one kernel: equal to the tables' rules, to the bit."""

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.ledger import EVENTS
from tests import residency_plan_contract as contract
from tests import slow
from tests.residency_plan_contract import CASES

FAST = ("decode", "scan_in_banks", "no_cache")


class ContractTest(parameterized.TestCase):
    @slow.where(lambda case, seed: case not in FAST or seed > 0)
    @parameterized.product(case=tuple(CASES), seed=(0, 1, 2))
    def test_the_kernel_decides_as_the_tables_do(self, case, seed):
        found, _ = contract.check(CASES[case], seed, implementation="triton", interpret=True)
        events = dict(zip(EVENTS, np.asarray(found.events).sum((0, 1)), strict=True))
        self.assertGreater(events["misses"], 0)

    @slow.where(lambda case: case not in FAST)
    @parameterized.parameters(*CASES)
    def test_the_reference_does_too(self, case):
        contract.check(CASES[case], 3, implementation="reference")


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    @parameterized.parameters(*CASES)
    def test_the_compiled_kernel_decides_as_the_tables_do(self, case):
        for seed in range(2):
            contract.check(CASES[case], seed, implementation="triton")


if __name__ == "__main__":
    absltest.main()
