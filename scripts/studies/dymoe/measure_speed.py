"""Sections `dymoe` and `compose`: policies under one budget of device memory.

XLA_CLIENT_MEM_FRACTION keeps JAX to it from outside; the peak stands beside the plan.
"""

from collections.abc import Callable
from typing import Any

from moejax.benchmarking.shape_memory import Memory
from moejax.experts.budget import BOTH, PREFILL
from moejax.policies.base import AnyPolicy
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.compose import Compose
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from scripts.studies.speed.section_run import Run
from scripts.studies.speed.timing import Measured

# DyMoE's Table 3: (TPOT, TTFT) in seconds at 16 and 24 GiB; the ratios are what is compared.
PAPER = {
    16.0: {
        "load on demand": (0.2795, 1.0193), "cache": (0.1489, 0.5922),
        "cache, prefetch": (0.1315, 0.5159), "cache, 4/2": (0.1307, 0.5431),
        "cache, 4/2, prefetch": (0.1150, 0.4269), "cache, 4/0, prefetch": (0.1048, 0.3921),
    },
    24.0: {
        "load on demand": (0.2795, 1.0193), "cache": (0.1273, 0.4893),
        "cache, prefetch": (0.1108, 0.3954), "cache, 4/2": (0.0796, 0.2423),
        "cache, 4/2, prefetch": (0.0754, 0.2121), "cache, 4/0, prefetch": (0.0656, 0.1877),
    },
}  # fmt: skip

OF_PROMPTS = " in prompts"  # look-ahead where it has something to hide behind; no row of the paper


def dymoe(run: Run) -> None:
    """DyMoE's Table 3 under each budget."""
    for gib in run.options.gibs or tuple(PAPER):
        _table_3(run, gib)


def _table_3(run: Run, gib: float) -> None:
    lab, retention = run.lab, run.options.retention
    width, work = lab.config.experts_per_token, run.workload()
    rows: dict[str, Measured] = {}

    def plain(
        slots: tuple[int, ...], prefetch: int, where: str = BOTH
    ) -> tuple[Callable[[], Memory], int]:
        budget = lab.budget((4,), gib, slots=slots, prefetch=prefetch, prefetch_in=where)
        plan = lab.plan_of(4, budget.tiers[0])
        return lambda: lab.tier_memory(plan), budget.total_device

    def quantized(low: str, prefetch: int, where: str = BOTH) -> tuple[Callable[[], Memory], int]:
        policy = DyMoE(low=low, retention=retention, prefetch=prefetch)
        bits, ahead = (4,) if low else (4, 2), width if prefetch else 0
        return _policy(run, policy, bits, gib, prefetch=ahead, prefetch_in=where)

    table: dict[str, Callable[[], tuple[Callable[[], Memory], int]]] = {
        "load on demand": lambda: plain((0,), 0),
        "cache": lambda: plain((), 0),
        "cache, prefetch": lambda: plain((), width),
        "cache, 4/2": lambda: quantized("", 0),
        "cache, 4/2, prefetch": lambda: quantized("", -1),
        "cache, 4/0, prefetch": lambda: quantized("skip", -1),
        f"cache, prefetch{OF_PROMPTS}": lambda: plain((), width, PREFILL),
        f"cache, 4/2, prefetch{OF_PROMPTS}": lambda: quantized("", -1, PREFILL),
        f"cache, 4/0, prefetch{OF_PROMPTS}": lambda: quantized("skip", -1, PREFILL),
    }
    for name, planned in table.items():
        what = f"{name}, {gib:g} GiB"
        made = run.attempt(f"plan, {what}", planned)
        if made is None:
            continue
        make, nbytes = made
        found = run.measured(what, make, work, ttft=run.options.ttft)
        if found is None:
            continue
        rows[name] = found
        run.tpot(what, found)
        run.peak(what, nbytes, gib)
        for base in ("load on demand", "cache"):
            if base in rows and base != name:
                _ratios(run, gib, base, name, rows)


def _ratios(run: Run, gib: float, base: str, name: str, rows: dict[str, Measured]) -> None:
    """How much faster a row is than another one, beside the paper's."""
    paper = PAPER.get(gib, {})
    for index, part in enumerate(("tpot", "ttft")):
        if not getattr(rows[name], part):
            continue
        beside = {}
        if paper:
            beside["paper"] = paper[base][index] / paper[name.removesuffix(OF_PROMPTS)][index]
        ratio = getattr(rows[base], part) / getattr(rows[name], part)
        run.report.add(f"{name} over {base}, {gib:g} GiB, {part.upper()}", ratio, "x", **beside)


def _policy(
    run: Run, policy: AnyPolicy, bits: tuple[int, ...], gib: float, **more: Any
) -> tuple[Callable[[], Memory], int]:
    """Maker of a policy's memory, and its planned bytes."""
    budget = run.lab.split(bits, gib, run.options.split, **more)
    plans = [run.lab.plan_of(b, tier) for b, tier in zip(bits, budget.tiers, strict=True)]
    slots = ", ".join(
        f"{tier.slots} of {name}" for name, tier in zip(budget.names, budget.tiers, strict=True)
    )
    print(f"  {policy.name}: {slots} a layer", flush=True)
    return lambda: run.lab.tiered(policy, plans), budget.total_device


def compose(run: Run) -> None:
    """Each policy alone, and together, at one budget; of speed only."""
    gib, bulk = (run.options.gibs or (16.0,))[0], run.options.bulk
    work, retention = run.workload(), run.options.retention
    hotness = DynaExq(period=run.options.period, max_requests=run.options.requests)
    importance = DyMoE(retention=retention, prefetch=0)
    buddies = BuddyMoe(lists=run.buddies(work), rho=1, spend_on="last")
    budget = run.lab.budget((4,), gib)
    plan = run.lab.plan_of(4, budget.tiers[0])
    cache = run.measured("cache", lambda: run.lab.tier_memory(plan), work)
    if cache is None:
        return
    run.tpot(f"cache, {gib:g} GiB", cache)
    parts: dict[str, tuple[AnyPolicy, tuple[int, ...], int]] = {
        "dynaexq": (hotness, (4, 2), bulk),
        "dymoe": (importance, (4, 2), 0),
        "buddymoe": (buddies, (4,), bulk),
        "dynaexq+dymoe": (Compose(hotness=hotness, importance=importance), (4, 2), bulk),
        "dymoe+buddymoe": (Compose(importance=importance, buddies=buddies), (4, 2), bulk),
        "dynaexq+dymoe+buddymoe": (
            Compose(hotness=hotness, importance=importance, buddies=buddies), (4, 2), bulk,
        ),
    }  # fmt: skip
    for name, (policy, bits, most) in parts.items():
        made = run.attempt(f"plan, {name}", lambda: _policy(run, policy, bits, gib, bulk=most))  # noqa: B023  # fmt: skip
        if made is None:
            continue
        found = run.measured(name, made[0], work)
        if found is None:
            continue
        what = f"{name}, {gib:g} GiB"
        run.tpot(what, found, cache_ms=1e3 * cache.tpot)
        run.report.add(f"{what}: throughput over the cache", cache.tpot / found.tpot, "x")
