"""Section `buddymoe`: substitution at cache rates."""

import dataclasses
import functools
from typing import Any

import numpy as np

from moejax.benchmarking.shape_memory import TierPlan, tier_name
from moejax.policies.buddymoe import BuddyMoe
from scripts.studies.buddymoe.controls import RandomExpert
from scripts.studies.speed.harness import Measured, Run, released

CACHE_RATES = (0.75, 0.5, 0.375)
BITS = 4
# Settings of a study of quality, and the best of the paper's tables; the first one's program
# serves all that differ in numbers alone.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "random": {"random": {"made_of": RandomExpert}},
    "buddies": {
        "co-activation": {},
        "co-activation, 16 places, rho 3": {"depth": 16, "rho": 3},
        "co-activation, rho 1": {"rho": 1},
    },
    "buddies, gains": {
        "co-activation, gains, rho 1 on the last": {"rho": 1, "spend_on": "last", "gains": True},
    },
}


def buddymoe(run: Run) -> None:
    """Throughput, bytes and substitution at each cache rate; "original" is the pool alone.

    Prompts run once a program: of the pool alone, and of the first of the settings that share one.

    The gains of the quality rows are how alike outputs are, which random weights cannot say: the
    array that stands for them here has their shape and costs what they cost.
    """
    for batch in run.options.batches or (1,):
        for rate in run.options.cache_rates or CACHE_RATES:
            _at_rate(run, batch, rate)


def _at_rate(run: Run, batch: int, rate: float) -> None:
    """The rows of a cache rate."""
    lab, work = run.lab, run.workload(batch)
    num_experts = lab.config.num_experts
    lists = run.buddies(work)
    depth = lists.ids.shape[-1]
    gains = np.full((lab.num_layers, num_experts, num_experts), 0.5)
    slots = round(rate * num_experts)
    plan = TierPlan(
        bits=BITS, slots=slots, first=work.hottest(slots),
        transient=min(num_experts, batch * lab.config.experts_per_token),
    )  # fmt: skip
    name = f"c {rate:g}, {slots} slots of {num_experts} in {tier_name(BITS)}, batch {batch}"
    original = run.measured(
        f"original, {name}", lambda: lab.one_tier(plan), work, batch, ttft=run.options.ttft
    )
    if original is None:
        return
    run.tpot(f"original, {name}", original, batch, distinct_experts=work.distinct)
    for group in SETTINGS.values():
        policies = {}
        for said, given in group.items():
            how = dict(given)
            own = gains if how.pop("gains", False) else None
            how["depth"] = min(how.get("depth", depth), depth)
            made_of = how.pop("made_of", BuddyMoe)
            policies[said] = made_of(lists=lists, gains=own, **how)
        background = dataclasses.replace(plan, bulk=run.options.bulk)
        run.attempt(
            f"{next(iter(group))}, {name}",
            functools.partial(_substituted, run, name, background, policies, original, batch),
        )


def _substituted(
    run: Run, name: str, plan: TierPlan, policies: dict[str, BuddyMoe], original: Measured,
    batch: int,
) -> bool:  # fmt: skip
    """Rows of policies that one program serves."""
    lab, work = run.lab, run.workload(batch)
    with released(lab.tiered(next(iter(policies.values())), [plan])) as memory:
        runner = lab.runner(memory)
        for i, (said, policy) in enumerate(policies.items()):
            memory.read_counters()
            memory.reset(policy)
            found = lab.timed(runner, work, batch, ttft=run.options.ttft and not i)
            what, facts = f"{said}, {name}", found.facts
            run.tpot(what, found, batch, original_ms=1e3 * original.tpot)
            run.report.add(
                f"{what}: throughput over original", 100 * (original.tpot / found.tpot - 1), "%",
                replaced_share=facts["replaced_share"], gate_substituted=facts["gate_substituted"],
            )  # fmt: skip
            moved, before = facts["megabytes_a_step"], original.facts["megabytes_a_step"]
            fewer = 100 * (1 - moved / before) if before else 0.0
            run.report.add(f"{what}: fewer bytes over the link", fewer, "%")
    return True
