"""MXFP4's arithmetic on bits, against the values that the standard lists."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized

from pallas_kernels import layout, mxfp4
from pallas_kernels.dequant_matmul import dequant_matmul
from pallas_kernels.packed import PackedMatrices, with_scale_pairs
from pallas_kernels.triton.product import FULL, _full_pairs
from tests import packed_operands
from tests.packed_operands import E2M1

DTYPES = {"bfloat16": (ml_dtypes.bfloat16, 2.0**126), "float16": (np.float16, 2.0**14)}


class Mxfp4Test(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        codes = np.array(list(itertools.product(range(16), repeat=2)), np.uint32)  # of both halves
        self.expected = E2M1[codes]
        # The other codes of a word are any.
        self.words = {
            position: mxfp4.arrange(
                np.uint32(np.random.default_rng(position).integers(0, 2**32, len(codes)))
                & np.uint32(~(0x000F000F << 4 * position) & 0xFFFFFFFF)
                | (codes[:, 0] | codes[:, 1] << 16) << np.uint32(4 * position)
            )
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

    def test_words_are_arranged_as_tests_say(self):
        words = np.uint32(np.random.default_rng(0).integers(0, 2**32, (3, 50)))
        stored = mxfp4.arrange(words)
        np.testing.assert_array_equal(packed_operands.words_of_mxfp4(stored), words)
        np.testing.assert_array_equal(mxfp4.packed(stored), words)

    @parameterized.parameters(*DTYPES)
    def test_full_pairs_are_values(self, name):
        dtype, _ = DTYPES[name]
        small = mxfp4.small_pairs(jnp.asarray(self.words[1]), 1, jnp.dtype(name))
        full = _full_pairs(small, jnp.dtype(name), interpret=True)
        np.testing.assert_array_equal(self._floats(full, dtype), self.expected)

    @parameterized.parameters(("bfloat16", 47, -40), ("float16", 15, -10))
    def test_streams_take_the_largest_x_and_scales(self, name, large, small):
        """Groups of large x with small scales or of small x with large ones, the others with 0."""
        rng, (rows, inputs) = np.random.default_rng(large), (32, 320)
        codes = rng.integers(0, 16, (1, rows, inputs), np.uint8)
        of_small = np.arange(inputs) // 32 % 2
        signs = np.where(rng.random((3, inputs)) < 0.5, -1, 1)
        mantissas = signs * rng.uniform(1, 1.99, (3, inputs))
        x = jnp.asarray(np.ldexp(mantissas, np.where(of_small, small, large)), jnp.dtype(name))
        groups, odd = np.indices((1, rows, 10))[2] % 2, np.arange(rows)[:, None] % 2
        exponents = np.where(
            groups, rng.integers(150, mxfp4.LARGEST + 1, (1, rows, 10)),
            rng.integers(1, 70, (1, rows, 10)),
        )  # fmt: skip
        exponents = np.where(groups == odd, exponents, 0).astype(np.uint8)
        exponents[0, 1, 1] = mxfp4.LARGEST
        weights = PackedMatrices(
            words=mxfp4.arrange(layout.pack(codes, 4)), scales=exponents, zeros=None,
            num_inputs=inputs, bits=4, group_size=32,
        )  # fmt: skip
        found = dequant_matmul(
            x, jax.tree.map(jnp.asarray, weights), out_dtype=jnp.float32,
            implementation="mosaic", interpret=True,
        )  # fmt: skip
        scales = np.where(exponents, np.exp2(exponents.astype(np.float64) - 127), 0)
        plain = E2M1[codes[0]].astype(np.float64) * np.repeat(scales[0], 32, 1)
        x = np.asarray(x).astype(np.float64)
        off = np.abs(np.asarray(found) - x @ plain.T) / (np.abs(x) @ np.abs(plain).T)
        self.assertLess(off.max(), 1e-6)

    def test_scales_in_pairs_keep_their_order(self):
        scales = np.random.default_rng(0).integers(0, 255, (2, 3, 4)).astype(np.uint8)
        words = np.zeros((2, 3, 16), np.uint32)
        weights = PackedMatrices(
            words=words, scales=scales, zeros=None, num_inputs=128, bits=4, group_size=32
        )
        pairs = with_scale_pairs(weights)
        self.assertEqual((pairs.num_groups, pairs.is_mxfp4), (4, True))
        np.testing.assert_array_equal(np.asarray(pairs.scales).view(np.uint8), scales)
