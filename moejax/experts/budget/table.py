"""A budget in lines, for people."""

from moejax.experts.budget.limits import GIB, size_text
from moejax.experts.budget.planned import Budget, TierBudget

MIB = 2**20
LINK_GIB_PER_S = 50  # PCIe 5 x16 by DMA, measured on an H200 with jax 0.11.2, 2026-11-20


def describe(budget: Budget) -> list[str]:
    """Table of all parts, then slots; for one tier also shares and link bytes."""
    first, is_alone = budget.tiers[0], len(budget.tiers) == 1
    head = f"batch {budget.batch}, context {budget.context}, prefill by {first.run.chunk} tokens"
    lines = [f"{head}, experts of {size_text(first.tier.expert_nbytes)}" if is_alone else head]
    width = 40 if is_alone else 46  # a tier's name ends its parts
    limits = {"device": budget.limits.device_gib, "host": budget.limits.host_gib}
    for place, part, nbytes in budget.table():
        of = f" of {limit:g}" if (limit := limits.get(place)) else ""
        gib = f" = {nbytes / GIB:.3f} GiB{of}" if part == "total" else ""
        lines.append(f"  {place:<7}{part:<{width}}{nbytes / MIB:>12.2f} MiB{gib}")
    if is_alone:
        return lines + _speed(first)
    return lines + [
        f"{tier.tier.name}: experts of {size_text(tier.tier.expert_nbytes)}, "
        f"{tier.slots} of {tier.num_experts} cached a layer, {tier.transient} transient slots, "
        f"{tier.host_rows} of {tier.num_layers * tier.num_experts} in host memory"
        for tier in budget.tiers
    ]


def _speed(budget: TierBudget) -> list[str]:
    if not budget.num_layers:
        return ["the model has no sparse layer, so no experts"]
    if not budget.pooled:
        return [f"all {budget.num_layers} x {budget.num_experts} experts stay on the device"]
    share = 100 * budget.slots / budget.num_experts
    lines = [
        f"slots: {budget.slots} of {budget.num_experts} a layer "
        f"({share:.1f} % of the experts), and {budget.transient} transient",
        f"host memory: {budget.host_rows} of {budget.num_layers * budget.num_experts} experts "
        f"({100 * budget.host_share:.1f} %)",
    ]
    batch = budget.run.batch
    for what, num_tokens, each in (
        ("a token of a decode step", batch, batch),
        ("a full prefill chunk", batch * budget.run.chunk, 1),
    ):
        nbytes = budget.link_nbytes(num_tokens) / each
        lines.append(
            f"over the link at worst: {size_text(nbytes)} {what}, "
            f"{1e3 * nbytes / (LINK_GIB_PER_S * GIB):.2f} ms at {LINK_GIB_PER_S} GiB/s"
        )
    return lines
