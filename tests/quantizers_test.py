"""Quantizers that need no calibration, against float64 numpy, the hqq library and searches."""

import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from absl.testing import parameterized

from moejax.quantization import factors
from moejax.quantization import least_squares as searches
from moejax.quantization.grid import Codes, Grid, dequantize, group_members, nearest_codes
from moejax.quantization.hqq import HARMLESS_ERROR, _shrink, hqq
from moejax.quantization.least_squares import least_squares
from moejax.quantization.milo import _balanced, _sketch, _subspace_svd
from moejax.quantization.rtn import rtn
from tests import slow
from tests.numpy_model import relative_error

KINDS = ("float", "integer", "symmetric")


def weights_of(shape, seed=0, scale=0.05):
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_t(4, size=shape)).astype(np.float32)


def reference(weights, grid):
    """float64 scales, zeros and unrounded codes of each group, written out group by group."""
    groups = range(0, weights.shape[-1], grid.group_size)
    parts = [weights[..., i : i + grid.group_size].astype(np.float64) for i in groups]
    scales, zeros, places = [], [], []
    for part in parts:
        low, high = part.min(-1, keepdims=True), part.max(-1, keepdims=True)
        if grid.zero_kind == "symmetric":
            scale = 2 * np.abs(part).max(-1, keepdims=True) / (2**grid.bits - 1)
            zero = np.full_like(scale, 2 ** (grid.bits - 1))
        elif grid.zero_kind == "integer":
            scale = (np.maximum(high, 0) - np.minimum(low, 0)) / (2**grid.bits - 1)
            zero = np.rint(-np.minimum(low, 0) / scale)
        else:
            scale = (high - low) / (2**grid.bits - 1)
            zero = -low / scale
        scales.append(scale)
        zeros.append(zero)
        places.append(part / scale + zero)
    return (np.concatenate(x, -1) for x in (scales, zeros, places))


class RtnTest(parameterized.TestCase):
    @parameterized.parameters(
        (2, "float", 32, 77),
        (3, "float", 32, 77),
        (3, "float", 100, 100),
        (8, "float", 64, 100),
        (2, "integer", 32, 77),
        (4, "integer", 64, 128),
        (2, "symmetric", 100, 100),
        (3, "symmetric", 32, 77),
    )
    def test_matches_float64(self, bits, kind, group_size, num_inputs):
        weights = weights_of((2, 9, num_inputs))
        grid = Grid(bits=bits, group_size=group_size, zero_kind=kind)
        got = rtn(jnp.asarray(weights), grid)
        scales, zeros, places = reference(weights, grid)
        self.assertEqual(got.codes.dtype, jnp.uint8)
        np.testing.assert_allclose(got.scales, scales, rtol=1e-6)
        np.testing.assert_allclose(got.zeros, zeros, rtol=1e-6, atol=1e-6)
        tie = np.abs(places - np.floor(places) - 0.5) < 2e-5 * 2**bits
        wanted = np.clip(np.rint(places), 0, 2**bits - 1)
        np.testing.assert_array_equal(np.where(tie, wanted, got.codes), wanted)
        self.assertLess(tie.mean(), 0.06)  # the largest of a symmetric group is one

    @parameterized.product(quantize=(rtn, least_squares), kind=KINDS)
    def test_groups_of_one_value_come_back(self, quantize, kind):
        weights = np.zeros((4, 70), np.float32)
        weights[1], weights[2], weights[3, 32:] = 0.03, -2.5, 1e-5
        grid = Grid(bits=3, group_size=32, zero_kind=kind)
        codes = quantize(jnp.asarray(weights), grid)
        got = dequantize(codes, grid)
        self.assertTrue(np.all(np.isfinite(codes.scales)) and np.all(np.asarray(codes.scales) > 0))
        # By the range a symmetric grid has no level at +max, but 6/7 of it.
        share = 0.1429 if (quantize, kind) == (rtn, "symmetric") else 1e-5
        np.testing.assert_array_less(
            np.abs(np.asarray(got) - weights), share * np.abs(weights) + 1e-7
        )
        np.testing.assert_array_equal(got[0], 0)

    @parameterized.parameters(rtn, least_squares)
    def test_narrow_groups_are_one_value_amid_them(self, quantize):
        weights = np.random.default_rng(0).uniform(-4e-5, 4e-5, (4, 70)).astype(np.float32)
        weights[1] += np.float32(0.25)
        grid = Grid(bits=3, group_size=32, zero_kind="float")
        missed = np.abs(dequantize(quantize(jnp.asarray(weights), grid), grid) - weights)
        self.assertLess(missed.max(), 0.75 * 8e-5)
        self.assertLess(np.square(missed).mean() ** 0.5, 0.35 * 8e-5)  # 0.29 of a uniform width

    def test_integer_zeros_are_codes(self):
        weights = jnp.asarray(weights_of((8, 64)) + np.float32(0.5))
        zeros = rtn(weights, Grid(bits=4, group_size=16, zero_kind="integer")).zeros
        np.testing.assert_array_equal(zeros, 0)
        zeros = rtn(-weights, Grid(bits=4, group_size=16, zero_kind="integer")).zeros
        np.testing.assert_array_equal(zeros, 15)

    def test_nearest_codes_take_negative_scales(self):
        weights = jnp.asarray([[0.4, -0.3, 0.1, 0.0]], jnp.float32)
        grid = Grid(bits=3, group_size=4, zero_kind="symmetric")
        codes = nearest_codes(weights, jnp.full((1, 1), -0.1), jnp.full((1, 1), 4.0), grid)
        np.testing.assert_array_equal(codes.codes, [[0, 7, 3, 4]])
        np.testing.assert_allclose(dequantize(codes, grid), weights, atol=1e-7)

    def test_group_longer_than_the_row_is_refused(self):
        with self.assertRaisesRegex(ValueError, r"group_size 64 is not in 1\.\.63"):
            rtn(jnp.zeros((2, 63)), Grid(bits=3, group_size=64, zero_kind="float"))


