"""DyMoE's equations, one by one, against numpy written from the paper's text."""

import collections
import dataclasses
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import strategies as st

from moejax.policies import base, dymoe
from moejax.policies.base import SKIPPED, Decision, Observation
from moejax.policies.dymoe import DyMoE, _critical_counts, _retention_ratios
from pallas_kernels import cache_plan
from tests import policies_contract as contract
from tests.policies_cases import FIGURE_3, SPEC, A, E, M, random_trace

HEAVY = jax.jit(dymoe._heavy_hitters)
BY_TOKENS = jax.jit(dymoe._critical_by_tokens)
PAIRS = jax.jit(dymoe._critical_pairs)
AHEAD = jax.jit(base.experts_ahead)


@jax.jit
def served(resident, decision, active):
    """The rules of the cache, of a policy's decision."""
    wishes = cache_plan.Wishes(decision.tier, decision.at_least)
    return cache_plan.resolve_tiers(resident, decision.ids, wishes, active)


def routed(ids, *, prefill: bool, weights=None, active=None, **more) -> Observation:
    """An observation of layer 0 with these ids, [N, A]."""
    ids = np.asarray(ids, np.int32)
    if weights is None:
        weights = np.full(ids.shape, 1 / ids.shape[1])
    return Observation(
        layer=np.int32(0),
        probabilities=np.full((len(ids), E), 1 / E, np.float32),
        ids=ids,
        weights=np.asarray(weights, np.float32),
        active=np.ones(len(ids), bool) if active is None else np.asarray(active),
        resident=np.zeros((2, E), bool),
        is_prefill=prefill,
        **more,
    )


