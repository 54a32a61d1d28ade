"""DynaExq against Algorithm 1 and eq. 2 written out in numpy, token by token."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import strategies as st

from moejax.policies import dynaexq
from moejax.policies.base import Observation, PolicySpec
from moejax.policies.dynaexq import DynaExq
from tests import policies_contract as contract
from tests import slow
from tests.policies_cases import SPEC, A, E, M, random_trace

HOT_SET = jax.jit(dynaexq._hot_set)
SWAPS = jax.jit(dynaexq._swaps, static_argnames="max_requests")
SMOOTHED = jax.jit(
    lambda scores, seen, alpha: dynaexq._smoothed(
        scores, dynaexq._gate_means(seen), dynaexq._num_active(seen), alpha
    )
)


class Paper:
    """A layer of Algorithm 1, line by line; scores in float32, as the code has them."""

    def __init__(self, period: int, alpha: float, n_hot: int, warmup: int, fixed: bool):
        self.period, self.alpha, self.n_hot = period, np.float32(alpha), n_hot
        self.warmup, self.fixed = warmup, fixed
        self.scores = np.zeros(E, np.float32)
        self.state = ["LOW"] * E
        self.tau: np.float32 | None = None
        self.asked: list[tuple[str, int]] = []

    def update_hotness(self, g: np.ndarray, activated: list[int]) -> None:
        one = np.float32(1)
        for i in range(E):
            if i in activated:
                self.scores[i] = self.alpha * self.scores[i] + (one - self.alpha) * g[i]
            else:
                self.scores[i] = self.alpha * self.scores[i]

    def precision_schedule(self, t: int) -> None:
        self.asked = []
        if t == self.warmup:  # section 3.5: the top n_hot initialize the set, tau is their last
            chosen = self._sorted()[: self.n_hot]
            self.tau = self.scores[chosen[-1]]
        elif t > self.warmup and t % self.period == 0:
            if not self.fixed:
                self.tau = self.scores[self._sorted()[self.n_hot - 1]]
            chosen = [i for i in self._sorted()[: self.n_hot] if self.scores[i] >= self.tau]
        else:
            return
        for i in range(E):
            if i in chosen and self.state[i] == "LOW":
                self.asked.append(("up", i))
                self.state[i] = "HIGH"
            elif i not in chosen and self.state[i] == "HIGH":
                self.asked.append(("down", i))
                self.state[i] = "LOW"

    def _sorted(self) -> list[int]:
        return sorted(range(E), key=lambda i: (-self.scores[i], self.state[i] != "HIGH", i))


def drifting(steps: int, tokens: int = 1, seed: int = 3) -> Observation:
    return random_trace(SPEC, steps, tokens, prefill=tokens > 1, seed=seed)


@functools.cache
def step_of(policy: DynaExq):
    """A step of all layers and the transfers after it, as one program."""

    @jax.jit
    def step(state, observations, resident):
        def layer(state, observation):
            decision, state = policy.decide(state, observation)
            return state, decision

        state, decisions = jax.lax.scan(layer, state, observations)
        requests, state = policy.transfers(state, resident)
        return decisions, requests, state

    return step


class Run:
    """A policy with pools whose transfers take no time."""

    def __init__(self, spec: PolicySpec, **settings):
        self.spec, policy = spec, DynaExq(**settings)
        self.state, self.step = policy.init(spec), step_of(policy)
        self.resident = contract.first_resident(spec)
        self.asked: list[tuple[int, int, int]] = []

    def take(self, observations: Observation) -> None:
        seen = dataclasses.replace(observations, resident=self.resident)
        self.decisions, requests, self.state = self.step(self.state, seen, self.resident)
        self.asked = list(contract.entries(requests))
        for entry in self.asked:
            contract.carry_out(self.spec, self.resident, *entry)

    @property
    def high(self) -> np.ndarray:
        return np.asarray(self.state.high)


class AlgorithmTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.product(tau=("fixed", "moving"), warmup=(4, 7), n_hot=(1, 3))
    def test_decode_is_algorithm_1(self, tau, warmup, n_hot):
        trace = drifting(32)
        run = Run(SPEC, period=4, alpha=0.8, tau=tau, warmup=warmup, n_hot=n_hot)
        papers = [Paper(4, 0.8, n_hot, warmup, tau == "fixed") for _ in range(M)]
        moved = 0
        for step in range(32):
            run.take(contract.at(trace, step))
            for layer, paper in enumerate(papers):
                g, ids = trace.probabilities[step, layer, 0], trace.ids[step, layer, 0]
                paper.update_hotness(g, ids.tolist())
                paper.precision_schedule(step + 1)
                np.testing.assert_allclose(run.state.scores[layer], paper.scores, rtol=1e-6)
                high = [state == "HIGH" for state in paper.state]
                np.testing.assert_array_equal(run.high[layer], high, f"step {step}")
                # The tier of cold experts is 1; nothing is in flight, so all is asked for at once.
                asked = [("down" if tier else "up", i) for at, i, tier in run.asked if at == layer]
                self.assertCountEqual(asked, paper.asked)
                moved += len(asked)
            np.testing.assert_array_equal(run.resident[:, 0], run.high)
        self.assertGreater(moved, 3 * M)

    def test_many_tokens_at_once(self):
        seen = contract.at(drifting(1, 5), 0, 1)
        seen = dataclasses.replace(seen, active=np.array([True, False, True, True, False]))
        rng = np.random.default_rng(0)
        scores = rng.random(E, np.float32)
        mean = np.zeros(E)
        for n in (0, 2, 3):
            for expert in seen.ids[n]:
                mean[expert] += seen.probabilities[n, expert] / 3
        expected = 0.7**3 * scores + (1 - 0.7**3) * mean
        alpha = jnp.float32(0.7)
        np.testing.assert_allclose(SMOOTHED(scores, seen, alpha), expected, rtol=2e-6)
        order = np.array([4, 2, 0, 1, 3])
        turned = dataclasses.replace(
            seen,
            probabilities=seen.probabilities[order],
            ids=seen.ids[order],
            active=seen.active[order],
        )
        np.testing.assert_allclose(SMOOTHED(scores, turned, alpha), expected, rtol=2e-6)
        idle = dataclasses.replace(seen, active=np.zeros(5, bool))
        for value in (0.0, 0.7):
            np.testing.assert_array_equal(SMOOTHED(scores, idle, jnp.float32(value)), scores)

    def test_a_prompt_counts_its_tokens(self):
        trace, run = drifting(3, 5), Run(SPEC, period=8, warmup=10)
        run.take(contract.at(trace, 0))
        self.assertFalse(run.high.any())
        run.take(contract.at(trace, 1))  # 10 tokens: the warm-up ends
        self.assertEqual(int(run.state.tokens), 2)
        before = run.high
        np.testing.assert_array_equal(before.sum(axis=1), 3)
        run.take(contract.at(trace, 2))  # 15: the next update is at 16
        np.testing.assert_array_equal(run.high, before)
        self.assertEqual(int(run.state.tokens), 7)

    def test_after_a_shift_moving_fills_the_slots_and_fixed_may_not(self):
        # All of the gate goes to one expert, then a third of it to each of three others.
        before = np.where(np.arange(E) == 0, 0.93, 0.01)
        after = np.where(np.isin(np.arange(E), (4, 5, 6)), 0.32, 0.008)
        runs = {tau: Run(SPEC, period=4, tau=tau, n_hot=1) for tau in ("fixed", "moving")}
        for gate, steps in ((before, 16), (after, 16)):
            ids = np.argsort(-gate, kind="stable")[:A].astype(np.int32)
            for run in runs.values():
                for _ in range(steps):
                    run.take(_constant(gate, ids))
        np.testing.assert_array_equal(np.flatnonzero(runs["moving"].high[0]), [4])
        self.assertFalse(runs["fixed"].high.any())  # no score reaches that of the warm-up

    def test_choices_that_look_at_no_frequency(self):
        trace, high = drifting(24), {}
        for choice, seed in (("first", 0), ("random", 0), ("random", 1)):
            run = Run(SPEC, period=4, choice=choice, seed=seed)
            for step in range(24):
                run.take(contract.at(trace, step))
                if step == 8:
                    high[choice, seed] = run.high
            np.testing.assert_array_equal(run.high, high[choice, seed])
            np.testing.assert_array_equal(run.high.sum(axis=1), 3)
        np.testing.assert_array_equal(high["first", 0], np.tile(np.arange(E) < 3, (M, 1)))
        self.assertTrue((high["random", 0] != high["random", 1]).any())
        # By the frequencies of the warm-up alone.
        run = Run(SPEC, period=2**30, alpha=0.75, warmup=4)
        for step in range(24):
            run.take(contract.at(trace, step))
            if step == 3:
                before = run.high
        self.assertTrue(before.any())
        np.testing.assert_array_equal(run.high, before)

    def test_hysteresis_spares_a_swap(self):
        scores = np.array([[0.30, 0.28, 0.05, 0.05]], np.float32)
        high = np.array([[False, True, False, False]])
        n_hot, none = np.array([1], np.int32), np.array([-np.inf], np.float32)
        for share, winner in ((0.0, 0), (0.05, 0), (0.1, 1)):
            found = HOT_SET(scores, high, n_hot, none, np.float32(share))
            np.testing.assert_array_equal(np.flatnonzero(found.high[0]), [winner])
        # Ties favour experts that are high already.
        even = HOT_SET(np.ones((1, 4), np.float32), high, n_hot, none, np.float32(0))
        np.testing.assert_array_equal(np.flatnonzero(even.high[0]), [1])


def _constant(gate: np.ndarray, ids: np.ndarray) -> Observation:
    """One token of all layers, whose router says the same in each."""
    return Observation(
        layer=np.arange(M, dtype=np.int32),
        probabilities=np.tile(gate.astype(np.float32), (M, 1, 1)),
        ids=np.tile(ids, (M, 1, 1)),
        weights=np.full((M, 1, A), 1 / A, np.float32),
        active=np.ones((M, 1), bool),
        resident=np.zeros((M, 2, E), bool),
    )


SCORES = st.lists(st.integers(0, 4), min_size=2 * E, max_size=2 * E).map(
    lambda values: np.float32(values).reshape(2, E)
)
MASKS = st.lists(st.booleans(), min_size=2 * E, max_size=2 * E).map(
    lambda values: np.array(values).reshape(2, E)
)


class SetsTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(SCORES, MASKS, st.lists(st.integers(0, E), min_size=2, max_size=2))
    def test_the_hot_set_is_a_sorted_list_cut(self, scores, high, n_hot):
        tau = np.float32([2, -np.inf])
        found = HOT_SET(scores, high, np.int32(n_hot), tau, np.float32(0))
        for layer in range(2):
            order = sorted(range(E), key=lambda i: (-scores[layer, i], ~high[layer, i] + 2, i))
            chosen = order[: n_hot[layer]]
            last = scores[layer, chosen[-1]] if chosen else 0
            chosen = [i for i in chosen if scores[layer, i] >= tau[layer]]
            np.testing.assert_array_equal(np.flatnonzero(found.high[layer]), sorted(chosen))
            self.assertEqual(float(found.last[layer]), last)

    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(SCORES, MASKS, MASKS, st.sampled_from((2, 6, 40)), st.booleans())
    def test_swaps_lead_to_the_set_within_the_slots(self, scores, high, hot, limit, exclusive):
        n_hot = np.maximum(np.maximum(high.sum(axis=1), hot.sum(axis=1)), 1).astype(np.int32)
        # One slot more than the cold experts take: a set that is smaller than n_hot may need more.
        cold = ~hot if exclusive else np.ones_like(hot)
        cold_slots = int((E - n_hot).max()) + 1 if exclusive else E
        cold_slots = max(cold_slots, int(cold.sum(axis=1).max()))
        hot, cold = hot.copy(), cold.copy()
        for _ in range(2 * E):
            tiers = np.int32(0), np.int32(1)
            asked = SWAPS(
                scores, high, hot, cold, n_hot, np.int32(cold_slots), tiers, max_requests=limit
            )
            self.assertEqual(asked.layer.shape, (limit,))
            pairs = list(zip(*(np.asarray(field).tolist() for field in asked), strict=True))
            gains = []
            for down, up in zip(pairs[::2], pairs[1::2], strict=True):
                if down[0] >= 0:
                    layer, expert, tier = down
                    self.assertEqual(tier, 1)
                    self.assertTrue(hot[layer, expert] and not high[layer, expert])
                    hot[layer, expert], cold[layer, expert] = False, True
                if up[0] >= 0:
                    layer, expert, tier = up
                    self.assertEqual(tier, 0)
                    self.assertTrue(high[layer, expert] and not hot[layer, expert])
                    hot[layer, expert] = True
                    cold[layer, expert] = not exclusive
                self.assertTrue((hot.sum(axis=1) <= n_hot).all())
                self.assertTrue((cold.sum(axis=1) <= cold_slots).all())
                gains.append(
                    (scores[up[0], up[1]] if up[0] >= 0 else 0)
                    - (scores[down[0], down[1]] if down[0] >= 0 else 0)
                    if (down[0] >= 0 or up[0] >= 0)
                    else -np.inf
                )
            self.assertEqual(gains, sorted(gains, reverse=True))
            if all(entry[0] < 0 for entry in pairs):
                break
        np.testing.assert_array_equal(high & ~hot, False)
        if not exclusive:
            np.testing.assert_array_equal(hot, high)

    def test_promotions_take_free_slots_before_those_of_others(self):
        scores = np.float32([[0.9, 0.5, 0.4, 0.1]])
        high, hot = np.array([[True, True, False, False]]), np.array([[False, False, False, True]])
        asked = SWAPS(
            scores, high, hot, np.ones((1, 4), bool), np.int32([2]), np.int32(4),
            (np.int32(0), np.int32(1)), max_requests=40,
        )  # fmt: skip
        # One slot of two is free: expert 0 takes it, expert 1 that of expert 3.
        self.assertEqual(list(contract.entries(asked)), [(0, 0, 0), (0, 3, 1), (0, 1, 0)])

    def test_hottest_promotions_pair_with_coldest_demotions(self):
        scores = np.float32([[0.9, 0.1, 0.5, 0.3], [0.6, 0.2, 0.0, 0.0]])
        high = np.array([[True, False, True, False], [True, False, False, False]])
        hot = np.array([[False, True, False, True], [False, True, False, False]])
        asked = SWAPS(
            scores, high, hot, np.ones((2, 4), bool), np.int32([2, 1]), np.int32(4),
            (np.int32(0), np.int32(1)), max_requests=8,
        )  # fmt: skip
        found = list(contract.entries(asked))
        # (0, 0) for (0, 1) gains 0.8; (1, 0) for (1, 1) 0.4; (0, 2) for (0, 3) 0.2.
        expected = [(0, 1, 1), (0, 0, 0), (1, 1, 1), (1, 0, 0), (0, 3, 1), (0, 2, 0)]
        self.assertEqual(found, expected)
        np.testing.assert_array_equal(np.asarray(asked.expert)[6:], -1)
