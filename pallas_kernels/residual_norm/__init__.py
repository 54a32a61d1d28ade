"""A residual sum and its root-mean-square norm, in one launch."""

from pallas_kernels.residual_norm.api import choose as choose
from pallas_kernels.residual_norm.api import refusal as refusal
from pallas_kernels.residual_norm.api import residual_norm as residual_norm
