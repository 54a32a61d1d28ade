"""The contract of the fetch kernel: reference, interpreted, compiled without a GPU and on one.

A copy is right bit for bit or wrong: arrays hold random bits, NaNs among them, and are compared as
bytes, slots that no job writes included.
"""

import functools
import re
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import expert_fetch as package
from pallas_kernels import op
from pallas_kernels.expert_fetch import CopyJob, CopyTiles, api, triton
from pallas_kernels.target import Target
from tests import gpu_targets, slow
from tests.host_test_case import HostTestCase
from tests.kernel_contract import one_program_fewer, tampered

H100 = gpu_targets.GPUS["H100"]
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16", "float32")
LARGEST, SMALLEST = 2**31 - 1, -(2**31)

Array = tuple[tuple[int, ...], str]  # shape of a row, dtype


def fetch(pools: Any, hosts: Any, src: Any, dst: Any, **how: Any) -> Any:
    (found,) = package.fetch([CopyJob(pools, hosts, src, dst)], **how)
    return found


class Case(NamedTuple):
    """One fetch; without `jobs`, `num_jobs` are drawn, a quarter of them to be skipped."""

    arrays: tuple[Array, ...] = (((6, 24), "uint32"), ((6, 5), "float16"), ((6, 5), "uint8"))
    slots: int = 9
    rows: int = 7
    num_jobs: int = 5
    jobs: tuple[tuple[int, int], ...] | None = None  # (src, dst)
    tiles: CopyTiles | None = None


SMALL_BLOCKS = CopyTiles(num_programs=3, block_bytes=64, num_warps=4)
CASES = {
    **{f"row_of_33_{dtype}": Case((((33,), dtype),), tiles=SMALL_BLOCKS) for dtype in DTYPES},
    **{f"jobs_{num}": Case(num_jobs=num, slots=80) for num in (1, 2, 3, 17, 64)},
    "one_element": Case((((1,), "uint32"), ((1,), "uint8"))),
    "one_row_one_slot": Case(slots=1, rows=1, jobs=((0, 0),)),
    "three_axes": Case((((2, 3, 7), "float32"), ((5, 1, 1), "bfloat16")), tiles=SMALL_BLOCKS),
    "whole_blocks": Case((((8, 16), "uint32"),), tiles=SMALL_BLOCKS),
    "a_block_and_one": Case((((17,), "uint32"),), tiles=SMALL_BLOCKS),
    "one_program": Case(tiles=CopyTiles(1, 64, 4)),
    "more_programs_than_blocks": Case(tiles=CopyTiles(64, 4096, 4)),
    "all_skipped": Case(jobs=((-1, 0), (0, -1), (7, 0), (0, 9), (-1, -1)), tiles=SMALL_BLOCKS),
    "ends_of_the_range": Case(
        jobs=((0, 0), (6, 8), (LARGEST, 1), (1, LARGEST), (SMALLEST, 2), (2, SMALLEST)),
        tiles=SMALL_BLOCKS,
    ),
    "the_last_of_a_slot": Case(jobs=((0, 4), (1, 4), (5, 3), (2, 4), (6, 3)), tiles=SMALL_BLOCKS),
    "the_last_that_is_not_skipped": Case(
        jobs=((0, 4), (1, 4), (-1, 4), (7, 4), (3, 5)), tiles=SMALL_BLOCKS
    ),
    "a_row_twice": Case(jobs=((3, 0), (3, 8), (3, 5))),
}
# Words, scales and zeros of an expert's gate and up, and of its down; INT4 group 64.
QWEN3 = (
    ((1536, 256), "uint32"), ((1536, 32), "float16"), ((1536, 32), "float16"),
    ((2048, 96), "uint32"), ((2048, 12), "float16"), ((2048, 12), "float16"),
)  # fmt: skip
MIXTRAL = (((28672, 512), "uint32"), ((28672, 64), "float16"), ((28672, 64), "uint8"))
GPU_CASES = {
    **CASES,
    "qwen3_30b": Case(QWEN3, slots=24, rows=32, num_jobs=8),
    "mixtral": Case(MIXTRAL, slots=3, rows=4, num_jobs=2),
    "many_jobs": Case(QWEN3, slots=80, rows=24, num_jobs=64),
}


class Operands(NamedTuple):
    """Arguments of `fetch`, on the host; an array of each leaf."""

    pools: tuple[np.ndarray, ...]
    hosts: tuple[np.ndarray, ...]
    src: np.ndarray
    dst: np.ndarray


