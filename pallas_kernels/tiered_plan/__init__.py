"""What a layer decides for experts in several tiers: which format serves, who leaves, who comes."""

from pallas_kernels.tiered_plan.api import place as place
from pallas_kernels.tiered_plan.api import refusal as refusal
from pallas_kernels.tiered_plan.operands import Asked as Asked
from pallas_kernels.tiered_plan.operands import Form as Form
from pallas_kernels.tiered_plan.operands import Placed as Placed
from pallas_kernels.tiered_plan.operands import Rule as Rule
from pallas_kernels.tiered_plan.operands import Tier as Tier
from pallas_kernels.tiered_plan.operands import Wishes as Wishes
