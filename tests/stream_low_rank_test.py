"""Low-rank terms in the streaming kernels, simulated: forms, ranges, ranks, mistakes, tiles."""

import dataclasses
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import mosaic_decode
from pallas_kernels.gating import SWIGLU
from pallas_kernels.mosaic_decode import low_rank_spec, support
from pallas_kernels.mosaic_decode.low_rank import BlockTerms
from pallas_kernels.mosaic_decode.matrix import matrix_of, tile_bytes
from pallas_kernels.mosaic_decode.product import Stream
from pallas_kernels.mosaic_decode.tiles import SHARED_BYTES, StreamTiles, dense_share, expert_share
from pallas_kernels.mosaic_decode.u_factor import PoolColumns
from pallas_kernels.packed import LowRank, PackedMatrices
from pallas_kernels.target import SIMULATED
from pallas_kernels.testing.simulator import _Simulator
from tests import packed_operands, slow
from tests.host_test_case import HostTestCase
from tests.packed_operands import Form, seed

FORMS = [
    Form(2, 32, "float"),
    Form(3, 64, "integer", "float32"),
    Form(4, 128, "symmetric"),
    Form(8, 64, "float", "float32"),
    Form(16, dtype="bfloat16"),
]
TILES = StreamTiles(row_tiles=1, warps_n=2, warps_k=2)  # 32 rows


def random_terms(
    rng: np.random.Generator,
    weights: PackedMatrices,
    *,
    u: Form = FORMS[1],
    v: Form = FORMS[1],
    rank: int = 5,
    max_rank: int = 8,
    first_row: int = 0,
    num_rows: int | None = None,
    before: int = 3,
    after: int = 9,
) -> LowRank:
    """Terms of slot 1, which owns rows in the middle of pools whose other rows are NaN."""
    length = num_rows or weights.num_outputs - first_row
    inputs, total = weights.num_inputs, before + rank + after
    owned = range(before, before + rank)
    size = 0.6 / max(1, rank) ** 0.5
    return LowRank(
        u=packed_operands.random_pool(rng, u, (total, length), owned, size),
        v=packed_operands.random_pool(rng, v, (total, inputs), owned, inputs**-0.5),
        start=np.asarray([0, before], np.int32), rank=np.asarray([before, rank], np.int32),
        first_row=first_row, max_rank=max_rank,
    )  # fmt: skip


class KernelTestCase(HostTestCase):
    def setUp(self):
        super().setUp()
        self.rng = np.random.default_rng(seed(self.id()))

    def weights(self, shape: tuple[int, int], form: Form = FORMS[1]) -> PackedMatrices:
        return packed_operands.random_matrices(self.rng, form, num_slots=2, shape=shape, used={1})

    def violation(
        self, weights: PackedMatrices, low_rank: tuple[LowRank, ...], rows: int = 2,
        tiles: StreamTiles = TILES,
    ) -> str | None:  # fmt: skip
        shape = (rows, weights.num_inputs)
        x = packed_operands.random_activations(self.rng, shape, "bfloat16")
        dtype = np.dtype(np.float32)
        y = mosaic_decode.dense(
            x, weights, np.int32(1), dtype, tiles, interpret=True, low_rank=low_rank
        )
        expected = packed_operands.product(x, weights, 1, low_rank)
        return packed_operands.violation(np.asarray(y), *expected, "bfloat16")


