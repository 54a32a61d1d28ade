"""Measures behind the papers' figures of routing and weights, against numpy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

from moejax.models.transformer import forward, merge_weights, model_definition
from scripts.studies.quality import coactivation, routing, weights
from scripts.studies.quality.bench import DOMAINS, Windows
from scripts.studies.quality.demo import WIKI, Demo

WINDOW, COUNT = 40, 4


class Texts:
    """Windows of random tokens in place of texts."""

    length = WINDOW

    def __init__(self, vocab_size):
        self._vocab_size = vocab_size

    def wikitext(self, count):
        return self.domain(WIKI, count)

    def domain(self, name, count):
        rng = np.random.default_rng(len(name))
        tokens = rng.integers(3, self._vocab_size, (count, WINDOW + 1)).astype(np.int32)
        return Windows(name, tokens, (name,) * count)


class ReproduceMeasureTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.demo = Demo.load("demo", jax.devices("cpu")[0])
        cls.demo.texts, cls.demo.num_windows = Texts(cls.demo.config.vocab_size), COUNT
        model = merge_weights(model_definition(cls.demo.config), cls.demo.weights)
        cls.windows = cls.demo.windows()
        run = jax.jit(lambda tokens: forward(model, tokens)[1])
        cls.routings = {
            name: jax.device_get(run(jnp.asarray(one.tokens[:, :-1])))
            for name, one in cls.windows.items()
        }

    def counts(self, name, layer):
        ids = self.routings[name].ids[layer]
        return np.bincount(ids.ravel(), minlength=self.demo.config.num_experts)

    @pytest.mark.slow
    def test_routing(self):
        found = {one.what: one for one in routing.measure(self.demo)}
        json.dumps([one.more for one in found.values()])
        num_layers = len(self.demo.config.moe_layers)
        for name in (WIKI, *DOMAINS):
            for layer in range(num_layers):
                one = found[f"counts | {name} | layer {layer}"]
                expected = self.counts(name, layer)
                # Two programs may route a token with a tie apart.
                self.assertLess(np.abs(np.asarray(one.more["counts"]) - expected).sum(), 9)
                self.assertEqual(one.more["assignments"], expected.sum())
                top = np.sort(one.more["counts"])[-8:].sum() / expected.sum()
                self.assertAlmostEqual(one.figure, 100 * top, places=3)
        shown = found["heavy | books, first window | layer 3"].more
        width = self.demo.config.experts_per_token
        self.assertEqual(sum(shown["heavy"]), width * round(routing.HEAVY_SHARE * WINDOW))
        self.assertEqual(sum(shown["all tokens"]), width * WINDOW)
        self.assertTrue(np.all(np.asarray(shown["heavy"]) <= shown["all tokens"]))
        for layer in range(num_layers - 1):
            one = found[f"similarity | {WIKI} | layers {layer} and {layer + 1}"]
            self.assertBetween(one.figure, 0.3, 1.0)
            self.assertLessEqual(one.more["tenth percentile"], one.figure)
            # By chance an eighth of the experts would be foreseen.
            self.assertBetween(one.more["recall of the next layer's experts"], 0.25, 1.0)

    @pytest.mark.slow
    def test_coactivation(self):
        found = {one.what: one for one in coactivation.measure(self.demo)}
        json.dumps([one.more for one in found.values()])
        layer = coactivation.SHOWN_LAYER
        counts = np.zeros((self.demo.config.num_experts,) * 2, int)
        for row in self.routings[WIKI].ids[layer]:
            for a in row:
                counts[a, [b for b in row if b != a]] += 1
        one = found[f"share of the first 8 peers | layer {layer}"]
        # The profile does not feed the last token, which nothing follows.
        self.assertLess(np.abs(np.asarray(one.more["counts"]) - counts).sum(), 40)
        cosines = np.asarray(found[f"cosine of outputs | layer {layer}"].more["cosines"])
        used = np.diagonal(np.asarray(cosines)) > 0
        np.testing.assert_allclose(np.diagonal(cosines)[used], 1.0, atol=2e-3)
        short, long = (
            found[f"list length, outputs, alpha {a} | layer 0"].figure for a in (0.5, 0.99)
        )
        self.assertLess(short, long)

    @pytest.mark.slow
    def test_weights(self):
        found = {one.what: one for one in weights.measure(self.demo)}
        json.dumps([one.more for one in found.values()])
        stacks = {one.name: one for one in weights.stacks(self.demo)}
        self.assertEqual(list(stacks), ["q", "k", "v", "o", "gate", "up", "down"])
        self.assertEqual(found["excess kurtosis | experts"].more["matrices"], 3 * 7 * 32)
        expected = []
        for name in "qkvo":
            for matrix in np.asarray(stacks[name].matrices, np.float64):
                x = matrix - matrix.mean()
                expected.append((x**4).mean() / (x**2).mean() ** 2 - 3)
        self.assertAlmostEqual(
            found["excess kurtosis | attention"].figure, float(np.mean(expected)), places=3
        )
        overlap = [
            found[f"overlap of histograms, {stored} | experts, gate | layer 1"].figure
            for stored in ("INT3", "INT4", "INT3 and rank 32")
        ]
        self.assertLess(overlap[0], min(overlap[1:]))
        for stored in ("INT3", "INT4"):
            more = found[f"overlap of histograms, {stored} | attention, q | layer 1"].more
            self.assertAlmostEqual(sum(more["plain"]), 1.0, places=2)
            self.assertAlmostEqual(sum(more["stored"]), 1.0, places=2)
        spectrum = found["spectrum of the INT3 residual, first quarter | attention, q | layer 1"]
        self.assertEqual(spectrum.more["spectrum"], sorted(spectrum.more["spectrum"], reverse=True))
        self.assertBetween(found["relative error, INT3 hqq | experts"].figure, 0.1, 0.3)
