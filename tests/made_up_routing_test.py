"""Scaled traces recur as the small one; hit rates of LRU caches."""

import numpy as np
from absl.testing import parameterized

from moejax.benchmarking.routing import scaled_trace


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
    def test_a_width_that_copies_do_not_divide(self):
        small = np.tile(np.arange(16)[None, None], (3, 2, 1))[..., :4]
        big = scaled_trace(small, 16, num_layers=2, of_experts=64, width=6)
        np.testing.assert_array_equal(big[0, 0], [0, 1, 16, 17, 32, 48])

    @parameterized.parameters((128, 8, 12), (32, 4, 7), (8, 2, 16))
    def test_a_scaled_trace_recurs_as_the_small_one(self, num_experts, width, num_layers):
        drawn = np.random.default_rng(2).random((200, 7, 32))
        small = np.argsort(drawn, axis=-1)[..., :4].astype(np.int32)
        big = scaled_trace(small, 32, num_layers=num_layers, of_experts=num_experts, width=width)
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
            scaled_trace(np.zeros((1, 1, 4), int), 32, num_layers=1, of_experts=60, width=8)
