"""Section `compose` of the quality benchmark: its policies, its front, equal memory."""

import types
from typing import Any

import numpy as np
from absl.testing import absltest

from moejax.policies.buddy_lists import buddy_lists, conditional_coactivation
from moejax.policies.compose import Compose
from scripts.studies.quality.compose import GROUPS, Group, front, policy_of
from scripts.studies.quality.decode import Decoded, held_first


class Profile:
    """Lists of two layers of eight experts."""

    lists = buddy_lists(
        conditional_coactivation(np.random.default_rng(0).integers(0, 9, (2, 8, 8))), 0.8, 4
    )
    gains = None


def decoded(tpot_ms: float, kl: float) -> Decoded:
    return Decoded(kl=kl, link=0.0, tpot_ms=tpot_ms, hit_rate=1.0, shares={}, device=1.0)


class ComposeTest(absltest.TestCase):
    def test_a_series_has_the_parts_of_its_name(self):
        profile: Any = Profile()
        for group in GROUPS:
            for setting in group.settings:
                policy = policy_of(group, setting, profile)
                names = [name.split()[0] for name in group.series.split("+")]
                if len(names) == 1:
                    self.assertEqual([policy.name], names)
                    continue
                assert isinstance(policy, Compose)
                parts = (policy.hotness, policy.importance, policy.buddies)
                self.assertEqual([part.name for part in parts if part is not None], names)

    def test_groups_of_a_memory_are_of_one_size(self):
        for group in GROUPS:
            taken = np.dot(group.slots, [1.8, 1.0][: len(group.slots)])
            self.assertBetween(taken / (1.8 * group.memory), 0.97, 1.0, str(group))

    def test_the_front(self):
        found = [decoded(1, 3), decoded(2, 2), decoded(2, 3), decoded(3, 2), decoded(4, 1)]
        self.assertEqual(front(found), [True, True, False, False, True])

    def test_no_expert_is_held_twice(self):
        shape: Any = types.SimpleNamespace(
            num_layers=2, config=types.SimpleNamespace(num_experts=8)
        )
        for slots in ((3, 4), (3, 5), (8,), (3, 8)):
            held = held_first(slots, shape)
            counts = [row.shape for row in held]
            whole = 8 in slots
            self.assertEqual(counts, [(2, 0 if whole and n < 8 else n) for n in slots])
            together = np.concatenate([row[0] for row in held])
            self.assertLen(set(together.tolist()), len(together))

    def test_a_part_is_not_found_in_another_ones_name(self):
        profile: Any = Profile()
        group = Group("buddymoe", 4, ("int4",), (4,), [{"rho": 1}])
        self.assertEqual(policy_of(group, {"rho": 1}, profile).name, "buddymoe")


if __name__ == "__main__":
    absltest.main()
