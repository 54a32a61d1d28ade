"""A residual sum and its root-mean-square norm, in one launch."""

from pallas_kernels.residual_norm.api import OPERATION as OPERATION
from pallas_kernels.residual_norm.api import residual_norm as residual_norm
