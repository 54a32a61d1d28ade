"""What the streaming kernels are made of, simulated: copies and reads of a stage, tiles, mistakes.

The contracts of the products have their values.
"""

import dataclasses
import importlib
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import dequant_matmul, grouped_dequant_matmul, layout, stream
from pallas_kernels.dequant_matmul import shapes as dense_shapes
from pallas_kernels.grouped_dequant_matmul import shapes as grouped_shapes
from pallas_kernels.packed import PackedMatrices
from pallas_kernels.stream import experts, fragments, product
from pallas_kernels.stream.fragments import Form
from pallas_kernels.stream.matrix import matrix_of, stage_parts, tile_bytes
from pallas_kernels.stream.product import Lane, Stream
from pallas_kernels.stream.simulate import Simulator
from pallas_kernels.stream.tiles import SHARED_BYTES, StreamTiles, fitted
from pallas_kernels.target import SIMULATED
from tests import packed_operands
from tests.grouped_dequant_matmul_cases import CASES
from tests.grouped_dequant_matmul_contract import expected_hidden, random_operands
from tests.host_test_case import HostTestCase
from tests.packed_operands import seed


class Banks(Simulator):
    """Notes reads of shared memory in which two of eight lanes wait for each other."""

    conflicts: list

    def load_shared_words(self, at, imm, count):
        if count == 4:
            for eight in (self._word(at) + imm).reshape(-1, 8) // 16:
                if len({place % 8 for place in eight}) < len(set(eight)):
                    self.conflicts.append(eight.tolist())
        return super().load_shared_words(at, imm, count)


FORMS = [
    packed_operands.Form(bits, 64, "float", "float16" if bits < 16 else "bfloat16")
    for bits in (2, 3, 4, 8, 16)
]


