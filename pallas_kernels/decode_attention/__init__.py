"""Attention of one new token of each sequence, read straight from the layer-stacked cache."""

from pallas_kernels.decode_attention.api import OPERATION as OPERATION
from pallas_kernels.decode_attention.api import decode_attention as decode_attention
from pallas_kernels.decode_attention.reference import Latent as Latent
from pallas_kernels.decode_attention.tiles import AttentionTiles as AttentionTiles
