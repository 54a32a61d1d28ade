"""Warnings of budgets that will be slow, or fail, on a machine."""

import dataclasses

from moejax.experts.budget.limits import PREFILL, Limits, gib_above, limit_nbytes, size_text
from moejax.experts.budget.planned import HEAD_LEAF, Budget, RunSizes, TierBudget, bulk_nbytes

PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineMemory:
    """Memory of a machine; None where it is not known."""

    host_nbytes: int | None = None  # memory that processes can still take
    pinned_nbytes: int | None = None  # that XLA lets JAX pin


def warnings(budget: Budget, machine: MachineMemory) -> list[str]:
    """Returns a line for each slowdown or failure to expect, worst first.

    How a policy uses slots of several tiers is not foreseen.
    """
    found = _host(budget, machine)
    if len(budget.tiers) == 1:
        return [*found, *_disk(budget.tiers[0]), *_slots(budget.tiers[0]), *unused(budget)]
    total = sum(tier.tier.expert_nbytes for tier in budget.tiers)  # shares are by these bytes
    least = max(-(-(_all_nbytes(t) + 1) * total // t.tier.expert_nbytes) for t in budget.tiers)
    for tier in budget.tiers:
        if tier.host_share < 1:
            found.append(
                f"{100 * (1 - tier.host_share):.0f} % of the experts of {tier.tier.name} are not "
                "in host memory: a step in which one of them is needed and has no slot waits for "
                f"the disk; raise memory.host_gib to {gib_above(least)}"
            )
    return found


def unused(budget: Budget) -> list[str]:
    """Returns a line naming options of transfers that have no effect."""
    if budget.pooled:
        return []
    names = (
        "prefetch", "prefetch_in", "bulk", "transient", "host_gib", "disk_path", "host_threads"
    )  # fmt: skip
    asked = {name: getattr(budget.limits, name) for name in names}
    plain = dataclasses.asdict(Limits())
    said = [f"memory.{name}={value}" for name, value in asked.items() if value != plain[name]]
    if not said:
        return []
    return [
        f"{', '.join(said)} is without effect: every expert stays on the device; state "
        "memory.device_gib or memory.slots"
    ]


def _host(budget: Budget, machine: MachineMemory) -> list[str]:
    found = []
    total = budget.total_host
    if machine.host_nbytes is not None and total > machine.host_nbytes:
        found.append(
            f"host memory for experts is {gib_above(total)}, but this machine has "
            f"{gib_above(machine.host_nbytes)} left: lower memory.host_gib"
        )
    if machine.pinned_nbytes is not None and total > machine.pinned_nbytes:
        needed = -(-total // 2**30) + 1
        found.append(
            f"{gib_above(total)} of pinned memory are over the limit of "
            f"{gib_above(machine.pinned_nbytes)}: set {PINNED_LIMIT}={needed} before JAX starts, "
            "or lower memory.host_gib"
        )
    return found


def _saved_by_head(run: RunSizes) -> int:
    """Bytes of a plain head beyond those of INT8 in groups of 64."""
    weights, config = run.weights_nbytes.get(HEAD_LEAF, 0), run.config
    plain = config.vocab_size * config.model_dim * run.itemsize
    return max(0, weights - plain * 17 // (16 * run.itemsize)) if weights == plain else 0


def _disk(budget: TierBudget) -> list[str]:
    if budget.host_share == 1:
        return []
    # Experts that hold a slot may be any, so the chance is that of one that has neither.
    absent = max(0.0, 1 - budget.host_share)
    least = gib_above(_all_nbytes(budget))

    def waited(num_tokens: int, share_cached: float) -> tuple[float, int]:
        needed = budget.num_layers * budget.num_needed(num_tokens)
        return absent * (1 - share_cached) * needed, needed

    batch = budget.run.batch
    cached = budget.total_slots / (budget.num_layers * budget.num_experts)
    cold, needed = waited(batch, 0.0)
    warm, _ = waited(batch, cached)
    chunk, _ = waited(budget.run.prefill_batch * budget.run.chunk, cached)
    said = (
        f"{100 * absent:.0f} % of the experts are not in host memory: a step in which one of them "
        f"is needed and has no slot waits for the disk (with even routing and an empty cache, "
        f"{cold:.0f} of the {needed} experts of a decode step; with a full one {warm:.0f}, and "
        f"{chunk:.0f} in a full prefill chunk); raise memory.host_gib to {least}"
    )
    if warm >= 1:
        said += "; every decode step is expected to wait"
    return [said]


def _all_nbytes(budget: TierBudget) -> int:
    """Bytes of host memory for every expert and for bulk transfers."""
    nbytes = budget.tier.expert_nbytes
    experts = budget.num_layers * budget.num_experts * nbytes
    return experts + bulk_nbytes(nbytes, budget.limits.bulk)


def _slots(budget: TierBudget) -> list[str]:
    if not budget.pooled:
        return []
    found, limits = [], budget.limits
    needed = budget.num_needed(budget.run.batch)
    if budget.total_slots == 0:
        found.append("no expert is cached: every one that a step needs crosses the link")
    elif budget.slots < needed:
        found.append(
            f"a layer caches {budget.said_slots} experts, but a decode step can need {needed}: the "
            "others stream through the transient slots, and such a pass evicts nothing"
        )
    elif limits.prefetch_in != PREFILL and budget.slots < needed + limits.prefetch:
        found.append(
            f"a layer caches {budget.said_slots} experts: {limits.prefetch} that are fetched ahead "
            f"evict some of the {needed} that a step can need"
        )
    limit = limit_nbytes(limits.device_gib)
    spare = None if limit is None else limit - budget.total_device
    if spare is not None and budget.slots < budget.num_experts:
        layer_of_slots = budget.num_layers * budget.tier.expert_nbytes
        more = (spare + _saved_by_head(budget.run)) // layer_of_slots
        if limits.slots < 0 and 8 * more > budget.slots:
            found.append(
                f"the head takes {size_text(budget.run.weights_nbytes[HEAD_LEAF])}: in INT8 it "
                f"leaves room for {more} more slots a layer (moejax.quantize "
                "--config.rules='head: method=rtn bits=8')"
            )
        if spare > 0.05 * (budget.total_device + spare):
            found.append(
                f"{gib_above(spare)} of memory.device_gib stay free: one more slot in each layer "
                f"takes {gib_above(layer_of_slots)}"
            )
    return found
