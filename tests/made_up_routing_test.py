"""Made-up routing is what it says; scaled traces recur as the small one."""

import dataclasses

import numpy as np
from absl.testing import parameterized

from moejax.benchmarking.routing import (
    EXPONENTS,
    QWEN3_HIT_RATES,
    _scaled_trace,
    make_workload,
    with_skew,
)
from moejax.models.shapes import SHAPES, TINY

QWEN3, MIXTRAL = (
    dataclasses.replace(SHAPES[name], num_layers=3, moe_layers=(0, 1, 2))
    for name in ("Qwen3-30B-A3B", "Mixtral-8x7B")
)
SKEW = EXPONENTS["Qwen3-30B-A3B"]


def lru_hit_rate(trace: np.ndarray, slots: int, num_experts: int) -> float:
    """Hit rate of int32[steps, M, A] on LRU caches of `slots` a layer, without the first tenth."""
    hits = total = 0
    for layer in range(trace.shape[1]):
        last_use = np.full(num_experts, -1)
        for step, experts in enumerate(trace[:, layer]):
            held = {e for e in np.argsort(-last_use, kind="stable")[:slots] if last_use[e] >= 0}
            if step >= len(trace) // 10:
                hits += sum(int(expert in held) for expert in experts)
                total += len(experts)
            last_use[experts] = step
    return hits / total


class TraceTest(parameterized.TestCase):
    @parameterized.parameters((128, 8, 12), (32, 4, 7), (8, 2, 16))
    def test_a_scaled_trace_recurs_as_the_small_one(self, num_experts, width, num_layers):
        drawn = np.random.default_rng(2).random((200, 7, 32))
        small = np.argsort(drawn, axis=-1)[..., :4].astype(np.int32)
        big = _scaled_trace(small, 32, num_layers=num_layers, of_experts=num_experts, width=width)
        self.assertEqual(big.shape, (200, num_layers, width))
        self.assertEqual({len(set(token)) for token in big.reshape(-1, width).tolist()}, {width})
        self.assertEqual((big.min(), big.max()), (0, num_experts - 1))
        if num_experts == 32:
            np.testing.assert_array_equal(big, small)
        if num_experts > 32:  # a copy of the small model takes its likeliest experts
            np.testing.assert_array_equal(big[:, 0, :2], small[:, 0, :2])
        # Layers from other places of the text differ.
        if num_layers > 7:
            self.assertTrue((big[:, 0] != big[:, 7]).any())

    def test_experts_that_do_not_divide_are_refused(self):
        with self.assertRaisesRegex(ValueError, "do not make 8 of 60"):
            _scaled_trace(np.zeros((1, 1, 4), int), 32, num_layers=1, of_experts=60, width=8)


