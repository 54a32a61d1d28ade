"""Contract of every fetch: cases, random operands, the result in numpy, THE check.

A copy is right bit for bit or wrong: arrays hold random bits, NaNs among them, and are compared as
bytes, slots that no job writes included.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_fetch import CopyTiles

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16", "float32")
LARGEST, SMALLEST = 2**31 - 1, -(2**31)

Array = tuple[tuple[int, ...], str]  # shape of a row, dtype


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
