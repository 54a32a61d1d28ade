"""BuddyMoE as a policy: its decisions as the paper's loops make them, its counts and transfers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moejax.errors import MoejaxError
from moejax.policies.buddy_lists import BuddyLists
from moejax.policies.buddymoe import BuddyMoe, BuddyState
from moejax.policies.interface import SKIPPED, Observation
from tests import buddymoe_reference as paper
from tests.buddymoe_cases import (
    EXPERTS,
    LAYERS,
    SPEC,
    TOKENS,
    WIDTH,
    as_lists,
    random_lists,
    routed,
)

LISTS = random_lists(np.random.default_rng(0))
HOPS = tuple(float(e % 3) for e in range(EXPERTS))


def observation(rng: np.random.Generator, layer: int = 0, share: float = 0.5) -> Observation:
    """A layer of a step; some rows are padding."""
    probabilities, ids, weights = routed(rng)
    active = rng.random(TOKENS) < 0.8
    active[0] = True
    arrays = (probabilities, ids, weights, active, rng.random((1, EXPERTS)) < share)
    return Observation(jnp.int32(layer), *map(jnp.asarray, arrays))


def steps(seed: int, count: int) -> list[Observation]:
    """Observations of all layers of some steps."""
    rng = np.random.default_rng(seed)
    return [observation(rng, i % LAYERS) for i in range(count * LAYERS)]


def expected_decision(
    policy: BuddyMoe, tau: np.ndarray, o: Observation
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, replaced and searched, by the paper's loops and gates."""
    layer, active = int(o.layer), np.asarray(o.active)
    probabilities, ids, resident = map(np.asarray, (o.probabilities, o.ids, o.resident[0]))
    may = np.zeros((TOKENS, WIDTH), bool)
    for t in range(TOKENS):
        tae = paper.entropy(probabilities[t], ids[t])
        held = tae <= tau[layer] or paper.margin(probabilities[t], ids[t]) >= policy.tae_margin
        may[t] = active[t] and not held
    requested = {int(e) for e in ids[active].ravel()}
    delta = paper.missing_share(requested, set(np.flatnonzero(resident).tolist()))
    if policy.beta is not None and delta >= policy.beta:
        may[:] = False
    q, lists = policy.lists.q[layer], policy.lists.ids[layer]
    scores = np.zeros((TOKENS, EXPERTS, EXPERTS))
    z = np.log(probabilities.astype(np.float64))
    z = (z - z.min(axis=1, keepdims=True)) / np.ptp(z, axis=1, keepdims=True)
    for i, place in np.argwhere(lists >= 0):
        j = lists[i, place]
        for t in range(TOKENS):
            hop = policy.hops[j] if policy.hops else 0
            scores[t, i, j] = paper.score(q[i, place], policy.eta, z[t, j], policy.kappa, hop)
    return paper.algorithm_1(
        ids, resident, as_lists(lists), policy.depth or lists.shape[1], budget=policy.rho,
        may=may, last_first=policy.spend_on == "last", scores=scores,
    )  # fmt: skip


