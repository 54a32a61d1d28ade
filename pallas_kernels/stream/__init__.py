"""Products of few rows with packed weights that stream through shared memory (Mosaic GPU)."""

import jax

from pallas_kernels.packed import PackedMatrices
from pallas_kernels.stream.dense import dense as dense
from pallas_kernels.stream.experts import expert_products as expert_products
from pallas_kernels.stream.matrix import matrix_of
from pallas_kernels.stream.support import KINDS
from pallas_kernels.stream.support import refusals as refusals
from pallas_kernels.stream.tiles import StreamTiles, dense_tiles, expert_tiles
from pallas_kernels.target import Target


def tiles_of_dense(x: jax.Array, weights: PackedMatrices, target: Target) -> StreamTiles:
    """The heuristic tiles of a product with one matrix."""
    matrix = matrix_of(weights, KINDS[x.dtype.name])
    return dense_tiles(matrix, x.shape[0], target.num_processors)


def tiles_of_experts(
    x: jax.Array, tiers: list[PackedMatrices], num_pairs: int, gated: bool, target: Target
) -> StreamTiles:
    """The heuristic tiles of a product of `num_pairs` pairs; x is [tokens, K]."""
    matrices = [matrix_of(weights, KINDS[x.dtype.name]) for weights in tiers]
    width = num_pairs // x.shape[0]
    return expert_tiles(matrices, x.shape[0], width, gated, target.num_processors)
