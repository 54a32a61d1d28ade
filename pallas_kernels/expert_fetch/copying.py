"""The loop of a copying program: blocks of all arrays of all jobs, dealt out in turn."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.expert_fetch.tiles import CopyTiles

Ref = Any


def copy_jobs(
    program: jax.Array,
    src_ref: Ref,
    dst_ref: Ref,
    host_refs: Sequence[Ref],
    pool_refs: Sequence[Ref],
    tiles: CopyTiles,
    dealt: jax.Array | int = 0,
) -> jax.Array:
    """What program `program` of `tiles.num_programs` copies.

    Rows are cut into blocks, and the blocks of the live jobs, array by array, go to the programs in
    turn: whichever jobs are skipped, no program has more than one block an array more than another.
    Each element is written by one program, so the result does not depend on their order.

    Returns:
      the blocks dealt out, `dealt` among them, modulo programs: where other stores' jobs go on.
    """
    num_jobs = src_ref.shape[0]
    num_rows, num_slots = host_refs[0].shape[0], pool_refs[0].shape[0]

    def job(j: jax.Array, dealt: jax.Array) -> jax.Array:
        src, dst = src_ref[j], dst_ref[j]
        valid = _valid(src, dst, num_rows, num_slots)

        def run() -> jax.Array:
            again = _written_later(j, dst, src_ref, dst_ref, num_rows, num_slots)
            return jax.lax.cond(again, lambda: dealt, lambda: _copy_job(src, dst, dealt))

        def _copy_job(src: jax.Array, dst: jax.Array, dealt: jax.Array) -> jax.Array:
            for host_ref, pool_ref in zip(host_refs, pool_refs, strict=True):
                dealt = _copy_row(src, dst, host_ref, pool_ref, program, dealt, tiles)
            return dealt

        return jax.lax.cond(valid, run, lambda: dealt)

    return jax.lax.fori_loop(0, num_jobs, job, jnp.int32(dealt))


def _valid(src: jax.Array, dst: jax.Array, num_rows: int, num_slots: int) -> jax.Array:
    return (src >= 0) & (src < num_rows) & (dst >= 0) & (dst < num_slots)


def _written_later(
    j: jax.Array, dst: jax.Array, src_ref: Ref, dst_ref: Ref, num_rows: int, num_slots: int
) -> jax.Array:
    """Whether a valid job after j has its slot: all programs then leave j out, and none races."""
    num_jobs = src_ref.shape[0]
    lanes = jax.lax.iota(jnp.int32, power_of_two_above(num_jobs))
    inside = lanes < num_jobs
    all_src = pltriton.load(src_ref.at[lanes], mask=inside, other=-1)
    all_dst = pltriton.load(dst_ref.at[lanes], mask=inside, other=-1)
    found = _valid(all_src, all_dst, num_rows, num_slots) & (all_dst == dst) & (lanes > j)
    return jnp.max(found.astype(jnp.int32)) > 0


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
    block = min(tiles.block_bytes // pool_ref.dtype.itemsize, power_of_two_above(length))
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


def power_of_two_above(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
