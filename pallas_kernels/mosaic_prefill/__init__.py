"""Products of many rows with packed weights unpacked in registers (Mosaic GPU, Hopper's wgmma)."""

from pallas_kernels.mosaic_prefill.dense import dense as dense
from pallas_kernels.mosaic_prefill.dense import refusals as refusals
from pallas_kernels.mosaic_prefill.grouped import gate_up as gate_up
from pallas_kernels.mosaic_prefill.grouped import layer as layer
from pallas_kernels.mosaic_prefill.grouped import products as products
