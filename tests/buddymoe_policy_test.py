"""BuddyMoE's decisions as the paper's loops and gates make them, transfers, refusals."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moejax.errors import MoejaxError
from moejax.policies import buddy_gates
from moejax.policies.base import SKIPPED, Observation
from moejax.policies.buddymoe import BuddyMoe, BuddyState
from pallas_kernels import buddy_search
from tests import buddymoe_reference as paper
from tests import slow
from tests.buddymoe_cases import EXPERTS, HOPS, LAYERS, LISTS, SPEC, as_lists, observation, steps


def expected_decision(
    policy: BuddyMoe, tau: np.ndarray, o: Observation
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, replaced and searched, by the paper's loops and gates."""
    layer, active = int(o.layer), np.asarray(o.active)
    probabilities, ids, resident = map(np.asarray, (o.probabilities, o.ids, o.resident[0]))
    may = np.zeros(ids.shape, bool)
    for t in range(len(ids)):
        tae = paper.entropy(probabilities[t], ids[t])
        held = tae <= tau[layer] or paper.margin(probabilities[t], ids[t]) >= policy.tae_margin
        may[t] = active[t] and not held
    requested = {int(e) for e in ids[active].ravel()}
    device = np.zeros(EXPERTS, int) if o.partition is None else np.asarray(o.partition)
    for one in set(device.tolist()):
        own = set(np.flatnonzero(device == one).tolist())
        on_gpu = set(np.flatnonzero(resident).tolist())
        if policy.beta is not None and requested & own:
            held = paper.missing_share(requested & own, on_gpu) >= policy.beta
            may &= ~(held & (device[ids] == one))
    q, lists = policy.lists.q[layer], policy.lists.ids[layer]
    scores = np.zeros((len(ids), *2 * probabilities.shape[1:]))
    z = np.log(probabilities.astype(np.float64))
    z = (z - z.min(axis=1, keepdims=True)) / np.ptp(z, axis=1, keepdims=True)
    for i, place in np.argwhere(lists >= 0):
        j = lists[i, place]
        for t in range(len(ids)):
            hop = policy.hops[j] if policy.hops else int(device[i] != device[j])
            scores[t, i, j] = paper.score(q[i, place], policy.eta, z[t, j], policy.kappa, hop)
    return paper.algorithm_1(
        ids, resident, as_lists(lists), policy.depth or lists.shape[1], budget=policy.rho,
        may=may, last_first=policy.spend_on == "last", scores=scores,
    )  # fmt: skip


class DecisionTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.parameters(
        {"rho": 1},
        {"rho": 2, "spend_on": "last"},
        {"rho": 0},
        {"depth": 1, "fall_back": "drop"},
        {"rho": 2, "fall_back": "drop"},
        {"tae_tau": 0.8},
        {"tae_tau": np.float32([0.7, 0.9]), "tae_margin": 0.3},
        {"beta": 0.5},
        {"beta": 1.0, "rho": 3},
        {"eta": 0.7},
        {"gains": np.random.default_rng(9).random((LAYERS, EXPERTS, EXPERTS)), "rho": 2},
        {"kappa": 0.45, "hops": HOPS, "rho": 2},
        {"eta": 0.2, "kappa": 0.6, "hops": HOPS},  # a hop of 2 is out
        # On a mesh that hands experts out.
        {"kappa": 0.45, "rho": 2, "num_devices": 2},
        {"eta": 0.2, "kappa": 1.0, "num_devices": 3},  # none of another device
        {"beta": 0.5, "num_devices": 2},
        {"beta": 0.5, "rho": 2, "form": "kernel", "num_devices": 3},
    )
    def test_as_the_papers_loops(self, num_devices=1, **settings):
        policy = BuddyMoe(lists=LISTS, **settings)
        tau = np.broadcast_to(policy.tae_tau, LAYERS)
        state, decide = policy.init(SPEC), jax.jit(policy.decide)
        counts = np.zeros((2, LAYERS, EXPERTS), int)
        for o in steps(1, 12):
            if num_devices > 1:
                partition = np.random.default_rng(int(o.layer)).integers(0, num_devices, EXPERTS)
                o = dataclasses.replace(o, partition=jnp.asarray(partition, jnp.int32))
            ids, replaced, searched = expected_decision(policy, tau, o)
            decision, state = decide(state, o)
            np.testing.assert_array_equal(decision.ids, ids)
            dropped = searched & ~replaced & (policy.fall_back == "drop")
            idle = ~np.asarray(o.active)[:, None]
            np.testing.assert_array_equal(decision.tier, np.where(dropped | idle, SKIPPED, 0))
            weights = np.array(o.weights)  # the missing one's, as is
            if policy.gains is not None:
                gains = policy.gains[int(o.layer), np.asarray(o.ids), ids].astype(np.float32)
                weights[replaced] *= gains[replaced]
            np.testing.assert_array_equal(decision.weights, weights)
            self.assertFalse(decision.at_least.any())
            for count, pairs in zip(counts, (replaced, dropped), strict=True):
                np.add.at(count[int(o.layer)], np.asarray(o.ids)[pairs], 1)
        np.testing.assert_array_equal(state.replaced, counts[0])
        np.testing.assert_array_equal(state.dropped, counts[1])
        _, state = jax.jit(policy.transfers)(state, jnp.ones((LAYERS, 1, EXPERTS), bool))
        np.testing.assert_array_equal(state.missed, counts.sum(axis=0))
        self.assertEqual(counts[0].sum() == 0, policy.rho == 0)

    @slow.repeats()
    @parameterized.parameters("ranks", "kernel")
    def test_beta_follows_from_the_bytes_that_may_be_fetched(self, form):
        budget = 250.0  # of experts of 100 bytes
        policy = BuddyMoe(lists=LISTS, bypass_bytes=budget, form=form, half_life=1e9)
        state, decide = policy.init(SPEC), jax.jit(policy.decide)
        given, missing, requested, fetched = steps(11, 150), [], [], 0
        for i, o in enumerate(given):
            asked = np.unique(np.asarray(o.ids)[np.asarray(o.active)])
            away = int((~np.asarray(o.resident[0])[asked]).sum())
            before = int(state.replaced.sum())
            _, state = decide(state, o)
            bypassed = int(state.replaced.sum()) == before
            fetched += 100 * away * bypassed * (i >= len(given) // 2)
            missing.append(away)
            requested.append(len(asked))
        rows = (np.asarray(a).reshape(-1, LAYERS) for a in (missing, requested))
        exact = paper.beta_of_budget(*rows, 100, budget)
        experts = buddy_gates.beta_within(state.missing / state.steps, jnp.float32(budget / 100))
        self.assertAlmostEqual(float(experts), exact, delta=2 / buddy_gates.DELTA_BINS)
        self.assertBetween(fetched / 75, 0.5 * budget, 1.25 * budget)  # of the second half

    def test_long_lists(self):
        ids = jnp.array([[0, 1]], jnp.int32)
        listed = jnp.tile(jnp.arange(2, 42, dtype=jnp.int32), (1, 2, 1))  # 40 places
        listed = listed.at[:, :, :35].set(-1)
        wanted, budget = jnp.ones((1, 2), bool), jnp.int32(2)
        given = (ids, listed, jnp.ones(42, bool), wanted, jnp.int32(40), budget)
        found, _ = buddy_search.search_pairs(*given)
        self.assertEqual(found.tolist(), [[37, 38]])

    def test_prompts_may_be_left_alone(self):
        o = observation(np.random.default_rng(3), share=0.2)
        for in_prefill, is_prefill, changes in (
            (True, True, True), (False, True, False), (False, False, True)
        ):  # fmt: skip
            policy = BuddyMoe(lists=LISTS, in_prefill=in_prefill)
            decision, _ = jax.jit(policy.decide)(
                policy.init(SPEC), dataclasses.replace(o, is_prefill=is_prefill)
            )
            self.assertEqual(bool((decision.ids != o.ids).any()), changes)

    @parameterized.product(form=("ranks", "kernel"), fall_back=("fetch", "drop"), rho=(1, None))
    def test_pairs_of_a_prompt_keep_experts_that_are_fetched_anyway(self, form, fall_back, rho):
        how = {"lists": LISTS, "fall_back": fall_back, "rho": rho}
        policy, printed = BuddyMoe(form=form, **how), BuddyMoe(keep_fetched=False, **how)
        state, expected_state, num_kept = policy.init(SPEC), printed.init(SPEC), 0
        for o in steps(5, 12):
            o = dataclasses.replace(o, is_prefill=True)
            decision, state = jax.jit(policy.decide)(state, o)
            plain, _ = jax.jit(printed.decide)(expected_state, o)
            ids, runs = np.asarray(o.ids), np.asarray(plain.tier) != SKIPPED
            active = np.broadcast_to(np.asarray(o.active)[:, None], ids.shape)
            missing = active & ~np.asarray(o.resident[0])[ids]
            fetched = {*ids[missing & runs & (np.asarray(plain.ids) == ids)].tolist()}
            kept = missing & np.isin(ids, [*fetched])
            np.testing.assert_array_equal(decision.ids, np.where(kept, ids, plain.ids))
            np.testing.assert_array_equal(decision.tier, np.where(kept | runs, 0, SKIPPED))
            ran = np.where(np.asarray(decision.tier) == SKIPPED, -1, np.asarray(decision.ids))
            away = {*ran[active].tolist()} - {-1, *np.flatnonzero(o.resident[0]).tolist()}
            self.assertEqual(away, fetched)
            num_kept += int((kept & (np.asarray(plain.ids) != ids)).sum())
            replaced = np.zeros((LAYERS, EXPERTS), int)
            np.add.at(replaced[int(o.layer)], ids[np.asarray(decision.ids) != ids], 1)
            np.testing.assert_array_equal(state.replaced - expected_state.replaced, replaced)
            expected_state = dataclasses.replace(expected_state, replaced=state.replaced)
            # On a mesh that hands experts out another device may have another copy to fetch.
            apart = dataclasses.replace(o, partition=jnp.zeros(EXPERTS, jnp.int32))
            found, _ = jax.jit(policy.decide)(policy.init(SPEC), apart)
            np.testing.assert_array_equal(found.ids, plain.ids)
        # Without a budget all that has no buddy is dropped, so that nothing is fetched.
        self.assertEqual(num_kept > 0, fall_back == "fetch" or rho == 1)


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
