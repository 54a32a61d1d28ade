"""Round to nearest and factor quantization, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.quantization import factors
from moejax.quantization.grid import Codes, Grid, dequantize, nearest_codes
from moejax.quantization.least_squares import least_squares
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

    @parameterized.parameters(*KINDS)
    def test_groups_of_one_value_come_back(self, kind):
        weights = np.zeros((4, 70), np.float32)
        weights[1], weights[2], weights[3, 32:] = 0.03, -2.5, 1e-5
        grid = Grid(bits=3, group_size=32, zero_kind=kind)
        codes = rtn(jnp.asarray(weights), grid)
        got = dequantize(codes, grid)
        self.assertTrue(np.all(np.isfinite(codes.scales)) and np.all(np.asarray(codes.scales) > 0))
        # A symmetric grid has no level at +max, but 6/7 of it.
        allowed = np.abs(weights) * (0.1429 if kind == "symmetric" else 1e-6) + 1e-9
        np.testing.assert_array_less(np.abs(np.asarray(got) - weights), allowed)
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

    @pytest.mark.slow
    def test_vmap_is_loop_and_jit_is_eager(self):
        weights = jnp.asarray(weights_of((3, 8, 77)))
        grid = Grid(bits=3, group_size=32, zero_kind="float")
        whole = rtn(weights, grid)
        mapped = jax.vmap(lambda w: rtn(w, grid))(weights)
        loop = Codes(*map(jnp.stack, zip(*(rtn(w, grid) for w in weights), strict=True)))
        with jax.disable_jit():
            eager = rtn(weights, grid)
        for other in (mapped, loop, eager):
            np.testing.assert_array_equal(other.codes, whole.codes)
            np.testing.assert_allclose(other.scales, whole.scales, rtol=1e-6)

    def test_nearest_codes_take_negative_scales(self):
        weights = jnp.asarray([[0.4, -0.3, 0.1, 0.0]], jnp.float32)
        grid = Grid(bits=3, group_size=4, zero_kind="symmetric")
        codes = nearest_codes(weights, jnp.full((1, 1), -0.1), jnp.full((1, 1), 4.0), grid)
        np.testing.assert_array_equal(codes.codes, [[0, 7, 3, 4]])
        np.testing.assert_allclose(dequantize(codes, grid), weights, atol=1e-7)

    @parameterized.parameters(
        ({"bits": 5}, "bits 5 is none of 2, 3, 4, 8"),
        ({"group_size": 0}, "group_size 0 is not positive"),
        ({"zero_kind": "none"}, "zero_kind 'none' is none of float, integer, symmetric"),
    )
    def test_bad_grids_are_named(self, change, said):
        with self.assertRaisesRegex(ValueError, said):
            Grid(**({"bits": 3, "group_size": 32, "zero_kind": "float"} | change))

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

    def test_share_of_the_gain_that_is_lost(self):
        plain, free = jnp.asarray([0.2, 0.2, 0.2, 0.2]), jnp.asarray([0.1, 0.1, 0.2, 0.2])
        rounded = jnp.asarray([0.15, 0.09, 0.2, 0.3])
        np.testing.assert_allclose(
            factors.gain_lost(plain, free, rounded), [0.5, 0, 0, np.inf], rtol=1e-5
        )
