"""Low-rank terms in Triton: thin products x V^T by one launch, U in the epilogue of the main one.

The thin products lie in float32 [parts, M, R'], where the terms of a matrix follow each other, each
padded to a multiple of `TILE`; parts are those of K, added in order where they are used.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import layout
from pallas_kernels.packed import LowRank
from pallas_kernels.triton import product as triton_product
from pallas_kernels.triton.elements import Int, element_values, iota
from pallas_kernels.triton.product import Columns, Span

Ref = Any
MAX_SPLIT_COLUMNS = 32
TILE = 32  # rows of V a program multiplies; a multiple of what a dot takes


def refusal(low_rank: Sequence[LowRank]) -> str | None:
    """Reason why terms of these forms cannot be added, or None."""
    reasons = [triton_product.refusal(terms.v) for terms in low_rank]
    return "; ".join(f"V: {reason}" for reason in dict.fromkeys(filter(None, reasons))) or None


def thin_rows(low_rank: Sequence[LowRank]) -> int:
    """Number R' of padded ranks of one matrix's terms."""
    return sum(_padded(terms) for terms in low_rank)


def thin_parts(low_rank: Sequence[LowRank], num_jobs: int) -> int:
    """Parts of K: few enough to add in every program, enough to fill the device.

    Args:
      num_jobs: columns of x, or blocks of them.
    """
    if num_jobs > MAX_SPLIT_COLUMNS:
        return 1
    blocks = min(terms.v.num_inputs for terms in low_rank) // layout.BLOCK
    return max(1, min(8, blocks // 2))


def thin_products(
    columns: Columns,
    low_rank: Sequence[LowRank],
    slot: Int,  # int32[]
    tile: Int,  # int32[], of R' / TILE
    part: Int,  # int32[], of `parts`
    parts: int,
    *,
    num_columns: int,
    store: Any,  # called with float32[TILE, columns]
    interpret: bool,
) -> None:
    """Program (tile, part) multiplies `TILE` rows of V by x over a part of K."""
    first_tile, step = 0, layout.BLOCK
    for terms in low_rank:
        num_tiles = _padded(terms) // TILE
        local = tile - first_tile
        steps = triton_product.split(triton_product.num_steps(terms.v, step), parts, part)
        span = Span(*steps, part == parts - 1)

        def run(terms: LowRank = terms, local: Int = local, span: Span = span) -> None:
            start = terms.start[slot] + local * TILE
            rows = triton_product.rows_from(start, TILE, terms.v.num_outputs)
            [acc] = triton_product.product(
                columns, terms.v, 0, [rows], span,
                num_columns=num_columns, step=step, interpret=interpret,
            )  # fmt: skip
            store(acc)

        pl.when((local >= 0) & (local * TILE < terms.rank[slot]) & (local < num_tiles))(run)
        first_tile += num_tiles


def add_tile(
    acc: jax.Array,  # float32[rows, columns]
    terms: LowRank,
    slot: Int,
    tile: Int,  # of the rank
    values: Callable[[jax.Array], jax.Array],  # float32[TILE, rows], at rows of U's pool
    thin: Ref,
    first: Int,  # row of `thin` of the term's first rank
    columns: jax.Array,  # int32[columns], rows of `thin`
    columns_mask: jax.Array,  # bool[columns]
    *,
    is_met: bool | jax.Array = True,
    interpret: bool,
) -> jax.Array:
    """Adds U (V x) of one term and `TILE` of its ranks to `acc`, if the matrix has any of them."""
    rank = terms.rank[slot]

    def add(acc: jax.Array) -> jax.Array:
        r = tile * TILE + iota(TILE)
        used = r < rank
        u = jnp.where(used[:, None], values(terms.start[slot] + jnp.where(used, r, 0)), 0.0)
        mask = columns_mask[:, None] & used[None, :]
        total = jnp.zeros((columns.shape[0], TILE), jnp.float32)
        for part in range(thin.shape[0]):
            view = thin.at[part, columns[:, None], (first + r)[None, :]]
            total = total + pltriton.load(view, mask=mask, other=0.0)
        # Three products of bfloat16 parts: what they drop is 2^-16 of the term.
        three = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3
        precision = jax.lax.Precision.HIGHEST if interpret else three
        return acc + pltriton.dot(u.T, total.T, precision=precision)

    return jax.lax.cond(is_met & (tile * TILE < rank), add, lambda acc: acc, acc)


def add_terms(
    acc: jax.Array,  # float32[rows, columns]
    low_rank: Sequence[LowRank],
    slot: Int,
    rows: jax.Array,  # int32[rows], outputs of the tile
    thin: Ref,
    columns: jax.Array,  # int32[columns], rows of `thin`
    columns_mask: jax.Array,  # bool[columns]
    *,
    # first .. last of the tile's outputs, or of all such tiles; terms of others are passed over.
    within: tuple[Int, Int],
    interpret: bool,
) -> jax.Array:
    """Adds U (V x) to `acc`: the epilogue of a tile."""

    def with_term(
        acc: jax.Array, terms: LowRank, first: int, is_met: bool | jax.Array
    ) -> jax.Array:
        local = rows - terms.first_row
        inside = (local >= 0) & (local < terms.num_rows)
        local = jnp.clip(local, 0, terms.num_rows - 1)

        def values(pool_rows: jax.Array) -> jax.Array:
            # As they lie in memory: neighbouring threads then read neighbouring words.
            u = element_values(terms.u, 0, pool_rows[:, None], local[None, :])
            return jnp.where(inside[None, :], u, 0.0)

        # Not a loop: Triton would keep several of its turns in shared memory.
        for tile in range(_padded(terms) // TILE):
            acc = add_tile(
                acc, terms, slot, tile, values, thin, first, columns, columns_mask, is_met=is_met,
                interpret=interpret,
            )  # fmt: skip
        return acc

    first = 0
    for terms in low_rank:
        is_met = (within[0] < terms.first_row + terms.num_rows) & (terms.first_row < within[1])
        if is_met is not False:
            acc = with_term(acc, terms, first, is_met)
        first += _padded(terms)
    return acc


def _padded(terms: LowRank) -> int:
    return math.ceil(terms.max_rank / TILE) * TILE