class DenseTest(KernelTestCase):
    """Float32 results, so that no rounding hides a wrong term."""

    @parameterized.parameters(FORMS)
    def test_every_form(self, *form):
        form = Form(*form)
        weights = self.weights((64, 512), form)
        for v in (form, form._replace(group_size=0)):
            self.assertIsNone(
                self.violation(weights, (random_terms(self.rng, weights, u=form, v=v),))
            )

    # The pools end with the matrix's rows, before those of a whole tile, or have fewer than one.
    @slow.repeats(lambda how: how["rank"])
    @parameterized.product(
        (
            {"rank": 0, "max_rank": 8}, {"rank": 1, "max_rank": 1}, {"rank": 16, "max_rank": 16},
            {"rank": 17, "max_rank": 40}, {"rank": 64, "max_rank": 64},
        ),
        (
            {"before": 0, "after": 0}, {"before": 21, "after": 0}, {"before": 5, "after": 2},
            {"before": 7, "after": 50},
        ),
    )  # fmt: skip
    def test_ranks_and_pools(self, **how):
        weights = self.weights((64, 256))
        self.assertIsNone(self.violation(weights, (random_terms(self.rng, weights, **how),)))

    @parameterized.parameters((0, 96), (16, 32), (40, 24), (70, 20), (95, 1), (33, 63), (0, 320))
    def test_ranges_of_rows(self, first_row, num_rows):
        weights = self.weights((320, 256))
        how = {"first_row": first_row, "num_rows": num_rows}
        self.assertIsNone(self.violation(weights, (random_terms(self.rng, weights, **how),)))

    def test_ranges_that_meet(self):
        weights = self.weights((96, 768))
        several = (
            random_terms(self.rng, weights, num_rows=60, rank=9, max_rank=9),
            random_terms(self.rng, weights, u=FORMS[4], first_row=40),
            random_terms(self.rng, weights, v=FORMS[3], first_row=40, num_rows=20, rank=0),
            random_terms(self.rng, weights, v=FORMS[2], first_row=80, rank=30, max_rank=33),
        )
        self.assertIsNone(self.violation(weights, several, rows=9))

    @slow.repeats(lambda tiles: tiles)
    @parameterized.product(
        tiles=(
            StreamTiles(1, 1, 4, depth=1), StreamTiles(2, 1, 16, depth=2), StreamTiles(3, 1, 8),
            StreamTiles(1, 4, 2), StreamTiles(1, 4, 1),
            StreamTiles(2, 1, 4, kept=True), StreamTiles(3, 1, 4, kept=True, cluster=2),
            StreamTiles(1, 4, 1, cluster=4),
        ),
        rows=(1, 8, 17),
    )  # fmt: skip
    def test_tiles_and_rows(self, tiles, rows):
        weights = self.weights((64, 1536))
        terms = random_terms(self.rng, weights, rank=20, max_rank=32)
        self.assertIsNone(self.violation(weights, (terms,), rows, tiles))


class JoinedTest(KernelTestCase):
    """V among the matrix's own rows, shared out in clusters or not."""

    @slow.repeats(lambda tiles: tiles)
    @parameterized.product(
        tiles=(
            StreamTiles(2, 1, 4, thin=2), StreamTiles(3, 1, 4, depth=2, thin=1, sharers=2),
            StreamTiles(1, 1, 4, depth=3, thin=1, sharers=2),
            StreamTiles(2, 1, 8, thin=1, sharers=4), StreamTiles(2, 1, 4, kept=True, thin=2),
            StreamTiles(3, 1, 4, kept=True, thin=1, sharers=2),
        ),
        rows=(1, 8, 17), inputs=(512, 1024, 1536),
    )  # fmt: skip
    def test_tiles_and_rows(self, tiles, rows, inputs):
        weights = self.weights((112, inputs))  # blocks that no cluster divides
        terms = random_terms(self.rng, weights, rank=20, max_rank=32, after=1)
        self.assertIsNone(self.violation(weights, (terms,), rows, tiles))

    @parameterized.product(form=FORMS, tiles=(
        StreamTiles(2, 1, 4, thin=1, sharers=2), StreamTiles(2, 1, 4, kept=True, thin=2),
    ))  # fmt: skip
    def test_every_form(self, form, tiles):
        weights = self.weights((64, 1024), form)
        terms = random_terms(self.rng, weights, v=form, u=form, rank=32, max_rank=32)
        self.assertIsNone(self.violation(weights, (terms,), 3, tiles))


class ExpertsTest(KernelTestCase):
    @slow.repeats()
    @parameterized.product(gated=(True, False), pairs=(1, 19))
    def test_pairs_of_an_expert(self, gated, pairs):
        outputs = 64
        matrix_rows = 2 * outputs if gated else outputs
        weights = self.weights((matrix_rows, 512))
        both = random_terms(self.rng, weights, rank=7)
        last = random_terms(self.rng, weights, u=FORMS[3], first_row=matrix_rows - 48, rank=3)
        x = packed_operands.random_activations(self.rng, (pairs, 512), "bfloat16")
        tiles = StreamTiles(1, 2, 2)
        found = mosaic_decode.expert_products(
            x, np.zeros(pairs, np.int32), np.ones(pairs, np.int32), (weights,),
            gating=SWIGLU if gated else None, tiles=tiles, interpret=True, low_rank=((both, last),),
        )  # fmt: skip
        y, slack = packed_operands.product(x, weights, 1, (both, last))
        if gated:
            (gate, up), (gate_slack, up_slack) = np.split(y, 2, axis=1), np.split(slack, 2, axis=1)
            silu = gate / (1 + np.exp(-gate))
            y = silu * up
            slack = 1.1 * gate_slack * (np.abs(up) + up_slack) + np.abs(silu) * up_slack
            slack += 1e-6 * np.abs(y)
        self.assertIsNone(packed_operands.violation(np.asarray(found), y, slack, "bfloat16"))


