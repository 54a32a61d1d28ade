"""Parts of the streaming kernels, simulated: copies and reads of a stage, tiles, faults.

The contracts of the products check their values.
"""

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import mosaic_decode
from pallas_kernels.gating import SWIGLU
from pallas_kernels.mosaic_decode import experts, fragments, product
from pallas_kernels.mosaic_decode.accumulate import Totals
from pallas_kernels.mosaic_decode.fragments import CodeFormat
from pallas_kernels.mosaic_decode.matrix import addressed, matrix_of, tile_bytes
from pallas_kernels.mosaic_decode.product import Lane, Stream
from pallas_kernels.mosaic_decode.tiles import StreamTiles
from pallas_kernels.packed import PackedMatrices
from pallas_kernels.target import SIMULATED
from pallas_kernels.testing.simulator import _Simulator
from tests import packed_operands, slow
from tests.grouped_dequant_matmul_cases import CASES
from tests.grouped_dequant_matmul_contract import expected_hidden, random_operands
from tests.host_test_case import HostTestCase
from tests.packed_operands import seed


class Banks(_Simulator):
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
] + [packed_operands.Form(bits, apart="own") for bits in (3, 4)]


class StageTest(parameterized.TestCase):
    """Lanes read from shared memory what their warp copied there."""

    @parameterized.parameters(FORMS)
    def test_lanes_read_their_words(self, *form):
        form = packed_operands.Form(*form)
        rng = np.random.default_rng(seed(self.id()))
        slot, first_row, stage = 1, 32, 1
        weights = packed_operands.random_matrices(
            rng, form, num_slots=2, shape=(64, 2048), used={slot}
        )
        words = np.ascontiguousarray(weights.words)
        scales = np.zeros(4) if weights.scales is None else np.ascontiguousarray(weights.scales)
        zeros = np.zeros(4) if weights.zeros is None else np.ascontiguousarray(weights.zeros)
        matrix = matrix_of(weights, "bf16")
        room = np.full(tile_bytes(matrix), 0xFF, np.uint8)
        arrays = [words, scales, zeros]
        for part in weights.refinements:
            arrays += [np.ascontiguousarray(part.words), part.slots]
        buffers = [array.reshape(-1).view(np.uint8) for array in (*arrays, room)]
        e, place = Banks(0, 32, buffers, len(arrays)), len(arrays)
        e.conflicts = []
        matrix = addressed(matrix, [e.address(i) for i in range(len(arrays))])
        lane = Lane.here(e, e.threads)
        tile = Stream(e, matrix, e.const(slot), [e.const(first_row)], lane)
        tile.fetch(0, e.const(stage), e.const(1), e.shared_address(place))
        rows = [words.view(np.uint32)[slot]]  # of planes that lie apart one after the other
        rows += [part.words[part.slots[slot]] for part in weights.refinements]
        found = tile._words(e.shared_address(place))
        for half in range(2):
            expected = self.words(np.concatenate(rows, axis=1), form, stage, first_row + 8 * half)
            np.testing.assert_array_equal(np.stack(found[half], axis=1), expected)
        self.assertEmpty(e.conflicts)

    def words(self, rows: np.ndarray, form: packed_operands.Form, block: int, first: int):
        """[lane, register]: lane (g, t) has words 4t.. of each 16 of a block of row g."""
        size = 32 if form.bits == 16 else 8 * form.widths[0]
        expected = []
        for lane in range(32):
            row, t = rows[first + lane // 4], lane % 4
            mine = [row[size * block + 16 * i + 4 * t :][:4] for i in range(size // 16)]
            if len(form.widths) == 2:  # the other plane's come after all of the first
                count = 8 * form.widths[1]
                mine.append(row[2048 // 16 + count * block + 4 * t % count :][:4])
            expected.append(np.concatenate(mine))
        return np.stack(expected)


def a_copy_skipped(self, tile, stage, present, to, row, fetch=Stream.fetch):
    if tile:
        fetch(self, tile, stage, present, to, row)


def one_pair_fewer(e, *rest, job_of_pair=experts.job_of_pair):
    """The last pair of an expert is left out."""
    tier, job, leads = job_of_pair(e, *rest)
    return tier, job._replace(count=e.sub(job.count, 1)), leads


def sums_of_the_first_column_tile(self, words, sums_at=None, prepare=Stream.prepare_x):
    found = prepare(self, words, sums_at)
    return dataclasses.replace(found, sums=lambda group, column: found.sums(group, 0))


# Whose function is another one.
BROKEN = (
    # INT3's lanes t >= 2 take the bits of the others.
    (product, "prepare", lambda e, form, raw, high: fragments.prepare(e, form, raw, 0)),
    # The first tile's rows are never brought; always those of the first stage are.
    (Stream, "fetch", a_copy_skipped),
    (Stream, "fetch", lambda self, tile, stage, *rest, fetch=Stream.fetch:
     fetch(self, tile, self.e.const(0), *rest)),
    # Rows g and g + 8 are exchanged.
    (Stream, "_words", lambda self, *rest, words=Stream._words: words(self, *rest)[::-1]),
    # The zero point is another quantizer's.
    (Stream, "_zeros", lambda self, *rest, zeros=Stream._zeros:
     [self.e.fadd(zero, 1.0) for zero in zeros(self, *rest)]),
    # Fields in place have 2^i times their code.
    (Stream, "_scaled", lambda self, words, step: words),
    # The offset of one step stays in the product.
    (Stream, "_sums", lambda self, span, column, sums=Stream._sums: sums(self, span[1:], column)),
)  # fmt: skip
BROKEN_KEPT = (
    # Totals are of the next row; those of earlier stages are forgotten.
    (Totals, "_places", lambda self, *rest, places=Totals._places:
     [place + 4 for place in places(self, *rest)]),
    (Totals, "load", lambda self, e, tile, count: [0.0] * count),
    # The second column tile has the sums of the first one.
    (Stream, "prepare_x", sums_of_the_first_column_tile),
    # The sums of other blocks of the cluster are this block's.
    (_Simulator, "load_cluster", lambda self, at, block, imm: self.load_shared(at, imm)),
)  # fmt: skip
BROKEN_EXPERTS = (
    ("LOG2_E", 1.0),
    ("job_of_pair", one_pair_fewer),
    # Scales for zero points.
    ("addressed", lambda matrix, at, addressed=experts.addressed:
     addressed(matrix, [at[0], at[2], at[1]])),
)  # fmt: skip
MXFP4 = packed_operands.Form(4, 32, "mxfp4")
KEPT_FORMS = (
    MXFP4,
    packed_operands.Form(2, 64), packed_operands.Form(3, 32, "integer"),
    packed_operands.Form(3, 64, "float", "float32"), packed_operands.Form(3, 0),
    packed_operands.Form(4, 128, "symmetric"), packed_operands.Form(4, 0, "integer"),
    packed_operands.Form(8, 64), packed_operands.Form(16, dtype="bfloat16"),
    packed_operands.Form(4, 64, apart="shared"),
)  # fmt: skip


class KernelTest(HostTestCase):
    def operands(
        self, form: packed_operands.Form, rows: int, shape: tuple[int, int], dtype: str = "bfloat16"
    ) -> tuple[np.ndarray, PackedMatrices]:
        rng = np.random.default_rng(seed(self.id()))
        weights = packed_operands.random_matrices(rng, form, num_slots=2, shape=shape, used={1})
        return packed_operands.random_activations(rng, (rows, shape[1]), dtype), weights

    def violation(self, x: np.ndarray, weights: PackedMatrices, tiles: StreamTiles) -> str | None:
        dtype = np.dtype(np.float32)
        y = mosaic_decode.dense(x, weights, np.int32(1), dtype, tiles, interpret=True)
        expected = packed_operands.product(x, weights, 1)
        return packed_operands.violation(np.asarray(y), *expected, x.dtype.name)

    def check_broken(
        self, x: np.ndarray, weights: PackedMatrices, tiles: StreamTiles, owner: Any, name: str,
        broken: Any,
    ) -> None:  # fmt: skip
        """The value is right, and is no longer with another function in place of one."""
        self.assertIsNone(self.violation(x, weights, tiles))
        with mock.patch.object(owner, name, broken):
            self.assertIsNotNone(self.violation(x, weights, tiles))

    @parameterized.product(bits=(2, 3, 4, 8), size=(1e-3, 1e-4))
    def test_small_fp16_activations_lose_nothing(self, bits, size):
        x, weights = self.operands(packed_operands.Form(bits), 2, (32, 512), "float16")
        x = (np.float16(size) * x).astype(np.float16)
        self.assertIsNone(self.violation(x, weights, StreamTiles(1, 1, 4)))

    @parameterized.parameters(
        (packed_operands.Form(3, 256), 256), (packed_operands.Form(3, 128, "integer"), 256),
        (packed_operands.Form(4, 512, "integer"), 512), (packed_operands.Form(4), 384),
        (packed_operands.Form(3, 32, "integer"), 640), (packed_operands.Form(2), 128),
        (packed_operands.Form(8), 384), (packed_operands.Form(3, apart="own"), 384),
        (packed_operands.Form(4), 320), (packed_operands.Form(8), 576), (MXFP4, 320), (MXFP4, 640),
        (packed_operands.Form(8, 32), 320), (packed_operands.Form(4, 0, "integer"), 320),
    )  # fmt: skip
    def test_the_last_rows_of_the_last_slot_read_nothing_behind_them(self, form, inputs):
        # The simulator raises for a load beyond an array.
        x, weights = self.operands(form, 1, (16, inputs))
        self.assertEmpty(mosaic_decode.refusals(x, [weights], SIMULATED))
        self.assertIsNone(self.violation(x, weights, StreamTiles(1, 1, 4)))

    @parameterized.parameters(
        (CodeFormat, "short_block", lambda self, size, step, right=CodeFormat.short_block:
         (right(self, size, step)[0] // 2, *right(self, size, step)[1:])),
        (Stream, "_of_short_groups", lambda self, short_block, rows, size: rows),
    )  # fmt: skip
    def test_a_wrong_kernel_of_half_a_block_fails(self, *wrong):
        x, weights = self.operands(packed_operands.Form(4), 9, (32, 384))
        self.check_broken(x, weights, StreamTiles(1, 1, 4), *wrong)

    @parameterized.parameters(
        (_Simulator, "permute", lambda self, low, high, selector, right=_Simulator.permute:
         right(self, low, low, selector)),  # odd rows end in their first bytes
        (CodeFormat, "short_block", lambda self, size, step, right=CodeFormat.short_block:
         right(self, size, step ^ 2)),
        (product, "_repeated", lambda e, words, index, size, times: words[index]),
        (fragments, "_floats_of_mxfp4", lambda e, kind, word, at, right=fragments._floats_of_mxfp4:
         right(e, kind, word, at ^ 1)),
    )  # fmt: skip
    def test_a_wrong_kernel_of_short_rows_fails(self, *wrong):
        x, weights = self.operands(MXFP4, 9, (32, 576))
        self.check_broken(x, weights, StreamTiles(1, 1, 4), *wrong)

    @parameterized.parameters(
        (packed_operands.Form(8, 32), 384, "groups of 32 of 8 bits"),
        (packed_operands.Form(4, 128, "integer"), 384, "no multiple of 2"),
        (packed_operands.Form(4), 288, "K 288 is no multiple of 256"),
        (packed_operands.Form(2), 320, "K 320 is no multiple of 256"),
    )
    def test_half_a_block_is_refused_where_its_rows_cannot_be_read(self, form, inputs, reason):
        x, weights = self.operands(form, 9, (32, inputs))
        self.assertIn(reason, "; ".join(mosaic_decode.refusals(x, [weights], SIMULATED)))

    @slow.repeats()
    @parameterized.parameters(*BROKEN)
    def test_a_wrong_kernel_fails(self, *wrong):
        x, weights = self.operands(packed_operands.Form(3), 9, (64, 2048))
        self.check_broken(x, weights, StreamTiles(row_tiles=2, warps_n=1, warps_k=4), *wrong)

    @parameterized.parameters(*BROKEN, *BROKEN_KEPT)
    @pytest.mark.slow
    def test_a_wrong_kernel_of_two_column_tiles_fails(self, *wrong):
        x, weights = self.operands(packed_operands.Form(3), 16, (64, 4096))
        tiles = StreamTiles(row_tiles=2, warps_n=1, warps_k=4, kept=True, cluster=2)
        self.check_broken(x, weights, tiles, *wrong)

    @slow.repeats(lambda form: form)
    @parameterized.product(
        form=KEPT_FORMS,
        tiles=(
            StreamTiles(1, 1, 8, depth=1, kept=True),  # some warps have nothing
            StreamTiles(3, 2, 2, depth=2, kept=True, cluster=2),
            StreamTiles(2, 1, 4, depth=3, kept=True),
            StreamTiles(8, 1, 4, depth=3, kept=True),  # a loop where K is long
            StreamTiles(7, 1, 4, depth=9, kept=True, cluster=8),  # more parts than blocks of K
            StreamTiles(2, 2, 2, depth=3, cluster=4),
        ),
        rows=(9, 16),
        inputs=(256, 1280),
    )
    def test_totals_in_shared_memory_and_clusters(self, form, tiles, rows, inputs):
        # The last rows are those of no whole block of threads.
        x, weights = self.operands(form, rows, (144, inputs))
        self.assertIsNone(self.violation(x, weights, tiles))

    @parameterized.parameters(*BROKEN_EXPERTS)
    @pytest.mark.slow
    def test_a_wrong_kernel_of_experts_fails(self, name, broken):
        operands = random_operands(CASES["whole_one_expert_owns_all_rows"], seed(self.id()))
        pairs = (operands.tier.reshape(-1), operands.slot.reshape(-1), tuple(operands.gate_up))
        tiles = StreamTiles(row_tiles=2, warps_n=2, warps_k=2)

        def wrong() -> str | None:
            hidden = mosaic_decode.expert_products(
                operands.x, *pairs, gating=SWIGLU, tiles=tiles, interpret=True
            )
            found = np.asarray(hidden).reshape(*operands.tier.shape, -1)
            return packed_operands.violation(found, *expected_hidden(operands), "bfloat16")

        self.assertIsNone(wrong())
        with mock.patch.object(experts, name, broken):
            self.assertIsNotNone(wrong())

    @parameterized.parameters(
        (2, StreamTiles(1, 2, 2, depth=1)),
        (3, StreamTiles(2, 2, 2, depth=2)),
        (3, StreamTiles(7, 1, 4, depth=9)),
        (4, StreamTiles(1, 4, 4, depth=3)),
        (4, StreamTiles(4, 1, 8, depth=1)),
        (8, StreamTiles(2, 1, 4, depth=3)),
        (8, StreamTiles(1, 1, 16, depth=2)),
        (16, StreamTiles(3, 2, 2, depth=5)),
    )
    def test_tiles_of_any_size_have_the_value(self, bits, tiles):
        dtype = "bfloat16" if bits == 16 else "float16"
        form = packed_operands.Form(bits, 32 if bits == 4 else 64, dtype=dtype)
        x, weights = self.operands(form, 11, (112, 2048))
        self.assertIsNone(self.violation(x, weights, tiles))
