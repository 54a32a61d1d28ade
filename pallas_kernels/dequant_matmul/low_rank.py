"""Low-rank terms of a matrix in launches of their own, beside its product.

Few rows of x take two Triton kernels, V x and U times that, which read packed factors in place.
Many rows take two of XLA's products with factors that are dequantized to x's dtype beforehand:
unpacking them once a call costs less than once a tile of rows.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch, layout
from pallas_kernels.mosaic_decode.low_rank_spec import MAX_RANK
from pallas_kernels.packed import LowRank, low_rank_factors
from pallas_kernels.triton import low_rank as triton_low_rank
from pallas_kernels.triton.elements import (
    Int,
    block_values,
    element_values,
    iota,
    power_above,
)
from pallas_kernels.triton.product import columns_of

Ref = Any
MAX_FEW_ROWS = triton_low_rank.MAX_SPLIT_COLUMNS  # of x
THIN_ROWS = 32  # of x, that a program of the thin products holds
NUM_WARPS = 2
# Programs of U at most, unless it has more blocks: enough to fill a device, and their parts of the
# sum take little memory.
U_PROGRAMS = 512


def are_fused(low_rank: Sequence[LowRank]) -> bool:
    """Whether ranks are small enough for the kernel of the product, which holds all of V x."""
    return all(terms.max_rank <= MAX_RANK for terms in low_rank)


def with_terms(
    y: jax.Array,
    x: jax.Array,
    slot: jax.Array,
    low_rank: tuple[LowRank, ...],
    out_dtype: jnp.dtype,
    interpret: bool,
) -> jax.Array:
    """Adds x (U V)^T of one matrix's terms to y, [M, N] in `out_dtype`."""
    if x.shape[0] > MAX_FEW_ROWS:
        return _by_xla(y, x, slot, low_rank).astype(out_dtype)
    num_rows, num_outputs = y.shape
    thin = thin_products(x, slot, low_rank, interpret)
    block_m = max(8, power_above(num_rows))
    num_blocks = sum(map(_num_blocks, low_rank))
    most = -(-max(terms.max_rank for terms in low_rank) // triton_low_rank.TILE)
    tiles = -(-most // max(1, U_PROGRAMS // (num_blocks * max(1, block_m // 16))))
    is_there, spans = _parts_of(low_rank, tiles * triton_low_rank.TILE, num_outputs)
    leaves, treedef = jax.tree.flatten((slot, low_rank, thin))
    parts = launch.triton_call(
        functools.partial(
            _u_body, treedef=treedef, spans=spans, tiles=tiles, block_m=block_m, interpret=interpret
        ),
        name=f"dequant_matmul_u_{low_rank[0].u.describe().replace(' ', '_')}_m{block_m}",
        grid=(num_blocks, max(map(len, spans))),
        out_shape=jax.ShapeDtypeStruct((len(is_there), num_rows, num_outputs), jnp.float32),
        num_warps=2 * NUM_WARPS,
        num_stages=1,
        interpret=interpret,
    )(*leaves)
    if not is_there.all():
        parts = jnp.where(is_there[:, None], parts, 0.0)
    return (y + jnp.sum(parts, axis=0)).astype(out_dtype)


def _parts_of(
    low_rank: Sequence[LowRank], ranks: int, num_outputs: int
) -> tuple[np.ndarray, list[range]]:
    """Says which parts of the sum an output has, bool[parts, N], and which are each term's.

    A part is of `ranks` ranks; terms of the same outputs have parts after each other.
    """
    is_there, spans = np.zeros((0, num_outputs), bool), []
    for terms in low_rank:
        rows = slice(terms.first_row, terms.first_row + terms.num_rows)
        first = int(np.flatnonzero(is_there[:, rows].any(axis=1)).max(initial=-1)) + 1
        spans.append(range(first, first + -(-terms.max_rank // ranks)))
        more = max(0, spans[-1].stop - len(is_there))
        is_there = np.pad(is_there, ((0, more), (0, 0)))
        is_there[first : spans[-1].stop, rows] = True
    return is_there, spans


def _num_blocks(terms: LowRank) -> int:
    return -(-terms.num_rows // layout.BLOCK)


def _by_xla(
    y: jax.Array, x: jax.Array, slot: jax.Array, low_rank: tuple[LowRank, ...]
) -> jax.Array:
    """Adds the terms to float32[M, N]; factors and V x are rounded to x's dtype."""
    times = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    for terms in low_rank:
        u, v = (part.astype(x.dtype) for part in low_rank_factors(terms, slot))
        thin = times("mk,rk->mr", x, v).astype(x.dtype)
        rows = slice(terms.first_row, terms.first_row + terms.num_rows)
        y = y.at[:, rows].add(times("mr,rn->mn", thin, u))
    return y


def thin_products(
    x: jax.Array, slot: jax.Array, low_rank: tuple[LowRank, ...], interpret: bool
) -> jax.Array:
    """Computes x V^T, float32[parts, M, R'] (`pallas_kernels.triton.low_rank`)."""
    num_rows = x.shape[0]
    block_m = min(THIN_ROWS, max(8, power_above(num_rows)))
    parts = triton_low_rank.thin_parts(low_rank, num_rows)
    rows = triton_low_rank.thin_rows(low_rank)
    leaves, treedef = jax.tree.flatten((x, slot, low_rank))
    return launch.triton_call(
        functools.partial(_thin_body, treedef=treedef, block_m=block_m, interpret=interpret),
        name=f"dequant_matmul_thin_{low_rank[0].v.describe().replace(' ', '_')}_m{block_m}",
        grid=(rows // triton_low_rank.TILE, -(-num_rows // block_m), parts),
        out_shape=jax.ShapeDtypeStruct((parts, num_rows, rows), jnp.float32),
        num_warps=NUM_WARPS,
        num_stages=2,
        interpret=interpret,
    )(*leaves)


def _thin_body(*refs: Ref, treedef: Any, block_m: int, interpret: bool) -> None:
    """Program (tile of V, m, part of K) computes a thin product."""
    x_ref, slot_ref, low_rank = treedef.unflatten(refs[:-1])
    out_ref = refs[-1]
    tile, m, part = (pl.program_id(axis) for axis in range(3))
    rows_m = m * block_m + iota(block_m)
    rows_r = tile * triton_low_rank.TILE + iota(triton_low_rank.TILE)

    def store(acc: jax.Array) -> None:
        view = out_ref.at[part, rows_m[:, None], rows_r[None, :]]
        mask = jnp.broadcast_to((rows_m < x_ref.shape[0])[:, None], acc.T.shape)
        pltriton.store(view, acc.T, mask=mask)

    triton_low_rank.thin_products(
        columns_of(x_ref, None, rows_m), low_rank, slot_ref[()], tile, part, out_ref.shape[0],
        num_columns=block_m, store=store, interpret=interpret,
    )  # fmt: skip


def _u_body(
    *refs: Ref, treedef: Any, spans: Sequence[range], tiles: int, block_m: int, interpret: bool
) -> None:
    """Program (block of a term's outputs, part of the rank) computes a part of U (V x)."""
    slot_ref, low_rank, thin_ref = treedef.unflatten(refs[:-1])
    out_ref, slot = refs[-1], slot_ref[()]
    block, part = pl.program_id(0), pl.program_id(1)
    columns, first = iota(block_m), 0
    is_column = columns < out_ref.shape[1]

    def add(terms: LowRank, block: Int, first: int, first_part: int, *, is_short: bool) -> None:
        outputs = block * layout.BLOCK + iota(layout.BLOCK)

        def values(rows: jax.Array) -> jax.Array:
            if is_short or layout.BLOCK % terms.u.group_size:
                inside = jnp.minimum(outputs, terms.num_rows - 1)
                return element_values(terms.u, 0, rows[:, None], inside[None])
            return block_values(terms.u, 0, rows, block)

        acc = jnp.zeros((layout.BLOCK, block_m), jnp.float32)
        for i in range(tiles):
            acc = triton_low_rank.add_tile(
                acc, terms, slot, part * tiles + i, values, thin_ref, first, columns, is_column,
                interpret=interpret,
            )  # fmt: skip
        place = (terms.first_row + outputs)[None]
        mask = is_column[:, None] & (outputs < terms.num_rows)[None]
        pltriton.store(out_ref.at[first_part + part, columns[:, None], place], acc.T, mask=mask)

    for terms, span in zip(low_rank, spans, strict=True):
        count, is_short = _num_blocks(terms), terms.num_rows % layout.BLOCK != 0
        run = functools.partial(add, terms, block, first, span.start)
        is_here = (block >= 0) & (part < len(span))
        pl.when(is_here & (block < count - is_short))(functools.partial(run, is_short=False))
        if is_short:
            pl.when(is_here & (block == count - 1))(functools.partial(run, is_short=True))
        block, first = block - count, first + triton_low_rank.thin_rows([terms])
