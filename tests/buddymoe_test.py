"""BuddyMoE's equations and its Algorithm 1 against plain numpy."""

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import strategies as st

from moejax.policies import buddy_gates, buddymoe
from moejax.policies.buddy_lists import (
    alpha_schedule,
    buddy_lists,
    conditional_coactivation,
    output_gains,
    output_similarity,
)
from pallas_kernels import buddy_search
from tests import buddymoe_reference as paper
from tests import slow
from tests.buddymoe_cases import DEPTH, EXPERTS, LAYERS, TOKENS, WIDTH, as_lists, routed


@functools.partial(jax.jit, static_argnames=("last_first", "scored"))
def found_by(
    ids: Any, lists: Any, resident: Any, depth: Any, wanted: Any, budget: Any, scores: Any,
    *, last_first: bool, scored: bool,
) -> buddymoe.Substitution:  # fmt: skip
    """`substitute` with scores float32[N, E, E] by token, missing expert and buddy."""
    listed = jnp.where(jnp.arange(lists.shape[1])[None, None] < depth, lists[ids], -1)
    if scored:
        token = jnp.arange(len(ids), dtype=jnp.int32)[:, None, None]
        value = scores[token, ids[:, :, None], jnp.maximum(listed, 0)]
        listed = buddymoe._in_order(listed, jnp.where(listed >= 0, value, 0.0))
    found, searched = buddy_search.search_pairs(
        ids, listed, resident, wanted, jnp.int32(lists.shape[1]), budget, last_first=last_first
    )
    return buddymoe.Substitution(found, found != ids, searched)


class GatesTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.parameters(0.8, 1.0, 1.2)
    def test_entropy_and_margin_are_those_of_the_paper(self, temperature):
        probabilities, ids, _ = routed(np.random.default_rng(0), 40)
        chosen = buddy_gates.chosen_probabilities(probabilities, ids, temperature)
        np.testing.assert_allclose(chosen.sum(axis=-1), 1, rtol=1e-6)
        found = buddy_gates.activating_entropy(chosen)
        expected = [
            paper.entropy(p, i, temperature) for p, i in zip(probabilities, ids, strict=True)
        ]
        np.testing.assert_allclose(found, expected, rtol=2e-6)
        chosen = buddy_gates.chosen_probabilities(probabilities, ids)
        margins = [paper.margin(p, i) for p, i in zip(probabilities, ids, strict=True)]
        np.testing.assert_allclose(buddy_gates._probability_margin(chosen), margins, atol=1e-6)

    @parameterized.parameters(10, 15, 20, 50, 100)
    def test_tau_is_the_percentile(self, percentile):
        entropies = np.random.default_rng(3).beta(5, 2, (LAYERS, 4001)).astype(np.float32)
        histogram = np.zeros((LAYERS, buddy_gates.ENTROPY_BINS), np.float32)
        for layer in range(LAYERS):
            np.add.at(histogram[layer], np.asarray(buddy_gates.entropy_bin(entropies[layer])), 1)
        tau = buddy_gates.percentile_tau(histogram, percentile)
        exact = np.percentile(entropies, percentile, axis=1, method="inverted_cdf")
        np.testing.assert_array_less(exact - 1e-6, tau)
        np.testing.assert_allclose(tau, exact, atol=1 / buddy_gates.ENTROPY_BINS + 1e-6)
        # The gate then holds back p % of the tokens, up to those that share the last bin.
        held = (entropies <= tau[:, None]).mean(axis=1) * 100
        self.assertTrue(((held >= percentile) & (held < percentile + 1)).all(), held)

    def test_tau_without_percentile_or_tokens_is_off(self):
        histogram = np.ones((2, buddy_gates.ENTROPY_BINS), np.float32) * [[1], [0]]
        np.testing.assert_array_equal(buddy_gates.percentile_tau(histogram, 0), [-1, -1])
        self.assertEqual(buddy_gates.percentile_tau(histogram, 10).tolist(), [np.float32(0.1), -1])

    def test_entropy_of_flat_peaky_and_single_choices(self):
        chosen = np.float32([[0.25] * 4, [1, 0, 0, 0], [0.5, 0.5, 0, 0]])
        found = buddy_gates.activating_entropy(chosen)
        np.testing.assert_allclose(found, [1, 0, 0.5], atol=1e-6)
        one = buddy_gates.chosen_probabilities(np.float32([[0.2, 0.8]]), np.int32([[1]]))
        np.testing.assert_array_equal(buddy_gates.activating_entropy(one), [0])  # k = 1: forbidden
        self.assertFalse(buddy_gates.tolerates(one, jnp.float32(0), jnp.float32(2))[0])
        self.assertTrue(buddy_gates.tolerates(one, jnp.float32(-1), jnp.float32(2))[0])


