"""Half-quadratic quantization against the hqq library on the CPU in float32."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from absl.testing import parameterized

from moejax.quantization.grid import Grid, dequantize, group_members
from moejax.quantization.hqq import HqqSettings, _shrink, hqq
from moejax.quantization.rtn import rtn
from tests.numpy_model import relative_error


def gaussian(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def heavy_tailed(shape, seed):
    return (0.05 * np.random.default_rng(seed).standard_t(3, size=shape)).astype(np.float32)


def column_scaled(shape, seed):
    rng = np.random.default_rng(seed)
    return (0.3 * rng.normal(size=shape) * np.exp(rng.normal(size=shape[-1]))).astype(np.float32)


def library(weights, bits, group_size, round_zero=False):
    """Codes uint8[N, K], scales and zeros float32[N, G], by the library's default solver."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own compiler, which the library imports
        from hqq.core.quantize import Quantizer  # takes seconds, also where no test runs
    codes, meta = Quantizer.quantize(
        torch.tensor(weights),
        nbits=bits,
        group_size=group_size,
        axis=1,
        round_zero=round_zero,
        bitpack=False,
        device="cpu",
    )
    rows = weights.shape[0]
    scale, zero = (meta[name].numpy().reshape(rows, -1) for name in ("scale", "zero"))
    return codes.numpy().reshape(weights.shape).astype(np.uint8), scale, zero


class HqqTest(parameterized.TestCase):
    @parameterized.parameters(
        (gaussian, (128, 512), 3, 64),
        (gaussian, (96, 320), 2, 32),
        (gaussian, (64, 200), 4, 200),  # per channel
        (gaussian, (48, 384), 8, 128),
        (heavy_tailed, (128, 512), 3, 64),
        (heavy_tailed, (64, 256), 2, 128),
        (heavy_tailed, (35, 75), 4, 25),
        (column_scaled, (128, 512), 3, 64),
        (column_scaled, (64, 512), 4, 32),
    )
    def test_equals_the_library(self, make, shape, bits, group_size):
        weights = make(shape, bits)
        codes, scales, zeros = library(weights, bits, group_size)
        grid = Grid(bits=bits, group_size=group_size, zero_kind="float")
        got = hqq(jnp.asarray(weights), grid)
        equal = np.asarray(got.codes) == codes
        self.assertGreaterEqual(equal.mean(), 0.9999)
        np.testing.assert_allclose(got.scales, scales, rtol=1e-6)
        off = np.abs(np.asarray(got.zeros) - zeros) > 1e-5 + 4e-7 * np.abs(zeros)
        # A code on a tie may also flip in a step before the last, and move the zero.
        self.assertLessEqual(off.sum(), max(1, off.size // 1000))
        theirs = np.repeat(zeros, group_size, 1), np.repeat(scales, group_size, 1)
        error = np.linalg.norm(weights - (codes - theirs[0]) * theirs[1]) / np.linalg.norm(weights)
        ours = float(relative_error(jnp.asarray(weights), dequantize(got, grid)))
        self.assertLessEqual(ours, error * (1 + 1e-5))

    def test_rounded_start_equals_the_library(self):
        weights = heavy_tailed((64, 256), 7)
        codes, _, zeros = library(weights, 4, 64, round_zero=True)
        grid = Grid(bits=4, group_size=64, zero_kind="float")
        got = hqq(jnp.asarray(weights), grid, HqqSettings(round_start=True))
        self.assertGreaterEqual((np.asarray(got.codes) == codes).mean(), 0.9999)
        self.assertLessEqual(np.sum(np.abs(got.zeros - zeros) > 1e-5), 1)

    def test_each_matrix_stops_by_itself(self):
        # The library stops at the first step without a fall, which comes at once for a matrix of
        # two values; beside it another one goes on.
        weights = np.stack([gaussian((32, 128), 1), np.sign(gaussian((32, 128), 2))])
        weights[1] *= 0.2
        grid = Grid(bits=3, group_size=64, zero_kind="float")
        got = hqq(jnp.asarray(weights), grid)
        for i in range(2):
            codes, _, zeros = library(weights[i], 3, 64)
            np.testing.assert_array_equal(got.codes[i], codes)
            np.testing.assert_allclose(got.zeros[i], zeros, atol=1e-5)

    def test_ragged_group_is_as_if_alone(self):
        weights = gaussian((40, 150), 3)
        grid = Grid(bits=3, group_size=64, zero_kind="float")
        # Without an early stop groups do not know each other.
        got = hqq(jnp.asarray(weights), grid)
        tail = hqq(jnp.asarray(weights[:, 128:]), Grid(bits=3, group_size=22, zero_kind="float"))
        np.testing.assert_array_equal(got.codes[:, 128:], tail.codes)
        np.testing.assert_allclose(got.zeros[:, 2:], tail.zeros, atol=1e-5)
        self.assertEqual(got.zeros.shape, (40, 3))
        counts = group_members(150, 64, 3)[1]
        np.testing.assert_array_equal(counts, [[[64], [64], [22]]])

    def test_groups_of_one_value_as_the_library(self):
        weights = np.zeros((4, 128), np.float32)
        weights[1], weights[2, :64], weights[3] = 0.3, -0.02, 5e-5 * np.arange(128) / 128
        codes, scales, zeros = library(weights, 3, 64)
        grid = Grid(bits=3, group_size=64, zero_kind="float")
        got = hqq(jnp.asarray(weights), grid)
        np.testing.assert_array_equal(got.codes, codes)
        np.testing.assert_allclose(got.scales, scales, rtol=1e-6)
        np.testing.assert_allclose(got.zeros, zeros, atol=1e-6)

    def test_shrinking_in_float64(self):
        x = np.linspace(-2, 2, 401, dtype=np.float32)
        settings = HqqSettings()
        with np.errstate(divide="ignore"):
            less = np.abs(x.astype(np.float64)) ** -0.3 / 10
        wanted = np.sign(x) * np.maximum(np.abs(x) - less, 0)
        np.testing.assert_allclose(_shrink(jnp.asarray(x), settings), wanted, atol=1e-6)
        np.testing.assert_array_equal(wanted[np.abs(x) < settings._threshold], 0)
        self.assertGreater(abs(wanted[np.abs(x) > settings._threshold / 0.99]).min(), 0)

    def test_better_than_rounding_to_the_range(self):
        for make in (gaussian, heavy_tailed, column_scaled):
            weights = jnp.asarray(make((64, 512), 5))
            grid = Grid(bits=3, group_size=64, zero_kind="float")
            plain = relative_error(weights, dequantize(rtn(weights, grid), grid))
            error = relative_error(weights, dequantize(hqq(weights, grid), grid))
            self.assertLess(float(error), 0.98 * float(plain))

    @pytest.mark.slow
    def test_vmap_is_loop(self):
        weights = jnp.asarray(column_scaled((3, 16, 150), 6))
        grid = Grid(bits=3, group_size=64, zero_kind="float")
        whole = hqq(weights, grid)
        mapped = jax.vmap(lambda w: hqq(w, grid))(weights)
        np.testing.assert_array_equal(mapped.codes, whole.codes)
        np.testing.assert_array_equal(hqq(weights[2], grid).codes, whole.codes[2])

    def test_other_zeros_are_refused(self):
        with self.assertRaisesRegex(ValueError, "zero_kind is 'integer'"):
            hqq(jnp.zeros((2, 64)), Grid(bits=3, group_size=64, zero_kind="integer"))