def a_part_left_out(self, reduce=BlockTerms.reduce):
    """K of the last warp."""
    (placed,) = self.placed
    parts = dataclasses.replace(placed.parts, number=placed.parts.number - 1)
    self.placed = [dataclasses.replace(placed, parts=parts)]
    reduce(self)


def no_row_of_v(self, tile, stage, present, to, row, fetch=Stream.fetch):
    """Tiles of V after the first are taken as zeros."""
    if self.wanted is not None and tile:
        present = self.e.const(0)
    fetch(self, tile, stage, present, to, row)


# Whose function is another one.
BROKEN = (
    (BlockTerms, "reduce", a_part_left_out),
    # A term of another matrix is added; the last one is left out.
    (BlockTerms, "_rank_here", lambda self, term, half, rank: self.e.add(rank, 1)),
    (BlockTerms, "_rank_here", lambda self, term, half, rank: self.e.sub(rank, 1)),
    # Outputs are of the weights alone.
    (BlockTerms, "add", lambda self, total, half, column, row: total),
    # Odd values of U for even ones.
    (PoolColumns, "values", lambda self, place, row, at, values=PoolColumns.values:
     values(self, place, row, at)[::-1]),
    (Stream, "fetch", no_row_of_v),
)  # fmt: skip


class WrongKernelTest(KernelTestCase):
    @slow.repeats()
    @parameterized.parameters(*BROKEN)
    def test_a_wrong_kernel_fails(self, owner, name, broken):
        weights = self.weights((64, 1024))  # a block of K for each warp
        terms = random_terms(self.rng, weights, rank=20, max_rank=32)
        self.assertIsNone(self.violation(weights, (terms,), rows=9))
        with mock.patch.object(owner, name, broken):
            self.assertIsNotNone(self.violation(weights, (terms,), rows=9))
        self.assertIsNone(self.violation(weights, (terms,), rows=9))


def shaped(form: Form, slots: int, rows: int, inputs: int) -> PackedMatrices:
    struct = jax.ShapeDtypeStruct
    made = packed_operands.random_matrices(
        np.random.default_rng(0), form, num_slots=1, shape=(1, inputs), used={0}
    )
    return jax.tree.map(lambda leaf: struct((slots, rows, leaf.shape[2]), leaf.dtype), made)


def shaped_terms(form: Form, slots: int, rows: int, inputs: int, first_row: int = 0) -> LowRank:
    whole = jax.ShapeDtypeStruct((slots,), jnp.int32)
    u, v = (shaped(form, 1, 999, length) for length in (rows, inputs))
    return LowRank(
        u=u, v=v, start=whole, rank=whole, first_row=first_row, max_rank=low_rank_spec.MAX_RANK
    )  # fmt: skip