class ListsTest(parameterized.TestCase):
    @parameterized.product(alpha=(0.1, 0.75, 0.95, 1.0), smoothing=(0.0, 0.5), max_size=(3, 16))
    def test_lists_are_those_of_the_paper(self, alpha, smoothing, max_size):
        rng = np.random.default_rng(4)
        tokens = [routed(rng, 30)[1].tolist() for _ in range(LAYERS)]
        counts = np.stack([paper.coactivations(chosen, EXPERTS) for chosen in tokens])
        q = conditional_coactivation(counts + 7 * np.eye(EXPERTS), smoothing)  # no diagonal is read
        expected = np.stack([paper.conditional(c, smoothing) for c in counts])
        np.testing.assert_allclose(q, expected, rtol=1e-12)
        lists = buddy_lists(q, alpha, max_size)
        self.assertEqual(lists.ids.shape, (LAYERS, EXPERTS, min(max_size, EXPERTS - 1)))
        self.assertEqual((lists.ids.dtype, lists.q.dtype), (np.int32, np.float32))
        for layer in range(LAYERS):
            wanted = paper.buddies(expected[layer], alpha, max_size)
            self.assertEqual(as_lists(lists.ids[layer]), wanted)
            for i, row in enumerate(wanted):
                shares = lists.q[layer, i]
                np.testing.assert_allclose(shares[: len(row)], expected[layer, i, row], rtol=1e-6)
                np.testing.assert_array_equal(shares[len(row) :], 0)
        np.testing.assert_array_equal(lists.sizes(), (lists.ids >= 0).sum(-1))

    def test_alpha_of_each_layer(self):
        counts = np.random.default_rng(5).integers(1, 9, (3, EXPERTS, EXPERTS))
        q = conditional_coactivation(counts)
        alphas = alpha_schedule(0.9, 0.5, 3)
        np.testing.assert_allclose(alphas, [0.9, 0.7, 0.5])
        sizes = buddy_lists(q, alphas, EXPERTS).sizes()
        for layer, alpha in enumerate(alphas):
            np.testing.assert_array_equal(sizes[layer], buddy_lists(q, alpha, 99).sizes()[layer])
        self.assertGreater(sizes[0].mean(), sizes[2].mean())

    def test_what_was_never_seen_has_no_buddies_but_by_smoothing(self):
        counts = np.zeros((1, 4, 4))
        counts[0, 0, 1] = counts[0, 1, 0] = 5
        lists = buddy_lists(conditional_coactivation(counts), 1.0, 3)
        self.assertEqual(as_lists(lists.ids[0]), [[1], [0], [], []])
        lists = buddy_lists(conditional_coactivation(counts, 1.0), 1.0, 3)
        self.assertEqual(as_lists(lists.ids[0])[2], [0, 1, 3])

    def test_similar_outputs(self):
        cosines = np.zeros((1, 4, 4))
        cosines[0, 0] = 10, 6, -3, 2  # of 10 tokens that went to expert 0
        cosines[0, 1] = 3, 5, 1, 0  # of 5 that went to expert 1
        tokens = np.array([[10, 5, 0, 0]])
        q = output_similarity(cosines, tokens)
        np.testing.assert_allclose(q[0, 0], np.array([0, 0.6, 0, 0.2]) / 0.8)
        np.testing.assert_allclose(q[0, 1], np.array([0.6, 0, 0.2, 0]) / 0.8)
        np.testing.assert_allclose(q[0, 2], [0, 1, 0, 0])  # no tokens of its own: those of others
        np.testing.assert_allclose(q[0, 3], [1, 0, 0, 0])
        gains = output_gains(cosines, tokens)
        np.testing.assert_allclose(gains[0, 0], [1, 0.6, 0, 0.2])
        np.testing.assert_allclose(gains[0, 1], [0.6, 1, 0.2, 0])


class SubstitutionTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
    @hypothesis.given(st.data())
    def test_algorithm_1_is_the_printed_loops(self, data):
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        # Few experts are often named, so that buddies are fought over.
        few = data.draw(st.integers(WIDTH + 1, EXPERTS))
        ids = np.stack([rng.permutation(few)[:WIDTH] for _ in range(TOKENS)]).astype(np.int32)
        lists = np.full((EXPERTS, DEPTH), -1, np.int32)
        for i in range(EXPERTS):
            peers = rng.permutation([j for j in range(few) if j != i])[:DEPTH]
            peers = peers[: rng.integers(0, len(peers) + 1)]
            lists[i, : len(peers)] = peers
        resident = rng.random(EXPERTS) < data.draw(st.sampled_from([0, 0.3, 0.5, 0.75, 1]))
        may = rng.random((TOKENS, WIDTH)) < data.draw(st.sampled_from([0.5, 1]))
        depth, budget = data.draw(st.integers(1, DEPTH)), data.draw(st.integers(0, WIDTH))
        last_first, scored = data.draw(st.booleans()), data.draw(st.booleans())
        scores = rng.integers(0, 4, (TOKENS, EXPERTS, EXPERTS)).astype(np.float32)  # with ties
        expected = paper.algorithm_1(
            ids, resident, as_lists(lists), depth, budget=budget, may=may, last_first=last_first,
            scores=scores if scored else None,
        )  # fmt: skip
        wanted = may & ~resident[ids]
        found = found_by(
            ids, lists, resident, np.int32(depth), wanted, np.int32(budget), scores,
            last_first=last_first, scored=scored,
        )  # fmt: skip
        for name, mine, theirs in zip(found._fields, found, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs, name)
        served = np.asarray(found.ids)
        self.assertTrue(all(len(set(row)) == WIDTH for row in served.tolist()))
        replaced = np.asarray(found.replaced)
        self.assertLessEqual(replaced.sum(axis=1).max(), budget)
        self.assertTrue(resident[served[replaced]].all())

    def test_a_small_case_by_hand(self):
        # 0 and 1 are missing and both like 4 best; 1 may not have it, nor 2, which is chosen.
        ids, resident = np.int32([[0, 1, 2, 3]]), np.arange(EXPERTS) >= 2
        lists = np.full((EXPERTS, DEPTH), -1, np.int32)
        lists[0, :3], lists[1, :3] = (1, 4, 5), (4, 2, 6)
        for last_first, budget, expected in (
            (False, 4, [4, 6, 2, 3]), (True, 4, [5, 4, 2, 3]),
            (False, 1, [4, 1, 2, 3]), (True, 1, [0, 4, 2, 3]), (False, 0, [0, 1, 2, 3]),
        ):  # fmt: skip
            found = found_by(
                ids, lists, resident, np.int32(5), ~resident[ids], np.int32(budget),
                np.zeros((1, EXPERTS, EXPERTS), np.float32), last_first=last_first, scored=False,
            )  # fmt: skip
            self.assertEqual(found.ids.tolist(), [expected])
