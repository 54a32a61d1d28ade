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
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.mosaic_decode.low_rank_spec import MAX_RANK
from pallas_kernels.packed import LowRank, low_rank_factors
from pallas_kernels.triton import low_rank as triton_low_rank
from pallas_kernels.triton import product as triton_product
from pallas_kernels.triton.elements import power_above
from pallas_kernels.triton.product import columns_of

Ref = Any
MAX_FEW_ROWS = triton_low_rank.MAX_SPLIT_COLUMNS  # of x
THIN_ROWS = 32  # of x, that a program of the thin products holds
U_OUTPUTS = 64  # of a program of U
U_TILES = 4  # of the rank, that a program of U adds; more programs fill the device
NUM_WARPS = 2


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
    thin = thin_products(x, slot, low_rank, interpret)
    most = max(terms.max_rank for terms in low_rank)
    parts = -(-most // (U_TILES * triton_low_rank.TILE))
    num_rows, num_outputs = y.shape
    block_m = max(8, power_above(num_rows))
    leaves, treedef = jax.tree.flatten((slot, low_rank, thin))
    terms = launch.triton_call(
        functools.partial(_u_body, treedef=treedef, block_m=block_m, interpret=interpret),
        name=f"dequant_matmul_u_{low_rank[0].u.describe().replace(' ', '_')}_m{block_m}",
        grid=(-(-num_outputs // U_OUTPUTS), -(-num_rows // block_m), parts),
        out_shape=jax.ShapeDtypeStruct((parts, num_rows, num_outputs), jnp.float32),
        num_warps=NUM_WARPS,
        num_stages=2,
        interpret=interpret,
    )(*leaves)
    return (y + jnp.sum(terms, axis=0)).astype(out_dtype)


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
    rows_m = triton_product.indices(m, block_m)
    rows_r = triton_product.indices(tile, triton_low_rank.TILE)

    def store(acc: jax.Array) -> None:
        view = out_ref.at[part, rows_m[:, None], rows_r[None, :]]
        mask = jnp.broadcast_to((rows_m < x_ref.shape[0])[:, None], acc.T.shape)
        pltriton.store(view, acc.T, mask=mask)

    triton_low_rank.thin_products(
        columns_of(x_ref, None, rows_m), low_rank, slot_ref[()], tile, part, out_ref.shape[0],
        num_columns=block_m, store=store, interpret=interpret,
    )  # fmt: skip


def _u_body(*refs: Ref, treedef: Any, block_m: int, interpret: bool) -> None:
    """Program (n, m, part of the rank) computes a tile of U (V x)."""
    slot_ref, low_rank, thin_ref = treedef.unflatten(refs[:-1])
    out_ref = refs[-1]
    num_rows, num_outputs = out_ref.shape[1:]
    n, m, part = (pl.program_id(axis) for axis in range(3))
    rows_m = triton_product.indices(m, block_m)
    outputs = triton_product.indices(n, U_OUTPUTS)
    acc = triton_low_rank.add_terms(
        jnp.zeros((U_OUTPUTS, block_m), jnp.float32), low_rank, slot_ref[()], outputs, thin_ref,
        rows_m, rows_m < num_rows, within=(n * U_OUTPUTS, (n + 1) * U_OUTPUTS), interpret=interpret,
        tiles=(part * U_TILES, U_TILES),
    )  # fmt: skip
    mask = (rows_m < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    pltriton.store(out_ref.at[part, rows_m[:, None], outputs[None, :]], acc.T, mask=mask)
