"""Sections `buddymoe` and `latency`: substitution, and a miss's time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from moejax.benchmarking.routing import Workload
from moejax.benchmarking.shape_memory import TierPlan, tier_name
from moejax.experts.cache import ExpertMemory
from moejax.models.config import ModelConfig
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


def latency(run: Run) -> None:
    """BuddyMoE's Table 1: a step a layer, where nothing misses, and where one expert of each does.

    A - 1 of a layer's experts are on the device in all cases; the last one is, or is fetched when
    it is needed, or is brought ahead by the layer before, or another one is brought in its place,
    or a buddy takes its place.
    """
    lab, config = run.lab, run.lab.config
    steps = 2 * lab.sizes.num_replayed
    # One more than a step takes: what leaves is older than what this step and the last one used.
    slots = max(config.num_experts // 4, config.experts_per_token + 1)
    first = np.tile(np.arange(slots, dtype=np.int32), (lab.num_layers, 1))
    plan = TierPlan(bits=BITS, slots=slots, first=first)

    def work(misses: bool, ahead: bool = True) -> Any:
        return one_miss_workload(
            config, num_steps=steps, slots=slots, misses=misses, hits_ahead=ahead
        )

    lists = run.buddies(run.workload(), alpha=1.0, most=31)
    policy = BuddyMoe(lists=lists, background_bytes=0.0)
    cases: list[tuple[Callable[[], ExpertMemory], dict[str, Any]]] = [
        (
            lambda: lab.one_tier(plan),
            {"all on the device": work(False), "on demand": work(True)},
        ),
        (
            lambda: lab.one_tier(dataclasses.replace(plan, prefetch=1)),
            {"prefetch hit": work(True), "prefetch miss": work(True, False)},
        ),
        (
            lambda: lab.tiered(policy, [plan]),
            {"buddy hit": work(False), "buddy miss": work(True)},
        ),
    ]
    hit = 0.0
    for make, works in cases:
        for name, found in _of_one_program(run, make, works).items():
            a_layer = 1e6 * found.tpot / lab.num_layers
            hit = hit or a_layer
            facts = {n: found.facts[n] for n in ("misses_a_step", "prefetched_a_step")}
            if "replaced_share" in found.facts:
                facts["replaced_a_layer"] = found.facts["replaced_share"] * config.experts_per_token
            run.report.add(f"one layer, {name}", a_layer, "us", over_a_hit=a_layer - hit, **facts)


def _of_one_program(
    run: Run, make: Callable[[], ExpertMemory], works: dict[str, Any]
) -> dict[str, Measured]:
    """Workloads on one memory, in their order."""

    def part() -> dict[str, Measured]:
        with released(make()) as memory:
            runner = run.lab.runner(memory)
            return {name: run.lab.timed(runner, work) for name, work in works.items()}

    return run.attempt(", ".join(works), part) or {}


def one_miss_workload(
    config: ModelConfig, *, num_steps: int, slots: int, misses: bool, hits_ahead: bool = True
) -> Workload:
    """Workload of one sequence whose last expert misses; the others stay in the first `slots`.

    With `misses` it is another one in each step, of those that no LRU cache of so many slots still
    holds, else it stays too. So a step's time over that without misses is what a miss costs.

    Args:
      config: of the model; more than twice `slots` - A + 1 experts, or fewer slots.
      num_steps: S.
      slots: of a layer, which hold the first experts before any step.
      misses: whether the last expert misses in every layer.
      hits_ahead: whether it is expected; else the prediction names one that is not needed.

    Raises:
      ValueError: a cache of so many slots would hold the last expert again.
    """
    num_experts, width = config.num_experts, config.experts_per_token
    num_layers, outside = len(config.moe_layers), config.num_experts - slots
    if misses and outside <= slots - width + 1:
        raise ValueError(f"{outside} experts in turn do not miss in {slots} slots")
    step = np.arange(num_steps)[:, None] + np.arange(num_layers)[None]
    ids = np.tile(np.arange(width, dtype=np.int32), (num_steps, num_layers, 1, 1))
    # What is brought in vain comes from the other half: the cache sees as many experts in turn.
    turn = outside if hits_ahead else outside // 2
    if misses:
        ids[:, :, 0, -1] = slots + step % turn
    weights = 0.9 * (np.arange(width, 0, -1) * 2 / (width * (width + 1)))
    probabilities = np.full((num_steps, num_layers, 1, num_experts), 1e-6, np.float32)
    np.put_along_axis(probabilities, ids, weights.astype(np.float32), axis=-1)
    predicted = probabilities.copy()
    if misses:  # nothing but the last expert is expected: the others are there
        predicted[...] = 1e-6
        wrong = slots + turn + step % max(1, outside - turn)
        named = ids[:, :, 0, -1] if hits_ahead else wrong
        np.put_along_axis(predicted, named[:, :, None, None], 0.9, axis=-1)
    return Workload(ids, probabilities, predicted, 0)
