"""Products of few rows with packed weights that stream through shared memory (Mosaic GPU)."""

from collections.abc import Sequence

import jax

from pallas_kernels.mosaic_decode.dense import dense as dense
from pallas_kernels.mosaic_decode.experts import expert_products as expert_products
from pallas_kernels.mosaic_decode.low_rank_spec import terms_of
from pallas_kernels.mosaic_decode.matrix import matrix_of
from pallas_kernels.mosaic_decode.support import KINDS
from pallas_kernels.mosaic_decode.support import refusals as refusals
from pallas_kernels.mosaic_decode.tiles import StreamTiles, dense_tiles, expert_tiles
from pallas_kernels.packed import LowRank, PackedMatrices
from pallas_kernels.target import Target


def tiles_of_dense(
    x: jax.Array, weights: PackedMatrices, target: Target, low_rank: Sequence[LowRank] = ()
) -> StreamTiles:
    """Chooses tiles for a product with one matrix."""
    kind = KINDS[x.dtype.name]
    terms = terms_of(low_rank, kind)
    return dense_tiles(matrix_of(weights, kind), x.shape[0], target.num_processors, terms)


def tiles_of_experts(
    x: jax.Array,
    tiers: list[PackedMatrices],
    num_pairs: int,
    gated: bool,
    target: Target,
    low_rank: Sequence[Sequence[LowRank]] = (),
) -> StreamTiles:
    """Chooses tiles for a product of `num_pairs` pairs; x is [tokens, K]."""
    kind = KINDS[x.dtype.name]
    matrices = [matrix_of(weights, kind) for weights in tiers]
    terms = [terms_of(of_tier, kind) for of_tier in low_rank]
    width = num_pairs // x.shape[0]
    return expert_tiles(matrices, x.shape[0], width, gated, target.num_processors, terms)
