"""Replays of the studies of prefetch and of cache-aware routing, beside plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from moejax.models.moe import Routing
from moejax.policies.base import PolicySpec
from moejax.policies.baselines import OnDemand
from scripts.studies.quality import prediction
from scripts.studies.quality.decoding import Decoder

M, N, E, A, SLOTS = 2, 60, 10, 3, 4


def routing(seed):
    logits = np.random.default_rng(seed).normal(size=(M, N, E)).cumsum(axis=1).astype(np.float32)
    ids = np.argsort(-logits, axis=-1)[..., :A].astype(np.int32)
    return logits, ids


class Cache:
    """Slots of one layer, the least recently used first."""

    def __init__(self, held):
        self.held = list(held)

    def use(self, experts):
        """Takes experts at once; how many were absent."""
        absent = [one for one in experts if one not in self.held]
        self.held = [one for one in self.held if one not in experts] + sorted(experts)[::-1]
        self.held = self.held[-SLOTS:]
        return absent


class ReplayTest(absltest.TestCase):
    def test_prefetch(self):
        (logits, ids), (guess, _) = routing(0), routing(0)
        guess = guess + np.random.default_rng(1).normal(size=guess.shape).astype(np.float32)
        found = prediction.replay(jnp.asarray(ids), jnp.asarray(guess), slots=SLOTS, count=A)
        del logits
        expected = np.zeros((4, M), int)
        for layer in range(M):
            cache = Cache(range(SLOTS)[::-1])
            for token in range(N):
                likely = np.argsort(-guess[layer, token])[:A].tolist()
                used = ids[layer, token].tolist()
                fetched = cache.use(likely)
                stalls = cache.use(used)
                wasted = [one for one in fetched if one not in used]
                expected[:, layer] += A, len(stalls), len(fetched), len(wasted)
        np.testing.assert_array_equal(np.stack(found), expected)
        self.assertGreater(expected[3].min(), 0)

    def test_equal_scores_prefetch_nothing(self):
        _, ids = routing(0)
        found = prediction.replay(
            jnp.asarray(ids), jnp.zeros((M, N, E), jnp.float32), slots=SLOTS, count=A
        )
        self.assertEqual(int(found.fetched.sum()), 0)

    def test_a_predictor_learns_what_can_be_known(self):
        rng = np.random.default_rng(2)
        x = rng.normal(size=(M, 2000, 16)).astype(np.float32)
        logits = x @ rng.normal(size=(M, 16, E)).astype(np.float32)
        ids = np.argsort(-logits, axis=-1)[..., :A].astype(np.int32)
        fitted = prediction.fit(x[:, :1500], ids[:, :1500], E, 500)
        scores = np.asarray(prediction.predict(fitted, x[:, 1500:]))
        self.assertGreater(prediction.recall(ids[:, 1500:], scores).min(), 0.6)
        chance = prediction.recall(ids[:, 1500:], rng.normal(size=scores.shape))
        self.assertLess(chance.max(), 0.4)

    def test_decoding_misses_as_an_lru_cache_does(self):
        logits, ids = routing(3)
        decoder = object.__new__(Decoder)  # its scan alone, without a model
        decoder.spec = PolicySpec(
            num_layers=M, num_experts=E, width=A, tiers=("bf16",), expert_bytes=(1,), slots=(SLOTS,)
        )
        stamps = np.where(np.arange(E) < SLOTS, 0, -1).astype(np.int32)
        decoder._policy, decoder._slots = OnDemand(), SLOTS
        decoder._stamps = jnp.asarray(np.tile(stamps, (M, 1)))
        state = OnDemand().init(decoder.spec)
        for layer in range(M):
            probabilities = jax.nn.softmax(jnp.asarray(logits[layer]))
            weights = jnp.ones((N, A), jnp.float32) / A
            given = Routing(probabilities, weights, jnp.asarray(ids[layer]))
            found, _, misses = decoder._decided(state, layer, given)
            np.testing.assert_array_equal(found, ids[layer])
            cache = Cache(range(SLOTS)[::-1])
            expected = sum(len(cache.use(ids[layer, token].tolist())) for token in range(N))
            self.assertEqual(int(misses), expected)


if __name__ == "__main__":
    absltest.main()
