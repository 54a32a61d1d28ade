"""Plans every byte of a run before anything is allocated; pure arithmetic.

Axes as in `moejax.models.config`, and C slots of each sparse layer that cache experts, B transient
slots that all layers share, R rows of the host store.
"""

from moejax.experts.budget.advice import PINNED_LIMIT as PINNED_LIMIT
from moejax.experts.budget.advice import MachineMemory as MachineMemory
from moejax.experts.budget.advice import unused as unused
from moejax.experts.budget.advice import warnings as warnings
from moejax.experts.budget.limits import BOTH as BOTH
from moejax.experts.budget.limits import GIB as GIB
from moejax.experts.budget.limits import PREFILL as PREFILL
from moejax.experts.budget.limits import BudgetError as BudgetError
from moejax.experts.budget.limits import Limits as Limits
from moejax.experts.budget.limits import check_gib as check_gib
from moejax.experts.budget.limits import check_phase as check_phase
from moejax.experts.budget.limits import default_bulk as default_bulk
from moejax.experts.budget.limits import gib_above as gib_above
from moejax.experts.budget.limits import size_text as size_text
from moejax.experts.budget.planned import LINK_GIB_PER_S as LINK_GIB_PER_S
from moejax.experts.budget.planned import Budget as Budget
from moejax.experts.budget.planned import RunSizes as RunSizes
from moejax.experts.budget.planned import TierBudget as TierBudget
from moejax.experts.budget.planned import TierSize as TierSize
from moejax.experts.budget.planned import describe as describe
from moejax.experts.budget.planned import table_nbytes as table_nbytes
from moejax.experts.budget.tiers import PolicyDemands as PolicyDemands
from moejax.experts.budget.tiers import make_budget as make_budget
from moejax.experts.budget.workspace import workspace_nbytes as workspace_nbytes
