"""Jobs of the grouped kernels: rows and matrix of a program, found on the device.

Decode: a program belongs to a pair. The first pair of a matrix (and each that comes `columns` pairs
later among those of the matrix) leads and does the work of `columns` of them, so that the matrix is
read once; the other programs end. Prefill: a program takes blocks of `blocks.make_blocks`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.grouped_dequant_matmul.blocks import Blocks
from pallas_kernels.triton.elements import quotient, remainder
from pallas_kernels.triton.product import Columns

Ref = Any


class Pairs(NamedTuple):
    """Tier and slot of the P = T A pairs, flat."""

    tier: jax.Array  # int32[P]
    slot: jax.Array  # int32[P]


class Job(NamedTuple):
    """Pairs of one matrix."""

    tier: jax.Array  # int32[]; outside 0 .. tiers - 1 for pairs that are skipped
    slot: jax.Array  # int32[]
    pairs: jax.Array  # int32[columns]; P or more where masked
    mask: jax.Array  # bool[columns]


def for_each_job(
    source: Pairs | Blocks,
    axis: int,
    columns: int,
    num_pairs: int,
    run: Callable[[Job], None],
    *,
    alone: bool,
) -> None:
    """Runs the jobs of program `pl.program_id(axis)`.

    The last program takes the first pair or block: idle programs then start first.

    Args:
      run: called once, under a condition or in a loop.
      alone: no search for other pairs of the same matrix; for one token.
    """
    programs = pl.num_programs(axis)
    program = programs - 1 - pl.program_id(axis)
    if isinstance(source, Pairs):
        if alone:
            mask = jax.lax.broadcasted_iota(jnp.int32, (columns,), 0) == 0
            pairs = jnp.where(mask, program, num_pairs)
            run(Job(source.tier[program], source.slot[program], pairs, mask))
            return
        job, leads = _pair_job(source, program, columns, num_pairs)
        pl.when(leads)(lambda: run(job))
        return
    places = jax.lax.broadcasted_iota(jnp.int32, (columns,), 0)

    def body(i: Any, carry: Any) -> Any:
        block = program + i * programs
        pairs = source.pairs[block, places]
        run(Job(source.tier[block], source.slot[block], pairs, pairs < num_pairs))
        return carry

    rounds = quotient(source.used[0] - program + programs - 1, programs)
    jax.lax.fori_loop(0, rounds, body, 0)


def _pair_job(
    source: Pairs, program: jax.Array, columns: int, num_pairs: int
) -> tuple[Job, jax.Array]:
    """Job of the pair `program`, and whether it leads."""
    tier, slot = source.tier[program], source.slot[program]
    index = jax.lax.broadcasted_iota(jnp.int32, (1 << (num_pairs - 1).bit_length(),), 0)
    exists = index < num_pairs
    refs: tuple[Ref, Ref] = (source.tier, source.slot)
    tiers, slots = (pltriton.load(ref.at[index], mask=exists, other=-1) for ref in refs)
    same = (exists & (tiers == tier) & (slots == slot)).astype(jnp.int32)
    before = jnp.sum(jnp.where(index < program, same, 0))
    column = jnp.cumsum(same) - 1 - before
    places = jax.lax.broadcasted_iota(jnp.int32, (columns,), 0)
    chosen = (column[None, :] == places[:, None]) & (same[None, :] > 0)
    pairs = jnp.sum(jnp.where(chosen, index[None, :], 0), axis=1)
    mask = places < jnp.sum(same) - before
    # Out of range where masked: in interpret mode a masked store writes back what it has read.
    job = Job(tier, slot, jnp.where(mask, pairs, num_pairs), mask)
    return job, remainder(before, columns) == 0


def gathered_columns(x: Ref, sums: Ref | None, rows: jax.Array, mask: jax.Array) -> Columns:
    """Gathers rows of x [R, K] by index; zero where masked.

    Args:
      sums: ref of float32[G, R], or None.
      rows: int32[columns].
      mask: bool[columns].
    """
    num_inputs = x.shape[1]

    def load(first: Any, count: int) -> jax.Array:
        k = first + jax.lax.broadcasted_iota(jnp.int32, (count,), 0)
        inside = mask[:, None] & (k < num_inputs)[None, :]
        view: Ref = x.at[rows[:, None], k[None, :]]
        return pltriton.load(view, mask=inside, other=0.0)

    def load_sums(group: Any) -> jax.Array:
        assert sums is not None
        return pltriton.load(sums.at[group, rows], mask=mask, other=0.0)

    return Columns(load, None if sums is None else load_sums, x.dtype)
