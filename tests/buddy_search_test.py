"""The search for buddies by one kernel: equal to the policy's own."""

import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels import buddy_search
from tests import buddy_search_contract as contract
from tests import slow
from tests.buddy_search_contract import CASES


class ContractTest(parameterized.TestCase):
    @slow.where(lambda case: case not in tuple(CASES)[:1])
    @parameterized.product(case=tuple(CASES), implementation=("triton", "reference"))
    def test_finds_whom_the_policy_finds(self, case, implementation):
        num = 0
        for seed in range(4):
            how = {"interpret": True} if implementation == "triton" else {}
            num += contract.check(CASES[case], seed, implementation=implementation, **how).sum()
        self.assertEqual(num > 0, case not in ("nobody", "no_budget"))


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    @parameterized.parameters(*CASES)
    def test_the_compiled_kernel_finds_whom_the_policy_finds(self, case):
        for seed in range(4):
            contract.check(CASES[case], seed, implementation="triton")


class ApiTest(absltest.TestCase):
    def test_what_does_not_fit_is_named(self):
        ids, flags, number = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, bool), jnp.int32(1)
        lists = jnp.zeros((1, 4, 2), jnp.int32)
        with self.assertRaisesRegex(ValueError, "resident \\(5,\\)"):
            buddy_search.search(ids, lists, 0, jnp.zeros(5, bool), flags, number, number)
        given = (ids, lists, 0, jnp.zeros(4, bool), flags, number, number)
        gate = buddy_search.Gate(jnp.zeros((2, 5)), *(jnp.zeros(n) for n in ((1,), (), ())))
        with self.assertRaisesRegex(ValueError, "the gate is .*2, 5"):
            buddy_search.search(*given, gate)
        with self.assertRaisesRegex(ValueError, "replaced is "):
            buddy_search.search(*given, None, jnp.zeros((1, 4)))


if __name__ == "__main__":
    absltest.main()
