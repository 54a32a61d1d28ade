"""Softmax over a router's logits and its k largest, in one launch."""

from pallas_kernels.router_topk.api import OPERATION as OPERATION
from pallas_kernels.router_topk.api import top_k as top_k
