"""Section `stand_ins`: errors by products of outputs are those of the outputs themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

from moejax.models.transformer import merge_weights, model_definition
from scripts.studies.quality import stand_ins as quality_stand_ins
from scripts.studies.quality.bench import Model, Windows

EXPERTS, WIDTH, SIZE, SLOTS = 8, 3, 12, 5
rng = np.random.default_rng(0)


def text(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs [N, E, D] with something in common, chosen experts and their weights."""
    outputs = rng.normal(size=(tokens, EXPERTS, SIZE)) + rng.normal(size=(tokens, 1, SIZE))
    ids = np.stack([rng.permutation(EXPERTS)[:WIDTH] for _ in range(tokens)])
    weights = rng.random((tokens, WIDTH)) + 0.1
    return outputs.astype(np.float32), ids, weights


def projected(target: np.ndarray, by: np.ndarray) -> float:
    """The squared distance of a vector from the span of others [n, D]."""
    found = np.linalg.lstsq(by.T, target, rcond=None)[0]
    return float(np.square(target - found @ by).sum())


class StandInsTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.own, self.text = text(40), text(60)
        self.means = quality_stand_ins.means_of(*self.own)
        self.fitted = quality_stand_ins.fit(*self.own, self.means)
        self.low = self.text[0] + 0.1
        products = quality_stand_ins.products_of(self.text[0], self.low, self.means)
        self.errors = quality_stand_ins.squared_errors(self.fitted, products, *self.text[1:], SLOTS)
        counts = np.bincount(self.own[1].ravel(), minlength=EXPERTS)
        self.resident = set(np.argsort(-counts, kind="stable")[:SLOTS].tolist())

    def absent(self):
        """Yields, per token with an absent expert: outputs, the lightest one, its weight, rest."""
        for outputs, ids, weights in zip(*self.text, strict=True):
            pairs = [(w, e) for w, e in zip(weights, ids, strict=True) if e not in self.resident]
            if pairs:
                weight, of = min(pairs)
                others = [e for e in ids if e != of]
                free = sorted(self.resident - set(others))
                yield outputs.astype(np.float64), of, weight, others, free

    def expect(self, kind, error):
        wanted = sum(w * w * error(f, of, others, free) for f, of, w, others, free in self.absent())
        np.testing.assert_allclose(self.errors[kind], wanted, rtol=1e-5)

    def test_what_is_not_fitted(self):
        self.expect("left out", lambda f, of, _, __: np.square(f[of]).sum())
        self.expect(
            "random",
            lambda f, of, _, free: np.mean([np.square(f[of] - f[e]).sum() for e in free]),
        )
        self.expect(
            "best resident, in hindsight",
            lambda f, of, _, free: min(projected(f[of], f[[e]]) for e in free),
        )
        self.expect(
            "all residents, in hindsight",
            lambda f, of, _, __: projected(f[of], f[sorted(self.resident)]),
        )
        self.expect("itself in INT2", lambda f, of, _, __: SIZE * 0.01)

    def test_what_a_profile_says(self):
        outputs, ids, weights = (array.astype(np.float64) for array in self.own)

        def chose(of):
            """Outputs of the tokens that chose it, and their weights."""
            tokens, places = np.nonzero(ids == of)
            return outputs[tokens], weights[tokens, places]

        def alike(of, e):
            f, _ = chose(of)
            norms = np.linalg.norm(f[:, of], axis=1) * np.linalg.norm(f[:, e], axis=1)
            return np.mean((f[:, of] * f[:, e]).sum(1) / norms)

        def buddy(f, of, _, free, gain=lambda c: 1.0):
            best = max(free, key=lambda e: alike(of, e))
            return np.square(f[of] - gain(alike(of, best)) * f[best]).sum()

        def fitted(f, of, others, free, joint):
            seen, share = chose(of)
            target = (share[:, None] * seen[:, of]).ravel()

            def column(e):
                return (share[:, None] * seen[:, e]).ravel()

            best = min(free, key=lambda e: projected(target, column(e)[None]))
            by = [*others, best] if joint else [best]
            columns = np.stack([column(e) for e in by])
            ridge = 1e-3 * sum(np.square(column(e)).sum() for e in range(EXPERTS)) / EXPERTS
            gains = np.linalg.solve(columns @ columns.T + ridge * np.eye(len(by)), columns @ target)
            return np.square(f[of] - gains @ f[by]).sum()

        def mean(f, of, _, __):
            seen, share = chose(of)
            return np.square(f[of] - np.average(seen[:, of], axis=0, weights=share**2)).sum()

        self.expect("buddy", buddy)
        self.expect("buddy, by its cosine", lambda *at: buddy(*at, gain=lambda c: max(c, 0.0)))
        self.expect("buddy, least squares", lambda *at: fitted(*at, joint=False))
        self.expect("buddy and the token's others", lambda *at: fitted(*at, joint=True))
        self.expect("its mean output", mean)

    def test_hindsight_bounds_all_but_the_expert_itself(self):
        bound = self.errors["best resident, in hindsight"]
        for kind in ("left out", "random", "buddy", "buddy, by its cosine", "buddy, least squares"):
            self.assertLessEqual(bound, self.errors[kind])
        self.assertLess(self.errors["all residents, in hindsight"], bound)


class RoutedTest(absltest.TestCase):
    @pytest.mark.slow
    def test_the_chosen_experts_make_the_layer(self):
        """The demo model's outputs by weight are what its first sparse layer adds."""
        model = Model("demo", jax.devices("cpu")[0], "rtn")
        tokens = np.arange(100, 117, dtype=np.int32)[None]
        found = quality_stand_ins.routed(model, Windows("t", tokens, ("t",)))
        self.assertEqual(found.x.shape[1], 16)
        outputs = quality_stand_ins.outputs_of(model, 0, found)
        chosen = np.take_along_axis(outputs, found.ids[0][..., None], axis=1)
        summed = (chosen * found.weights[0][..., None]).sum(1)
        whole = merge_weights(model_definition(model.config), model.weights)
        x = jnp.asarray(found.x[0])
        ran = whole.moe(x, whole.moe.route(x, 0), 0, jnp.ones(16, bool), "block")
        np.testing.assert_allclose(summed, ran, rtol=2e-4, atol=2e-5)
