"""Between steps a policy's requests are carried out as far as experts may set out."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.experts.transfer_programs import request_transfers
from moejax.policies.base import Policy, Requests
from moejax.policies.dymoe import DyMoE
from moejax.policies.resident import as_routed
from tests import slow
from tests.host_test_case import HostTestCase
from tests.tiered_case import CONFIG, tiered_runner

HOT, COLD = 0, 1
# Each demotion makes room for the promotion after it; experts 0 to 3 are hot at first.
ASKED = [(0, 0, COLD), (0, 5, HOT), (1, 2, COLD), (1, 6, HOT), (1, 3, HOT), (1, 1, COLD)]


@dataclasses.dataclass(frozen=True)
class Asking(Policy[Any]):
    """Asks for the same again and again."""

    name: ClassVar[str] = "asking"
    repeats_requests: bool = True

    def init(self, spec):
        return jnp.zeros((), jnp.int32)

    def decide(self, state, observation):
        return as_routed(observation, jnp.int32(COLD)), state

    def transfers(self, state, resident):
        layer, expert, tier = (
            jnp.asarray(numbers, jnp.int32) for numbers in zip(*ASKED, strict=True)
        )
        return Requests(layer, expert, tier), state


class AskTest(HostTestCase, parameterized.TestCase):
    # Promotions of two pairs move bytes; where nothing is in any slot, all of them, and demotions.
    @slow.repeats()
    @parameterized.parameters(
        (0, 0), (1, 2), (2, 4), (9, 6), (1, 2, False), (2, 2, False), (3, 4, False), (5, 6, False),
    )  # fmt: skip
    def test_pairs_set_out_while_there_is_room(self, room, carried_out, low_is_full=True):
        self.check(Asking(), room, carried_out, low_is_full)

    @parameterized.parameters(0, 1)
    @pytest.mark.slow
    def test_all_is_carried_out_of_a_policy_that_does_not_ask_again(self, room):
        self.check(Asking(repeats_requests=False), room, len(ASKED), True)

    def check(self, policy, room, carried_out, low_is_full):
        first = 4 if low_is_full else 0
        _, memory = tiered_runner(policy, (4, 2), (4, CONFIG.num_experts), first=first)
        everyone = np.arange(CONFIG.num_experts, dtype=np.int32)
        held = memory.tiers[COLD].pool.residency.table[:, : len(everyone)]
        coming = np.zeros((len(CONFIG.moe_layers), 2, len(everyone)), bool)
        coming[:, COLD] = low_is_full  # the low tier has all of them, or will
        self.assertEqual(held.shape[0], len(CONFIG.moe_layers))
        operands = jnp.asarray(coming), jnp.int32(room)
        pool, said = request_transfers(memory.spec, memory.pool, *operands)
        self.assertEqual(said.ahead.layer.shape, (0,))
        rows = np.stack([np.asarray(numbers) for numbers in said.moved], axis=1).tolist()
        wanted = [list(row) for row in ASKED[:carried_out]] + [[-1] * 3] * (6 - carried_out)
        self.assertEqual(rows, wanted)
        hot = np.asarray(pool.tiers[HOT].residency.table)[:, : len(everyone)] >= 0
        expected = np.zeros_like(hot)
        expected[:, :first] = True
        for layer, expert, tier in ASKED[:carried_out]:
            expected[layer, expert] &= tier == HOT
        np.testing.assert_array_equal(hot, expected)


class ResetTest(HostTestCase):
    def test_a_policy_of_another_rule_is_refused(self):
        policy = DyMoE(low="skip", prefetch=0)
        _, memory = tiered_runner(policy, (4,), (4,))
        memory.reset(dataclasses.replace(policy, retention=0.9))
        with self.assertRaisesRegex(ValueError, "renormalise=True.*has another rule"):
            memory.reset(dataclasses.replace(policy, renormalise=True))
        _, asked = tiered_runner(dataclasses.replace(policy, renormalise=True), (4,), (4,))
        asked.reset(policy)  # its programs ask the policy itself


if __name__ == "__main__":
    absltest.main()
