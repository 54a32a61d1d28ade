"""Section `dymoe`: the rows of DyMoE's Table 3 under budgets of device memory.

XLA_CLIENT_MEM_FRACTION keeps JAX to a budget from outside; the peak stands beside the plan.
"""

from collections.abc import Callable

from moejax.experts.budget import BOTH, PREFILL, Budget
from moejax.experts.cache import ExpertMemory
from moejax.policies.dymoe import DyMoE
from scripts.studies.speed.harness import Measured, Run

RETENTION = 0.75
Planned = tuple[Callable[[], ExpertMemory], Budget]  # maker of a memory, and its plan


def dymoe(run: Run) -> None:
    """DyMoE's Table 3 under each budget."""
    for gib in run.options.gibs or (16.0, 24.0):
        _table_3(run, gib)


def _table_3(run: Run, gib: float) -> None:
    width, work = run.lab.config.experts_per_token, run.workload()
    rows: dict[str, Measured] = {}
    table: dict[str, Callable[[], Planned]] = {
        "load on demand": lambda: _plain(run, gib, (0,), 0),
        "cache": lambda: _plain(run, gib, (), 0),
        "cache, prefetch": lambda: _plain(run, gib, (), width),
        "cache, 4/2": lambda: quantized(run, gib, "", 0),
        "cache, 4/2, prefetch": lambda: quantized(run, gib, "", -1),
        "cache, 4/0, prefetch": lambda: quantized(run, gib, "skip", -1),
        # Look-ahead where it has something to hide behind; no rows of the paper.
        "cache, prefetch in prompts": lambda: _plain(run, gib, (), width, PREFILL),
        "cache, 4/2, prefetch in prompts": lambda: quantized(run, gib, "", -1, PREFILL),
        "cache, 4/0, prefetch in prompts": lambda: quantized(run, gib, "skip", -1, PREFILL),
    }
    for name, plan in table.items():
        what = f"{name}, {gib:g} GiB"
        planned = run.attempt(f"plan, {what}", plan)
        if planned is None:
            continue
        make, budget = planned
        found = run.measured(what, make, work, ttft=run.options.ttft)
        if found is None:
            continue
        rows[name] = found
        run.tpot(what, found)
        run.peak(what, budget.total_device, gib)
        for base in ("load on demand", "cache"):
            if base in rows and base != name:
                _ratios(run, f"{name} over {base}, {gib:g} GiB", rows[base], found)


def _plain(
    run: Run, gib: float, slots: tuple[int, ...], prefetch: int, where: str = BOTH
) -> Planned:
    """The cache alone."""
    lab = run.lab
    budget = lab.budget((4,), gib, slots=slots, prefetch=prefetch, prefetch_in=where)
    plan = lab.plan_of(4, budget.tiers[0])
    return lambda: lab.one_tier(plan), budget


def quantized(run: Run, gib: float, low: str, prefetch: int, where: str = BOTH) -> Planned:
    """The cache under DyMoE, which skips experts or runs them in INT2."""
    lab, bits = run.lab, (4,) if low else (4, 2)
    policy = DyMoE(low=low, retention=RETENTION, prefetch=prefetch)
    if run.options.planes and not low:
        budget, plans = lab.by_planes(policy, gib, where)
    else:
        ahead = lab.config.experts_per_token if prefetch else 0
        budget = lab.split(bits, gib, run.options.split, prefetch=ahead, prefetch_in=where)
        plans = [lab.plan_of(b, tier) for b, tier in zip(bits, budget.tiers, strict=True)]
    slots = ", ".join(
        f"{tier.slots} of {name}" for name, tier in zip(budget.names, budget.tiers, strict=True)
    )
    print(f"  {policy.name}: {slots} a layer", flush=True)
    return lambda: lab.tiered(policy, plans), budget


def _ratios(run: Run, what: str, base: Measured, found: Measured) -> None:
    """How much faster a row is than another one."""
    run.report.add(f"{what}, TPOT", base.tpot / found.tpot, "x")
    if base.ttft and found.ttft:
        run.report.add(f"{what}, TTFT", base.ttft / found.ttft, "x")
