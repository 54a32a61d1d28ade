"""Plans every byte of a run before anything is allocated; pure arithmetic.

Axes as in `moejax.models.config`, and C slots of each sparse layer that cache experts, B transient
slots that all layers share, R rows of the host store.
"""

from moejax.experts.budget.advice import PINNED_LIMIT, Machine, unused, warnings
from moejax.experts.budget.limits import (
    BOTH,
    GIB,
    PHASES,
    PREFILL,
    BudgetError,
    Limits,
    check_gib,
    check_phase,
    default_bulk,
    gib_above,
    size_text,
)
from moejax.experts.budget.planned import Budget, RunSizes, Tier, TierBudget
from moejax.experts.budget.table import describe
from moejax.experts.budget.tables import table_nbytes
from moejax.experts.budget.tiers import PolicyDemands, make_budget
from moejax.experts.budget.workspace import workspace_nbytes

__all__ = [
    "BOTH",
    "GIB",
    "PHASES",
    "PINNED_LIMIT",
    "PREFILL",
    "Budget",
    "BudgetError",
    "Limits",
    "Machine",
    "PolicyDemands",
    "RunSizes",
    "Tier",
    "TierBudget",
    "check_gib",
    "check_phase",
    "default_bulk",
    "describe",
    "gib_above",
    "make_budget",
    "size_text",
    "table_nbytes",
    "unused",
    "warnings",
    "workspace_nbytes",
]
