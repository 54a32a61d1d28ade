"""Pallas-Triton implementation for Ampere, Ada, Hopper and Blackwell; the portable one.

One launch; few plain outputs go by one of its own (`RowTiles`). One more each where K is split over
programs (XLA adds the parts, in order), where there are low-rank terms (x V^T comes first), and at
prefill of packed weights (sums of x over groups). Terms of large ranks are added apart, by
`low_rank`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.dequant_matmul.low_rank import are_fused, thin_products, with_terms
from pallas_kernels.dequant_matmul.tiles import (
    RowTiles,
    Tiles,
    TritonTiles,
    triton_tiles,
)
from pallas_kernels.packed import PLAIN_BITS, LowRank, PackedMatrices, with_scale_pairs
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton import low_rank as triton_low_rank
from pallas_kernels.triton import product as triton_product
from pallas_kernels.triton.elements import iota, power_above
from pallas_kernels.triton.product import Span, columns_of

Ref = Any


def refusal(
    x: Any, weights: PackedMatrices, low_rank: tuple[LowRank, ...], target: Target
) -> str | None:
    """Reason why this implementation refuses, or None."""
    del x
    reasons = [platform_refusal(target), triton_product.refusal(weights)]
    reasons.append(triton_low_rank.refusal(low_rank))
    return "; ".join(filter(None, reasons)) or None


def _body(*refs: Ref, treedef: Any, tiles: TritonTiles, interpret: bool) -> None:
    """Program (n, m, s) computes a tile of one part of the sum over K."""
    x_ref, sums_ref, slot_ref, weights, low_rank, thin_ref = treedef.unflatten(refs[:-1])
    out_ref, slot = refs[-1], slot_ref[()]
    n, m, s = (pl.program_id(axis) for axis in range(3))
    rows_m = m * tiles.block_m + iota(tiles.block_m)
    rows_n = triton_product.rows_from(n * tiles.block_n, tiles.block_n, weights.num_outputs)
    steps = triton_product.num_steps(weights, tiles.step)
    is_last = s == tiles.split_k - 1
    (acc,) = triton_product.product(
        columns_of(x_ref, sums_ref, rows_m), weights, slot, [rows_n],
        Span(*triton_product.split(steps, tiles.split_k, s), is_last),
        num_columns=tiles.block_m, step=tiles.step, interpret=interpret,
    )  # fmt: skip
    mask_m = rows_m < x_ref.shape[0]
    if low_rank:
        acc = triton_low_rank.add_terms(
            acc, low_rank, slot, rows_n, thin_ref, rows_m, mask_m & is_last,
            within=(n * tiles.block_n, (n + 1) * tiles.block_n), interpret=interpret,
        )  # fmt: skip
    outputs = n * tiles.block_n + iota(tiles.block_n)
    mask = mask_m[:, None] & (outputs < weights.num_outputs)[None, :]
    view = out_ref.at[s, rows_m[:, None], outputs[None, :]]
    pltriton.store(view, acc.T.astype(out_ref.dtype), mask=mask)


def _rows_body(x_ref: Ref, slot_ref: Ref, words_ref: Ref, out_ref: Ref, *, tiles: RowTiles) -> None:
    """Program (n, m) computes whole products of some rows, in an order independent of M."""
    (num_rows, num_inputs), num_outputs = x_ref.shape, words_ref.shape[1]
    n, m, slot = pl.program_id(0), pl.program_id(1), slot_ref[()]
    k = iota(power_above(num_inputs))
    outputs = n * tiles.block_n + iota(tiles.block_n)
    is_output, is_input = outputs < num_outputs, k < num_inputs
    w = pltriton.load(
        words_ref.at[slot, outputs[:, None], k[None]],
        mask=is_output[:, None] & is_input[None], other=0.0,
    ).astype(jnp.float32)  # fmt: skip
    for i in range(tiles.block_m):
        row = m * tiles.block_m + i
        is_row = row < num_rows
        x = pltriton.load(x_ref.at[row, k], mask=is_input & is_row, other=0.0).astype(jnp.float32)
        y = jnp.sum(w * x[None], axis=1)
        pltriton.store(out_ref.at[row, outputs], y.astype(out_ref.dtype), mask=is_output & is_row)


def _by_rows(
    x: jax.Array, weights: PackedMatrices, slot: jax.Array, out_dtype: jnp.dtype, tiles: RowTiles,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """Computes [M, N] in `out_dtype`; one launch."""
    num_rows, num_outputs = x.shape[0], weights.num_outputs
    return launch.triton_call(
        functools.partial(_rows_body, tiles=tiles),
        name=f"dequant_matmul_{weights.describe().replace(' ', '_')}_{tiles.describe()}",
        grid=(-(-num_outputs // tiles.block_n), -(-num_rows // tiles.block_m)),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_outputs), out_dtype),
        num_warps=tiles.num_warps,
        num_stages=1,
        interpret=interpret,
    )(x, slot, weights.words)


def dequant_matmul_triton(
    x: jax.Array,
    weights: PackedMatrices,
    slot: jax.Array,
    low_rank: tuple[LowRank, ...],
    *,
    out_dtype: jnp.dtype,
    target: Target,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Computes `api.dequant_matmul` by Triton."""
    interpret = target.simulated
    if tiles is None:
        tiles = triton_tiles(x.shape[0], weights, target, has_terms=bool(low_rank))
    if isinstance(tiles, RowTiles):
        if weights.bits != PLAIN_BITS or low_rank:
            raise ValueError(f"tiles {tiles.describe()} are of plain weights without terms")
        return _by_rows(x, weights, slot, out_dtype, tiles, interpret)
    if not isinstance(tiles, TritonTiles):
        raise ValueError(f"tiles {tiles} are not Triton's")
    tiles.check(weights)
    num_rows, num_outputs = x.shape[0], weights.num_outputs
    apart: tuple[LowRank, ...] = ()
    if not are_fused(low_rank):
        apart, low_rank = low_rank, ()
    thin = thin_products(x, slot, low_rank, interpret) if low_rank else None
    sums = None
    if tiles.block_m > 32 and (size := triton_product.sum_size(weights, tiles.step)):
        sums = triton_product.sums_of(x, size)
    paired = with_scale_pairs(weights)
    leaves, treedef = jax.tree.flatten((x, sums, slot, paired, low_rank, thin))
    whole = tiles.split_k == 1
    out = launch.triton_call(
        functools.partial(_body, treedef=treedef, tiles=tiles, interpret=interpret),
        name=f"dequant_matmul_{weights.describe().replace(' ', '_')}_{tiles.describe()}",
        grid=(-(-num_outputs // tiles.block_n), -(-num_rows // tiles.block_m), tiles.split_k),
        out_shape=jax.ShapeDtypeStruct(
            (tiles.split_k, num_rows, num_outputs),
            out_dtype if whole and not apart else jnp.float32,
        ),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(*leaves)
    y = out[0] if whole else jnp.sum(out, axis=0)
    return with_terms(y, x, slot, apart, out_dtype, interpret) if apart else y.astype(out_dtype)
