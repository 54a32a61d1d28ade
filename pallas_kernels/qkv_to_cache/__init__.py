"""Splits a token's qkv product into rotated queries and cache writes, in one launch."""

from pallas_kernels.qkv_to_cache.api import OPERATION as OPERATION
from pallas_kernels.qkv_to_cache.api import qkv_to_cache as qkv_to_cache
from pallas_kernels.qkv_to_cache.reference import HeadNorms as HeadNorms
