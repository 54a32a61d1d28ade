"""BuddyMoE as a policy among others: its controls, its transfers, refusals."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moejax.errors import MoejaxError
from moejax.policies.buddymoe import BuddyMoe, BuddyState
from tests.buddymoe_cases import EXPERTS, LAYERS, LISTS, SPEC, steps


class TransfersTest(parameterized.TestCase):
    def missing(self, **settings: Any) -> tuple[BuddyMoe, BuddyState]:
        """A policy, and a state in which (layer, expert) were missed so often."""
        policy = BuddyMoe(lists=LISTS, half_life=1e9, **settings)
        missed = np.zeros((LAYERS, EXPERTS), np.float32)
        for layer, expert, count in ((0, 3, 5), (1, 7, 9), (1, 2, 4), (0, 1, 1), (0, 0, 20)):
            missed[layer, expert] = count
        return policy, dataclasses.replace(policy.init(SPEC), missed=jnp.asarray(missed))

    def test_the_most_missed_come_as_far_as_the_bytes_go(self):
        policy, state = self.missing(background_bytes=150.0)  # experts of 100 bytes
        resident = jnp.zeros((LAYERS, 1, EXPERTS), bool).at[0, 0, 0].set(True)
        transfers = jax.jit(policy.transfers)
        asked = []
        for _ in range(4):
            requests, state = transfers(state, resident)
            rows = zip(*map(np.asarray, requests), strict=True)
            asked.append([tuple(map(int, row)) for row in rows if row[0] >= 0])
            self.assertLen(requests.layer, 4)
        # (0, 0) is resident, (0, 1) was missed once: below `least_misses`.
        self.assertEqual(asked, [[(1, 7, 0)], [(0, 3, 0), (1, 2, 0)], [], []])
        self.assertEqual(int(state.requested), 3)
        self.assertEqual(float(state.credit), 300)  # of 4 * 150, 3 * 100 spent
        np.testing.assert_array_equal(state.missed[1], 0)
        self.assertAlmostEqual(float(state.missed[0, 1]), 1, places=5)

    def test_never_more_than_the_budget(self):
        policy = BuddyMoe(lists=LISTS, background_bytes=30.0, least_misses=1.0)
        state, rng = policy.init(SPEC), np.random.default_rng(7)
        decide, transfers = jax.jit(policy.decide), jax.jit(policy.transfers)
        resident = jnp.asarray(rng.random((LAYERS, 1, EXPERTS)) < 0.5)
        for step, o in enumerate(steps(8, 20)):
            o = dataclasses.replace(o, resident=resident[int(o.layer)])
            _, state = decide(state, o)
            if int(o.layer) == LAYERS - 1:
                requests, state = transfers(state, resident)
                for layer, expert in zip(*map(np.asarray, requests[:2]), strict=True):
                    self.assertTrue(layer < 0 or not resident[layer, 0, expert])
                self.assertLessEqual(100 * int(state.requested), 30 * (step // LAYERS + 1))
        self.assertEqual(int(state.requested), 6)  # all of 20 * 30 bytes that whole experts take

    def test_the_default_is_an_expert_in_four_steps(self):
        policy, state = self.missing()
        nothing = jnp.zeros((LAYERS, 1, EXPERTS), bool)
        counts, transfers = [], jax.jit(policy.transfers)
        for _ in range(8):
            _, state = transfers(state, nothing)
            counts.append(int(state.requested))
        self.assertEqual(counts, [0, 0, 0, 1, 1, 1, 1, 2])

    def test_misses_fade_and_credit_does_not_pile_up(self):
        policy = BuddyMoe(lists=LISTS, half_life=2.0, background_bytes=1e6)
        state = policy.init(SPEC)
        state = dataclasses.replace(state, missed=state.missed.at[0, 0].set(8))
        everything, transfers = jnp.ones((LAYERS, 1, EXPERTS), bool), jax.jit(policy.transfers)
        for _ in range(4):
            _, state = transfers(state, everything)
        self.assertAlmostEqual(float(state.missed[0, 0]), 2, places=5)
        self.assertEqual(float(state.credit), 400)
        none = BuddyMoe(lists=LISTS, max_requests=0)
        requests, _ = none.transfers(none.init(SPEC), everything)
        self.assertEqual(requests.layer.shape, (0,))


class RefusalTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"form": "x"}, "form='x' must be one of ranks, kernel"),
        ({"fall_back": "x"}, "fall_back='x' must be one of fetch, drop"),
        ({"rho": -1}, "rho=-1 must be an integer, from 0"),
        ({"rho": 1.5}, "rho=1.5 must be an integer"),
        ({"bypass_bytes": -1}, "bypass_bytes=-1 must be a number, 0 or more"),
        ({"bypass_bytes": 1.0, "beta": 0.5}, "beta=0.5 and bypass_bytes are of one gate"),
        ({"depth": 6}, "depth=6 must be an integer, from 1 to 5"),
        ({"hops": 1.0}, "hops=1.0 must be a tuple"),
        ({"gains": "profil"}, "gains='profil' must be finite numbers"),
        ({"in_prefill": "maybe"}, "in_prefill='maybe' must be True or False"),
        ({"least_misses": -1}, "least_misses=-1 must be a number, 0 or more"),
        ({"tae_tau": float("nan")}, "tae_tau=nan must be finite numbers"),
        ({"tae_tau": np.float32([0.5, np.nan])}, "tae_tau=.* must be finite numbers"),
        ({"tae_temperature": 0.0}, "tae_temperature=0.0 must be a number, above 0"),
        ({"background_bytes": -1.0}, "background_bytes=-1.0 must be a number, 0 or more"),
    )
    def test_settings(self, settings, said):
        with self.assertRaisesRegex(MoejaxError, said):
            BuddyMoe(lists=LISTS, **settings)

    @parameterized.parameters(
        ({"num_layers": 3}, "lists are of 2 layers of 12 experts, the model has 3 of 12"),
        ({"num_experts": 8}, "the model has 2 of 8"),
        ({"tiers": ("int4", "int2")}, "buddymoe serves one tier, not int4, int2"),
    )
    def test_models(self, fields, said):
        with self.assertRaisesRegex(MoejaxError, said):
            BuddyMoe(lists=LISTS).init(dataclasses.replace(SPEC, **fields))
        with self.assertRaisesRegex(MoejaxError, "hops has 1 of 12 experts"):
            BuddyMoe(lists=LISTS, hops=(1.0,)).init(SPEC)
        with self.assertRaisesRegex(MoejaxError, "tae_tau has 3 of 2 layers"):
            BuddyMoe(lists=LISTS, tae_tau=np.zeros(3, np.float32)).init(SPEC)
        with self.assertRaisesRegex(MoejaxError, r"gains is \[2, 12\], not \[layers"):
            BuddyMoe(lists=LISTS, gains=np.ones((LAYERS, EXPERTS))).init(SPEC)
