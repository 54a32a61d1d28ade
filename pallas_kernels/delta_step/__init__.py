"""One token of each sequence through a gated delta rule, its state changed in place."""

from pallas_kernels.delta_step.api import OPERATION as OPERATION
from pallas_kernels.delta_step.api import delta_step as delta_step
from pallas_kernels.delta_step.reference import DeltaWeights as DeltaWeights
from pallas_kernels.delta_step.reference import Projection as Projection
