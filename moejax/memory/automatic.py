"""`policy.name=auto`: from a checkpoint and limits to what is recommended for them.

Before anything is read, the tiers that could be had are planned byte by byte;
`moejax.policies.auto` chooses by what memory leaves each.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from moejax.checkpoints.open import Checkpoint
from moejax.checkpoints.sizes import checkpoint_sizes
from moejax.errors import MoejaxError
from moejax.memory.allocator import limits_on
from moejax.memory.budget import Budget, BudgetError, Limits, TieredBudget, make_budget
from moejax.memory.expert_memory import ExpertMemory
from moejax.memory.opening import open_memory
from moejax.memory.tiered_memory import TieredMemory
from moejax.memory.tiered_opening import Planned, open_tiered, plan_tiers
from moejax.policies.auto import AUTO, Facts, Option, Recommendation, recommended
from moejax.qtensor import Weight
from moejax.tiering import STORED, Tiering

# Tiers that plain experts are tried in. Where INT4 beside a whole INT2 would serve the floor of the
# gate mass, INT4 alone fits whole.
_LADDER = ((STORED,), (STORED, "int4"), ("int4",))


def open_under_policy(
    checkpoint: Checkpoint, tiering: Tiering, limits: Limits, *, progress: bool, **sizes: Any
) -> tuple[Mapping[str, Weight], TieredMemory | ExpertMemory | None, TieredBudget | Budget]:
    """`tiered_opening.open_tiered`, or `opening.open_memory` where auto takes no policy.

    Args:
      checkpoint: as of `open_tiered`.
      tiering: likewise, or of the policy "auto".
      limits: likewise.
      progress: likewise.
      **sizes: dtype, device, batch, context and chunk, likewise.

    Raises:
      MoejaxError: as of `open_tiered`.
    """
    if tiering.policy == AUTO:
        found = _chosen(checkpoint, tiering, limits_on(sizes["device"], limits), sizes)
        if found is None:
            return open_memory(checkpoint, limits, progress=progress, **sizes)
        tiering = found
    return open_tiered(checkpoint, tiering, limits, progress=progress, **sizes)


def plan_under_policy(
    checkpoint: Checkpoint, tiering: Tiering, limits: Limits, **sizes: Any
) -> Planned | None:
    """`tiered_opening.plan_tiers`; None where auto takes no policy, so that there are no tiers.

    Arguments and errors as of `open_under_policy`.
    """
    if tiering.policy == AUTO:
        found = _chosen(checkpoint, tiering, limits, sizes)
        if found is None:
            return None
        tiering = found
    return plan_tiers(checkpoint, tiering, limits, **sizes)


def _chosen(
    checkpoint: Checkpoint, tiering: Tiering, limits: Limits, sizes: Mapping[str, Any]
) -> Tiering | None:
    """The tiering that auto stands for, which is logged with its reason; None for no policy."""
    config = checkpoint.config
    if not config.moe_layers:
        raise MoejaxError(f"{checkpoint.directory}: the model has no experts for a policy")
    all_fit = not tiering.tiers and _all_fit(checkpoint, limits, **sizes)
    options = () if all_fit else _options(checkpoint, tiering, limits, sizes)
    found = recommended(
        Facts(
            num_experts=config.num_experts,
            width=config.experts_per_token,
            all_fit=all_fit,
            options=options,
        )
    )
    if not found.policy:
        logging.warning("policy auto: none; %s", found.why)
        return None

    def asked(what: Recommendation) -> Tiering:
        tiers = _as_given(tiering, what.tiers)
        return dataclasses.replace(
            tiering, policy=what.policy, settings=dict(what.settings), tiers=tiers
        )

    found, budget = _that_fits(
        found, lambda what: plan_tiers(checkpoint, asked(what), limits, **sizes).budget
    )
    logging.warning("policy auto: %s", _said(found, budget))
    return asked(found)


def _that_fits(
    found: Recommendation, plan: Callable[[Recommendation], TieredBudget]
) -> tuple[Recommendation, TieredBudget]:
    """With its plan; the same tier on demand where the policy takes memory from the slots."""
    if len(found.tiers) > 1:  # as it was planned
        return found, plan(found)
    plain = Recommendation(policy="on_demand", tiers=found.tiers, settings={}, why="")
    least = plan(plain)
    try:
        budget = plan(found)
        if budget.tiers[0].slots >= least.tiers[0].slots:
            return found, budget
        lacks = f"leaves {budget.tiers[0].slots} slots a layer"
    except BudgetError:
        lacks = "does not fit"
    why = f"{found.policy}, which is {found.why}, {lacks}"
    return dataclasses.replace(plain, why=why), least


def _said(found: Recommendation, budget: TieredBudget) -> str:
    settings = "".join(f" {name}={value}" for name, value in found.settings.items())
    slots = ", ".join(
        f"{tier.slots} in {name}" for name, tier in zip(budget.names, budget.tiers, strict=True)
    )
    fit = f"of {budget.tiers[0].num_experts} experts a layer fit {slots}"
    return f"{found.policy} {'/'.join(found.tiers)}{settings}; {fit}; {found.why}"


def _as_given(tiering: Tiering, names: tuple[str, ...]) -> tuple[str, ...]:
    """Entries of `policy.tiers` for tiers by name."""
    given = dict(zip((tier.name for tier in tiering.stored()), tiering.tiers, strict=False))
    return tuple(given.get(name, name) for name in names)


def _all_fit(
    checkpoint: Checkpoint,
    limits: Limits,
    *,
    dtype: str,
    device: jax.Device,
    batch: int,
    context: int,
    chunk: int,
) -> bool:
    """As `opening.open_memory` has it."""
    chosen = np.dtype(checkpoint.choose_dtype(dtype, device))
    sizes = checkpoint_sizes(checkpoint, chosen)
    try:
        budget = make_budget(
            checkpoint.config, sizes.weights_nbytes, sizes.tier, batch=batch, context=context,
            chunk=chunk, limits=limits, platform=device.platform, itemsize=chosen.itemsize,
        )  # fmt: skip
    except MoejaxError:  # too little even for slots of these; another form may do
        return False
    return not budget.pooled


def _options(
    checkpoint: Checkpoint, tiering: Tiering, limits: Limits, sizes: Mapping[str, Any]
) -> tuple[Option, ...]:
    """Tiers that memory has room for.

    Raises:
      MoejaxError: none of one tier; what the last of these lacked.
    """
    ladder: tuple[tuple[str, ...], ...] = _LADDER
    if tiering.tiers:
        ladder = tuple(dict.fromkeys((tiering.tiers[:1], tiering.tiers)))
    elif checkpoint.is_quantized:
        ladder = ((STORED,),)
    found, refusal = [], MoejaxError("auto found no tiers")
    for tiers in ladder:
        policy = "dynaexq" if len(tiers) > 1 else "on_demand"
        asked = dataclasses.replace(tiering, policy=policy, settings={}, tiers=tiers)
        try:
            planned = plan_tiers(checkpoint, asked, limits, **sizes)
        except MoejaxError as error:
            if len(tiers) == 1:
                refusal = error
            continue
        slots = tuple(tier.slots for tier in planned.budget.tiers)
        names = tuple(tier.name for tier in planned.stored)
        found.append(Option(tiers=names, slots=slots, low=names[-1]))
    if not any(len(option.tiers) == 1 for option in found):
        raise refusal
    return tuple(found)