class DecisionTest(parameterized.TestCase):
    @parameterized.parameters(
        {"form": "table"},
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
        {"kappa": 0.45, "hops": HOPS, "rho": 2},
        {"eta": 0.2, "kappa": 0.6, "hops": HOPS},  # a hop of 2 is out
    )
    def test_as_the_papers_loops(self, **settings):
        policy = BuddyMoe(lists=LISTS, **{"form": "ranks", **settings})
        tau = np.broadcast_to(policy.tae_tau, LAYERS)
        state, decide = policy.init(SPEC), jax.jit(policy.decide)
        counts = np.zeros((2, LAYERS, EXPERTS), int)
        for o in steps(1, 12):
            ids, replaced, searched = expected_decision(policy, tau, o)
            decision, state = decide(state, o)
            np.testing.assert_array_equal(decision.ids, ids)
            dropped = searched & ~replaced & (policy.fall_back == "drop")
            np.testing.assert_array_equal(decision.tier, np.where(dropped, SKIPPED, 0))
            np.testing.assert_array_equal(decision.weights, o.weights)  # the missing one's, as is
            self.assertFalse(decision.at_least.any())
            for count, pairs in zip(counts, (replaced, dropped), strict=True):
                np.add.at(count[int(o.layer)], np.asarray(o.ids)[pairs], 1)
        np.testing.assert_array_equal(state.replaced, counts[0])
        np.testing.assert_array_equal(state.dropped, counts[1])
        _, state = jax.jit(policy.transfers)(state, jnp.ones((LAYERS, 1, EXPERTS), bool))
        np.testing.assert_array_equal(state.missed, counts.sum(axis=0))
        self.assertEqual(counts[0].sum() == 0, policy.rho == 0)

    def test_weights_meet_where_a_buddy_serves_twice(self):
        ids = np.full((LAYERS, EXPERTS, 2), -1, np.int32)
        ids[:, 0], ids[:, 1] = (4, 5), (4, 6)
        lists = BuddyLists(ids, np.where(ids >= 0, np.float32([0.8, 0.2]), 0).astype(np.float32))
        policy = BuddyMoe(lists=lists, discount=0.5)
        weights = jnp.float32([[0.1, 0.2, 0.3, 0.4]])
        resident = jnp.arange(EXPERTS)[None] >= 2
        o = Observation(
            jnp.int32(1), jnp.ones((1, EXPERTS), jnp.float32) / EXPERTS,
            jnp.int32([[0, 1, 2, 3]]), weights, jnp.array([True]), resident,
        )  # fmt: skip
        decision, state = jax.jit(policy.decide)(policy.init(SPEC), o)
        self.assertEqual(decision.ids.tolist(), [[4, 1, 2, 3]])  # different from each other
        self.assertEqual(decision.tier.tolist(), [[0, SKIPPED, 0, 0]])
        np.testing.assert_allclose(decision.weights, [[0.3, 0, 0.3, 0.4]], rtol=1e-6)
        self.assertEqual(state.replaced[1, :2].tolist(), [1, 1])

    def test_baselines(self):
        total = {}
        for choose in ("none", "buddies", "matched_random", "random"):
            policy = BuddyMoe(lists=LISTS, choose=choose, rho=3, seed=5)
            state, decide = policy.init(SPEC), jax.jit(policy.decide)
            others = 0
            for o in steps(2, 30):
                decision, state = decide(state, o)
                ids, old = np.asarray(decision.ids), np.asarray(o.ids)
                new = ids != old
                resident = np.asarray(o.resident[0])
                self.assertTrue(resident[ids[new]].all())
                self.assertFalse(resident[old[new]].any())
                self.assertTrue(all(len(set(row)) == WIDTH for row in ids.tolist()))
                self.assertLessEqual(new.sum(axis=1).max(), 3)
                self.assertFalse(new[~np.asarray(o.active)].any())
                others += sum(
                    int(b) not in policy.lists.ids[int(o.layer), i]
                    for i, b in zip(old[new], ids[new], strict=True)
                )
            total[choose] = (int(state.replaced.sum()), others)
        self.assertEqual(total["none"], (0, 0))
        self.assertEqual(total["buddies"][1], 0)
        self.assertEqual(total["matched_random"][0], total["buddies"][0])
        self.assertGreater(total["random"][0], total["buddies"][0])
        for choose in ("matched_random", "random"):  # most are nobody's listed buddies
            self.assertGreater(total[choose][1], 0.2 * total[choose][0])

    def test_prompts_may_be_left_alone(self):
        o = observation(np.random.default_rng(3), share=0.2)
        for in_prefill, is_prefill, changes in (
            (True, True, True), (False, True, False), (False, False, True)
        ):  # fmt: skip
            policy = BuddyMoe(lists=LISTS, in_prefill=in_prefill, form="ranks")
            decision, _ = jax.jit(policy.decide)(
                policy.init(SPEC), dataclasses.replace(o, is_prefill=is_prefill)
            )
            self.assertEqual(bool((decision.ids != o.ids).any()), changes)


