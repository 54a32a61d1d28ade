"""Section `decide`: methods under budgets, a sequence at a time, for the picture of a shape.

A row's `method` joins it with the quality of that method (`scripts.studies.tables.decide`), `share`
says at which setting: the part of a layer's experts that slots of the first tier hold. What a
budget cannot run, or where INT4 fits as a whole and no policy has anything to decide, is a row that
says why. Rows that the output has are passed over: the same command goes on where it stopped.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from moejax.benchmarking.random_weights import Packing, expert_terms_nbytes, random_weights
from moejax.errors import MoejaxError
from moejax.experts.budget import Budget
from moejax.experts.cache import ExpertMemory
from moejax.files.result_rows import read_rows
from moejax.inference.runner import Runner
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.dynaexq import DynaExq
from moejax.policies.make import make_policy
from scripts.studies.dymoe.measure_speed import RETENTION, quantized
from scripts.studies.measuring import time_limit
from scripts.studies.speed.harness import Measured, Run, released

BUDGETS = (6.0, 8.0, 12.0, 16.0, 24.0)  # GiB
MILO_RANK = 16  # of experts' INT3 compensators
RHO = 3  # replacements of a token and layer, as in the rows of quality
REFUSED = "refused"  # unit of a row that says why there is none
Timed = tuple[Callable[[], Measured], float]  # measures, and the share of experts in slots


def decide(run: Run) -> None:
    """Every method under every budget."""
    check_time = time_limit(run.options.seconds)
    made: dict[str, Callable[[Run, float], Timed]] = {
        "INT4": functools.partial(_uniform, bits=4),
        "INT3": functools.partial(_uniform, bits=3),
        "INT2": functools.partial(_uniform, bits=2),
        "MiLo INT3": functools.partial(_uniform, bits=3, rank=MILO_RANK),
        "DyMoE 4/2": functools.partial(_dymoe, low=""),
        "DyMoE 4/0": functools.partial(_dymoe, low="skip"),
        "DynaExq 4/2": _dynaexq,
        "BuddyMoE": _buddymoe,
        "DyMoE 4/0 + BuddyMoE": functools.partial(_buddymoe, composed=True),
    }
    done = set(_done(run))
    for method, plan in made.items():
        for gib in run.options.gibs or BUDGETS:
            what = f"{method}, {gib:g} GiB"
            if what in done:
                continue
            check_time()
            run.attempt(what, functools.partial(_row, run, what, method, gib, plan))


def _done(run: Run) -> Iterator[str]:
    path = Path(run.report.output)
    for row in read_rows(path) if run.report.output and path.is_file() else []:
        if row.what.endswith(f", TPOT{run.report.end}"):
            yield row.what.removesuffix(f", TPOT{run.report.end}")


def _row(run: Run, what: str, method: str, gib: float, plan: Callable[[Run, float], Timed]) -> None:
    facts: dict[str, Any] = {"method": method, "gib": gib, "shape": run.lab.shape}
    try:
        measure, share = plan(run, gib)
    except MoejaxError as error:
        run.report.add(f"{what}, TPOT", gib, REFUSED, reason=f"{error}", **facts)
        return
    run.tpot(what, measure(), share=share, **facts)


def _uniform(run: Run, gib: float, *, bits: int, rank: int = 0) -> Timed:
    """One precision: a cache, or the resident model where the budget holds every expert."""
    lab = run.lab
    packing = Packing(bits=bits, attention_bits=lab.packing.attention_bits, expert_rank=rank)
    terms = expert_terms_nbytes(lab.config, packing)
    budget = lab.budget((bits,), gib, low_rank_nbytes=terms)
    if budget.tiers[0].pooled:
        if rank:
            raise MoejaxError("compensators of a shape's experts are measured on the device alone")
        plan = lab.plan_of(bits, budget.tiers[0])
        return _timed(run, lambda: lab.one_tier(plan)), _share(run, budget)

    def resident() -> Measured:
        experts = random_weights(lab.config, packing, lab.device, dense=False)
        runner: Runner = lab.runner(None, lab.dense | experts)
        try:
            return lab.timed(runner, run.workload())
        finally:
            for leaf in jax.tree.leaves(experts):
                leaf.delete()

    return resident, 1.0


def _dymoe(run: Run, gib: float, *, low: str) -> Timed:
    _require_misses(run, gib)
    make, budget = quantized(run, gib, low, 0)
    return _timed(run, make), _share(run, budget)


def _dynaexq(run: Run, gib: float) -> Timed:
    """INT4 for the hot, INT2 for all, which lies on the device as a whole."""
    _require_misses(run, gib)
    lab, num_experts = run.lab, run.lab.config.num_experts
    budget = lab.split((4, 2), gib, "rule", bulk=run.options.bulk)
    high, low = budget.tiers
    if low.slots < num_experts or not high.slots:
        raise MoejaxError(
            f"{gib:g} GiB hold {high.slots} experts in INT4 and {low.slots} of {num_experts} in "
            "INT2, not some and all"
        )
    policy = DynaExq(period=run.options.period, max_requests=run.options.requests)
    plans = [
        lab.plan_of(4, high, first=run.workload().hottest(high.slots), few_rows=True),
        lab.plan_of(2, low, few_rows=True),
    ]
    return _timed(run, lambda: lab.tiered(policy, plans)), _share(run, budget)


def _buddymoe(run: Run, gib: float, *, composed: bool = False) -> Timed:
    """Buddies by co-activation for what the cache lacks; composed, of what DyMoE leaves."""
    _require_misses(run, gib)
    lab, work = run.lab, run.workload()
    budget = lab.budget((4,), gib, bulk=run.options.bulk)
    (tier,) = budget.tiers
    how: dict[str, Any] = {"lists": run.buddies(work), "rho": RHO}
    policy: Any = BuddyMoe(**how)
    if composed:
        how |= {"parts": "dymoe+buddymoe", "low": "skip", "retention": RETENTION}
        policy = make_policy("compose", **how)
    plan = lab.plan_of(4, tier, first=work.hottest(tier.slots))
    return _timed(run, lambda: lab.tiered(policy, [plan])), _share(run, budget)


def _timed(run: Run, make: Callable[[], ExpertMemory]) -> Callable[[], Measured]:
    def measure() -> Measured:
        with released(make()) as memory:
            return run.lab.timed(run.lab.runner(memory), run.workload())

    return measure


def _share(run: Run, budget: Budget) -> float:
    return budget.tiers[0].slots / run.lab.config.num_experts


def _require_misses(run: Run, gib: float) -> None:
    if run.lab.budget((4,), gib).tiers[0].slots == run.lab.config.num_experts:
        raise MoejaxError("INT4 fits as a whole, and no policy has anything to decide")