def random_operands(case: Case, seed: int) -> Operands:
    """Fresh operands of random bits."""
    rng = np.random.default_rng(seed)

    def bits(count: int) -> tuple[np.ndarray, ...]:
        shapes = [((count, *row), jnp.dtype(dtype)) for row, dtype in case.arrays]
        return tuple(
            one_nan(np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype)).reshape(
                shape
            )
            for shape, dtype in shapes
        )

    jobs = case.jobs
    if jobs is None:
        src = rng.integers(0, case.rows, case.num_jobs)
        dst = rng.integers(0, case.slots, case.num_jobs)
        src[rng.random(case.num_jobs) < 0.25] = -1
        jobs = tuple(zip(src, dst, strict=True))
    src, dst = np.asarray(jobs, np.int32).T.copy()
    return Operands(bits(case.slots), bits(case.rows), src, dst)


def one_nan(array: np.ndarray) -> np.ndarray:
    """With one NaN for all: XLA on a CPU takes bf16 through float32, and their payloads go."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(array), array.dtype.type(np.nan), array)


def expected(operands: Operands) -> tuple[np.ndarray, ...]:
    """The pools afterwards: job after job."""
    pools = tuple(pool.copy() for pool in operands.pools)
    for pool, host in zip(pools, operands.hosts, strict=True):
        for src, dst in zip(operands.src.tolist(), operands.dst.tolist(), strict=True):
            if 0 <= src < len(host) and 0 <= dst < len(pool):
                pool[dst] = host[src]
    return pools


def violation(found: Any, operands: Operands) -> str | None:
    """Describes the first fault of the pools after a fetch; None if there is none."""
    wanted = expected(operands)
    if len(found) != len(wanted):
        return f"{len(found)} arrays, expected {len(wanted)}"
    for i, (pool, right) in enumerate(zip(found, wanted, strict=True)):
        pool = np.asarray(pool)
        if (pool.shape, pool.dtype) != (right.shape, right.dtype):
            return f"array {i} is {pool.dtype}{pool.shape}, expected {right.dtype}{right.shape}"
        wrong = as_bytes(pool) != as_bytes(right)
        if wrong.any():
            slots = sorted(set(np.nonzero(wrong)[0].tolist()))
            return f"array {i}: {wrong.sum()} bytes differ, in slots {slots}"
    return None


def as_bytes(array: np.ndarray) -> np.ndarray:
    """uint8[slots, bytes of a slot]."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)


def in_plain_jnp(operands: Operands, case: Case) -> tuple[jax.Array, ...]:
    del case
    return jax.jit(functools.partial(fetch, implementation="reference"))(*operands)


def in_memory(arrays: Any, kind: str) -> Any:
    device = jax.devices()[0]
    return jax.device_put(arrays, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))


def interpreted(operands: Operands, case: Case) -> tuple[jax.Array, ...]:
    """Traced anew at each call, so that a kernel may be tampered with."""
    run = functools.partial(fetch, implementation="triton", tiles=case.tiles, interpret=True)
    return jax.jit(run)(*operands)


class ContractTest(HostTestCase):
    @slow.repeats(lambda run, name: name if run is in_plain_jnp else run)
    @parameterized.product(run=(in_plain_jnp, interpreted), name=sorted(CASES))
    def test_pools_are_those_of_numpy(self, run, name):
        operands = random_operands(CASES[name], seed=len(name))
        self.assertIsNone(violation(run(operands, CASES[name]), operands))

    def test_the_reference_reads_a_store_in_host_memory(self):
        operands = random_operands(Case(), seed=1)
        placed = operands._replace(hosts=in_memory(operands.hosts, "pinned_host"))
        self.assertIsNone(violation(in_plain_jnp(placed, Case()), operands))

    @pytest.mark.skipif(
        jax.__version_info__ < (0, 11, 2),
        reason="before jax 0.11.2 the interpreter takes no operand in host memory",
    )
    def test_the_interpreted_kernel_reads_a_store_in_host_memory(self):
        operands = random_operands(Case(), seed=2)
        placed = operands._replace(hosts=in_memory(operands.hosts, "pinned_host"))
        self.assertIsNone(violation(interpreted(placed, Case()), operands))

    @slow.repeats()
    @parameterized.product(
        how=("reference", "triton"), sizes=(("one_element", "jobs_17"), ("whole_blocks",) * 3)
    )
    def test_several_stores_in_one_launch(self, how, sizes):
        cases = [CASES[name] for name in sizes]
        given = [random_operands(case, seed) for seed, case in enumerate(cases)]
        call, launched = triton.launch.triton_call, []

        def counted(*args: Any, **more: Any) -> Any:
            launched.append(more["name"])
            return call(*args, **more)

        with mock.patch.object(triton.launch, "triton_call", counted):
            found = package.fetch(
                [CopyJob(*operands) for operands in given],
                implementation=how, tiles=SMALL_BLOCKS, interpret=how == "triton",
            )  # fmt: skip
        self.assertLen(launched, how == "triton")
        for pools, operands in zip(found, given, strict=True):
            self.assertIsNone(violation(pools, operands))

    def test_of_several_stores_one_without_jobs(self):
        given = [random_operands(Case(), seed) for seed in (5, 6)]
        given[0] = given[0]._replace(src=given[0].src[:0], dst=given[0].dst[:0])
        found = package.fetch(
            [CopyJob(*operands) for operands in given], implementation="triton", interpret=True
        )
        for pools, operands in zip(found, given, strict=True):
            self.assertIsNone(violation(pools, operands))

    def test_no_jobs(self):
        operands = random_operands(Case(), seed=4)
        none = operands._replace(src=operands.src[:0], dst=operands.dst[:0])
        for run in (in_plain_jnp, interpreted):
            self.assertIsNone(violation(run(none, Case()), none))


