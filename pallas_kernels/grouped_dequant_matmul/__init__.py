"""Experts of a MoE layer with packed weights: gate, up and SwiGLU; down and weighted combine."""

from pallas_kernels.assignments import Assignments as Assignments
from pallas_kernels.assignments import Turn as Turn
from pallas_kernels.grouped_dequant_matmul.api import OPERATION as OPERATION
from pallas_kernels.grouped_dequant_matmul.api import moe_products as moe_products
from pallas_kernels.grouped_dequant_matmul.reference import combine as combine