class ScheduleTest(parameterized.TestCase):
    @parameterized.product(num_layers=(2, 7, 32, 48), retention=(0.5, 0.75, 0.9, 1.0))
    def test_equation_4(self, num_layers, retention):
        found = _retention_ratios("cosine", retention, num_layers)
        lam = 2 * retention - 1
        for i in range(num_layers):
            expected = (1 - lam) * (math.cos(math.pi * i / (num_layers - 1)) + 1) / 2 + lam
            self.assertAlmostEqual(found[i], expected)
        self.assertAlmostEqual(found.mean(), retention)
        self.assertAlmostEqual(found[0], 1)
        self.assertAlmostEqual(found[-1], lam)

    def test_equation_5_by_the_letter_on_mixtral(self):
        ratios = {r: _retention_ratios("cosine", r, 32) for r in (0.75, 0.9)}
        decode = _critical_counts(ratios[0.75], 2, "ceil")
        self.assertEqual(decode.tolist(), [2] * 31 + [1])  # a mean of 0.984
        self.assertEqual(_critical_counts(ratios[0.9], 2, "ceil").tolist(), [2] * 32)
        prefill = _critical_counts(ratios[0.75], 8, "ceil")
        self.assertEqual(prefill.tolist(), [math.ceil(8 * x - 1e-9) for x in ratios[0.75]])

    @parameterized.product(
        shape=((32, 2), (32, 8), (48, 8), (48, 128), (7, 4)),
        retention=(0.5, 0.6, 0.75, 0.9, 1.0),
        schedule=("cosine", "linear", "equal"),
    )
    def test_diffused_rounding_keeps_the_mean(self, shape, retention, schedule):
        num_layers, requested = shape
        counts = _critical_counts(
            _retention_ratios(schedule, retention, num_layers), requested, "diffused"
        )
        wanted = retention * requested * num_layers
        self.assertEqual(counts.sum(), math.floor(wanted + 0.5 + 1e-9))
        self.assertBetween(abs(counts.mean() / requested - retention), 0, 0.5 / wanted + 1e-9)
        self.assertBetween(counts.min(), 0, counts.max())
        self.assertLessEqual(counts.max(), requested)

    @hypothesis.settings(max_examples=50, deadline=None)
    @hypothesis.given(
        st.lists(st.integers(0, 100), min_size=1, max_size=12), st.sampled_from((1, 2, 8))
    )
    def test_diffused_rounding_carries_what_is_left(self, hundredths, requested):
        counts = _critical_counts(np.array(hundredths) / 100, requested, "diffused")
        total = 0
        for i, share in enumerate(hundredths):
            total += share * requested  # in hundredths
            self.assertEqual(counts[: i + 1].sum(), (total + 50) // 100)
            self.assertBetween(counts[i], 0, requested)

    @hypothesis.settings(max_examples=50, deadline=None)
    @hypothesis.given(st.lists(st.integers(1, 50), min_size=2, max_size=10))
    def test_sensitivity_is_proportional_cut_at_one(self, measured):
        found = _retention_ratios("sensitivity", 0.7, len(measured), [float(x) for x in measured])
        profile = (found - 0.4) / 0.6
        low, high = 0.0, float(len(measured))  # bisection for c of min(1, c s)
        for _ in range(80):
            middle = (low + high) / 2
            mean = np.minimum(1, middle * np.array(measured)).mean()
            low, high = (middle, high) if mean < 0.5 else (low, middle)
        np.testing.assert_allclose(profile, np.minimum(1, high * np.array(measured)), atol=1e-9)
        self.assertAlmostEqual(found.mean(), 0.7)


class PrefillTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=80, deadline=None)
    @hypothesis.given(st.randoms(use_true_random=False), st.integers(0, 6), st.integers(0, E))
    def test_equations_1_and_2(self, random, num, limit):
        ids = [random.sample(range(E), A) for _ in range(6)]
        importance = np.float32([random.randint(0, 3) for _ in range(6)])
        active = np.array([random.random() < 0.8 for _ in range(6)])
        seen = routed(ids, prefill=True, active=active, importance=importance)
        rows = [i for i in range(6) if active[i]]
        heavy = sorted(rows, key=lambda i: (-importance[i], i))[:num]
        found = HEAVY(importance, active, jnp.int32(num))
        self.assertEqual(np.flatnonzero(found).tolist(), sorted(heavy))
        tokens = {e: {i for i in rows if e in ids[i]} for e in range(E)}
        score = {e: len(tokens[e] & set(heavy)) for e in range(E)}
        order = sorted(range(E), key=lambda e: (-score[e], -len(tokens[e]), e))
        found = BY_TOKENS(seen, found, jnp.int32(limit))
        self.assertEqual(np.flatnonzero(found).tolist(), sorted(order[:limit]))

    @parameterized.parameters((0.1, 0, 30, 3), (0.1, 0, 31, 4), (0, 0, 9, 0), (0.5, 2, 9, 2))
    def test_number_of_heavy_hitters(self, share, count, tokens, expected):
        active = np.arange(40) < tokens
        found = dymoe._num_heavy(active, np.float32(share), np.int32(count))
        self.assertEqual(int(found), expected)

    def test_prefill_without_importance_is_an_error(self):
        policy = DyMoE()
        with self.assertRaisesRegex(ValueError, "needs the importance of tokens"):
            policy.decide(policy.init(SPEC), routed([[0, 1]], prefill=True))


class DecodeTest(parameterized.TestCase):
    @parameterized.parameters(0, 1, 2, 3)
    def test_equation_3(self, limit):
        weights = [[0.2, 0.5, 0.3]]
        seen = routed([[4, 0, 6]], prefill=False, weights=weights)
        found = np.asarray(PAIRS(seen, seen.weights, jnp.int32(limit)))
        order = sorted(range(3), key=lambda a: -weights[0][a])
        self.assertEqual(np.flatnonzero(found[0]).tolist(), sorted(order[:limit]))

    def test_one_format_for_an_expert_that_two_tokens_ask_for(self):
        ids, weights = [[4, 0], [5, 4], [0, 7]], [[0.6, 0.4], [0.6, 0.4], [0.6, 0.4]]
        seen = routed(ids, prefill=False, weights=weights, active=[True, True, False])
        found = PAIRS(seen, seen.weights, jnp.int32(1))
        # Token 2 is padding, and so does not make expert 0 critical for token 0.
        np.testing.assert_array_equal(found, [[1, 0], [1, 1], [0, 0]])


