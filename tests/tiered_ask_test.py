"""Between steps a policy's requests are carried out as far as experts may set out."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moejax.memory.tiered import ask
from moejax.policies.interface import Needs, Requests
from moejax.policies.resident import as_routed
from tests.host_test_case import HostTestCase
from tests.tiered_case import CONFIG, tiered_runner

HOT, COLD = 0, 1
# Each demotion makes room for the promotion after it; experts 0 to 3 are hot at first.
ASKED = [(0, 0, COLD), (0, 5, HOT), (1, 2, COLD), (1, 6, HOT), (1, 3, HOT), (1, 1, COLD)]


@dataclasses.dataclass(frozen=True)
class Asking:
    """Asks for the same again and again."""

    name: str = "asking"
    needs: Needs = dataclasses.field(default_factory=Needs)

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
    # The second and the fourth move bytes; what stands behind the last of them waits.
    @parameterized.parameters((0, 0), (1, 2), (2, 4), (9, 6))
    def test_as_many_as_may_set_out_and_what_makes_room_for_them(self, room, carried_out):
        _, memory = tiered_runner(Asking(), (4, 2), (4, CONFIG.num_experts), first=4)
        everyone = np.arange(CONFIG.num_experts, dtype=np.int32)
        held = memory.tiers[COLD].pool.residency.table[:, : len(everyone)]
        coming = np.zeros((len(CONFIG.moe_layers), 2, len(everyone)), bool)
        coming[:, COLD] = True  # the low tier has all of them, or will
        self.assertEqual(held.shape[0], len(CONFIG.moe_layers))
        pool, found = ask(memory.spec, memory.pool, jnp.asarray(coming), jnp.int32(room))
        rows = np.stack([np.asarray(numbers) for numbers in found], axis=1).tolist()
        wanted = [list(row) for row in ASKED[:carried_out]] + [[-1] * 3] * (6 - carried_out)
        self.assertEqual(rows, wanted)
        hot = np.asarray(pool.pools[HOT].residency.table)[:, : len(everyone)] >= 0
        expected = np.zeros_like(hot)
        expected[:, :4] = True
        for layer, expert, tier in ASKED[:carried_out]:
            expected[layer, expert] &= tier == HOT
        np.testing.assert_array_equal(hot, expected)


if __name__ == "__main__":
    absltest.main()
