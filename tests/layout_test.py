"""The packed layout against its definition, bit by bit, and its size in bytes."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import strategies as st

from pallas_kernels import layout

WIDTHS = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


def packed_by_definition(row: list[int], bits: int) -> list[int]:
    """A row's words, one bit field at a time, from the formula in the module's docstring."""
    padded = row + [0] * (-len(row) % 32)
    words: list[int] = []
    shift = bits
    for width in WIDTHS[bits]:
        shift -= width
        for first in range(0, len(padded), 256):
            block = padded[first : first + 256]
            found = [0] * (len(block) * width // 32)
            lanes = len(block) * width // 16
            for j in range(len(found)):
                for h in range(2):
                    for p in range(16 // width):
                        field = block[p * lanes + 2 * j + h] >> shift & ((1 << width) - 1)
                        found[j] |= field << (16 * h + p * width)
            words += found
    return words


@st.composite
def packable(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    bits = draw(st.sampled_from(layout.BITS))
    lead = draw(st.sampled_from([(), (1,), (3,), (2, 5)]))
    num_codes = draw(st.integers(1, 700))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.integers(0, 2**bits, (*lead, num_codes)).astype(np.uint8), bits


class LayoutTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
    @hypothesis.given(packable())
    def test_unpack_inverts_pack(self, drawn):
        codes, bits = drawn
        words = layout.pack(codes, bits)
        self.assertEqual(words.dtype, np.uint32)
        np.testing.assert_array_equal(layout.unpack(words, bits, codes.shape[-1]), codes)

    @parameterized.product(bits=layout.BITS, num_codes=(31, 256, 300))
    def test_jax_packs_as_numpy_does(self, bits, num_codes):
        codes = np.random.default_rng(1).integers(0, 2**bits, (2, 3, num_codes)).astype(np.uint8)
        words = jax.jit(layout.pack, static_argnums=1)(jnp.asarray(codes), bits)
        self.assertIsInstance(words, jax.Array)
        np.testing.assert_array_equal(words, layout.pack(codes, bits))
        unpacked = jax.jit(layout.unpack, static_argnums=(1, 2))(words, bits, num_codes)
        np.testing.assert_array_equal(unpacked, codes)

    @hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
    @hypothesis.given(packable())
    def test_every_bit_is_where_the_definition_puts_it(self, drawn):
        codes, bits = drawn
        row = codes.reshape(-1, codes.shape[-1])[0]
        words = layout.pack(row, bits)
        self.assertEqual(words.tolist(), packed_by_definition(row.tolist(), bits))

    @parameterized.parameters(*layout.BITS)
    def test_planes_cover_the_row_and_the_bits_once(self, bits):
        for num_codes in (32, 300, 2048):
            planes = layout.planes(num_codes, bits)
            self.assertEqual(sum(plane.width for plane in planes), bits)
            self.assertEqual(planes[-1].shift, 0)
            ends = [plane.first_word + plane.num_words for plane in planes]
            self.assertEqual([0, *ends[:-1]], [plane.first_word for plane in planes])
            self.assertEqual(ends[-1], layout.num_words(num_codes, bits))

    def test_rows_concatenate_as_words(self):
        rng = np.random.default_rng(0)
        one, two = (rng.integers(0, 8, (n, 200)).astype(np.uint8) for n in (3, 5))
        whole = layout.pack(np.concatenate([one, two]), 3)
        np.testing.assert_array_equal(
            whole, np.concatenate([layout.pack(one, 3), layout.pack(two, 3)])
        )

    @parameterized.product(group_size=(32, 64, 128), width=(1, 2, 4, 8))
    def test_a_position_of_a_full_block_lies_in_one_group(self, group_size, width):
        lanes = layout.BLOCK * width // 16
        for first in range(0, layout.BLOCK, lanes):
            for step in range(first, first + lanes, 16):
                self.assertEqual(step // group_size, (step + 15) // group_size)

    @parameterized.parameters((100, 64, 2), (64, 64, 1), (65, 32, 3), (7, 7, 1))
    def test_groups(self, num_codes, group_size, groups):
        self.assertEqual(layout.num_groups(num_codes, group_size), groups)

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "bits 5 is none of 2, 3, 4, 8"):
            layout.pack(np.zeros(4, np.uint8), 5)
        with self.assertRaisesRegex(ValueError, "group_size 128 is not in 1..64"):
            layout.num_groups(64, 128)
        with self.assertRaisesRegex(ValueError, "rows of 64 codes of 3 bits have 6 words, got 5"):
            layout.unpack(np.zeros((2, 5), np.uint32), 3, 64)


class PlanesTest(parameterized.TestCase):
    @parameterized.product(bits=layout.BITS, num_codes=(31, 256, 300, 520))
    def test_a_prefix_has_the_leading_bits(self, bits, num_codes):
        codes = np.random.default_rng(2).integers(0, 2**bits, (3, num_codes)).astype(np.uint8)
        parts = layout.pack_planes(codes, bits)
        self.assertEqual([part.shape[-1] for part in parts], [
            layout.num_plane_words(num_codes, width) for width in layout.PREFIX_PLANES[bits]
        ])  # fmt: skip
        np.testing.assert_array_equal(parts[0], layout.pack(codes >> (bits - 2), 2))
        for narrow in (2, 4, 8) if bits != 3 else (2, 3):
            if narrow <= bits:
                np.testing.assert_array_equal(
                    layout.unpack_planes(parts, narrow, num_codes), codes >> (bits - narrow)
                )

    def test_three_bits_are_the_split_layout(self):
        codes = np.random.default_rng(3).integers(0, 8, (2, 300)).astype(np.uint8)
        parts = layout.pack_planes(codes, 3)
        np.testing.assert_array_equal(np.concatenate(parts, -1), layout.pack(codes, 3))

    def test_jax_packs_planes_as_numpy_does(self):
        codes = np.random.default_rng(4).integers(0, 16, (2, 300)).astype(np.uint8)
        packed = jax.jit(layout.pack_planes, static_argnums=1)(jnp.asarray(codes), 4)
        for found, expected in zip(packed, layout.pack_planes(codes, 4), strict=True):
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(layout.unpack_planes(packed, 4, 300), codes)

    def test_a_missing_plane_is_named(self):
        base = layout.pack_planes(np.zeros((1, 64), np.uint8), 4)[:1]
        with self.assertRaisesRegex(ValueError, r"planes of 64 codes of 4 bits have \[4, 4\]"):
            layout.unpack_planes(base, 4, 64)

    @parameterized.parameters(*layout.BITS)
    def test_grids_of_all_widths_have_one_centre(self, bits):
        scale, zero = 0.037, 1.23
        constants = layout.prefix_constants(bits)
        step = constants.scale_factor * scale
        first = step * (0 - constants.zero_offset - constants.zero_factor * zero)
        last = step * (2**bits - 1 - constants.zero_offset - constants.zero_factor * zero)
        np.testing.assert_allclose((first + last) / 2, scale * (1.5 - zero), rtol=1e-12)
        if bits == 2:
            self.assertEqual(constants, (1.0, 0.0, 1.0))
