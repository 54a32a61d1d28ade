"""MXFP4's arithmetic on bits, against the values that the standard lists."""

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized

from pallas_kernels import mxfp4
from pallas_kernels.packed import PackedMatrices, with_scale_pairs
from pallas_kernels.triton.product import FULL, _full_pairs
from tests.packed_operands import E2M1

DTYPES = {"bfloat16": (ml_dtypes.bfloat16, 2.0**126), "float16": (np.float16, 2.0**14)}


class Mxfp4Test(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        codes = np.array(list(itertools.product(range(16), repeat=2)), np.uint32)  # of both halves
        self.expected = E2M1[codes]
        # The other codes of a word are any.
        self.words = {
            position: np.uint32(np.random.default_rng(position).integers(0, 2**32, len(codes)))
            & np.uint32(~(0x000F000F << 4 * position) & 0xFFFFFFFF)
            | (codes[:, 0] | codes[:, 1] << 16) << np.uint32(4 * position)
            for position in range(4)
        }

    def _floats(self, pairs, dtype):
        return np.asarray(pairs).view(np.uint16).view(dtype).astype(np.float64).reshape(-1, 2)

    @parameterized.parameters(*itertools.product(DTYPES, (False, True)))
    def test_small_pairs_are_values_times_a_power_of_two(self, name, traced):
        dtype, factor = DTYPES[name]
        for position, words in self.words.items():
            at = jnp.int32(position) if traced else position
            small = mxfp4.small_pairs(jnp.asarray(words), at, jnp.dtype(name))
            np.testing.assert_array_equal(self._floats(small, dtype) * factor, self.expected)
            # What the kernel multiplies by is that power, and such a product is exact.
            multiplier = np.array(FULL[name], np.uint16).view(dtype)
            self.assertEqual(float(multiplier), factor)

    @parameterized.parameters(*DTYPES)
    def test_full_pairs_are_values(self, name):
        dtype, _ = DTYPES[name]
        small = mxfp4.small_pairs(jnp.asarray(self.words[1]), 1, jnp.dtype(name))
        full = _full_pairs(small, jnp.dtype(name), interpret=True)
        np.testing.assert_array_equal(self._floats(full, dtype), self.expected)

    def test_scales_in_pairs_keep_their_order(self):
        scales = np.random.default_rng(0).integers(0, 255, (2, 3, 4)).astype(np.uint8)
        words = np.zeros((2, 3, 16), np.uint32)
        weights = PackedMatrices(
            words=words, scales=scales, zeros=None, num_inputs=128, bits=4, group_size=32
        )
        pairs = with_scale_pairs(weights)
        self.assertEqual((pairs.num_groups, pairs.is_mxfp4), (4, True))
        np.testing.assert_array_equal(np.asarray(pairs.scales).view(np.uint8), scales)
