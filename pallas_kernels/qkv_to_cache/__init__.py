"""From a token's query, key and value products to rotated queries and the cache, in one launch."""

from pallas_kernels.qkv_to_cache.api import OPERATION as OPERATION
from pallas_kernels.qkv_to_cache.api import qkv_to_cache as qkv_to_cache
from pallas_kernels.qkv_to_cache.reference import HeadNorms as HeadNorms