class FactorsTest(parameterized.TestCase):
    @parameterized.parameters(3, 4, 8)
    def test_equation_13_in_float64(self, bits):
        x = weights_of((5, 150), seed=1)
        got = factors.quantize_factor(jnp.asarray(x), bits)
        for first in (0, 64, 128):
            part = x[:, first : first + 64].astype(np.float64)
            s = np.abs(part).max(-1, keepdims=True)
            place = (2**bits - 1) * part / (2 * s)
            wanted = np.clip(np.rint(place) + 2 ** (bits - 1), 0, 2**bits - 1)
            # The largest elements lie on a tie by construction: it is the clipping that decides.
            tie = np.abs(place - np.floor(place) - 0.5) < 2e-5 * 2**bits
            codes = np.asarray(got.codes[:, first : first + 64])
            np.testing.assert_array_equal(np.where(tie, wanted, codes), wanted)
            self.assertLess(np.abs(codes - wanted).max(), 2)

    @slow.repeats()
    @parameterized.product(bits=(3, 4, 8), fitted=(False, True))
    def test_zero_groups_stay_zero(self, bits, fitted):
        x = weights_of((3, 130), seed=2)
        x[0], x[1, 64:128] = 0, 0
        codes = factors.quantize_factor(jnp.asarray(x), bits, fitted=fitted)
        got = np.asarray(dequantize(codes, factors.factor_grid(bits, 130)))
        self.assertTrue(np.all(np.isfinite(got)))
        np.testing.assert_array_equal(got[x == 0], 0)

    @slow.repeats()
    @parameterized.parameters(3, 4, 8)
    def test_order_of_errors(self, bits):
        x = jnp.asarray(np.random.default_rng(3).normal(size=(16, 512)).astype(np.float32))
        grid = factors.factor_grid(bits, 512)
        errors = [
            float(relative_error(x, dequantize(factors.quantize_factor(x, bits, fitted=f), grid)))
            for f in (False, True)
        ]
        self.assertGreater(errors[0], 1.02 * errors[1])


