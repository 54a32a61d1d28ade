"""Reads, unpacking and writes of a warpgroup's lanes, carried out by numpy."""

import itertools
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized

from pallas_kernels.mosaic_prefill import fragments, grouped, lanes, tiles
from pallas_kernels.mosaic_prefill.dense import refusals
from pallas_kernels.packed import plain
from pallas_kernels.target import Target
from pallas_kernels.testing.simulator import KINDS, _Simulator
from tests import packed_operands, slow
from tests.model_products import DENSE_SHAPES
from tests.packed_operands import Form

ROWS, BLOCK = 64, 256
MOST_SHARED_BYTES = 227 * 1024  # that a block of threads may have on sm_90
FORMS = [
    Form(bits, group, zero, dtype)
    for bits in (2, 3, 4, 8)
    for group, zero, dtype in (
        (64, "float", "float16"),
        (32, "float", "float32"),
        (128, "integer", "float16"),
        (0, "symmetric", "float16"),
        (512, "float", "float16"),
        (16, "integer", "float32"),
    )
] + [
    Form(bits, group, "float", dtype, "own")
    for bits in (3, 4)
    for group, dtype in ((64, "float16"), (32, "float32"), (0, "float16"))
]


HALF_BLOCKS = [
    Form(2), Form(4), Form(8), Form(2, 32, "symmetric"), Form(4, 16, "integer"),
    Form(4, 128, "float", "float32"), Form(8, 32), Form(4, 0),
]  # fmt: skip


