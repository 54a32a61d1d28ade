"""Attention of a chunk of new tokens, read straight from the layer-stacked cache."""

from pallas_kernels.chunk_attention.api import OPERATION as OPERATION
from pallas_kernels.chunk_attention.api import chunk_attention as chunk_attention
from pallas_kernels.chunk_attention.tiles import ChunkTiles as ChunkTiles