class SupportTest(parameterized.TestCase):
    @parameterized.product(form=FORMS, factors=FORMS)
    def test_heuristic_tiles_fit_shared_memory(self, form, factors):
        for inputs, outputs in ((4096, 14336), (2048, 768), (14336, 4096)):
            for rows, several in itertools.product((1, 9, 16), (1, 2)):
                weights = shaped(form, 2, outputs, inputs)
                low_rank = (shaped_terms(factors, 2, outputs, inputs),) * several
                x: Any = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
                tiles = mosaic_decode.tiles_of_dense(x, weights, SIMULATED, low_rank)
                share = dense_share(tiles, rows, outputs)
                self.check(tiles, share, weights, low_rank)
            both = shaped(form, 2, 2 * outputs, inputs)
            gate = shaped_terms(factors, 2, outputs, inputs)
            low_rank = (gate, dataclasses.replace(gate, first_row=outputs))
            for tokens in (1, 32):
                x = jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16)
                tiles = mosaic_decode.tiles_of_experts(
                    x, [both], 8 * tokens, True, SIMULATED, [low_rank]
                )  # fmt: skip
                self.check(tiles, expert_share(tiles, True, outputs), both, low_rank)

    def check(self, tiles: StreamTiles, share: Any, weights: PackedMatrices, low_rank: Any) -> None:
        matrix = matrix_of(weights, "bf16")
        each = tile_bytes(matrix)
        room = share.room(low_rank_spec.terms_of(low_rank, "bf16"))
        self.assertLessEqual(tiles.num_warps * tiles.depth * each + room, SHARED_BYTES)
        self.assertEqual(tiles.num_warps % 4, 0)

    def tiles_with(self, form: Form, rank: int, **how: Any) -> StreamTiles:
        """Tiles with V in INT3, groups of 64, a matrix of 14336 x 4096 and one row of x."""
        weights = shaped(form, 2, 14336, 4096)
        terms_of_all = shaped_terms(Form(3, 64), 2, 14336, 4096)
        low_rank = (dataclasses.replace(terms_of_all, max_rank=rank, **how),)
        x: Any = jax.ShapeDtypeStruct((1, 4096), jnp.bfloat16)
        target = SIMULATED._replace(num_processors=132)
        return mosaic_decode.tiles_of_dense(x, weights, target, low_rank)

    def test_v_joins_the_rows_of_a_matrix_of_its_form(self):
        for rank, thin, sharers in ((8, 1, 1), (16, 1, 1), (17, 1, 2), (32, 1, 2), (64, 2, 2)):
            tiles = self.tiles_with(Form(3, 64), rank)
            self.assertEqual((tiles.thin, tiles.sharers), (thin, sharers))
        for form in (Form(3, 128), Form(4, 64)):
            self.assertEqual(self.tiles_with(form, 32).thin, 0)
        self.assertEqual(self.tiles_with(Form(3, 64), 32, first_row=16).thin, 0)

    def test_reasons(self):
        weights = shaped(FORMS[1], 2, 64, 512)
        x: Any = jax.ShapeDtypeStruct((1, 512), jnp.bfloat16)
        right = shaped_terms(FORMS[1], 2, 64, 512)

        def reasons(*low_rank: LowRank) -> list[str]:
            return support.refusals(x, [weights], SIMULATED, [low_rank])

        self.assertEmpty(reasons(right))
        self.assertEmpty(reasons(shaped_terms(Form(16, dtype="bfloat16"), 2, 64, 512)))
        self.assertIn("rank 65, more than 64", reasons(dataclasses.replace(right, max_rank=65))[0])
        self.assertIn("5 low-rank terms of a matrix", reasons(*[right] * 5)[0])
        many = dataclasses.replace(right, u=shaped(FORMS[4], 1, 2**25, 64))
        self.assertIn("U of low-rank terms has 4294967296 bytes", reasons(many)[0])
        plain = shaped_terms(Form(16, dtype="float16"), 2, 64, 512)
        self.assertIn("V of low-rank terms: plain weights are float16", reasons(plain)[0])
        odd = shaped_terms(Form(3, 48), 2, 64, 512)
        self.assertIn("V of low-rank terms: groups of 48", reasons(odd, right)[0])


class ColumnsTest(HostTestCase):
    @slow.repeats()
    @parameterized.product(
        bits=(2, 3, 4, 8, 16), zero_kind=("float", "integer", "symmetric"),
        length=(32, 300, 513, 700), group_size=(48, 33),
    )  # fmt: skip
    def test_every_value_of_some_rows(self, bits, zero_kind, length, group_size):
        """Windows all along the rows, also across their ends."""
        rng, rows = np.random.default_rng(seed(self.id())), 3
        form = Form(bits, group_size, zero_kind, "float32" if length > 400 else "float16")
        form = Form(16, dtype="bfloat16") if bits == 16 else form
        weights = packed_operands.random_matrices(
            rng, form, num_slots=1, shape=(rows, length), used={0}
        )
        leaves = [a for a in (weights.words, weights.scales, weights.zeros) if a is not None]
        buffers = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in leaves]
        shared = np.zeros(1 << 16, np.uint8)
        for first, count in ((-16, 32), (0, 32), (96, 48), (250, 112), (length // 2 * 2 - 4, 16)):
            e = _Simulator(0, 64, [*buffers, shared], len(buffers))
            addresses = [e.address(i) for i in range(len(buffers))]
            matrix = low_rank_spec.addressed(matrix_of(weights, "bf16"), addresses)
            columns = PoolColumns(e, matrix, e.const(first), count)
            at, warp, lane = e.shared_address(len(buffers)), e.threads // 32, e.threads % 32
            columns.start_copy(e.const(1), at, e.const(rows - 1), e.const(rows), warp, 2, lane)
            index = np.minimum(max(0, first) + 2 * (e.threads % (count // 2)), length - 1)
            index = index // 2 * 2
            for r in range(rows - 1):
                place = columns.position_of(index)
                found = columns.values(place, e.const(1 + r), at + r * columns.pitch)
                for half, values in enumerate(found):
                    inside = index + half < min(length, first + count)
                    expected = packed_operands.values(weights, 0)[1 + r]
                    expected = expected[index[inside] + half]
                    np.testing.assert_allclose(values[inside], expected, rtol=1e-5, atol=1e-7)