class WorkloadTest(parameterized.TestCase):
    @parameterized.parameters((QWEN3, 1), (QWEN3, 3), (MIXTRAL, 2))
    def test_the_chosen_are_the_likeliest(self, config, batch):
        made = make_workload(config, num_steps=40, batch=batch, exponent=SKEW, shift_every=16)
        width = config.experts_per_token
        self.assertEqual(made.ids.shape, (40, 3, batch, width))
        self.assertEqual(made.probabilities.shape, (40, 3, batch, config.num_experts))
        np.testing.assert_allclose(made.probabilities.sum(-1), 1, rtol=1e-5)
        chosen = np.take_along_axis(made.probabilities, made.ids, axis=-1)
        np.testing.assert_array_equal(chosen, -np.sort(-made.probabilities, axis=-1)[..., :width])
        self.assertTrue((np.sort(made.ids, axis=-1)[..., 1:] > np.sort(made.ids)[..., :-1]).all())

    @parameterized.parameters((QWEN3, 0.25), (MIXTRAL, 0.65))
    def test_weights_are_those_of_a_trained_router(self, config, top):
        skew = SKEW if config is QWEN3 else 0.0
        made = make_workload(config, num_steps=200, batch=1, exponent=skew)
        chosen = np.take_along_axis(made.probabilities, made.ids, axis=-1)
        weights = chosen / chosen.sum(axis=-1, keepdims=True)
        self.assertAlmostEqual(float(weights[..., 0].mean()), top, delta=0.02)

    def test_caches_hit_as_often_as_published(self):
        made = make_workload(QWEN3, num_steps=300, batch=1, exponent=SKEW)
        for slots, share in QWEN3_HIT_RATES.items():
            self.assertAlmostEqual(lru_hit_rate(made.ids[:, :, 0], slots, 128), share, delta=0.03)
        even = make_workload(MIXTRAL, num_steps=300, batch=1)
        self.assertAlmostEqual(lru_hit_rate(even.ids[:, :, 0], 4, 8), 0.5, delta=0.04)

    def test_the_hottest_quarter_carries_most_and_shifts(self):
        how = {"num_steps": 400, "batch": 1, "exponent": SKEW}
        steady = make_workload(QWEN3, **how)
        shifting = make_workload(QWEN3, **how, shift_every=100, shift_share=1.0)
        self.assertEqual(steady.num_shifts, 0)
        # Each layer at a time of its own: after 100, 133 and 166 steps, and then every 100.
        self.assertEqual(shifting.num_shifts, 9)
        early, late = slice(0, 100), slice(300, 400)
        for made, least, most in ((steady, 0.75, 1.0), (shifting, 0.1, 0.5)):
            counts = dataclasses.replace(made, ids=made.ids[early], popularity=None).activations()
            first = np.argsort(-counts, axis=1)[:, :32]
            share = [np.isin(made.ids[late, layer], first[layer]).mean() for layer in range(3)]
            self.assertBetween(float(np.mean(share)), least, most)

    def test_a_profile_is_of_other_steps_of_the_same_popularity(self):
        how = {"num_steps": 200, "batch": 1, "exponent": SKEW}
        for made in (make_workload(QWEN3, **how), make_workload(QWEN3, **how, shift_every=100)):
            of_these = dataclasses.replace(made, popularity=None).activations()
            self.assertLess((made.activations() == of_these).mean(), 0.3)
            first = np.argsort(-made.activations(), axis=1)[:, :32]
            share = [np.isin(made.ids[:100, layer], first[layer]).mean() for layer in range(3)]
            self.assertGreater(min(share), 0.8)
        how["seed"] = 1
        steady, shifting = (
            make_workload(QWEN3, **how, shift_every=n).activations() for n in (0, 9)
        )
        np.testing.assert_array_equal(
            steady[0], shifting[0]
        )  # of layer 0 the first ranks are equal

    def test_what_a_benchmark_replays_shifts_in_every_batch(self):
        how = {"shape": "x", "exponent": SKEW, "recall": 0.85, "seed": 0}
        made = with_skew(QWEN3, 32, **how, shift_every=64)
        self.assertEqual((len(made.ids), made.num_shifts), (128, 3))
        self.assertIn("25% of a layer's experts in turn every 64 steps", made.about)
        self.assertEqual(with_skew(QWEN3, 32, **how).num_shifts, 0)

    @parameterized.parameters(0.0, 0.85, 1.0)
    def test_needed_experts_are_expected_with_the_recall(self, recall):
        made = make_workload(QWEN3, num_steps=100, batch=1, exponent=SKEW, recall=recall)
        expected = made.expected(8)
        needed = (expected[:, :, None] == made.ids[:, :, 0, :, None]).any(axis=-1)
        self.assertAlmostEqual(float(needed.mean()), recall, delta=0.03)
        np.testing.assert_allclose(
            np.sort(made.predicted, axis=-1), np.sort(made.probabilities, axis=-1)
        )

    def test_coactivations_are_counts_of_tokens(self):
        made = make_workload(TINY, num_steps=30, batch=2)
        counts = dataclasses.replace(made, popularity=None).coactivations()
        both = np.zeros_like(counts)
        for step, layer, row in np.ndindex(made.ids.shape[:3]):
            first, second = made.ids[step, layer, row]
            both[layer, first, second] += 1
            both[layer, second, first] += 1
        np.testing.assert_array_equal(counts, both)