def without_the_last_part(copy_row, src, dst, host, pool, program, dealt, tiles):  # type: ignore[no-untyped-def]
    whole = mock.Mock(dtype=pool.dtype, at=pool.at, shape=(*pool.shape[:1], 16))
    return copy_row(src, dst, host, whole, program, dealt, tiles)


# What the kernel gets wrong, and a case that shows it.
BROKEN = {
    "one program too few": (
        tampered(interpreted, triton.launch, "triton_call", one_program_fewer), "three_axes"
    ),
    "the next row": (
        lambda of, case: interpreted(of._replace(src=of.src + np.int32(1)), case), "a_row_twice"
    ),
    "earlier jobs too": (
        tampered(interpreted, triton, "_written_later", lambda *_: jnp.bool_(False)),
        "the_last_of_a_slot",
    ),
    "no check of the range": (
        tampered(interpreted, triton, "_valid", lambda _, src, *__: src == src), "all_skipped"
    ),
    "without the last part": (
        tampered(interpreted, triton, "_copy_row", without_the_last_part), "a_block_and_one"
    ),
}  # fmt: skip


class BrokenKernelTest(HostTestCase):
    @slow.repeats()
    @parameterized.parameters(*BROKEN)
    def test_fails(self, name):
        broken, case = BROKEN[name]
        operands = random_operands(CASES[case], seed=5)
        self.assertIsNotNone(violation(broken(operands, CASES[case]), operands))


class RefusalTest(parameterized.TestCase):
    def shapes(self, count: int, *arrays: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct((count, *row), dtype) for row, dtype in arrays)

    def test_the_choice(self):
        pools, hosts = self.shapes(16, *QWEN3), self.shapes(6144, *QWEN3)
        self.assertEqual(package.choose(pools, hosts, H100.target).describe(), "triton")
        for target, said in (
            (Target("cpu", None), "it runs on GPUs, this is cpu"),
            (Target("gpu", (7, 5)), "needs sm_80, this is gpu sm_75"),
        ):
            choice = package.choose(pools, hosts, target)
            self.assertEqual(choice.implementation, "reference")
            self.assertIn(said, choice.describe())

    def test_every_reason_is_listed(self):
        row = ((2**20,), "int8"), ((4,), "complex64")
        shapes = self.shapes(4, *row), self.shapes(3000, *row)
        reason = api.OPERATION.refusal("triton", *shapes, target=Target("cpu", None))
        self.assertLen(reason.split("; "), 3)
        for part in ("runs on GPUs", "complex64, none of uint8", "2 to 4 Gi elements"):
            self.assertIn(part, reason)

    @parameterized.parameters(
        ("pools", lambda a: (a[0], a[0]), "stores PyTreeDef"),
        ("pools", lambda a: (a[0][:, 1:],), "do not fit slots"),
        ("pools", lambda a: (a[0].astype(np.uint8),), "a pool is uint8, its store uint32"),
        ("src", lambda a: a.astype(np.int64), "src is int64"),
        ("dst", lambda a: a[1:], r"dst is int32\(4,\)"),
    )
    def test_operands_that_do_not_fit(self, name, change, said):
        operands = random_operands(Case((((4,), "uint32"),)), seed=10)
        changed = operands._replace(**{name: change(getattr(operands, name))})
        with self.assertRaisesRegex(ValueError, said):
            fetch(*changed)

    def test_arrays_of_different_lengths(self):
        operands = random_operands(Case(), seed=11)
        hosts = (operands.hosts[0][1:], *operands.hosts[1:])
        with self.assertRaisesRegex(ValueError, "stores of 6, 7, 7 rows"):
            fetch(operands.pools, hosts, *operands[2:])

    def test_implementations(self):
        operands = random_operands(Case(), seed=12)
        with self.assertRaisesRegex(ValueError, "'cuda' is none of triton, reference"):
            fetch(*operands, implementation="cuda")
        with (
            mock.patch.object(op, "current_target", lambda: Target("cpu", None)),
            self.assertRaisesRegex(ValueError, "triton refuses: it runs on GPUs"),
        ):
            fetch(*operands, implementation="triton")


