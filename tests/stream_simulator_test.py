"""The simulator of the streaming kernels, against definitions written out here.

What the contracts accept of a simulated kernel says nothing if the simulator is wrong.
"""

from fractions import Fraction

import numpy as np
from absl.testing import parameterized

from pallas_kernels.testing.simulator import KINDS, _Simulator, run_blocks
from tests.packed_operands import seed

THREADS = 64  # two warps
MANTISSA = {"bf16": 7, "f16": 10}
LEAST_EXPONENT = {"bf16": -126, "f16": -14}  # of normal numbers


def machine(*memory: np.ndarray, shared: int = 0, threads: int = THREADS) -> _Simulator:
    """A block whose last `shared` buffers are shared memory; arrays are seen, not copied."""
    buffers = [array.reshape(-1).view(np.uint8) for array in memory]
    return _Simulator(0, threads, buffers, len(buffers) - shared)


def words_of(values: np.ndarray) -> np.ndarray:
    """int64[...] of pairs [..., 2] in a 16-bit type, the first in the low half."""
    return np.ascontiguousarray(values).view(np.uint32)[..., 0].astype(np.int64)


def halves_of(word: np.ndarray, kind: str) -> np.ndarray:
    """The other way round, in float64."""
    raw = np.asarray(word).astype(np.uint32).reshape(-1, 1)
    return raw.view(KINDS[kind]).astype(np.float64)


def rounded(value: Fraction, kind: str) -> float:
    """To the nearest, of two as near to the even one; without overflow."""
    if value == 0:
        return 0.0
    exponent = LEAST_EXPONENT[kind]
    while Fraction(2) ** (exponent + 1) <= abs(value):
        exponent += 1
    unit = Fraction(2) ** (exponent - MANTISSA[kind])
    return float(round(value / unit) * unit)


