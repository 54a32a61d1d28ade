"""Methods that see inputs, in float64 numpy: GPTQ as its paper has it, AutoRound's descent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.quantization.autoround import autoround
from moejax.quantization.gptq import GptqSettings, gptq
from moejax.quantization.grid import Codes, Grid, dequantize
from moejax.quantization.hessian import damped, inverse_factor, mean_hessian
from moejax.quantization.hqq import hqq
from moejax.quantization.rtn import rtn
from tests import slow

K = 96


def correlated_inputs(rng: np.random.Generator, num_tokens: int, width: int = K) -> np.ndarray:
    """float64[n, K] with falling spectrum and columns of unlike sizes, as activations have."""
    spectrum = np.exp(-np.arange(width) / (width / 6))
    mix = rng.standard_normal((width, width)) * spectrum[:, None]
    sizes = np.exp(0.7 * rng.standard_normal(width))
    x = rng.standard_normal((num_tokens, width)) @ mix + 0.1 * rng.standard_normal(
        (num_tokens, width)
    )
    return x * sizes


def hessian_of(x: np.ndarray) -> np.ndarray:
    """2 X^T X / n in float64."""
    return 2 * x.T @ x / len(x)


def range_of(part: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero float64[N] of columns [N, g] by their range."""
    low, high, top = part.min(1), part.max(1), 2**grid.bits - 1
    if grid.zero_kind == "symmetric":
        return 2 * np.maximum(-low, high) / top, np.full(len(part), 2.0 ** (grid.bits - 1))
    if grid.zero_kind == "integer":
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    scale = (high - low) / top
    return scale, np.round(-low / scale) if grid.zero_kind == "integer" else -low / scale


def rounded(w: np.ndarray, grid: Grid) -> np.ndarray:
    """float64[N, K]: each group rounded to nearest."""
    values, size = np.empty_like(w), grid.group_size
    for k in range(0, w.shape[1], size):
        scale, zero = (part[:, None] for part in range_of(w[:, k : k + size], grid))
        codes = np.clip(np.round(w[:, k : k + size] / scale + zero), 0, 2**grid.bits - 1)
        values[:, k : k + size] = (codes - zero) * scale
    return values


