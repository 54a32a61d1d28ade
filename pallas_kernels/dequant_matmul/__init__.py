"""x W^T with packed weights: INT2, INT3, INT4, INT8 or plain, with low-rank terms."""

from pallas_kernels.dequant_matmul.api import OPERATION as OPERATION
from pallas_kernels.dequant_matmul.api import dequant_matmul as dequant_matmul
