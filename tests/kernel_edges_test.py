"""Where packed products could go wrong without a contract's case: small fp16, last slots, tiles."""

import itertools

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import dequant_matmul, layout
from pallas_kernels.mosaic_prefill import tiles as wgmma_tiles
from pallas_kernels.packed import PackedMatrices
from tests.host_test_case import HostTestCase
from tests.model_products import DENSE_SHAPES
from tests.packed_operands import seed

MOST_SHARED_BYTES = 227 * 1024  # that a block of threads may have on sm_90


def random_matrices(rng, slots, rows, inputs, bits, group_size, zero_dtype):
    """Matrices with every scale and zero different."""
    groups = layout.num_groups(inputs, group_size)
    codes = rng.integers(0, 2**bits, (slots, rows, inputs), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, (slots, rows, groups)).astype(np.float16)
    zeros = rng.uniform(0, 2**bits - 1, (slots, rows, groups)).astype(zero_dtype)
    return codes, PackedMatrices(
        words=jnp.asarray(layout.pack(codes, bits)), scales=jnp.asarray(scales),
        zeros=jnp.asarray(zeros), num_inputs=inputs, bits=bits, group_size=group_size,
    )  # fmt: skip


def relative_error(x, codes, weights, slot):
    """Relative error of the simulated streaming kernel, against float64."""
    found = dequant_matmul.dequant_matmul(
        x, weights, slot=slot, out_dtype=jnp.float32, implementation="mosaic", interpret=True
    )
    group = np.arange(weights.num_inputs) // weights.group_size
    scales, zeros = (
        np.asarray(part[slot], np.float64)[:, group] for part in (weights.scales, weights.zeros)
    )
    expected = np.asarray(x, np.float64) @ ((codes[slot] - zeros) * scales).T
    return np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected)


class StreamTest(HostTestCase):
    """The streaming kernels."""

    @parameterized.product(bits=(2, 3, 4, 8), size=(1.0, 1e-3, 1e-4))
    def test_small_fp16_activations_lose_nothing(self, bits, size):
        rng = np.random.default_rng(seed(self.id()))
        codes, weights = random_matrices(rng, 1, 32, 512, bits, 64, np.float16)
        x = jnp.asarray((size * rng.standard_normal((2, 512))).astype(np.float16))
        # Sums carry an offset of 1024 a code until it is taken out: 1024 float32 units.
        self.assertLess(relative_error(x, codes, weights, 0), 1024 * 2.0**-24)

    @parameterized.parameters(
        (3, 256, 256, np.float16), (3, 256, 128, np.uint8), (4, 512, 512, np.uint8)
    )
    def test_the_last_rows_of_the_last_slot_read_nothing_behind_them(
        self, bits, inputs, group_size, zero_dtype
    ):
        # The simulator raises for a load beyond an array.
        rng = np.random.default_rng(seed(self.id()))
        codes, weights = random_matrices(rng, 2, 16, inputs, bits, group_size, zero_dtype)
        x = jnp.asarray(rng.standard_normal((1, inputs)), jnp.bfloat16)
        self.assertLess(relative_error(x, codes, weights, 1), 1e-4)


class WgmmaTilesTest(parameterized.TestCase):
    """Tiles of the kernels for many rows."""

    @parameterized.parameters(2, 3, 4, 8, 16)
    def test_heuristic_tiles_fit_shared_memory(self, bits):
        numbers = (*range(17, 513), 1024, 4096)
        for (inputs, outputs), rows in itertools.product(DENSE_SHAPES.values(), numbers):
            tiles = wgmma_tiles.dense_tiles(rows, outputs, inputs, bits, 132)
            # Barriers and the alignment of buffers take the rest.
            used = wgmma_tiles.shared_bytes(tiles, bits) + 1024
            self.assertLessEqual(used, MOST_SHARED_BYTES, (rows, tiles))
            self.assertEqual(tiles.x_stages % 4, 0)

    @parameterized.parameters(({"tokens": 12},), ({"x_stages": 6},), ({"word_blocks": 0},))
    def test_others_are_refused(self, field):
        # Tried among such tiles, one ended in an illegal access on the GPU.
        sound = {"tokens": 64, "x_stages": 8, "word_blocks": 4}
        wgmma_tiles.WgmmaTiles(**sound)
        with self.assertRaises(ValueError):
            wgmma_tiles.WgmmaTiles(**{**sound, **field})


if __name__ == "__main__":
    absltest.main()
