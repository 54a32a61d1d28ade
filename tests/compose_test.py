"""Policies together: what one leaves out takes nothing from another."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.policies.base import SKIPPED, Decision, Observation, PolicySpec
from moejax.policies.buddy_lists import BuddyLists
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.compose import Compose
from moejax.policies.dymoe import DyMoE
from scripts.studies.buddymoe.controls import RandomExpert
from tests import slow

# A token's experts 0, 1 and 2 are missing; DyMoE leaves out 2, of the least weight.
SPEC = PolicySpec(
    num_layers=1, num_experts=6, width=3, tiers=("int4",), expert_bytes=(100,), slots=(3,)
)
WEIGHTS = (0.5, 0.3, 0.2)


def lists(*buddies: tuple[int, ...]) -> BuddyLists:
    """Lists with two places for experts 0, 1, ..."""
    ids = np.full((1, 6, 2), -1, np.int32)
    for expert, row in enumerate(buddies):
        ids[0, expert, : len(row)] = row
    return BuddyLists(ids, np.where(ids >= 0, np.float32(0.5), np.float32(0)))


def decided(
    of: BuddyLists, first: int = 3, buddies: type[BuddyMoe] = BuddyMoe, **settings: Any
) -> tuple[Decision, list[int]]:
    """The decision of DyMoE 4/0 with BuddyMoE, and the counts of what was replaced.

    Experts from `first` on are resident.
    """
    policy = Compose(
        importance=DyMoE(low="skip", schedule="equal", retention=0.67, prefetch=0),
        buddies=buddies(lists=of, spend_on="last", **settings),
    )
    probabilities = jnp.array([[0.4, 0.24, 0.16, 0.1, 0.06, 0.04]], jnp.float32)
    o = Observation(
        jnp.int32(0), probabilities, jnp.array([[0, 1, 2]], jnp.int32),
        jnp.array([WEIGHTS], jnp.float32), jnp.array([True]), jnp.arange(6)[None] >= first,
    )  # fmt: skip
    decision, state = jax.jit(policy.decide)(policy.init(SPEC), o)
    return decision, state.buddies.replaced[0].tolist()


class SkippedPairsTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.parameters("ranks", "kernel")
    def test_spend_no_replacement(self, form):
        decision, replaced = decided(lists((3,), (4,), (5,)), rho=1, form=form)
        self.assertEqual(decision.ids.tolist(), [[0, 4, 2]])
        self.assertEqual(decision.tier.tolist(), [[0, 0, SKIPPED]])
        self.assertEqual(replaced, [0, 1, 0, 0, 0, 0])

    @parameterized.parameters("ranks", "kernel")
    def test_take_no_buddy(self, form):
        decision, _ = decided(lists((), (3, 4), (3,)), form=form)
        self.assertEqual(decision.ids.tolist(), [[0, 3, 2]])

    @pytest.mark.slow
    def test_are_drawn_for_by_nobody(self):
        decision, replaced = decided(lists((3,), (4,), (5,)), buddies=RandomExpert)
        self.assertEqual(replaced, [1, 1, 0, 0, 0, 0])
        self.assertEqual(decision.ids[0, 2].item(), 2)

    @slow.repeats()
    @parameterized.parameters("ranks", "kernel")
    def test_ask_for_no_expert(self, form):
        of = lists((3,), (4,), (5,))
        # Expert 2 is resident. All that the others ask for is missing; of the three, 2 in 3.
        self.assertEqual(sum(decided(of, 2, beta=0.9, form=form)[1]), 0)
        self.assertEqual(sum(decided(of, 2, beta=1.1, form=form)[1]), 2)
