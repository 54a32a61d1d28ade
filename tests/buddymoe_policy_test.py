"""BuddyMoE's decisions, as the paper's loops and gates make them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moejax.policies import buddy_gates, buddymoe
from moejax.policies.base import SKIPPED, Observation
from moejax.policies.buddymoe import BuddyMoe, _Candidates
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
        found = buddymoe._substitute(ids, _Candidates(listed), wanted, budget)
        self.assertEqual(found.ids.tolist(), [[37, 38]])

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