class StageTest(parameterized.TestCase):
    """What a warp copies to shared memory is what its lanes then read."""

    @parameterized.parameters(
        (form, span)
        for form, span in itertools.product(FORMS, (1, 2, 4))
        if span <= Form(form.bits, "bf16").longest_span
    )
    def test_lanes_read_their_words(self, form, span):
        rng = np.random.default_rng(seed(self.id()))
        slot, first_row, stage = 1, 32, 1
        weights = packed_operands.random_matrices(
            rng, form, num_slots=2, shape=(64, 2048), used={slot}
        )
        words = np.ascontiguousarray(weights.words)
        scales = np.zeros(4) if weights.scales is None else np.ascontiguousarray(weights.scales)
        zeros = np.zeros(4) if weights.zeros is None else np.ascontiguousarray(weights.zeros)
        matrix = matrix_of(weights, "bf16")
        room = np.full(tile_bytes(matrix, span), 0xFF, np.uint8)
        buffers = [array.reshape(-1).view(np.uint8) for array in (words, scales, zeros, room)]
        e = Banks(0, 32, buffers, 3)
        e.conflicts = []
        matrix = dataclasses.replace(
            matrix, words=e.address(0), scales=e.address(1), zeros=e.address(2)
        )
        lane = Lane.here(e, e.threads)
        tile = Stream(e, matrix, e.const(slot), [e.const(first_row)], lane, span)
        tile.fetch(0, e.const(stage), e.const(1), e.shared_address(3))
        for block in range(span):
            found = tile._words(e.shared_address(3), block)
            for half in range(2):
                expected = self.words(words.view(np.uint32)[slot], form, span * stage + block,
                                      first_row + 8 * half)  # fmt: skip
                np.testing.assert_array_equal(np.stack(found[half], axis=1), expected)
        self.assertEmpty(e.conflicts)

    def words(self, rows: np.ndarray, form: packed_operands.Form, block: int, first: int):
        """[lane, register]: lane (g, t) has words 4t.. of each 16 of a block of row g."""
        size = 64 * form.bits // 32 if form.bits == 16 else 8 * (2 if form.bits == 3 else form.bits)
        expected = []
        for lane in range(32):
            row, t = rows[first + lane // 4], lane % 4
            mine = [row[size * block + 16 * i + 4 * t :][:4] for i in range(size // 16)]
            if form.bits == 3:  # 8 words of the other plane, which come after all of the first
                mine.append(row[2048 // 16 + 8 * block + 4 * (t % 2) :][:4])
            expected.append(np.concatenate(mine))
        return np.stack(expected)

    @parameterized.parameters(FORMS)
    def test_parts_of_a_stage_do_not_overlap(self, *form):
        form = packed_operands.Form(*form)
        rng = np.random.default_rng(0)
        weights = packed_operands.random_matrices(
            rng, form, num_slots=1, shape=(16, 1024), used={0}
        )
        matrix = matrix_of(weights, "bf16")
        end = 0
        for part in stage_parts(matrix, 1):
            if part.copied:
                self.assertGreaterEqual(part.at, end)
                self.assertEqual(part.at % 16, 0)
                end = part.at + 15 * part.pitch + part.row_bytes
        self.assertLessEqual(end, tile_bytes(matrix, 1))


def without_the_shift(e, form, raw, high):
    """INT3's lanes t >= 2 take the bits of the others."""
    return fragments.prepare(e, form, raw, 0)


def a_copy_skipped(self, tile, stage, present, to, fetch=Stream.fetch):
    """The first tile's rows are never brought."""
    if tile:
        fetch(self, tile, stage, present, to)


def copies_of_no_stage(self, tile, stage, present, to, fetch=Stream.fetch):
    """Always those of the first stage."""
    fetch(self, tile, self.e.const(0), present, to)


def rows_exchanged(self, at, block, words=Stream._words):
    """Rows g and g + 8."""
    return words(self, at, block)[::-1]


def zeros_one_more(self, constants, group, zeros=Stream._zeros):
    """The zero point of another quantizer."""
    return [self.e.fadd(zero, 1.0) for zero in zeros(self, constants, group)]


def x_not_scaled(self, words, step):
    """Fields in place have 2^i times their code."""
    del self, step
    return words


def sums_without_a_step(self, span, column, sums=Stream._sums):
    """The offset of one step stays in the product."""
    return sums(self, span[1:], column)


def one_pair_fewer(e, *rest, members=experts._members):
    """The last pair of an expert is left out."""
    count, earlier = members(e, *rest)
    return e.sub(count, 1), earlier


def zeros_for_scales(matrix, addresses, addressed=experts.addressed):
    """The two exchanged."""
    words, scales, zeros = addresses
    return addressed(matrix, [words, zeros, scales])


BROKEN = (
    (product, "prepare", without_the_shift),
    (Stream, "fetch", a_copy_skipped),
    (Stream, "fetch", copies_of_no_stage),
    (Stream, "_words", rows_exchanged),
    (Stream, "_zeros", zeros_one_more),
    (Stream, "_scaled", x_not_scaled),
    (Stream, "_sums", sums_without_a_step),
)


class KernelTest(HostTestCase):
    def operands(self, form: packed_operands.Form, rows: int, shape: tuple[int, int]):
        rng = np.random.default_rng(seed(self.id()))
        weights = packed_operands.random_matrices(rng, form, num_slots=2, shape=shape, used={1})
        return packed_operands.random_activations(rng, (rows, shape[1]), "bfloat16"), weights

    def violation(self, x: np.ndarray, weights: PackedMatrices, tiles: StreamTiles) -> str | None:
        y = stream.dense(x, weights, np.int32(1), np.dtype(np.float32), tiles, interpret=True)
        expected = packed_operands.product(x, weights, 1)
        return packed_operands.violation(np.asarray(y), *expected, "bfloat16")

    @parameterized.parameters(*BROKEN)
    def test_a_wrong_kernel_fails(self, owner, name, broken):
        x, weights = self.operands(packed_operands.Form(3), 9, (64, 2048))
        tiles = StreamTiles(row_tiles=2, warps_n=1, warps_k=4)
        self.assertIsNone(self.violation(x, weights, tiles))
        with mock.patch.object(owner, name, broken):
            self.assertIsNotNone(self.violation(x, weights, tiles))
        self.assertIsNone(self.violation(x, weights, tiles))

    @parameterized.parameters(
        ("LOG2_E", 1.0),
        ("_members", one_pair_fewer),
        ("addressed", zeros_for_scales),
    )
    def test_a_wrong_kernel_of_experts_fails(self, name, broken):
        operands = random_operands(CASES["whole_one_expert_owns_all_rows"], seed(self.id()))
        pairs = (operands.tier.reshape(-1), operands.slot.reshape(-1), tuple(operands.gate_up))
        tiles = StreamTiles(row_tiles=2, warps_n=2, warps_k=2)

        def wrong() -> str | None:
            hidden = stream.expert_products(
                operands.x, *pairs, gated=True, tiles=tiles, interpret=True
            )
            found = np.asarray(hidden).reshape(*operands.tier.shape, -1)
            return packed_operands.violation(found, *expected_hidden(operands), "bfloat16")

        self.assertIsNone(wrong())
        with mock.patch.object(experts, name, broken):
            self.assertIsNotNone(wrong())

    @parameterized.parameters(
        (2, StreamTiles(1, 2, 2, depth=1, span=4)),
        (2, StreamTiles(3, 1, 4, depth=4, span=2)),
        (3, StreamTiles(2, 2, 2, depth=2, span=2)),
        (3, StreamTiles(7, 1, 4, depth=9)),
        (4, StreamTiles(1, 4, 4, depth=3, span=2)),
        (4, StreamTiles(4, 1, 8, depth=1)),
        (8, StreamTiles(2, 1, 4, depth=3)),
        (8, StreamTiles(1, 1, 16, depth=2)),
        (16, StreamTiles(3, 2, 2, depth=5, span=2)),
    )
    def test_tiles_of_any_size_have_the_value(self, bits, tiles):
        dtype = "bfloat16" if bits == 16 else "float16"
        form = packed_operands.Form(bits, 32 if bits == 4 else 64, dtype=dtype)
        x, weights = self.operands(form, 11, (112, 2048))
        self.assertIsNone(self.violation(x, weights, tiles))


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


STORED = [(bits, group) for bits in (2, 3, 4, 8) for group in (32, 64, 128)] + [(16, 0)]
MOST_SHARED = 227 * 1024  # bytes of a block of threads (CUDA programming guide, sm_90)


class TilesTest(parameterized.TestCase):
    """The heuristic tiles of real shapes are ones that the kernels and the GPU can run."""

    def launches(self, module: str, call: Any, *operands: Any) -> list[dict[str, Any]]:
        """What a kernel asks `launch_blocks` for, without running it."""
        asked = []

        def record(body: Any, operands: Any, **how: Any) -> list[jax.Array]:
            asked.append(how)
            return [jnp.zeros(out.shape, out.dtype) for out in how["out_shapes"]]

        place = importlib.import_module(f"pallas_kernels.stream.{module}")
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

    @parameterized.product(name=sorted(dense_shapes.SHAPES), stored=STORED)
    def test_dense(self, name, stored):
        inputs, outputs = dense_shapes.SHAPES[name]
        weights = shape_of(*stored, outputs, inputs)
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        for rows in (1, 8, 9, dequant_matmul.mosaic.MOST_STREAMED):
            x: Any = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
            tiles = stream.tiles_of_dense(x, weights, SIMULATED)

            def call(x, weights, slot, tiles=tiles):
                return stream.dense.__wrapped__(x, weights, slot, jnp.float32, tiles)

            [how] = self.launches("dense", call, x, weights, slot)
            self.check(how, tiles, outputs)

    @parameterized.product(name=sorted(grouped_shapes.SHAPES), stored=STORED)
    def test_experts(self, name, stored):
        model_dim, expert_dim, width = grouped_shapes.SHAPES[name]
        plain = shape_of(16, 0, 2 * expert_dim, model_dim), shape_of(16, 0, model_dim, expert_dim)
        mine = (
            shape_of(*stored, 2 * expert_dim, model_dim, 4),
            shape_of(*stored, model_dim, expert_dim, 4),
        )
        for tokens in (1, 4, 9, grouped_dequant_matmul.mosaic.MOST_STREAMED):
            for part, gated in enumerate((True, False)):
                for tiers in ((mine[part],), (mine[part], plain[part])):
                    self.one_product(tiers, tokens, width, gated)

    def one_product(self, tiers: Any, tokens: int, width: int, gated: bool) -> None:
        pairs: Any = jax.ShapeDtypeStruct((tokens * width,), jnp.int32)
        x: Any = jax.ShapeDtypeStruct((tokens, tiers[0].num_inputs), jnp.bfloat16)
        tiles = stream.tiles_of_experts(x, list(tiers), tokens * width, gated, SIMULATED)

        def call(x, tier, slot, tiers):
            run = stream.expert_products.__wrapped__
            return run(x, tier, slot, tiers, gated=gated, tiles=tiles)

        [how] = self.launches("experts", call, x, pairs, pairs, tiers)
        self.check(how, tiles, tiers[0].num_outputs // (2 if gated else 1))

    def test_rings_are_no_deeper_than_shared_memory(self):
        matrix = matrix_of(shape_of(8, 32, 4096, 4096), "bf16")
        tiles = fitted(StreamTiles(1, 1, 16, depth=9), [matrix])
        stage = tile_bytes(matrix, 1) * tiles.num_warps
        self.assertBetween(tiles.depth, 1, 8)
        self.assertLessEqual(tiles.depth * stage, SHARED_BYTES)
        self.assertGreater((tiles.depth + 1) * stage, SHARED_BYTES)

    @parameterized.parameters(16, 32, 48, 80, 528)
    def test_small_matrices_are_not_left(self, outputs):
        for bits, inputs in itertools.product((2, 3, 4, 8, 16), (256, 512, 768, 4352)):
            weights = shape_of(bits, 64, outputs, inputs)
            for rows in (1, 9):
                x: Any = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
                tiles = stream.tiles_of_dense(x, weights, SIMULATED)
                self.assertLessEqual(tiles.rows, outputs)
                self.assertEqual(tiles.num_warps % 4, 0)


if __name__ == "__main__":
    absltest.main()
