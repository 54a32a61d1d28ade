"""The Pallas-Triton kernel: one launch for all jobs and all arrays."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.expert_fetch.tiles import ALONE, CopyTiles
from pallas_kernels.op import byte_pairs, offset_refusal
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton.elements import power_above

Ref = Any
Operand = jax.Array | jax.ShapeDtypeStruct

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16", "float32")


class _JobLanes(NamedTuple):
    """Jobs of one store in a program: vectors over lanes, empty beyond the last job."""

    src: jax.Array  # int32, rows
    dst: jax.Array  # int32, slots
    valid: jax.Array  # bool, to be copied
    num: jax.Array  # int32[], how many are


def refusal(pools: Sequence[Operand], hosts: Sequence[Operand], target: Target) -> str | None:
    """Reason why this implementation refuses, or None."""
    reasons = [platform_refusal(target)]
    for pool, host in zip(map(byte_pairs, pools), map(byte_pairs, hosts), strict=True):
        if jnp.dtype(pool.dtype).name not in DTYPES:
            reasons.append(f"an array is {pool.dtype}, none of {', '.join(DTYPES)}")
        reasons += map(offset_refusal, (pool, host))
    return "; ".join(filter(None, reasons)) or None


class Copies(NamedTuple):
    """Jobs between one store and its pool; see `api.fetch`."""

    pools: Sequence[jax.Array]  # of each array [S, ...]
    hosts: Sequence[jax.Array]  # of each array [R, ...]
    src: jax.Array  # int32[J]
    dst: jax.Array  # int32[J]


def fetch_triton(
    copies: Sequence[Copies],
    after: Sequence[jax.Array] = (),
    *,
    tiles: CopyTiles | None = None,
    target: Target,
) -> list[tuple[jax.Array, ...]]:
    """Computes `api.fetch` by Triton; one launch."""
    tiles = tiles or ALONE
    sizes = [len(of.pools) for of in copies]
    given = [pool for of in copies for pool in of.pools]
    num, pools = len(given), list(map(byte_pairs, given))
    read = [x for of in copies for x in (of.src, of.dst, *map(byte_pairs, of.hosts))]

    def body(*refs: Ref) -> None:
        inputs, outputs, dealt, stores = iter(refs), iter(refs[-num:]), jnp.int32(0), []
        for size in sizes:
            src_ref, dst_ref, *host_refs = itertools.islice(inputs, 2 + size)
            pool_refs = list(itertools.islice(outputs, size))
            jobs = _load_jobs(src_ref, dst_ref, host_refs[0], pool_refs[0])
            stores.append((jobs, host_refs, pool_refs))
        for store in stores:
            dealt = _copy_jobs(pl.program_id(0), *store, tiles, dealt)

    jobs = "_".join(f"{len(of.pools)}x{of.src.shape[0]}" for of in copies)
    filled = launch.triton_call(
        body,
        name=f"expert_fetch_{jobs}_{tiles.num_programs}x{tiles.block_bytes}",
        grid=(tiles.num_programs,),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        num_warps=tiles.num_warps,
        num_stages=1,
        interpret=target.simulated,
        aliases={len(read) + len(after) + i: i for i in range(num)},
    )(*read, *after, *pools)
    found = (
        new if new.shape == old.shape
        else jax.lax.bitcast_convert_type(new, old.dtype).reshape(old.shape)
        for new, old in zip(filled, given, strict=True)
    )  # fmt: skip
    return [tuple(itertools.islice(found, size)) for size in sizes]


def _load_jobs(src_ref: Ref, dst_ref: Ref, host_ref: Ref, pool_ref: Ref) -> _JobLanes:
    """The jobs between arrays [R, ...] and [S, ...]; of all stores before any is copied."""
    lanes = jax.lax.iota(jnp.int32, power_above(src_ref.shape[0]))
    src, dst = _load(src_ref, lanes), _load(dst_ref, lanes)
    valid = _valid(src, dst, host_ref.shape[0], pool_ref.shape[0])
    return _JobLanes(src, dst, valid, jnp.sum(valid.astype(jnp.int32)))


def _copy_jobs(
    program: jax.Array,
    jobs: _JobLanes,
    host_refs: Sequence[Ref],
    pool_refs: Sequence[Ref],
    tiles: CopyTiles,
    dealt: jax.Array | int = 0,
) -> jax.Array:
    """Copies the share of program `program` of `tiles.num_programs`.

    Rows are cut into blocks, and the blocks of the live jobs, array by array, go to the programs in
    turn: whichever jobs are skipped, no program has more than one block an array more than another.
    Each element is written by one program, so the result does not depend on their order.

    Returns:
      the blocks dealt out, `dealt` among them, modulo programs: where other stores' jobs go on.
    """
    lanes = jax.lax.iota(jnp.int32, len(jobs.src))

    def job(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Copies the next valid job: most of a list is padding if caching pays."""
        last, dealt = carry
        this = jnp.min(jnp.where(jobs.valid & (lanes > last), lanes, len(lanes)))
        row, slot = _of_lane(jobs.src, lanes == this), _of_lane(jobs.dst, lanes == this)

        def run() -> jax.Array:
            found = dealt
            for host_ref, pool_ref in zip(host_refs, pool_refs, strict=True):
                found = _copy_row(row, slot, host_ref, pool_ref, program, found, tiles)
            return found

        again = _is_any(_written_later(jobs, slot, lanes > this))
        return this, jax.lax.cond(again, lambda: dealt, run)

    return jax.lax.fori_loop(0, jobs.num, job, (jnp.int32(-1), jnp.int32(dealt)))[1]