COPY = r"= \S+ copy(-start)?\("


def abstract(num_slots: int, num_rows: int, num_jobs: int) -> Operands:
    def shapes(count: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct((count, *row), dtype) for row, dtype in QWEN3)

    index = jax.ShapeDtypeStruct((num_jobs,), jnp.int32)
    return Operands(shapes(num_slots), shapes(num_rows), index, index)


class LoweringTest(parameterized.TestCase):
    """The program for CUDA, made without a GPU."""

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(op, "current_target", lambda: H100.target))

    def test_one_launch_and_nothing_else(self):
        with gpu_targets.described(H100):
            traced = jax.jit(fetch, donate_argnums=0).trace(*abstract(2048, 6144, 8))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        operations = re.findall(r"= stablehlo\.(\w+)", text)
        self.assertEqual(operations, ["custom_call"])
        self.assertIn("expert_fetch_6x8_128x16384", text)
        aliased = re.findall(r"output_operand_alias<output_tuple_indices = \[(\d+)\]", text)
        self.assertEqual(aliased, [*"012345"])
        donated = re.findall(r"tf\.aliasing_output = (\d+)", text)
        self.assertEqual(donated, [*"012345"])


@functools.partial(jax.jit, donate_argnums=0, static_argnames="tiles")
def compiled(pools: Any, hosts: Any, src: Any, dst: Any, tiles: CopyTiles | None = None) -> Any:
    return fetch(pools, hosts, src, dst, implementation="triton", tiles=tiles)


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    """The kernel compiled, the store in pinned host memory."""

    @parameterized.product(name=sorted(GPU_CASES), kind=("pinned_host", "device"))
    def test_pools_are_those_of_numpy(self, name, kind):
        case = GPU_CASES[name]
        operands = random_operands(case, seed=len(name))
        hosts = in_memory(operands.hosts, kind)
        for _ in range(2):  # the same bits every time
            pools = in_memory(operands.pools, "device")
            places = [pool.unsafe_buffer_pointer() for pool in pools]
            found = compiled(pools, hosts, *operands[2:], tiles=case.tiles)
            self.assertIsNone(violation(found, operands))
            self.assertEqual([pool.unsafe_buffer_pointer() for pool in found], places)
            self.assertTrue(all(pool.is_deleted() for pool in pools))

    @parameterized.parameters("qwen3_30b", "mixtral")  # bytes, which are seen two by two, too
    def test_the_compiled_step_has_no_temporary_and_no_copy(self, name):
        operands = random_operands(GPU_CASES[name], seed=13)
        placed = operands._replace(
            pools=in_memory(operands.pools, "device"),
            hosts=in_memory(operands.hosts, "pinned_host"),
        )
        program = compiled.lower(*placed).compile()
        memory = program.memory_analysis()
        self.assertEqual(memory.alias_size_in_bytes, sum(pool.nbytes for pool in operands.pools))
        # The outputs' addresses, if any: a pool would be larger.
        self.assertLessEqual(memory.temp_size_in_bytes, 8 * len(operands.pools))
        self.assertEqual(memory.host_temp_size_in_bytes, 0)
        self.assertEqual(
            memory.host_argument_size_in_bytes, sum(host.nbytes for host in operands.hosts)
        )
        self.assertNotRegex(program.as_text(), COPY)

    @pytest.mark.gpu(gib=20)
    def test_arrays_beyond_four_gib(self):
        length, slots = 2**20, 1100  # of 4 MiB

        @jax.jit
        def numbered(offset: jax.Array) -> jax.Array:
            row = jax.lax.broadcasted_iota(jnp.uint32, (slots, length), 0)
            return row * jnp.uint32(7) + offset

        pool, host = numbered(jnp.uint32(0)), numbered(jnp.uint32(1))
        src, dst = jnp.asarray([1099, 1, 1030], jnp.int32), jnp.asarray([1099, 1098, 0], jnp.int32)
        [found] = compiled((pool,), (host,), src, dst)
        wanted = np.arange(slots, dtype=np.uint32) * 7
        wanted[np.asarray(dst)] = np.asarray(src) * 7 + 1
        np.testing.assert_array_equal(jnp.min(found, axis=1), wanted)
        np.testing.assert_array_equal(jnp.max(found, axis=1), wanted)
