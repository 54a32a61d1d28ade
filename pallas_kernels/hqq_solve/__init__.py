"""Half-quadratic (HQQ) solve of every group in one pass over the weights."""

from pallas_kernels.hqq_solve.api import HqqSolution as HqqSolution
from pallas_kernels.hqq_solve.api import hqq_solve as hqq_solve
from pallas_kernels.hqq_solve.api import refusal as refusal
from pallas_kernels.hqq_solve.api import steps_until_stop as steps_until_stop