def _load(ref: Ref, lanes: jax.Array) -> jax.Array:
    """All of a vector, -1 beyond its end."""
    return pltriton.load(ref.at[lanes], mask=lanes < ref.shape[0], other=-1)


def _of_lane(values: jax.Array, lane: jax.Array) -> jax.Array:
    """The one value, not negative, where `lane` is set."""
    return jnp.max(jnp.where(lane, values, -1))


def _is_any(mask: jax.Array) -> jax.Array:
    return jnp.max(mask.astype(jnp.int32)) > 0


def _valid(src: jax.Array, dst: jax.Array, num_rows: int, num_slots: int) -> jax.Array:
    return (src >= 0) & (src < num_rows) & (dst >= 0) & (dst < num_slots)


def _written_later(jobs: _JobLanes, slot: jax.Array, after: jax.Array) -> jax.Array:
    """Valid jobs after one that have its slot: all programs then leave that out, and none races."""
    return jobs.valid & after & (jobs.dst == slot)


def _copy_row(
    src: jax.Array,
    dst: jax.Array,
    host_ref: Ref,
    pool_ref: Ref,
    program: jax.Array,
    dealt: jax.Array,
    tiles: CopyTiles,
) -> jax.Array:
    """Copies this program's blocks of one row; returns the blocks dealt out, modulo programs."""
    row_shape = pool_ref.shape[1:]
    length = math.prod(row_shape)
    block = min(tiles.block_bytes // pool_ref.dtype.itemsize, power_above(length))
    num_blocks, programs = -(-length // block), tiles.num_programs
    first = jax.lax.rem(program + programs - dealt, jnp.int32(programs))
    mine = jax.lax.div(num_blocks - first + (programs - 1), jnp.int32(programs))

    def copy(i: jax.Array, carry: jax.Array) -> jax.Array:
        place = (first + i * programs) * block + jax.lax.iota(jnp.int32, block)
        # A row that blocks divide needs no mask, and its loads stay wide whatever its shape.
        mask = None if length % block == 0 else place < length
        index = _unravel(place, row_shape)
        # The store's line is read once; the slot's may be a product's next operand.
        source = host_ref.at[(src, *index)]
        values = pltriton.load(source, mask=mask, eviction_policy="evict_first")
        pltriton.store(pool_ref.at[(dst, *index)], values, mask=mask)
        return carry

    jax.lax.fori_loop(0, mine, copy, jnp.int32(0))
    return jax.lax.rem(dealt + num_blocks, jnp.int32(programs))


def _unravel(place: jax.Array, shape: Sequence[int]) -> tuple[jax.Array, ...]:
    """Indices of a place in a row-major array; beyond its end, of a place outside it.

    Truncating divisions by constants: Triton sees through them that neighbours stay neighbours.
    """
    indices: list[jax.Array] = []
    for size in reversed(shape[1:]):
        indices.append(jax.lax.rem(place, jnp.full_like(place, size)))
        place = jax.lax.div(place, jnp.full_like(place, size))
    if shape:
        indices.append(place)
    return tuple(reversed(indices))
