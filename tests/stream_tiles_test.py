"""Tiles of the streaming kernels: which are chosen, which are refused, what they ask for."""

import dataclasses
import importlib
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import parameterized

from moejax.models.shapes import SHAPES
from pallas_kernels import dequant_matmul, grouped_dequant_matmul, layout, mosaic_decode
from pallas_kernels.dequant_matmul import tiles as dense_tiles
from pallas_kernels.gating import SWIGLU
from pallas_kernels.grouped_dequant_matmul import tiles as grouped_tiles
from pallas_kernels.mosaic_decode.matrix import matrix_of, tile_bytes
from pallas_kernels.mosaic_decode.tiles import SHARED_BYTES, StreamTiles, _fitted
from pallas_kernels.packed import PackedMatrices
from pallas_kernels.target import SIMULATED, Target
from tests import slow
from tests.grouped_dequant_matmul_cases import CASES
from tests.grouped_dequant_matmul_contract import random_operands
from tests.kernel_shapes import LAYERS, PRODUCTS
from tests.model_products import DENSE_SHAPES
from tests.packed_operands import seed


def shape_of(bits: int, group_size: int, rows: int, inputs: int, slots: int = 1) -> PackedMatrices:
    """Float zero points and scales in float32, which take the most room."""
    struct = jax.ShapeDtypeStruct
    if bits == 16:
        words: Any = struct((slots, rows, inputs), jnp.bfloat16)
        return PackedMatrices(
            words=words, scales=None, zeros=None, num_inputs=inputs, bits=16, group_size=inputs
        )
    constants: Any = struct((slots, rows, -(-inputs // group_size)), jnp.float32)
    words = struct((slots, rows, layout.num_words(inputs, bits)), jnp.uint32)
    return PackedMatrices(
        words=words, scales=constants, zeros=constants, num_inputs=inputs, bits=bits,
        group_size=group_size,
    )  # fmt: skip


class ShapesTest(parameterized.TestCase):
    @parameterized.parameters(sorted(SHAPES))
    def test_experts_of_every_named_model_are_among_those_of_the_contracts(self, name):
        c = SHAPES[name]
        layer = (c.model_dim, c.expert_dim, c.experts_per_token)
        self.assertIn(layer, LAYERS.values())
        dense = set(PRODUCTS.values())
        self.assertLessEqual({(c.model_dim, 2 * c.expert_dim), (c.expert_dim, c.model_dim)}, dense)


STORED = [(bits, group) for bits in (2, 3, 4, 8) for group in (32, 64, 128)] + [(16, 0)]
MOST_SHARED = 227 * 1024  # bytes of a block of threads (CUDA programming guide, sm_90)


class TilesTest(parameterized.TestCase):
    """The heuristic tiles of real shapes are ones that the kernels and the GPU can run."""

    def launches(self, module: str, call: Any, *operands: Any) -> list[dict[str, Any]]:
        """Records the calls of `launch_blocks` by a kernel, without running it."""
        asked = []

        def record(body: Any, operands: Any, **how: Any) -> list[jax.Array]:
            asked.append(how)
            return [jnp.zeros(out.shape, out.dtype) for out in how["out_shapes"]]

        place = importlib.import_module(f"pallas_kernels.mosaic_decode.{module}")
        with mock.patch.object(place, "launch_blocks", record):
            jax.eval_shape(call, *operands)
        return asked

    def check(self, how: dict[str, Any], tiles: StreamTiles, outputs: int) -> None:
        self.assertLessEqual(4 * how["shared_floats"], MOST_SHARED)
        self.assertEqual(how["num_warps"] % 4, 0)
        self.assertBetween(how["num_warps"], 4, 16)
        self.assertEqual(how["num_warps"], tiles.num_warps)
        self.assertLessEqual(tiles.rows, outputs)
        self.assertGreaterEqual(tiles.depth, 1)

    @slow.where(lambda stored: stored[1] in (64, 128))  # whose constants take less room
    @parameterized.parameters(*STORED)
    def test_dense(self, *stored):
        slot, all_rows = (
            jax.ShapeDtypeStruct((), jnp.int32), (1, 8, 9, dequant_matmul.mosaic.MOST_STREAMED)
        )  # fmt: skip
        for (inputs, outputs), rows in itertools.product(DENSE_SHAPES.values(), all_rows):
            weights = shape_of(*stored, outputs, inputs)
            x: Any = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
            tiles = mosaic_decode.tiles_of_dense(x, weights, SIMULATED)

            def call(x, weights, slot, tiles=tiles):
                return mosaic_decode.dense.__wrapped__(x, weights, slot, jnp.float32, tiles)

            [how] = self.launches("dense", call, x, weights, slot)
            self.check(how, tiles, outputs)

    @slow.where(lambda stored: stored[1] in (64, 128))
    @parameterized.parameters(*STORED)
    def test_experts(self, *stored):
        numbers = (1, 4, 9, grouped_dequant_matmul.mosaic.MOST_STREAMED)
        for shape, tokens in itertools.product(LAYERS.values(), numbers):
            model_dim, expert_dim, width = shape
            for gated, size in ((True, (2 * expert_dim, model_dim)), (False, shape[:2])):
                mine, plain = shape_of(*stored, *size, 4), shape_of(16, 0, *size)
                for tiers in ((mine,), (mine, plain)):
                    self.one_product(tiers, tokens, width, gated)

    def one_product(self, tiers: Any, tokens: int, width: int, gated: bool) -> None:
        pairs: Any = jax.ShapeDtypeStruct((tokens * width,), jnp.int32)
        x: Any = jax.ShapeDtypeStruct((tokens, tiers[0].num_inputs), jnp.bfloat16)
        tiles = mosaic_decode.tiles_of_experts(x, list(tiers), tokens * width, gated, SIMULATED)

        def call(x, tier, slot, tiers):
            run = mosaic_decode.expert_products.__wrapped__
            return run(x, tier, slot, tiers, gating=SWIGLU if gated else None, tiles=tiles)

        [how] = self.launches("experts", call, x, pairs, pairs, tiers)
        self.check(how, tiles, tiers[0].num_outputs // (2 if gated else 1))

    def test_tiles_that_no_kernel_has_are_refused(self):
        with self.assertRaisesRegex(ValueError, "clusters of 3 thread blocks"):
            StreamTiles(1, 1, 4, cluster=3).check(64)
        operands = random_operands(CASES["whole_one_token"], seed(self.id()))
        pairs = (operands.tier.reshape(-1), operands.slot.reshape(-1), tuple(operands.gate_up))
        tiles = StreamTiles(1, 1, 4, cluster=2)
        with self.assertRaisesRegex(ValueError, "products with one matrix"):
            mosaic_decode.expert_products(
                operands.x, *pairs, gating=SWIGLU, tiles=tiles, interpret=True
            )

    def test_rings_are_no_deeper_than_shared_memory(self):
        matrix = matrix_of(shape_of(8, 32, 4096, 4096), "bf16")
        tiles = _fitted(StreamTiles(1, 1, 16, depth=9), [matrix])
        stage = tile_bytes(matrix) * tiles.num_warps
        self.assertBetween(tiles.depth, 1, 8)
        self.assertLessEqual(tiles.depth * stage, SHARED_BYTES)
        self.assertGreater((tiles.depth + 1) * stage, SHARED_BYTES)

    @parameterized.parameters(16, 32, 48, 80, 528)
    def test_small_matrices_are_not_left(self, outputs):
        for bits, inputs in itertools.product((2, 3, 4, 8, 16), (256, 512, 768, 3072, 4352)):
            weights = shape_of(bits, 64, outputs, inputs)
            for rows in (1, 9):
                x: Any = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
                tiles = mosaic_decode.tiles_of_dense(x, weights, SIMULATED)
                self.assertLessEqual(tiles.rows, outputs)
                self.assertEqual(tiles.num_warps % 4, 0)
            for tokens, gated in itertools.product((1, 8, 9), (True, False)):
                x = jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16)
                tier = shape_of(bits, 64, outputs * (2 if gated else 1), inputs)
                tiles = mosaic_decode.tiles_of_experts(x, [tier], 4 * tokens, gated, SIMULATED)
                tiles.check(outputs)


class MeasuredTest(parameterized.TestCase):
    """Tiles in the tables are found for the rows that they serve, and fit the outputs."""

    @parameterized.parameters(*dense_tiles.MEASURED)
    def test_dense(self, *key):
        capability, bits, most, outputs, inputs = key
        weights, target = shape_of(bits, 64, outputs, inputs), Target("gpu", capability)
        for tiles in dense_tiles.MEASURED[key]:
            for rows in (most // 2 + 1, most):
                found = dense_tiles.measured(rows, weights, target, (type(tiles),))
                self.assertEqual(found, tiles)
            assert isinstance(tiles, StreamTiles)
            tiles.check(outputs)

    @parameterized.parameters(*grouped_tiles.MEASURED)
    def test_grouped(self, *key):
        capability, what, bits, most, width, outputs, inputs = key
        tiers = [shape_of(bits, 64, outputs, inputs, 4)]
        target = Target("gpu", capability, num_processors=100)
        for tiles in grouped_tiles.MEASURED[key]:
            assert isinstance(tiles, StreamTiles)
            expected = dataclasses.replace(tiles, workers=100)  # one a multiprocessor
            for tokens in (most // 2 + 1, most):
                found = grouped_tiles.measured(what, tokens, width, tiers, target, (StreamTiles,))
                self.assertEqual(found, expected)
            tiles.check(outputs // 2 if what == "gate_up" else outputs)
