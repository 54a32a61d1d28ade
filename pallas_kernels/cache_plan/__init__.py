"""The cache's rule: which slots the experts of a layer run from, and which are fetched."""

from pallas_kernels.cache_plan.api import PLAN as PLAN
from pallas_kernels.cache_plan.api import plan as plan
from pallas_kernels.cache_plan.api import predict as predict
from pallas_kernels.cache_plan.operands import Asked as Asked
from pallas_kernels.cache_plan.operands import Fetch as Fetch
from pallas_kernels.cache_plan.operands import LayerPlan as LayerPlan
from pallas_kernels.cache_plan.operands import Rule as Rule
from pallas_kernels.cache_plan.operands import SharedBase as SharedBase
from pallas_kernels.cache_plan.operands import Tables as Tables
from pallas_kernels.cache_plan.operands import TierOperands as TierOperands
from pallas_kernels.cache_plan.operands import TierShape as TierShape
from pallas_kernels.cache_plan.operands import Wishes as Wishes
from pallas_kernels.cache_plan.operands import num_waves as num_waves
from pallas_kernels.cache_plan.reference import resolve_tiers as resolve_tiers
from pallas_kernels.cache_plan.reference import servable as servable
from pallas_kernels.cache_plan.shared_slots import resident_planes as resident_planes