class Lanes(_Simulator):
    """The instructions that wgmma's kernels have more."""

    def bxor(self, a, b):
        return self._word(a) ^ self._word(b)

    def byte_number(self, word, byte):
        number = 32768.0 + (self._word(word) >> 8 * byte & 0xFF)
        return number.astype(np.float32).view(np.uint32).astype(np.int64)

    def pack_pair(self, kind, low, high):
        halves = np.stack([self._float(low), self._float(high)], -1).astype(KINDS[kind])
        return np.ascontiguousarray(halves).view(np.uint32)[:, 0].astype(np.int64)

    def quotient_of_exp(self, value):
        with np.errstate(over="ignore"):
            return np.float32(1) / (np.float32(1) + np.exp(-self._float(value)))

    def store_four(self, base, imm, words):
        if words[0].dtype == np.float32:
            words = [word.view(np.uint32) for word in words]
        self._put(base + imm, np.stack([self._word(w) for w in words], -1).astype(np.uint32))

    def load_four(self, base, imm):
        return [word.astype(np.uint32).view(np.float32) for word in self.load(base, imm, 4)]

    def warpgroup_barrier(self):
        assert self.active.all(), "a barrier in a branch that not all threads take"

    def store_matrices(self, at, words):
        """PTX ISA, stmatrix .trans: element (i, j) as stored is of lane 4 j + i / 2, half i % 2."""
        lane = self.threads % 32
        for matrix, word in enumerate(words):
            halves = self._word(word).astype(np.uint32).reshape(-1, 1).view(np.uint16)
            for warp in range(len(lane) // 32):
                for i in range(8):
                    to = int(self._word(at)[32 * warp + 8 * matrix + i])
                    row = [halves[32 * warp + 4 * j + i // 2, i % 2] for j in range(8)]
                    room, to = self.memory[to >> 24], to & 0xFFFFFF
                    room[to : to + 16] = np.array(row, np.uint16).view(np.uint8)


def swizzled(rows: np.ndarray) -> np.ndarray:
    """Bytes of rows as a swizzled copy leaves them: bits 4.. of an address change by bits 7.. ."""
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    mask = {128: 7, 64: 3, 32: 1}[raw.shape[1]]
    at = np.arange(raw.size)
    out = np.empty(raw.size, np.uint8)
    out[at ^ ((at >> 7 & mask) << 4)] = raw.reshape(-1)
    return out


def wgmma_left(words: list[np.ndarray], kind: str) -> np.ndarray:
    """float64[64, 16] of the registers of 128 lanes, by the figure of the PTX ISA."""
    found = np.empty((ROWS, 16))
    for i, word in enumerate(words):
        pairs = np.asarray(word).astype(np.uint32).reshape(-1, 1).view(KINDS[kind])
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            row = 16 * warp + lane // 4 + 8 * (i % 2)
            column = lane % 4 * 2 + 8 * (i // 2)
            found[row, column : column + 2] = pairs[thread].astype(np.float64)
    return found


def tile_rows(first_row: int, half: int | None) -> np.ndarray:
    """Rows of a matrix in a tile of two warpgroups; `half`: of the matrix, where paired."""
    if half is None:
        return first_row + np.arange(2 * ROWS)
    return np.concatenate([first_row + np.arange(ROWS), half + first_row + np.arange(ROWS)])


def warpgroup_rows(group: int, first_row: int, half: int | None) -> np.ndarray:
    """Rows of a matrix in a warpgroup's operand: paired, eight of each half in turn."""
    if half is None:
        return first_row + ROWS * group + np.arange(ROWS)
    eights, within = np.divmod(np.arange(ROWS), 8)
    return first_row + 32 * group + 8 * (eights // 2) + within + half * (eights % 2)


class LanesTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.product(form=FORMS, kind=("bf16", "f16"), half=(None, 192))
    def test_block_is_unpacked_to_the_left_operand(self, form, kind, half):
        self.unpack(form, kind, half, num_inputs=1024, block=2)

    @parameterized.product(form=HALF_BLOCKS, half=(None, 192), block=(0, 1))
    def test_half_a_block_is_unpacked_to_its_place(self, form, half, block):
        self.unpack(form, "bf16", half, num_inputs=384, block=block)

    @parameterized.parameters(
        (lanes, "from_half_block", lambda e, form, raw: raw),
        (fragments, "_every_other", lambda e, bits, word: word),
        (lanes, "_run_of_either_block", lambda e, at, imm, size, is_half:
         size // 4 * lanes._run(e, at, imm, 4)),
    )  # fmt: skip
    def test_half_a_block_at_a_wrong_place_fails(self, owner, name, broken):
        with mock.patch.object(owner, name, broken), self.assertRaises(AssertionError):
            self.unpack(Form(4, 32), "bf16", None, num_inputs=384, block=1)

    def unpack(self, form, kind, half, num_inputs, block):
        """Checks a block's operand, of the last slot: the simulator raises for reads behind it."""
        rng = np.random.default_rng(packed_operands.seed(self.id()))
        slot, first_row = 2, 128
        weights = packed_operands.random_matrices(
            rng, form, num_slots=3, shape=(384, num_inputs), used={slot}, size=1.0
        )
        known = fragments.form_of(weights, kind, paired=half is not None)
        planes = [weights.words[slot], *(r.words[r.slots[slot]] for r in weights.refinements)]
        tiles = []
        for tile in known.tiles:
            words = np.asarray(planes[tile.refined])[tile_rows(first_row, half)]
            start = tile.first_word + block * tile.pitch
            words = words[:, start : start + tile.num_words]
            missing = tile.num_words - words.shape[1]  # a copy puts zeros behind an array
            tiles.append(swizzled(np.pad(words, ((0, 0), (0, missing)))))
        constants = [np.asarray(a) for a in (weights.scales, weights.zeros) if a is not None]
        memory = [a.reshape(-1).view(np.uint8) for a in constants] + tiles
        e = Lanes(0, 256, memory, len(constants))
        shared = [len(constants) + i for i in range(len(tiles))]
        read = lanes.read_words(e, known, np.int64(block), shared, 2 * ROWS)
        numbers = lanes.read_constants(
            e, known, np.int64(slot), np.int64(first_row), np.int64(block), range(len(constants))
        )
        expected = packed_operands.values(weights, slot)[:, block * BLOCK : (block + 1) * BLOCK]
        scales = np.abs(np.asarray(weights.scales)[slot].astype(np.float64)).max()
        # The constant term is rounded, and of low bits the low half's part of the high is the mean.
        slack = scales * (2.0**-8 if form.bits == 8 else 2.0**-12)
        roundoff = {"bf16": 2.0**-8, "f16": 2.0**-11}[kind]
        for stage in range(expected.shape[1] // 64):
            left = fragments.operand(e, known, read, numbers, stage)
            for piece in range(4):
                for group in range(2):
                    registers = [
                        np.broadcast_to(word, (256,))[128 * group : 128 * (group + 1)]
                        for word in left[4 * piece : 4 * piece + 4]
                    ]
                    k = 64 * stage + 16 * piece
                    want = expected[warpgroup_rows(group, first_row, half), k : k + 16]
                    found = wgmma_left(registers, kind)
                    tolerance = roundoff * (np.abs(want) + slack) + slack
                    self.assertTrue(
                        (np.abs(found - want) <= tolerance).all(),
                        (stage, piece, np.abs(found - want).max(), tolerance.min()),
                    )

    def test_plain_halves_are_the_left_operand(self):
        rng = np.random.default_rng(packed_operands.seed(self.id()))
        first_row, half = 64, 128
        weights = rng.standard_normal((2 * half, 64), np.float32).astype(ml_dtypes.bfloat16)
        rows = weights[tile_rows(first_row, half)]
        e = Lanes(0, 256, [swizzled(rows.view(np.uint16))], 0)
        left = lanes.read_plain(e, 0, 2 * ROWS)
        for piece in range(4):
            for group in range(2):
                registers = [w[128 * group : 128 * group + 128] for w in left[4 * piece :][:4]]
                want = weights[warpgroup_rows(group, first_row, half), 16 * piece :][:, :16]
                np.testing.assert_array_equal(wgmma_left(registers, "bf16"), want)

    @parameterized.product(way=("hidden", "sums"), tokens=(32, 64, 128), groups=(1, 2))
    def test_rows_go_where_the_order_says(self, way, tokens, groups):
        rng = np.random.default_rng(packed_operands.seed(self.id()))
        num_pairs, first, end, row = 300, 17, 17 + tokens - 5, 64
        order = rng.permutation(num_pairs).astype(np.int32)
        sums = rng.standard_normal((2, ROWS, tokens)).astype(np.float32)
        width = 32 if way == "hidden" else ROWS
        columns = row + groups * width  # one warpgroup may lie beyond
        dtype = np.dtype(np.float32) if way == "sums" else np.dtype(ml_dtypes.bfloat16)
        out = np.full((num_pairs, columns), np.nan, dtype)
        chunk = min(tokens, 64)
        rooms = [np.zeros(chunk * width * 2, np.uint8) for _ in range(4)]
        memory = [order.view(np.uint8), out.reshape(-1).view(np.uint8), *rooms]
        e = Lanes(0, 256, memory, 2)
        group, thread = np.divmod(np.arange(256), 128)
        at, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        values = [
            [sums[group, at + a, i + column + b] for a in (0, 8) for b in (0, 1)]
            for i in range(0, tokens, 8)
        ]
        place = grouped._Destination(np.int64(row), np.int64(first), np.int64(end))
        refs = [2 + 2 * group, 3 + 2 * group, 0, 1]
        if way == "hidden":
            grouped._scatter_hidden(e, "bf16", values, place, chunk, columns, refs)
            eights = sums.reshape(2, 4, 2, 8, tokens).astype(np.float64)
            gate, up = (eights[:, :, i].reshape(2 * width, tokens) for i in range(2))
            found = gate / (1 + np.exp(-gate)) * up
        else:
            grouped._scatter_sums(e, values, place, columns, refs[2:])
            found = sums.reshape(2 * width, tokens)
        expected = np.full((num_pairs, columns), np.nan)
        expected[order[first:end], row:] = found.T[: end - first, : columns - row]
        np.testing.assert_allclose(
            out.astype(np.float64), expected, rtol=2.0**-8 if dtype.itemsize == 2 else 0
        )

    @parameterized.parameters(64, 40, 8)
    def test_rounded_sums_are_transposed(self, count):
        rng = np.random.default_rng(packed_operands.seed(self.id()))
        sums = rng.standard_normal((128, count), np.float32)  # of two warpgroups
        room = np.zeros(count * 128, np.uint8)
        for group in range(2):
            e = Lanes(0, 256, [room], 0)
            thread = np.arange(256)
            row = thread // 32 * 16 + thread % 32 // 4
            values = []
            for i in range(0, count, 8):
                column = i + thread % 4 * 2
                values.append([sums[row + a, column + b] for a in (0, 8) for b in (0, 1)])
            # Both write to the room; the test lets one warpgroup do so.
            e.threads = e.threads[128 * group : 128 * (group + 1)]
            mine = [[v[128 * group : 128 * (group + 1)] for v in four] for four in values]
            e.active = e.active[:128]
            lanes.write_rounded(e, "bf16", mine, 0)
            wanted = sums[ROWS * group : ROWS * (group + 1)].T.astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(room, swizzled(wanted.view(np.uint16)))

    def test_sums_beyond_the_result_are_left_out(self):
        shape = (13, 192)
        out = np.full(shape, np.nan, np.float32)
        e = Lanes(0, 256, [out.reshape(-1).view(np.uint8)], 1)
        thread = np.arange(256)
        row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        sums = [
            [(row + a) * 1000.0 + i + column + b for a in (0, 8) for b in (0, 1)]
            for i in range(0, 16, 8)
        ]
        lanes.write_sums(e, sums, np.int64(128), np.int64(0), 0, shape)
        expected = np.full(shape, np.nan, np.float32)
        tokens, rows = np.arange(13), np.arange(64)
        expected[:, 128:] = rows * 1000 + tokens[:, None]
        np.testing.assert_array_equal(out, expected)

    @parameterized.parameters(8, 88)
    def test_parts_are_added_to_the_sums_that_they_belong_to(self, tokens):
        rng = np.random.default_rng(packed_operands.seed(self.id()))
        sums = rng.standard_normal((3, tokens // 8, 4, 256), np.float32)  # of two warpgroups
        parts = np.full(2 * 128 * tokens, np.nan, np.float32)
        e = Lanes(0, 256, [parts.view(np.uint8)], 0)
        for part in range(2):
            lanes.write_part(e, sums[part], np.int64(part), 0)
        self.assertFalse(np.isnan(parts).any())
        found = sums[2]
        for part in range(2):
            found = lanes.add_part(e, found, np.int64(part), 0)
        np.testing.assert_array_equal(np.asarray(found), sums[2] + sums[0] + sums[1])


class RefusalsTest(parameterized.TestCase):
    def test_plain_rows_that_end_in_half_a_block_are_refused(self):
        x = jnp.zeros((64, 384), jnp.bfloat16)
        weights = plain(jnp.zeros((2, 128, 384), jnp.bfloat16))
        found = "; ".join(refusals(x, [weights], Target("gpu", (9, 0))))
        self.assertIn("K 384 is no multiple of 256", found)


class TilesTest(parameterized.TestCase):
    """Tiles of the kernels for many rows."""

    @parameterized.parameters(2, 3, 4, 8, 16)
    def test_heuristic_tiles_fit_shared_memory(self, bits):
        numbers = (*range(17, 513), 1024, 4096)
        for (inputs, outputs), rows in itertools.product(DENSE_SHAPES.values(), numbers):
            found = tiles.dense_tiles(rows, outputs, inputs, bits, 132)
            # Barriers and the alignment of buffers take the rest.
            used = tiles._shared_bytes(found, bits) + 1024
            self.assertLessEqual(used, MOST_SHARED_BYTES, (rows, found))
            self.assertEqual(found.x_stages % 4, 0)

    @parameterized.parameters(({"tokens": 12},), ({"x_stages": 6},), ({"word_blocks": 0},))
    def test_others_are_refused(self, field):
        # Tried among such tiles, one ended in an illegal access on the GPU.
        sound = {"tokens": 64, "x_stages": 8, "word_blocks": 4}
        tiles.WgmmaTiles(**sound)
        with self.assertRaises(ValueError):
            tiles.WgmmaTiles(**{**sound, **field})
