"""Sections `dynaexq` and `dynaexq_wide`: two precisions, against uniform ones in the same run."""

import functools

import jax

from moejax.benchmarking.random_weights import Packing, random_weights
from moejax.benchmarking.routing import Workload
from moejax.benchmarking.shape_memory import TierPlan, release, tier_name
from moejax.experts.cache import ExpertMemory, TierMemory
from moejax.inference.runner import Runner
from moejax.policies.dynaexq import DynaExq
from scripts.studies.speed.harness import Measured, Run


def dynaexq(run: Run) -> None:
    """INT4 for what is hot, INT2 for all; the workload shifts, so that promotions keep running.

    Beside it uniform INT2, on the same workload from a pool that holds every expert, and as a
    resident model, which routes as its random router says.
    """
    lab, high, low = run.lab, 4, 2
    num_experts = lab.config.num_experts
    n_hot = min(run.options.n_hot, num_experts // 4)
    packing = Packing(bits=low, attention_bits=16)
    resident = lab.runner(None, random_weights(lab.config, packing, lab.device))
    full = lab.tier_memory(TierPlan(bits=low, slots=num_experts, few_rows=True))
    uniform = lab.runner(ExpertMemory([full]))
    for batch in run.options.batches or (1, 4, 16):
        work, name = run.workload(batch, shifts=True), f"batch {batch}"
        whole, pooled = (
            run.attempt(f"{of}, {name}", functools.partial(lab.timed, runner, work, batch))
            for of, runner in (("resident", resident), ("uniform pool", uniform))
        )
        if whole is None or pooled is None:
            continue
        run.tpot(f"uniform INT2, resident model, {name}", whole, batch)
        run.tpot(f"uniform INT2, a pool of all experts, {name}", pooled, batch,
                 distinct_experts=work.distinct)  # fmt: skip
        plan = TierPlan(
            bits=high, slots=n_hot, bulk=run.options.bulk, first=work.hottest(n_hot, slice(0, 1)),
            transient=min(num_experts, batch * lab.config.experts_per_token),
            refines=high - low if run.options.planes else 0,
        )  # fmt: skip
        policy = DynaExq(period=run.options.period * batch, max_requests=run.options.requests)

        timed = functools.partial(_with_hot, run, plan, low, full, policy, work, batch)
        found = run.attempt(f"dynaexq, {name}", timed)
        if found is not None:
            how = " by planes" if run.options.planes else ""
            what = f"dynaexq int4/int2{how}, {n_hot} hot of {num_experts}, {name}"
            _rows_of_hot(run, what, found, batch, {"pool": pooled, "resident": whole})
    release(full)


def _rows_of_hot(
    run: Run, what: str, found: Measured, batch: int, uniform: dict[str, Measured]
) -> None:
    """TPOT, throughput over that of uniform INT2, the hot tier's share of the gate mass."""
    beside = {f"uniform_{name}_ms": 1e3 * one.tpot for name, one in uniform.items()}
    promoted = found.facts["bulk_a_step"] / batch
    run.tpot(what, found, batch, promotions_a_token=promoted, **beside)
    for name, one in uniform.items():
        share = 100 * one.tpot / found.tpot
        run.report.add(f"{what}: throughput over uniform INT2 ({name})", share, "%")
    run.report.add(
        f"{what}: gate mass of the hot tier", 100 * found.facts["gate_int4"], "%",
        promotions_a_token=promoted, experts=100 * found.facts["experts_int4"],
    )  # fmt: skip


def _with_hot(
    run: Run,
    plan: TierPlan,
    low: int,
    full: TierMemory,
    policy: DynaExq,
    work: Workload,
    batch: int,
) -> Measured:
    """Times a policy over a hot tier made by `plan`, which goes afterwards, and `full`."""
    hot, names = run.lab.tier_memory(plan), (tier_name(plan.bits), tier_name(low))
    try:
        memory = run.lab.tiered(policy, [hot, full], names)
        return run.lab.timed(run.lab.runner(memory), work, batch)
    finally:
        release(hot)


def dynaexq_wide(run: Run) -> None:
    """Much precision for what is hot, little for all, under budgets, beside what the bytes take.

    t = t_low + hot_share (t_high - t_low): both ends are pools that hold every expert, and
    hot_share is that of the experts which ran, not of the gate mass. Both precisions are measured
    as resident models, too, which route as their random routers say. What is of high precision
    comes last, so that the peaks before are those of the budgets.
    """
    high, low = run.options.tiers
    steady = run.workload()
    works = {"steady": steady, "shifting": run.workload(shifts=True)}
    residents = {low: _resident(run, low, steady)}
    full = _full(run, low)
    uniform = _end(run, low, full, steady)
    within: dict[str, Measured] = {}
    if uniform is None:
        release(full)
        return
    for gib in sorted(run.options.gibs or (32.0, 48.0)):
        part = functools.partial(_within, run, gib, works, full, uniform)
        within |= run.attempt(f"{gib:g} GiB", part) or {}
    release(full)
    full = _full(run, high)
    whole = _end(run, high, full, steady)
    release(full)
    residents[high] = _resident(run, high, steady)
    for bits, resident in residents.items():
        if resident is None:
            continue
        for what, found in within.items():
            run.report.add(
                f"{what}: throughput over the resident {tier_name(bits)} model",
                100 * resident.tpot / found.tpot, "%", resident_ms=1e3 * resident.tpot,
            )  # fmt: skip
    if whole is None:
        return
    for what, found in within.items():
        share = found.facts[f"experts_{tier_name(high)}"]
        model = uniform.tpot + share * (whole.tpot - uniform.tpot)
        run.report.add(
            f"{what}: time over that of the bytes", found.tpot / model, "x", hot_share=share,
            model_ms=1e3 * model,
        )  # fmt: skip


def _resident(run: Run, bits: int, work: Workload) -> Measured | None:
    """A model of one precision that holds its experts; all but these is as in the pools."""
    lab, name = run.lab, f"uniform {tier_name(bits)}, resident model"

    def measured() -> Measured:
        packing = Packing(bits=bits, attention_bits=16)
        experts = random_weights(lab.config, packing, lab.device, dense=False)
        try:
            runner = lab.runner(None, lab.dense | experts)
            return lab.timed(runner, work, ttft=run.options.ttft)
        finally:
            for leaf in jax.tree.leaves(experts):
                leaf.delete()

    return _row(run, name, run.attempt(name, measured))


def _full(run: Run, bits: int) -> TierMemory:
    plan = TierPlan(bits=bits, slots=run.lab.config.num_experts, few_rows=True)
    return run.lab.tier_memory(plan)


def _end(run: Run, bits: int, full: TierMemory, work: Workload) -> Measured | None:
    """A pool of one precision that holds every expert."""
    name = f"uniform {tier_name(bits)}, a pool of all experts"
    runner: Runner = run.lab.runner(ExpertMemory([full]))
    found = run.attempt(name, lambda: run.lab.timed(runner, work, ttft=run.options.ttft))
    return _row(run, name, found)


def _row(run: Run, name: str, found: Measured | None) -> Measured | None:
    if found is not None:
        run.tpot(name, found)
    return found


def _within(
    run: Run, gib: float, works: dict[str, Workload], full: TierMemory, uniform: Measured
) -> dict[str, Measured]:
    """The rows of one budget; what was measured, by what it is."""
    lab, num_experts, (high, low) = run.lab, run.lab.config.num_experts, run.options.tiers
    names = (tier_name(high), tier_name(low))
    asked = run.options.split
    budget = lab.split((high, low), gib, asked if "," in asked else "rule", bulk=run.options.bulk)
    slots = [tier.slots for tier in budget.tiers]
    if slots[1] < num_experts or not 0 < slots[0] < num_experts:
        raise ValueError(
            f"{gib:g} GiB are {slots} slots of {' and '.join(names)}, not some and all"
        )
    first = works["steady"].hottest(slots[0])
    hot = lab.tier_memory(lab.plan_of(high, budget.tiers[0], first=first, few_rows=True))
    policy = DynaExq(period=run.options.period, max_requests=run.options.requests)
    memory = lab.tiered(policy, [hot, full], names)
    measured = {}
    try:
        runner = lab.runner(memory)
        for kind, work in works.items():
            found = lab.timed(runner, work, ttft=run.options.ttft and kind == "steady")
            what = (
                f"dynaexq {'/'.join(names)}, {gib:g} GiB, {slots[0]} hot of {num_experts}, {kind}"
            )
            run.tpot(what, found, uniform_ms=1e3 * uniform.tpot)
            over = 100 * uniform.tpot / found.tpot
            run.report.add(f"{what}: throughput over uniform {names[1]}", over, "%")
            mass = 100 * found.facts[f"gate_{names[0]}"]
            run.report.add(f"{what}: gate mass of the hot tier", mass, "%")
            run.peak(what, budget.total_device, gib)
            measured[what] = found
    finally:
        jax.block_until_ready(memory.pool)
        release(hot)
    return measured