@dataclasses.dataclass
class Reference:
    """GPTQ one column at a time: the inverse Hessian itself, no blocks, no lazy updates."""

    codes: np.ndarray  # [N, K] in the order of visiting
    steps: np.ndarray  # what was rounded to get them
    scales: np.ndarray
    zeros: np.ndarray
    order: np.ndarray

    @classmethod
    def run(cls, w: np.ndarray, h: np.ndarray, grid: Grid, settings: GptqSettings) -> "Reference":
        w, h = w.astype(np.float64), h.astype(np.float64).copy()
        num_inputs, size = w.shape[1], grid.group_size
        dead = np.diag(h) == 0
        h[dead, dead] = 1
        w[:, dead] = 0
        order = np.arange(num_inputs)
        if settings.act_order:
            order = np.argsort(-np.where(dead, 0, np.diag(h)), kind="stable")
        original, w, h = w.copy(), w[:, order], h[order][:, order]
        inverse = np.linalg.inv(h + settings.damping * np.diag(h).mean() * np.eye(num_inputs))
        upper = np.linalg.cholesky(inverse).T
        num_groups = -(-num_inputs // size)
        scales, zeros = np.zeros((2, len(w), num_groups))
        codes, steps = np.zeros((2, *w.shape))
        for k in range(num_inputs):
            g = order[k] // size
            if settings.act_order:
                scales[:, g], zeros[:, g] = range_of(original[:, g * size : (g + 1) * size], grid)
            elif k % size == 0:
                scales[:, g], zeros[:, g] = range_of(w[:, k : k + size], grid)
            steps[:, k] = w[:, k] / scales[:, g] + zeros[:, g]
            codes[:, k] = np.clip(np.round(steps[:, k]), 0, 2**grid.bits - 1)
            value = (codes[:, k] - zeros[:, g]) * scales[:, g]
            error = (w[:, k] - value) / upper[k, k]
            w[:, k + 1 :] -= error[:, None] * upper[None, k, k + 1 :]
        return cls(codes, steps, scales, zeros, order)


def output_error(difference: np.ndarray, hessian: np.ndarray) -> float:
    """tr(D H D^T), the loss of GPTQ's eq. 1, in float64."""
    difference = difference.astype(np.float64)
    return float(np.trace(difference @ hessian @ difference.T))


class GptqTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.rng = np.random.default_rng(0)

    def _problem(self, num_tokens: int = 400) -> tuple[np.ndarray, np.ndarray]:
        w = self.rng.standard_normal((40, K)).astype(np.float32)
        return w, hessian_of(correlated_inputs(self.rng, num_tokens)).astype(np.float32)

    @slow.repeats()
    @parameterized.parameters(
        (2, 32, "float", {}),
        (3, 32, "integer", {}),
        (8, 32, "symmetric", {"block_size": 12}),
        (4, 40, "float", {"block_size": 16}),  # blocks of 14, the group padded to 42, the last 16
        (3, K, "float", {"block_size": 40}),
        (3, 32, "float", {"act_order": True}),
        (4, 40, "symmetric", {"act_order": True, "block_size": 7}),
        (3, 40, "integer", {"act_order": True, "block_size": 20}),
    )
    def test_same_codes_as_the_float64_reference_but_for_ties(self, bits, group, kind, how):
        grid = Grid(bits=bits, group_size=group, zero_kind=kind)
        settings = GptqSettings(**how)
        w, h = self._problem()
        if group == 40:
            w = w + 4  # without a weight near 0, padding of zeros would show
        found = gptq(jnp.asarray(w), jnp.asarray(h), grid, settings)
        expected = Reference.run(w, h, grid, settings)
        codes = np.asarray(found.codes.codes)
        codes = codes[:, expected.order]
        same = codes == expected.codes
        # Rows go by themselves: behind its first other code, a row is another problem.
        for row in np.flatnonzero(~same.all(1)):
            step = expected.steps[row, np.argmin(same[row])]
            self.assertLess(abs(step - np.floor(step) - 0.5), 2e-3, "a code that is no tie differs")
        whole = same.all(1)
        self.assertGreater(whole.mean(), 0.9)
        for name in ("scales", "zeros"):
            np.testing.assert_allclose(
                np.asarray(getattr(found.codes, name))[whole],
                getattr(expected, name)[whole],
                rtol=2e-4,
                atol=2e-4,
            )
        self.assertFalse(found.starved)
        self.assertAlmostEqual(float(found.damping), 0.01)
        values = np.asarray(dequantize(found.codes, grid), np.float64)
        plain = rounded(w.astype(np.float64), grid)
        lost, lost_by_rounding = (np.trace((w - v) @ h @ (w - v).T) for v in (values, plain))
        self.assertLess(lost, 0.6 * lost_by_rounding)

    def test_inverse_factor_in_float64(self):
        _, h = self._problem()
        upper, damping = inverse_factor(jnp.asarray(h), 0.01)
        np.testing.assert_array_equal(np.tril(upper, -1), 0)
        inverse = np.linalg.inv(h.astype(np.float64) + 0.01 * np.diag(h).mean() * np.eye(K))
        upper = np.asarray(upper, np.float64)
        np.testing.assert_allclose(upper.T @ upper, inverse, atol=1e-4 * np.abs(inverse).max())
        self.assertAlmostEqual(float(damping), 0.01)
        np.testing.assert_allclose(
            damped(jnp.asarray(h), 0.5), h + 0.5 * np.diag(h).mean() * np.eye(K), rtol=1e-6
        )
        totals = jnp.asarray(np.stack([h, h]))
        counts = jnp.asarray([4, 0], jnp.int32)
        np.testing.assert_allclose(mean_hessian(totals, counts), np.stack([h / 2, 2 * h]))

    def test_inputs_that_were_never_active(self):
        grid = Grid(bits=4, group_size=32, zero_kind="integer")
        w, h = self._problem()
        dead = [0, 17, 95]
        h[dead], h[:, dead] = 0, 0
        found = gptq(jnp.asarray(w), jnp.asarray(h), grid)
        expected = Reference.run(w, h, grid, GptqSettings())
        self.assertGreater(np.mean(np.asarray(found.codes.codes) == expected.codes), 0.99)
        np.testing.assert_array_equal(np.asarray(dequantize(found.codes, grid))[:, dead], 0)
        self.assertFalse(found.starved)

    @pytest.mark.slow
    def test_damping_is_raised_until_the_hessian_factors(self):
        grid = Grid(bits=3, group_size=32, zero_kind="float")
        w, h = self._problem(num_tokens=20)  # of rank 20
        settings = GptqSettings(damping=1e-12)
        found = gptq(jnp.asarray(w), jnp.asarray(h), grid, settings)
        self.assertGreater(float(found.damping), 5e-12)
        self.assertLess(float(found.damping), 1e-3)
        self.assertFalse(found.starved)
        plain = dequantize(rtn(jnp.asarray(w), grid), grid)
        self.assertLess(
            output_error(w - np.asarray(dequantize(found.codes, grid)), h),
            output_error(w - np.asarray(plain), h),
        )

    @slow.repeats()
    @parameterized.parameters(np.nan, np.inf)
    def test_a_hessian_that_is_not_finite_is_no_calibration(self, value):
        grid = Grid(bits=3, group_size=32, zero_kind="float")
        w, h = self._problem()
        h[3, 3] = value
        found = gptq(jnp.asarray(w), jnp.asarray(h), grid)
        self.assertTrue(found.starved)
        np.testing.assert_array_equal(found.codes.codes, hqq(jnp.asarray(w), grid).codes)

    def test_a_group_longer_than_the_row(self):
        w, h = map(jnp.asarray, self._problem())
        with self.assertRaisesRegex(ValueError, "group_size 97"):
            gptq(w, h, Grid(bits=3, group_size=97, zero_kind="float"))


def row_errors(w: np.ndarray, codes: Codes, grid: Grid, h: np.ndarray) -> np.ndarray:
    """float64[N]: d H d^T of each row."""
    difference = w - np.asarray(dequantize(codes, grid), np.float64)
    return np.einsum("nk,kj,nj->n", difference, h.astype(np.float64), difference)


def with_damping(h: np.ndarray, share: float = 0.01) -> np.ndarray:
    """Damps H like the settings do."""
    return h + share * np.diag(h).mean() * np.eye(len(h))


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
        w = self.rng.standard_normal((24, 80)).astype(np.float32)
        return w, hessian_of(correlated_inputs(self.rng, 300, 80)).astype(np.float32)

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
        grid = Grid(bits=3, group_size=80, zero_kind="float")
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
        found = autoround(jnp.asarray(w), jnp.full((80, 80), value, jnp.float32), grid)
        for part, expected in zip(found, rtn(jnp.asarray(w), grid), strict=True):
            np.testing.assert_array_equal(part, expected)
