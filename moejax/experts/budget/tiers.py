"""Bytes and slots of a run, whose experts are stored in one tier or in several."""

import dataclasses
from collections.abc import Mapping, Sequence

from moejax.experts.budget.allocation import plan_tier
from moejax.experts.budget.limits import BudgetError, Limits, check_gib, gib_above, limit_nbytes
from moejax.experts.budget.planned import Budget, RunSizes, Tier, TierBudget, least_host_nbytes

# Parts of a budget that each tier has of its own.
OWN_PARTS = ("expert", "transient", "residency", "low-rank", "blocks", "ring")  # how they begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyDemands:
    """Memory that a policy asks for.

    Attributes:
      slots: of a layer in each tier; () for the rule of `make_budget`.
      prefetch: experts of the next layer that each tier which lacks some brings ahead at most.
      bulk: experts of such a tier in flight between steps at once.
      device: bytes by part that the steps take on the device for the policy's sake.
      first_alone: a copy of the first tier serves whoever asks for a lower one, and nothing is
        brought to the lower ones between steps, so slots are best spent on the first (experts
        drawn evenly: four slots of INT4 move 0.81 of the bytes that three of INT4 and two of INT2
        do; `tests/bench_policies_test.py`).
    """

    slots: Sequence[int] = ()
    prefetch: int = 0
    bulk: int = 0
    device: Mapping[str, int] = dataclasses.field(default_factory=dict)
    first_alone: bool = False


def make_budget(
    run: RunSizes, tiers: Sequence[Tier], limits: Limits, policy: PolicyDemands | None = None
) -> Budget:
    """Plans every byte of a run, and the slots of each tier.

    Without a policy `plan_tier` says it, of one tier. Under one, unless it asks for `slots`:
    without a limit every tier has room for all experts (the first one for
    `limits.slots`, if that is given). Under a limit the lower tiers have, if that leaves the first
    one as many slots as a token needs experts, and it gets what is left; else all tiers have the
    same number, or the first one has them all (`first_alone`).

    Args:
      tiers: in order of falling fidelity.
      limits: of all tiers together; host memory is shared by their bytes.
      policy: memory that the policy asks for; None: no policy decides.

    Raises:
      BudgetError: it does not fit, or slots are not possible; the text names what would do.
    """
    if policy is None:
        (tier,) = tiers
        only = plan_tier(run, tier, limits)
        return Budget(
            tiers=(only,), limits=limits, device=only.device, host=only.host, disk=only.disk
        )
    num_experts, names = run.config.num_experts, tuple(tier.name for tier in tiers)
    total_nbytes = sum(tier.expert_nbytes for tier in tiers)

    def alone(chosen: Sequence[int], host_gib: float) -> list[TierBudget]:
        budgets = []
        for tier, count in zip(tiers, chosen, strict=True):
            cached = 0 < count < num_experts
            own = dataclasses.replace(
                limits, device_gib=0.0, host_gib=host_gib * tier.expert_nbytes / total_nbytes,
                slots=count, transient=1 if count == num_experts else limits.transient,
                prefetch=min(policy.prefetch, count) if cached else 0,
                bulk=policy.bulk if cached else 0,
            )  # fmt: skip
            budgets.append(plan_tier(run, tier, own, len(tiers)))
        return budgets

    def made(chosen: Sequence[int]) -> Budget:
        budgets = alone(chosen, 0.0)
        if limits.host_gib:
            _check_host(budgets, limits)
            budgets = alone(chosen, limits.host_gib)
        return Budget(
            tiers=tuple(budgets),
            limits=limits,
            device=_together(names, [b.device for b in budgets]) | dict(policy.device),
            host=_together(names, [b.host for b in budgets]),
            disk=_together(names, [b.disk for b in budgets]),
        )

    check_gib(limits.device_gib, limits.host_gib)
    limit, num_lower = limit_nbytes(limits.device_gib), len(tiers) - 1
    if slots := policy.slots:
        _check(slots, names, num_experts)
        if limits.slots >= 0:
            raise BudgetError(
                f"memory.slots={limits.slots} and policy.slots={tuple(slots)} both say how many "
                "experts are cached: leave memory.slots out"
            )
        return _within(made(slots), limit, policy.device)
    if limit is None:
        first = num_experts if limits.slots < 0 else limits.slots
        return made([first] + [num_experts] * num_lower)
    counts = range(num_experts, -1, -1)
    choices = [(n, num_experts) for n in counts if n >= run.config.experts_per_token]
    choices += [(n, 0 if policy.first_alone else n) for n in counts]
    for first, lower in choices:
        found = made([first] + [lower] * num_lower)
        if found.total_device <= limit:
            return found
    return _within(found, limit, policy.device)


def _check(slots: Sequence[int], names: Sequence[str], num_experts: int) -> None:
    if len(slots) != len(names):
        raise BudgetError(
            f"policy.slots has {len(slots)} numbers, but there are {len(names)} tiers: "
            f"{', '.join(names)}"
        )
    if not all(0 <= count <= num_experts for count in slots):
        said = ", ".join(map(str, slots))
        raise BudgetError(f"policy.slots={said} must be from 0 to the {num_experts} of a layer")


def _check_host(budgets: Sequence[TierBudget], limits: Limits) -> None:
    """Raises BudgetError where a tier's share of host memory is too small."""
    tiers = [budget.tier for budget in budgets]
    total = sum(tier.expert_nbytes for tier in tiers)
    least = 0
    for budget, tier in zip(budgets, tiers, strict=True):
        needed = least_host_nbytes(
            tier.expert_nbytes, budget.num_layers * budget.num_experts, budget.limits.bulk,
            budget.at_once,
        )  # fmt: skip
        # Shares are rounded down.
        least = max(least, -(-(needed + 1) * total // tier.expert_nbytes))
    limit = limit_nbytes(limits.host_gib)
    if limit is not None and limit < least:
        raise BudgetError(
            f"memory.host_gib={limits.host_gib:g} is too little for experts of "
            f"{', '.join(tier.name for tier in tiers)} on their way from the disk: the smallest "
            f"that would do is {gib_above(least)}"
        )


def _within(budget: Budget, limit: int | None, of_policy: Mapping[str, int]) -> Budget:
    """Returns the budget; raises BudgetError above the limit, naming what suffices."""
    if limit is None or budget.total_device <= limit:
        return budget
    slots, names = [tier.slots for tier in budget.tiers], ", ".join(budget.names)
    what = f"{', '.join(map(str, slots))} slots a layer of {names}"
    if not any(slots):  # there is nothing to spare
        what = f"experts in {names}, even with no slots to cache them"
    parts = (f", of which {part} {gib_above(n)}" for part, n in of_policy.items())
    raise BudgetError(
        f"memory.device_gib={budget.limits.device_gib:g} is too little for {what}: the smallest "
        f"that would do is {gib_above(budget.total_device)} (batch {budget.batch}, context "
        f"{budget.context}){''.join(parts)}; raise memory.device_gib to that, or lower batch or "
        "context"
    )


def _together(names: Sequence[str], parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Merges the tiers' parts: own parts by tier, shared ones by the largest."""
    found: dict[str, int] = {}
    for name, own in zip(names, parts, strict=True):
        for part, nbytes in own.items():
            said = f"{part}, {name}" if len(names) > 1 and part.startswith(OWN_PARTS) else part
            found[said] = max(nbytes, found.get(said, 0))
    return found
