"""AutoRound: its objective and gradient in float64 numpy, and that it only ever gains on RTN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.quantization.autoround import autoround
from moejax.quantization.grid import Codes, Grid, dequantize
from moejax.quantization.rtn import rtn
from tests import slow

K = 80


def hessian_of(rng: np.random.Generator, num_tokens: int = 300) -> np.ndarray:
    """float32[K, K] of correlated inputs."""
    mix = rng.standard_normal((K, K)) * np.exp(-np.arange(K) / 12)[:, None]
    x = rng.standard_normal((num_tokens, K)) @ mix + 0.2 * rng.standard_normal((num_tokens, K))
    return (2 * x.T @ x / num_tokens).astype(np.float32)


def row_errors(w: np.ndarray, codes: Codes, grid: Grid, h: np.ndarray) -> np.ndarray:
    """float64[N]: d H d^T of each row."""
    difference = w - np.asarray(dequantize(codes, grid), np.float64)
    return np.einsum("nk,kj,nj->n", difference, h.astype(np.float64), difference)


def with_damping(h: np.ndarray, share: float = 0.01) -> np.ndarray:
    """Damps H like the settings do."""
    return h + share * np.diag(h).mean() * np.eye(K)


def descend(w: np.ndarray, h: np.ndarray, iterations: int) -> tuple[np.ndarray, np.ndarray]:
    """The method for INT3, float zeros, one group a row, the gradient written out by hand.

    Returns:
      Quantized rows of the best step of each, and their errors.
    """
    top, low, high = 7, w.min(1, keepdims=True), w.max(1, keepdims=True)
    offset, alpha, beta = np.zeros_like(w), np.ones_like(low), np.ones_like(low)
    best, least = w.copy(), np.full(len(w), np.inf)
    for i in range(iterations + 1):
        scale = (alpha * high - beta * low) / top
        zero = -beta * low / scale
        steps = np.round(w / scale + zero + offset)
        codes = np.clip(steps, 0, top)
        inside = ((steps > 0) & (steps < top)) + 0.5 * ((steps == 0) | (steps == top))
        value = (codes - zero) * scale
        difference = w - value
        product = difference @ h
        errors = (product * difference).sum(1)
        better = errors < least
        best[better], least = value[better], np.minimum(errors, least)
        # d value / d (offset, scale, zero), rounding passed straight through
        by_offset = scale * inside
        by_scale = codes - zero - (w / scale) * inside
        by_zero = scale * (inside - 1)
        to_scale = -(product * by_scale).sum(1, keepdims=True)
        to_zero = -(product * by_zero).sum(1, keepdims=True)
        to_scale = to_scale + to_zero * (beta * low / scale**2)
        to_alpha = to_scale * high / top
        to_beta = to_scale * -low / top + to_zero * -low / scale
        rate = (1 - i / iterations) / iterations
        offset = np.clip(offset - rate * np.sign(-product * by_offset), -0.5, 0.5)
        alpha = np.clip(alpha - rate * np.sign(to_alpha), 0.5, 1)
        beta = np.clip(beta - rate * np.sign(to_beta), 0.5, 1)
    return best, least


class AutoRoundTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.rng = np.random.default_rng(0)

    def _problem(self) -> tuple[np.ndarray, np.ndarray]:
        return self.rng.standard_normal((24, K)).astype(np.float32), hessian_of(self.rng)

    @slow.repeats()
    @parameterized.parameters(
        (2, 32, "float"),
        (3, 32, "integer"),  # the last group holds 16
        (4, 40, "symmetric"),
    )
    def test_every_row_gains_on_rounding(self, bits, group_size, kind):
        grid = Grid(bits=bits, group_size=group_size, zero_kind=kind)
        w, h = self._problem()
        found = autoround(jnp.asarray(w), jnp.asarray(h), grid)
        plain = rtn(jnp.asarray(w), grid)
        lost = row_errors(w, found, grid, with_damping(h))
        lost_by_rtn = row_errors(w, plain, grid, with_damping(h))
        self.assertTrue(np.all(lost <= 1.0001 * lost_by_rtn))
        self.assertLess(lost.sum(), 0.8 * lost_by_rtn.sum())
        self.assertLessEqual(int(found.codes.max()), grid.max_code)
        if kind != "float":
            np.testing.assert_array_equal(found.zeros, np.round(found.zeros))
        if kind == "symmetric":
            np.testing.assert_array_equal(found.zeros, 2 ** (bits - 1))

    def test_follows_the_float64_descent(self):
        grid = Grid(bits=3, group_size=K, zero_kind="float")
        w, h = self._problem()
        found = autoround(jnp.asarray(w), jnp.asarray(h), grid, iterations=50)
        best, least = descend(w.astype(np.float64), with_damping(h.astype(np.float64)), 50)
        lost = row_errors(w, found, grid, with_damping(h))
        # A sign near zero may fall either way and the paths part; most rows stay together.
        near = np.abs(np.asarray(dequantize(found, grid)) - best).max(1) < 1e-3
        self.assertGreater(near.mean(), 0.5)
        np.testing.assert_allclose(lost[near], least[near], rtol=1e-3)
        np.testing.assert_allclose(lost.sum(), least.sum(), rtol=0.05)

    @pytest.mark.slow
    def test_deterministic_and_the_same_eager_jitted_and_under_vmap(self):
        grid = Grid(bits=3, group_size=32, zero_kind="float")
        problems = [self._problem() for _ in range(3)]
        w, h = (jnp.asarray(np.stack(part)) for part in zip(*problems, strict=True))
        one = autoround(w[0], h[0], grid, 20)
        for again in (
            autoround(w[0], h[0], grid, 20),
            jax.jit(lambda w, h: autoround(w, h, grid, 20))(w[0], h[0]),
        ):
            for name in Codes._fields:
                np.testing.assert_array_equal(getattr(one, name), getattr(again, name))
        together = jax.vmap(lambda w, h: autoround(w, h, grid, 20))(w, h)
        for i in range(3):
            alone = autoround(w[i], h[i], grid, 20)
            same = np.asarray(alone.codes == together.codes[i])
            self.assertGreater(same.mean(), 0.98)  # sums of another order, signs near zero
            of_both = [
                row_errors(np.asarray(w[i]), codes, grid, np.asarray(h[i])).sum()
                for codes in (alone, Codes(*(part[i] for part in together)))
            ]
            self.assertAlmostEqual(of_both[0] / of_both[1], 1, delta=0.01)

    @parameterized.parameters(0.0, np.nan)
    def test_without_calibration_it_is_rounding(self, value):
        grid = Grid(bits=3, group_size=32, zero_kind="float")
        w, _ = self._problem()
        found = autoround(jnp.asarray(w), jnp.full((K, K), value, jnp.float32), grid)
        for part, expected in zip(found, rtn(jnp.asarray(w), grid), strict=True):
            np.testing.assert_array_equal(part, expected)