class TiersTest(parameterized.TestCase):
    def decided(self, policy, observation, spec=SPEC):
        decision, _ = jax.jit(policy.decide)(policy.init(spec), observation)
        return jax.device_get(decision)

    # A skipped pair's weight is of no use to anybody: it may stay as it is.
    @parameterized.parameters((False, [[0.4, 0.2, 0.1]]), (True, [[0.7, 0.0, 0.0]]))
    def test_skipping(self, renormalise, expected):
        policy = DyMoE(low="skip", schedule="equal", retention=1 / 3, renormalise=renormalise)
        seen = routed([[2, 5, 1]], prefill=False, weights=[[0.4, 0.2, 0.1]])
        found = self.decided(policy, seen)
        np.testing.assert_array_equal(found.tier, [[0, SKIPPED, SKIPPED]])
        np.testing.assert_array_equal(found.at_least, False)
        np.testing.assert_allclose(found.weights, expected, rtol=1e-6)

    def test_nothing_left_keeps_the_weights_finite(self):
        policy = DyMoE(low="skip", schedule="equal", retention=0.0, renormalise=True)
        found = self.decided(policy, routed([[2, 5, 1]], prefill=False))
        np.testing.assert_array_equal(found.tier, SKIPPED)
        self.assertTrue(np.isfinite(found.weights).all())

    @parameterized.parameters((False, [[0, -1, -1]]), (True, [[0, 0, -1]]))
    def test_a_skipped_expert_may_run_where_its_high_copy_is(self, reuse, expected):
        policy = DyMoE(low="skip", schedule="equal", retention=1 / 3, reuse_skipped=reuse)
        seen = routed([[2, 5, 1]], prefill=False, weights=[[0.5, 0.3, 0.2]])
        resident = np.stack([np.arange(E) == 5, np.ones(E, bool)])
        found = self.decided(policy, dataclasses.replace(seen, resident=resident))
        np.testing.assert_array_equal(found.tier, expected)

    @pytest.mark.slow
    def test_figure_3(self):
        trace = random_trace(SPEC, 3, 6, prefill=True, seed=2)
        tiers = {}
        for name, settings in FIGURE_3.items():
            policy = DyMoE(**settings, retention=0.6, heavy_count=2)
            _, found = jax.jit(lambda s, t, p=policy: contract.roll(p, s, t))(
                policy.init(SPEC), trace
            )
            tiers[name] = np.asarray(found.tier)
            for step, layer in np.ndindex(3, M):
                # The schedule's number of experts, among all E, requested or not.
                limit = policy.counts(M, E)[layer]
                run = trace.ids[step, layer][tiers[name][step, layer] == 0]
                self.assertLessEqual(len(set(run.tolist())), limit)
        np.testing.assert_array_equal(tiers["token"], tiers["equal"])
        self.assertTrue((tiers["token"] != tiers["depth"]).any())
        self.assertTrue((tiers["token"] != tiers["random"]).any())


class AheadTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(st.randoms(use_true_random=False), st.integers(0, E), st.booleans())
    def test_equations_7_and_8(self, random, limit, prefill):
        num = 4 if prefill else 1
        predicted = np.float32([[random.randint(1, 5) for _ in range(E)] for _ in range(num)])
        active = np.array([random.random() < 0.7 for _ in range(num)])
        ids = np.tile(np.arange(A), (num, 1))
        seen = routed(ids, prefill=prefill, active=active, predicted=predicted)
        rows = [i for i in range(num) if active[i]]
        if prefill:  # c_e of eq. 7
            top = {i: sorted(range(E), key=lambda e, i=i: (-predicted[i, e], e))[:A] for i in rows}
            score = [sum(e in top[i] for i in rows) for e in range(E)]
        else:
            score = predicted[0].tolist() if rows else [0] * E
        order = [e for e in sorted(range(E), key=lambda e: (-score[e], e)) if score[e] > 0]
        found = AHEAD(seen, jnp.int32(limit))
        self.assertEqual(np.flatnonzero(found).tolist(), sorted(order[:limit]))

    def test_t_is_that_of_the_next_layer_and_fits_the_slots(self):
        policy = DyMoE(retention=0.5)  # t_l of 3: 3, 2 (1.5 and what was left), 0
        state = policy.init(SPEC)
        self.assertEqual(policy.counts(M, A).tolist(), [3, 2, 0])
        np.testing.assert_array_equal(state.ahead[0], [2, 0, 0])
        np.testing.assert_array_equal(state.ahead[1], np.minimum([*policy.counts(M, E)[1:], 0], 3))
        found = policy.init(dataclasses.replace(SPEC, prefetch=(1, 2))).ahead
        np.testing.assert_array_equal(found, np.minimum(state.ahead, 1))  # the best ones
        found = DyMoE(prefetch=2).init(SPEC).ahead
        np.testing.assert_array_equal(found, [[2, 2, 0]] * 2)