class InstructionsTest(parameterized.TestCase):
    """Threads of two warps, so that what belongs to a warp does not leak to the other."""

    def setUp(self):
        super().setUp()
        self.rng = np.random.default_rng(seed(self.id()))

    @parameterized.parameters("bf16", "f16")
    def test_mma_multiplies_fragments_of_the_ptx_isa(self, kind):
        a = self.rng.standard_normal((2, 16, 16)).astype(KINDS[kind])
        b = self.rng.standard_normal((2, 16, 8)).astype(KINDS[kind])
        c = self.rng.standard_normal((2, 16, 8)).astype(np.float32)
        of_a = np.empty((4, THREADS, 2), KINDS[kind])
        of_b = np.empty((2, THREADS, 2), KINDS[kind])
        of_c = np.empty((4, THREADS), np.float32)
        expected = np.empty((4, THREADS))
        sums = np.einsum("wik,wkj->wij", a.astype(np.float64), b.astype(np.float64)) + c
        # PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
        for thread in range(THREADS):
            warp, lane = divmod(thread, 32)
            group, number = lane >> 2, lane % 4
            for i in range(8):
                row = group if i < 2 or 4 <= i < 6 else group + 8
                column = number * 2 + (i & 1) + (0 if i < 4 else 8)
                of_a[i // 2, thread, i % 2] = a[warp, row, column]
            for i in range(4):
                row = number * 2 + (i & 1) + (0 if i < 2 else 8)
                of_b[i // 2, thread, i % 2] = b[warp, row, group]
            for i in range(4):
                row, column = group if i < 2 else group + 8, number * 2 + (i & 1)
                of_c[i, thread] = c[warp, row, column]
                expected[i, thread] = sums[warp, row, column]
        found = machine().mma(kind, words_of(of_a), words_of(of_b), of_c)
        self.assertLen(found, 4)
        for value, want in zip(found, expected, strict=True):
            self.assertEqual(value.dtype, np.float32)
            np.testing.assert_array_equal(value, want.astype(np.float32))

    @parameterized.parameters("bf16", "f16")
    def test_fma_pair_rounds_once(self, kind):
        a, b, c = (self.rng.standard_normal((THREADS, 2)).astype(KINDS[kind]) for _ in range(3))
        # 289 / 256 lies halfway between two bfloat16, the even one below. A little more must go
        # up; rounded to float32 on the way it would not.
        a[0], b[0], c[0] = 17 / 16, 17 / 16, (2.0**-30, 0)
        a[1], b[1], c[1] = 65 / 64, 17 / 16, (2.0**-24, -(2.0**-24))
        a[2], b[2], c[2] = 17 / 16, 17 / 16, (-(2.0**-30), 2.0**-20)
        e = machine()
        found = halves_of(e.fma_pair(kind, words_of(a), words_of(b), words_of(c)), kind)
        for at in np.ndindex(a.shape):
            exact = [Fraction(float(part[at])) for part in (a, b, c)]
            self.assertEqual(found[at], rounded(exact[0] * exact[1] + exact[2], kind), at)

    def test_ballot_is_of_the_active_lanes_of_a_warp(self):
        condition, active = (self.rng.random(THREADS) < 0.5 for _ in range(2))
        e = machine()
        found = []
        e.when(active, lambda: found.append(e.ballot(condition)))
        for thread in range(THREADS):
            first = thread // 32 * 32
            lanes = (condition & active)[first : first + 32]
            self.assertEqual(found[0][thread], sum(1 << i for i in range(32) if lanes[i]))
        self.assertEqual(e.count_ones(found[0])[0], (condition & active)[:32].sum())

    def test_a_loop_runs_as_often_as_each_thread_asks(self):
        e = machine()
        sums = e.loop(e.threads, 10, 3, [0], lambda i, held: [e.add(held[0], i)])[0]
        for thread in range(THREADS):
            self.assertEqual(sums[thread], sum(range(thread, 10, 3)))
        self.assertTrue(e.active.all())

    def test_only_active_threads_store(self):
        memory = np.zeros(THREADS, np.uint32)
        e = machine(memory)
        at = e.offset(e.address(0), e.threads, 4)
        e.when(e.compare(e.threads, "ge", 40), lambda: e.store(at, 0, e.threads, "b32"))
        np.testing.assert_array_equal(memory, np.where(np.arange(THREADS) < 40, 0, np.arange(64)))


class MemoryTest(parameterized.TestCase):
    def test_what_is_beyond_or_not_aligned_is_an_error(self):
        e = machine(np.zeros(16, np.uint32), np.zeros(4, np.uint32), shared=1, threads=32)
        at, shared = e.address(0), e.shared_address(1)
        e.load(at, 48, 4)
        for refused in (
            lambda: e.load(at, 52, 4),
            lambda: e.load(at, 64, 1),
            lambda: e.load(e.offset(at, e.threads, 4), 0, 1),
            lambda: e.load_shared(shared, 16),
            lambda: e.load_shared_words(shared, 8, 4),
            lambda: e.store(at, 64, 0, "b32"),
            lambda: e.store_shared(shared, 16, 0, "b32"),
            lambda: e.copy_async(shared, 8, at, 0, 1, 16),
            lambda: e.copy_async(shared, 0, at, 56, 1, 16),
        ):
            with self.assertRaises(IndexError):
                refused()

    def test_scratch_is_nan_in_every_block(self):
        seen = np.zeros(4, np.float32)

        def body(e, out, scratch):
            at, shared = (
                e.offset(e.address(out), e.special("ctaid.x"), 4),
                e.shared_address(scratch),
            )
            first = e.compare(e.special("tid.x"), "eq", 0)
            e.when(first, lambda: e.store(at, 0, e.load_shared(shared, 0), "f32"))
            e.store_shared(shared, 0, 1.0)

        run_blocks(body, 4, 32, [], [seen], [8])
        self.assertTrue(np.isnan(seen).all())

    def test_blocks_of_a_cluster_reach_each_other(self):
        threads, cluster = 32, 4
        seen = np.zeros((2 * cluster, threads), np.float32)

        def body(e, out, first, scratch):
            del first
            block, thread = e.special("ctaid.x"), e.special("tid.x")
            mine = e.add(e.shared_address(scratch), e.mul(thread, 4))
            e.store_shared(mine, 0, e.byte_to_f32(e.add(e.mul(block, threads), thread), 0))
            e.cluster_arrive()
            e.cluster_wait()
            place = e.add(e.mul(block, threads), thread)
            total = e.load_cluster(mine, 1, 0)
            total = e.fadd(total, e.fmul(e.load_shared(mine, 0), 1000.0))
            e.store(e.offset(e.address(out), place, 4), 0, total, "f32")

        run_blocks(body, 2, threads, [], [seen], [8, threads], cluster)
        own = np.arange(2 * cluster * threads).reshape(2 * cluster, threads)
        peer = own[[1] * cluster + [1 + cluster] * cluster]
        np.testing.assert_array_equal(seen, 1000.0 * own + peer)

    def test_a_barrier_that_some_threads_miss_is_an_error(self):
        e = machine()
        with self.assertRaises(AssertionError):
            e.when(e.compare(e.threads, "lt", 32), e.block_barrier)
