"""The Mosaic GPU implementation: streaming kernels for few rows, wgmma for many (Hopper)."""

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic_decode, mosaic_prefill
from pallas_kernels.dequant_matmul.low_rank import are_fused, with_terms
from pallas_kernels.dequant_matmul.tiles import Tiles, measured
from pallas_kernels.mosaic_decode.tiles import StreamTiles
from pallas_kernels.mosaic_prefill.tiles import WgmmaTiles
from pallas_kernels.packed import LowRank, PackedMatrices
from pallas_kernels.target import Target
from pallas_kernels.triton import low_rank as triton_low_rank

Operand = jax.Array | jax.ShapeDtypeStruct
# Rows of x up to which the streaming kernel is the faster one.
MOST_STREAMED = 16


def _streams(x: Operand, tiles: Tiles | None) -> bool:
    """Whether streaming kernels run, by the rows of x or by the given tiles."""
    if tiles is None:
        return x.shape[0] <= MOST_STREAMED
    if not isinstance(tiles, StreamTiles | WgmmaTiles):
        raise ValueError(f"{type(tiles).__name__} are tiles of another implementation than mosaic")
    return isinstance(tiles, StreamTiles)


def _fuses(x: Operand, low_rank: tuple[LowRank, ...], tiles: Tiles | None = None) -> bool:
    """Whether the kernel of the product adds the terms: the one for few rows, of small ranks."""
    return not low_rank or (_streams(x, tiles) and are_fused(low_rank))


def refusal(
    x: Operand, weights: PackedMatrices, low_rank: tuple[LowRank, ...], target: Target
) -> str | None:
    """Reason why this implementation refuses, or None."""
    fused = _fuses(x, low_rank)
    if _streams(x, None):
        found = mosaic_decode.refusals(x, [weights], target, [low_rank] if fused else ())
    else:
        found = mosaic_prefill.refusals(x, [weights], target)
        if target.simulated:
            found.append("its kernel for many rows has no interpret mode")
    if not fused:
        found += filter(None, [triton_low_rank.refusal(low_rank)])
    return "; ".join(found) or None


def dequant_matmul_mosaic(
    x: jax.Array,
    weights: PackedMatrices,
    slot: jax.Array,
    low_rank: tuple[LowRank, ...],
    *,
    out_dtype: jnp.dtype,
    target: Target,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Computes `api.dequant_matmul` by Mosaic GPU; terms that are not fused are added apart."""
    if not _fuses(x, low_rank, tiles):
        y = dequant_matmul_mosaic(
            x, weights, slot, (), out_dtype=jnp.dtype(jnp.float32), target=target, tiles=tiles
        )
        return with_terms(y, x, slot, low_rank, out_dtype, target.simulated)
    if tiles is None and not low_rank:
        tiles = measured(x.shape[0], weights, target, (StreamTiles, WgmmaTiles))
    if _streams(x, tiles):
        chosen = tiles if isinstance(tiles, StreamTiles) else None
        return mosaic_decode.dense(
            x, weights, slot, out_dtype,
            chosen or mosaic_decode.tiles_of_dense(x, weights, target, low_rank),
            target.simulated, low_rank,
        )  # fmt: skip
    return mosaic_prefill.dense(
        x, weights, slot, out_dtype, tiles if isinstance(tiles, WgmmaTiles) else None, target
    )
