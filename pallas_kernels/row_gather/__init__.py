"""Rows of a matrix in host memory, read over the link by indices on the device."""

from pallas_kernels.row_gather.api import OPERATION as OPERATION
from pallas_kernels.row_gather.api import gather_rows as gather_rows
