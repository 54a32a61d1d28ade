"""Section `cost`: the time that a policy's own decisions take."""

import functools
import statistics
from collections.abc import Sequence

import numpy as np

from moejax.benchmarking.shape_memory import TierPlan
from moejax.policies.base import AnyPolicy
from moejax.policies.baselines import OnDemand
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from scripts.studies.speed.harness import Measured, Run, released

BITS = 4
ROUNDS = 5


def cost(run: Run) -> None:
    """Times policies that lead to the transfers of the pool alone, each beside that pool.

    All experts are resident; at a cache rate below 1 every policy fetches what the pool fetches.
    All run every expert in INT4: DyMoE has all experts critical (of one tier, and with INT2 beside
    it that no expert needs), BuddyMoE may replace nothing, or searches whole lists in which each
    expert stands in for itself, DynaExq ranks by hotness and has no expert hot in the tier beside.
    Pool and policy are measured in turns, as a link is not always as fast; a cost is the median
    over the rounds of the excess of the policy's median call over the pool's.
    """
    num_experts = run.lab.config.num_experts
    for rate in run.options.cache_rates or (1.0,):
        slots = round(rate * num_experts)
        first = run.workload().hottest(slots)
        plan = TierPlan(bits=BITS, slots=slots, first=first, few_rows=slots == num_experts)
        for name, (policy, plans) in _policies(run, plan).items():
            what = f"{name}, {slots} slots of {num_experts}"
            part = functools.partial(_rounds, run, plan, policy, plans)
            if rounds := run.attempt(what, part):
                _add_rows(run, what, rounds)


def _policies(run: Run, plan: TierPlan) -> dict[str, tuple[AnyPolicy, list[TierPlan]]]:
    num_experts = run.lab.config.num_experts
    lists = run.buddies(run.workload())
    itself = np.arange(num_experts, dtype=lists.ids.dtype)[None, :, None]
    useless = lists._replace(ids=np.where(lists.ids < 0, lists.ids, itself))

    def beside(bits: int) -> TierPlan:
        return TierPlan(bits=bits, slots=run.lab.config.experts_per_token, few_rows=True)

    return {
        "on_demand": (OnDemand(), [plan]),
        "dymoe, all critical, 4/0": (DyMoE(low="skip", retention=1.0, prefetch=0), [plan]),
        "dymoe, all critical, 4/2": (DyMoE(retention=1.0, prefetch=0), [plan, beside(2)]),
        "buddymoe, rho 0": (BuddyMoe(lists=lists, rho=0, background_bytes=0.0), [plan]),
        "buddymoe, useless lists": (BuddyMoe(lists=useless, background_bytes=0.0), [plan]),
        "dynaexq, nothing hot": (DynaExq(n_hot=0), [beside(16), plan]),
        "dynaexq, nothing hot, INT8 beside": (DynaExq(n_hot=0), [beside(8), plan]),
    }


def _rounds(
    run: Run, plan: TierPlan, policy: AnyPolicy, plans: Sequence[TierPlan]
) -> list[tuple[Measured, Measured]]:
    """Measures the pool alone and the policy, one after the other, in each round."""
    lab, work = run.lab, run.workload()
    with released(lab.one_tier(plan)) as pool, released(lab.tiered(policy, plans)) as memory:
        alone, under_policy = lab.runner(pool), lab.runner(memory)
        return [(lab.timed(alone, work), lab.timed(under_policy, work)) for _ in range(ROUNDS)]


def _add_rows(run: Run, what: str, rounds: Sequence[tuple[Measured, Measured]]) -> None:
    found = sorted((found for _, found in rounds), key=lambda found: found.median)
    run.tpot(what, found[len(found) // 2])
    costs = [100 * (found.median / alone.median - 1) for alone, found in rounds]
    alone, under_policy = rounds[0]
    run.report.add(
        f"{what}: cost of a step", statistics.median(costs), "%",
        lowest_round=min(costs), highest_round=max(costs),
        pool_median_ms=1e3 * statistics.median(alone.median for alone, _ in rounds),
        misses_a_step=under_policy.facts["misses_a_step"],
        pool_misses_a_step=alone.facts["misses_a_step"],
    )  # fmt: skip
