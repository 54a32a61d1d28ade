"""The plan of a layer's experts by one kernel: equal to the tables' rules, to the bit."""

from absl.testing import absltest, parameterized

from tests import residency_plan_contract as contract
from tests.residency_plan_contract import CASES


class ContractTest(parameterized.TestCase):
    @parameterized.product(case=tuple(CASES), seed=(0, 1, 2))
    def test_the_kernel_decides_as_the_tables_do(self, case, seed):
        contract.check(CASES[case], seed, implementation="triton", interpret=True)

    @parameterized.parameters(*CASES)
    def test_the_reference_does_too(self, case):
        contract.check(CASES[case], 3, implementation="reference")


if __name__ == "__main__":
    absltest.main()