class Cache:
    """The mixed-precision cache of section 4.4.2 for one expert at a time, without a size."""

    def __init__(self) -> None:
        self.stored: dict[int, str] = {}
        self.loads: collections.Counter[str] = collections.Counter()

    def request(self, expert: int, precision: str) -> str:
        """Requests an expert; returns the precision that runs."""
        cached = self.stored.get(expert)
        if cached == "High" and precision == "Low":
            return "High"  # conservative reuse
        if cached != precision:  # absent, or low where high is asked for: a miss
            self.loads[precision] += 1
            self.stored[expert] = precision  # in place of the low version: no duplication
        return precision


class CacheTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(
        st.lists(st.tuples(st.permutations(range(E)), st.integers(0, 3)), min_size=1, max_size=6)
    )
    def test_three_rules(self, requests):
        names, cache = ("High", "Low"), Cache()
        resident, loads = np.zeros((2, E), bool), collections.Counter()
        for order, num_high in requests:
            tier = (np.arange(3) >= num_high).astype(np.int32)[None]
            ids = np.asarray(order[:3], np.int32)[None]
            decision = Decision(ids, tier, np.ones((1, 3), np.float32), tier == 1)
            found = jax.device_get(served(resident, decision, np.ones(1, bool)))
            for expert, asked in zip(ids[0].tolist(), tier[0].tolist(), strict=True):
                had, before = cache.stored.get(expert), cache.loads.total()
                self.assertEqual(names[found.tier[expert]], cache.request(expert, names[asked]))
                self.assertEqual(found.fetched[expert], cache.loads.total() > before)
                self.assertEqual(found.reused[expert], had == "High" and asked == 1)
                self.assertEqual(found.leaving[1, expert], had == "Low" and asked == 0)
                if found.fetched[expert]:
                    loads[names[asked]] += 1
            self.assertEqual(int((found.tier >= 0).sum()), 3)
            comes = (found.tier == np.arange(2)[:, None]) & found.fetched
            resident = (resident & ~found.leaving) | comes
            self.assertLessEqual(resident.sum(axis=0).max(), 1)
            for expert in range(E):
                held = [names[t] for t in range(2) if resident[t, expert]]
                self.assertEqual(held, [cache.stored[expert]] if expert in cache.stored else [])
        self.assertEqual(loads, cache.loads)

    @parameterized.parameters(((), [0, 1, 0]), ((True, False), [1, 1, 0]))
    def test_a_high_copy_is_reused_beside_every_low_one(self, refines, expected):
        copies = jnp.stack([jnp.arange(E) == 0, jnp.ones(E, bool)])
        resident = cache_plan.servable(copies, (False, True))
        ids, tier = np.int32([[0, 1, 2]]), np.int32([[1, 1, 0]])  # 2 is in low alone
        wishes = cache_plan.Wishes(tier, tier == 1)
        found = cache_plan.resolve_tiers(resident, ids, wishes, np.ones(1, bool), refines)
        np.testing.assert_array_equal(found.tier[:3], expected)
        np.testing.assert_array_equal(found.reused[:3], [not refines, False, False])
        np.testing.assert_array_equal(found.fetched[:3], [False, False, True])
        strict = cache_plan.Wishes(tier, tier < 0)
        found = cache_plan.resolve_tiers(resident, ids, strict, np.ones(1, bool), refines)
        np.testing.assert_array_equal(found.tier[:3], tier[0])

    def test_who_asks_strictly_gets_what_it_asks_for(self):
        resident = np.stack([np.ones(E, bool), np.zeros(E, bool)])
        decision = Decision(
            np.int32([[0, 1, 2]]), np.int32([[1, 1, SKIPPED]]), np.ones((1, 3), np.float32),
            np.array([[False, True, False]]),
        )  # fmt: skip
        found = served(resident, decision, np.ones(1, bool))
        np.testing.assert_array_equal(found.tier[:3], [1, 0, -1])
        np.testing.assert_array_equal(found.fetched[:3], [True, False, False])
        idle = served(resident, decision, np.zeros(1, bool))
        np.testing.assert_array_equal(idle.tier, -1)
