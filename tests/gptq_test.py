"""GPTQ against the paper's algorithm in float64 numpy, and what it does with too few tokens."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.quantization.gptq import GptqSettings, gptq
from moejax.quantization.grid import Grid, dequantize
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
