"""Least squares on scale and zero, against float64 numpy and brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.quantization.grid import Grid, dequantize
from moejax.quantization.hqq import hqq
from moejax.quantization.least_squares import LeastSquaresSettings, least_squares
from moejax.quantization.rtn import rtn
from tests import slow
from tests.numpy_model import relative_error


def gaussian(shape, seed=0, scale=0.05):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def alternate(group, bits, iterations):
    """float64: the alternation on one group from its whole range; scale, zero, squared error."""
    x = group.astype(np.float64)
    scale = (x.max() - x.min()) / (2**bits - 1)
    zero = -x.min() / scale
    for _ in range(iterations):
        codes = np.clip(np.rint(x / scale + zero), 0, 2**bits - 1)
        scale, constant = np.polyfit(codes, x, 1)
        zero = -constant / scale
    codes = np.clip(np.rint(x / scale + zero), 0, 2**bits - 1)
    return scale, zero, np.sum((x - scale * (codes - zero)) ** 2)


class LeastSquaresTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.parameters((2, 4), (3, 1), (3, 4), (4, 2))
    def test_steps_in_float64(self, bits, iterations):
        weights = gaussian((16, 150)) + np.float32(0.02)
        grid = Grid(bits=bits, group_size=64, zero_kind="float")
        settings = LeastSquaresSettings(iterations=iterations, cuts=(0.0,))
        got = least_squares(jnp.asarray(weights), grid, settings)
        off = 0
        for row in range(16):
            for group, first in enumerate((0, 64, 128)):
                scale, zero, _ = alternate(weights[row, first : first + 64], bits, iterations)
                found = got.scales[row, group], got.zeros[row, group]
                off += not np.allclose(found, (scale, zero), rtol=1e-4)
        self.assertLessEqual(off, 1)  # a tie sends a group to another minimum

    def test_near_the_best_of_a_fine_search(self):
        weights = gaussian((8, 64), seed=1)
        grid = Grid(bits=3, group_size=64, zero_kind="float")
        fine = LeastSquaresSettings(iterations=12, cuts=tuple(np.linspace(0, 0.4, 12).tolist()))
        best = relative_error(
            jnp.asarray(weights), dequantize(least_squares(weights, grid, fine), grid)
        )
        # Result of a search over 20,000 pairs of ends per row, in float64 and without fits.
        ends = np.linspace(0, 0.45, 140)
        total = 0.0
        for row in weights.astype(np.float64):
            low = row.min() + ends[:, None, None] * np.ptp(row)
            high = row.max() - ends[None, :, None] * np.ptp(row)
            scale = (high - low) / 7
            codes = np.clip(np.rint((row - low) / scale), 0, 7)
            total += np.square(row - low - codes * scale).sum(-1).min()
        searched = np.sqrt(total / np.square(weights.astype(np.float64)).sum())
        self.assertLess(float(best), searched)
        usual = relative_error(jnp.asarray(weights), dequantize(least_squares(weights, grid), grid))
        self.assertLess(float(usual), 1.01 * float(best))

    @slow.repeats()
    @parameterized.parameters(
        (2, "float"), (4, "float"), (8, "float"), (2, "integer"), (4, "integer"), (3, "symmetric")
    )
    def test_better_than_rounding_to_the_range(self, bits, kind):
        weights = jnp.asarray(gaussian((2, 32, 150), seed=2))
        grid = Grid(bits=bits, group_size=64, zero_kind=kind)
        codes = least_squares(weights, grid)
        error = relative_error(weights, dequantize(codes, grid))
        plain = relative_error(weights, dequantize(rtn(weights, grid), grid))
        self.assertTrue(np.all(np.asarray(error) < (0.97 if bits < 8 else 1.0) * np.asarray(plain)))
        if kind == "integer":
            np.testing.assert_array_equal(
                codes.zeros, np.clip(np.rint(codes.zeros), 0, 2**bits - 1)
            )
        if kind == "symmetric":
            np.testing.assert_array_equal(codes.zeros, 2 ** (bits - 1))
        self.assertGreater(float(jnp.min(codes.scales)), 0)

    def test_order_of_errors_with_column_scales(self):
        rng = np.random.default_rng(3)
        columns = np.exp(0.5 * rng.normal(size=512)).astype(np.float32)
        weights = jnp.asarray(gaussian((96, 512), seed=4) * columns)
        grid = Grid(bits=3, group_size=64, zero_kind="float")
        errors = [
            float(relative_error(weights, dequantize(quantize(weights, grid), grid)))
            for quantize in (rtn, hqq, least_squares)
        ]
        self.assertGreater(errors[0], 1.02 * errors[1])
        self.assertGreater(errors[1], 1.08 * errors[2])

    @slow.repeats()
    @parameterized.parameters("float", "integer", "symmetric")
    def test_groups_of_one_value(self, kind):
        weights = np.zeros((3, 70), np.float32)
        weights[1], weights[2, :64] = 0.03, -2.5
        grid = Grid(bits=3, group_size=32, zero_kind=kind)
        codes = least_squares(jnp.asarray(weights), grid)
        got = dequantize(codes, grid)
        np.testing.assert_allclose(got, weights, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(got[0], 0)

    @pytest.mark.slow
    def test_vmap_is_loop(self):
        weights = jnp.asarray(gaussian((2, 8, 77), seed=5))
        grid = Grid(bits=3, group_size=32, zero_kind="float")
        whole = least_squares(weights, grid)
        mapped = jax.vmap(lambda w: least_squares(w, grid))(weights)
        np.testing.assert_array_equal(mapped.codes, whole.codes)
        np.testing.assert_array_equal(least_squares(weights[1], grid).codes, whole.codes[1])
