"""What a step decides for the experts of a layer: who is in which slot, who leaves, who comes."""

from pallas_kernels.residency_plan.api import plan as plan
from pallas_kernels.residency_plan.api import predict as predict
from pallas_kernels.residency_plan.api import refusal as refusal
from pallas_kernels.residency_plan.operands import Fetch as Fetch
from pallas_kernels.residency_plan.operands import Placed as Placed
from pallas_kernels.residency_plan.operands import Tables as Tables
from pallas_kernels.residency_plan.operands import Waves as Waves