def gaussian(shape, seed, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def heavy_tailed(shape, seed):
    return (0.05 * np.random.default_rng(seed).standard_t(3, size=shape)).astype(np.float32)


def column_scaled(shape, seed):
    rng = np.random.default_rng(seed)
    return (0.3 * rng.normal(size=shape) * np.exp(rng.normal(size=shape[-1]))).astype(np.float32)


def library(weights, bits, group_size):
    """Codes uint8[N, K], scales and zeros float32[N, G], by the library's default solver."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own compiler, which the library imports
        from hqq.core.quantize import Quantizer  # takes seconds, also where no test runs
    codes, meta = Quantizer.quantize(
        torch.tensor(weights),
        nbits=bits,
        group_size=group_size,
        axis=1,
        round_zero=False,
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
        with np.errstate(divide="ignore"):
            less = np.abs(x.astype(np.float64)) ** -0.3 / 10
        wanted = np.sign(x) * np.maximum(np.abs(x) - less, 0)
        np.testing.assert_allclose(_shrink(jnp.asarray(x)), wanted, atol=1e-6)
        np.testing.assert_array_equal(wanted[np.abs(x) < 0.999 * HARMLESS_ERROR], 0)
        self.assertGreater(abs(wanted[np.abs(x) > 1.009 * HARMLESS_ERROR]).min(), 0)


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
        weights = gaussian((16, 150), seed=0, scale=0.05) + np.float32(0.02)
        grid = Grid(bits=bits, group_size=64, zero_kind="float")
        with mock.patch.multiple(searches, ITERATIONS=iterations, CUTS=(0.0,)):
            got = least_squares.__wrapped__(jnp.asarray(weights), grid)
        off = 0
        for row in range(16):
            for group, first in enumerate((0, 64, 128)):
                scale, zero, _ = alternate(weights[row, first : first + 64], bits, iterations)
                found = got.scales[row, group], got.zeros[row, group]
                off += not np.allclose(found, (scale, zero), rtol=1e-4)
        self.assertLessEqual(off, 1)  # a tie sends a group to another minimum

    def test_near_the_best_of_a_fine_search(self):
        weights = gaussian((8, 64), seed=1, scale=0.05)
        grid = Grid(bits=3, group_size=64, zero_kind="float")
        with mock.patch.multiple(searches, ITERATIONS=12, CUTS=np.linspace(0, 0.4, 12)):
            fine = least_squares.__wrapped__(jnp.asarray(weights), grid)
        best = relative_error(jnp.asarray(weights), dequantize(fine, grid))
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
        weights = jnp.asarray(gaussian((2, 32, 150), seed=2, scale=0.05))
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
        weights = jnp.asarray(gaussian((96, 512), seed=4, scale=0.05) * columns)
        grid = Grid(bits=3, group_size=64, zero_kind="float")
        errors = [
            float(relative_error(weights, dequantize(quantize(weights, grid), grid)))
            for quantize in (rtn, hqq, least_squares)
        ]
        self.assertGreater(errors[0], 1.02 * errors[1])
        self.assertGreater(errors[1], 1.08 * errors[2])

    @parameterized.parameters(rtn, hqq, least_squares)
    @pytest.mark.slow
    def test_vmap_is_loop_and_jit_is_eager(self, quantize):
        weights = jnp.asarray(column_scaled((3, 16, 150), 6))
        grid = Grid(bits=3, group_size=64, zero_kind="float")
        whole, one = quantize(weights, grid), quantize(weights[2], grid)
        with jax.disable_jit(quantize is rtn):
            mapped = jax.vmap(lambda w: quantize(w, grid))(weights)
        for codes, found in ((whole, mapped), (Codes(*(a[2] for a in whole)), one)):
            np.testing.assert_array_equal(found.codes, codes.codes)
            np.testing.assert_allclose(found.scales, codes.scales, rtol=1e-6)


def matrices(shape, decay, seed=0):
    """Random matrices [..., N, K] in float32 whose singular values fall as 1 / i^decay."""
    rng = np.random.default_rng(seed)
    *lead, n, k = shape
    rank = min(n, k)
    u = np.linalg.qr(rng.normal(size=(*lead, n, rank)))[0]
    v = np.linalg.qr(rng.normal(size=(*lead, k, rank)))[0]
    sigma = 1 / np.arange(1, rank + 1) ** decay
    return ((u * sigma) @ np.swapaxes(v, -1, -2)).astype(np.float32)


def tails(matrix, rank):
    """The least possible error of a rank, in float64 (Eckart and Young)."""
    sigma = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    return np.sqrt(np.sum(sigma[..., rank:] ** 2, axis=-1))


def error(matrix, u, v):
    product = np.asarray(u, np.float64) @ np.asarray(v, np.float64)
    return np.sqrt(np.sum((matrix - product) ** 2, axis=(-2, -1)))


def truncated(matrix, rank):
    """U [..., N, rank] and V [..., rank, K] from random rows in two iterations."""
    return _balanced(*_subspace_svd(jnp.asarray(matrix), _sketch(matrix, rank), 2), rank)


class LowRankTest(parameterized.TestCase):
    @parameterized.parameters(
        (0.1, (64, 200), 1.02), (1, (3, 200, 64), 1.01), (1.5, (64, 200), 1.01)
    )
    def test_near_the_bound(self, decay, shape, share):
        matrix = matrices(shape, decay)
        u, v = truncated(matrix, 16)
        bound = tails(matrix, 16)
        self.assertLessEqual(np.max(error(matrix, u, v) / (share * bound + 1e-6)), 1)
        self.assertGreaterEqual(np.min(error(matrix, u, v) / (bound - 1e-6)), 1)

    @pytest.mark.slow
    def test_singular_values_are_split_evenly_and_descend(self):
        u, v = truncated(matrices((40, 60), 1), 6)
        sigma = 1 / np.arange(1, 7)
        np.testing.assert_allclose(np.linalg.norm(u, axis=0), np.sqrt(sigma), rtol=1e-3)
        np.testing.assert_allclose(np.linalg.norm(v, axis=1), np.sqrt(sigma), rtol=1e-3)
        np.testing.assert_allclose(u.T @ u, np.diag(sigma), atol=1e-4)

    @pytest.mark.slow
    def test_an_earlier_v_is_a_better_start(self):
        matrix = matrices((120, 160), 0.1)
        basis = _sketch(matrix, 12)
        for _ in range(5):
            columns, basis = _subspace_svd(jnp.asarray(matrix), basis, 1)
        warm, cold = _balanced(columns, basis, 12), truncated(matrix, 12)
        bound = tails(matrix, 12)
        self.assertLess(error(matrix, *warm) - bound, 0.5 * (error(matrix, *cold) - bound))

    def test_ranks_that_a_matrix_does_not_have(self):
        matrix = np.zeros((3, 32, 48), np.float32)
        matrix[1, 3, 5] = 2.0
        matrix[2] = matrices((32, 48), 0, seed=1) @ np.diag(np.arange(48) < 4).astype(np.float32)
        u, v = truncated(matrix, 8)
        self.assertTrue(np.all(np.isfinite(u)) and np.all(np.isfinite(v)))
        np.testing.assert_allclose(error(matrix, u, v), 0, atol=2e-5)
        np.testing.assert_array_equal(np.asarray(u[0] @ v[0]), 0)