class ContractTest(parameterized.TestCase):
    @parameterized.parameters(
        {"rho": 2, "beta": 0.8, "eta": 0.5, "tae_tau": 0.6, "form": "ranks"},
        {"discount": 0.5, "fall_back": "drop", "tae_tau": 0.6},
        {"choose": "random", "rho": 2},
        {"choose": "matched_random"},
    )
    def test_jit_is_eager_and_scan_is_a_loop(self, **settings):
        policy = BuddyMoe(lists=LISTS, **settings)
        start, given = policy.init(SPEC), steps(4, 3)
        decide = jax.jit(policy.decide)
        if (
            policy.choose == "buddies"
        ):  # operation by operation takes seconds: once a form is enough
            one = policy.decide(start, given[0])
            jax.tree.map(np.testing.assert_array_equal, one, decide(start, given[0]))
        state, decisions = start, []
        for o in given:
            decision, state = decide(state, o)
            decisions.append(decision)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *given)

        def step(state: BuddyState, o: Observation) -> Any:
            decision, state = policy.decide(state, o)
            return state, decision

        last, scanned = jax.jit(lambda s, o: jax.lax.scan(step, s, o))(start, stacked)
        jax.tree.map(np.testing.assert_array_equal, last, state)
        jax.tree.map(
            np.testing.assert_array_equal,
            scanned, jax.tree.map(lambda *leaves: np.stack(leaves), *decisions),
        )  # fmt: skip
        kinds = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), start)
        self.assertEqual(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), last), kinds)

    def test_settings_sweep(self):
        base = BuddyMoe(lists=LISTS, form="ranks", eta=1.0, kappa=1.0, beta=1.0, hops=HOPS)
        given = steps(5, 2)
        swept = [
            BuddyMoe(
                lists=LISTS, form="ranks", hops=HOPS, eta=eta, kappa=kappa, beta=beta, tae_tau=tau, rho=rho,
                depth=depth,
            )
            for eta, kappa, beta, tau, rho, depth in (
                (0.5, 0.1, 0.9, -1.0, 1, 5), (0.1, 0.3, 0.6, 0.7, 3, 2), (2.0, 0.4, 1.0, 0.5, 4, 3)
            )
        ]  # fmt: skip
        states = [policy.init(SPEC) for policy in swept]
        together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        alone_decide = [jax.jit(policy.decide) for policy in swept]
        decide = jax.jit(jax.vmap(base.decide, in_axes=(0, None)))
        for o in given:
            found, together = decide(together, o)
            for i in range(len(swept)):
                alone, states[i] = alone_decide[i](states[i], o)
                mine = jax.tree.map(lambda leaf, i=i: leaf[i], found)
                jax.tree.map(np.testing.assert_array_equal, mine, alone)
        self.assertGreater(len({int(state.replaced.sum()) for state in states}), 1)

    @parameterized.parameters({}, {"choose": "random"}, {"beta": 0.7})
    def test_padding_changes_nothing(self, **settings):
        policy = BuddyMoe(lists=LISTS, **settings)
        o = observation(np.random.default_rng(6))

        def padded(leaf: jax.Array) -> jax.Array:
            return jnp.concatenate([leaf, leaf[:2]])

        longer = dataclasses.replace(
            o, probabilities=padded(o.probabilities), ids=padded(o.ids),
            weights=padded(o.weights), active=jnp.append(o.active, jnp.zeros(2, bool)),
        )  # fmt: skip
        decide = jax.jit(policy.decide)
        short, state = decide(policy.init(SPEC), o)
        long, other = decide(policy.init(SPEC), longer)
        np.testing.assert_array_equal(short.ids, long.ids[:TOKENS])
        np.testing.assert_array_equal(long.ids[TOKENS:], o.ids[:2])
        jax.tree.map(np.testing.assert_array_equal, state, other)


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
        policy = BuddyMoe(lists=LISTS, background_bytes=30.0, least_misses=1.0, form="ranks")
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
        ({"choose": "friends"}, "choose='friends' must be one of buddies, none, random"),
        ({"form": "x"}, "form='x' must be one of table, ranks"),
        ({"fall_back": "x"}, "fall_back='x' must be one of fetch, drop"),
        ({"spend_on": "x"}, "spend_on='x' must be one of first, last"),
        ({"rho": -1}, "rho=-1 must be at least 0, or None"),
        ({"beta": -0.1}, "beta=-0.1 must be at least 0, or None"),
        ({"depth": 6}, "depth=6 must be from 1 to 5"),
        ({"discount": 1.5}, "discount=1.5 must be from 0"),
        ({"tae_temperature": 0.0}, "tae_temperature=0.0 must be above 0"),
        ({"background_bytes": -1.0}, "background_bytes=-1.0 must be at least 0"),
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


if __name__ == "__main__":
    absltest.main()
