"""Public calls of the cache plan, and their operations."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cache_plan import triton
from pallas_kernels.cache_plan.operands import (
    EVENTS,
    Asked,
    Fetch,
    LayerPlan,
    Rule,
    Tables,
    TierOperands,
    TierShape,
    Wishes,
)
from pallas_kernels.cache_plan.reference import plan_reference, predict_reference
from pallas_kernels.op import Implementation, Operation, check_operands, refuse

Operands = dict[str, tuple[Any, str]]  # arrays and their forms, by name

# A choice is for E experts, pairs of a plan (N A) or experts of a prediction (L), and T tiers.
PLAN = Operation(
    "cache_plan.plan",
    kernels=(Implementation("triton", triton.refusal, triton.plan_triton),),
    reference=plan_reference,
    abstract=lambda tiers, gate, layer, asked, *_, **__: (
        tiers[0].row_of.shape[-1], asked.ids.size, len(tiers)
    ),
)  # fmt: skip
PREDICT = Operation(
    "cache_plan.predict",
    kernels=(Implementation("triton", triton.refusal, triton.predict_triton),),
    reference=predict_reference,
    abstract=lambda tiers, layer, ids, *_, **__: (
        tiers[0].row_of.shape[-1], ids.size, len(tiers)
    ),
)  # fmt: skip


def plan(
    tiers: Sequence[TierOperands],
    gate: jax.Array | None,
    layer: int | jax.Array,
    asked: Asked,
    active: jax.Array,
    *,
    forms: Sequence[TierShape],
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[tuple[Tables, ...], jax.Array | None, LayerPlan]:
    """Where each pair of a layer runs, and what is fetched for that.

    Of several tiers `reference.resolve_tiers` says which one serves an expert. A copy leaves a tier
    that is not full when its expert comes in another one, or is in a better one. Then in each tier
    misses, in order of id, take the victims: free slots, then those of experts not needed, the
    least recently used first; ties go to the smaller expert id. With waves, where there are fewer
    victims than misses, misses take the free slots alone and the rest is streamed (a scan evicts
    nothing). What was used gets the clock, which then advances. Tiers that share slots follow
    `shared_slots`.

    Args:
      tiers: of falling fidelity; donate their tables.
      gate: float32[M, T + 3], donated: the router's gate mass that each tier served, that was
        skipped, that another expert served, and of all. None: only the tiers' own is counted.
      asked: of N tokens; wishes, or a rule by which the call itself finds them: a launch less.
      active: bool[N], tokens that count.

    Returns:
      The tables of each tier and the gate mass, in the same places in memory if they were donated,
      and the plan.
    """
    reasons = []
    if len(tiers) > 1 and asked.by is None:
        reasons.append(f"{len(tiers)} tiers, and nobody says which")
    alone = len(tiers) == 1 and asked.by is None and gate is None and active.shape == (1,)
    if asked.host is not None and not alone:
        reasons.append("the host multiplies misses of one token and one tier")
    operands = _operands_of(asked, gate, active, len(tiers))
    _check("cache_plan.plan", tiers, forms, operands, reasons)
    return PLAN(
        tuple(tiers), gate, jnp.asarray(layer, jnp.int32), asked, active, forms=forms,
        implementation=implementation, interpret=interpret,
    )  # fmt: skip


def predict(
    tiers: Sequence[TierOperands],
    layer: int | jax.Array,
    ids: jax.Array,
    active: jax.Array,
    *,
    forms: Sequence[TierShape],
    refined: jax.Array | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[tuple[Tables, ...], tuple[Fetch, ...]]:
    """Admits experts that a layer to come will probably need, ahead of its `plan`.

    Those that are not resident, in order of id, take victims as in `plan`, never one that is itself
    listed. The clock stands, and nothing is added to `gate`. Of tiers that share slots base planes
    come first, then refinements, of experts whose base plane was there: a guess that is wrong moves
    one plane alone.

    Args:
      tiers: the only one, with slots; or of refinements, whose table stays, and of base planes.
        Donate their tables.
      ids: int32[L], experts (whose base plane is to come, of tiers that share slots); -1: none.
      active: bool[N]; nothing is admitted if no token is.
      refined: bool[L], those that will run in the first of tiers that share slots; else None.

    Returns:
      The tables of each tier, and what to fetch of each before that layer's products, int32[L].
    """
    shares, reasons = bool(forms) and forms[0].shares_slots, []
    if not shares and any(form.most_slots == 0 for form in forms):
        reasons.append("there are no slots")
    if (len(tiers) > 1 or refined is not None) and not shares:
        reasons.append("no tiers share slots")
    if shares and refined is None:
        reasons.append("tiers share slots, and nobody says who is refined")
    operands = {
        "ids": (ids, "int32[L]"), "refined": (refined, "bool[L]"), "active": (active, "bool[N]")
    }  # fmt: skip
    _check("cache_plan.predict", tiers, forms, operands, reasons)
    return PREDICT(
        tuple(tiers), jnp.asarray(layer, jnp.int32), ids, active, refined, forms=tuple(forms),
        implementation=implementation, interpret=interpret,
    )  # fmt: skip


def _check(
    operation: str,
    tiers: Sequence[TierOperands],
    forms: Sequence[TierShape],
    operands: Operands,
    reasons: Sequence[str] = (),
) -> None:
    """Raises ValueError unless `operands` fit their forms, and tiers theirs.

    `reasons` join those that are found.
    """
    if not tiers or len(forms) != len(tiers):
        raise ValueError(f"{operation}: {len(forms)} forms of {len(tiers)} tiers")
    num_experts = tiers[0].row_of.shape[-1]
    reasons = list(reasons)
    for i, (tier, form) in enumerate(zip(tiers, forms, strict=True)):
        width = 0 if form.shares_slots else form.planes * num_experts + 3 * form.most_slots
        operands = {
            f"row_of of tier {i}": (tier.row_of, "int32[M, E]"),
            f"table of tier {i}, {form.most_slots} slots": (
                tier.tables.table,
                f"int32[M, {width}]",
            ),
            f"clock of tier {i}": (tier.tables.clock, "int32[]"),
            f"events of tier {i}": (tier.tables.events, f"int32[M, {len(EVENTS)}]"),
            f"gate of tier {i}": (tier.tables.gate, "float32[M, .]"),
            **operands,
        }
        if form.waves < 0 or form.transient < 1 or (form.streams and not form.waves):
            reasons.append(f"tier {i}: {form.slots} slots, {form.waves} waves of {form.transient}")
        if form.shares_slots and (i or len(tiers) != 2 or form.planes != 2 or form.transient < 2):
            reasons.append(
                "slots are shared by the first of two tiers, which refines the second, with two "
                "transient ones or more"
            )
        if form.longer_layers and (form.planes > 1 or form.is_complete):
            reasons.append(f"tier {i} has slots of planes, or of every expert: no layer is longer")
        if form.static_in_step and (i or not form.slots):
            reasons.append(f"tier {i} is fixed: the first one may be, with slots")
        if (form.is_full or form.is_complete) and form.slots < num_experts:
            reasons.append(f"tier {i} is not full: it has {form.slots} slots")
    refuse(operation, reasons)
    check_operands(operation, operands)


def _operands_of(
    asked: Asked, gate: jax.Array | None, active: jax.Array, num_tiers: int
) -> Operands:
    num_chosen = asked.ids.shape[-1]
    operands: Operands = {
        "active": (active, "bool[N]"),
        "ids": (asked.ids, "int32[N, A]"),
        "weights": (asked.weights, "float32[N, A]"),
        "routed_ids": (asked.routed_ids, "int32[N, A]"),
        "host": (asked.host, f"int32[{num_chosen + 1}]"),
        f"gate of {num_tiers} tiers": (gate, f"float32[M, {num_tiers + 3}]"),
    }
    if isinstance(asked.by, Wishes):
        operands["tier"] = asked.by.tier, "int32[N, A]"
        operands["at_least"] = asked.by.at_least, "bool[N, A]"
    elif isinstance(asked.by, Rule):
        operands["critical"] = asked.by.critical, "int32[M]"
        operands["high"] = asked.by.high, "int32[]"
        operands["low"] = asked.by.low, "int32[]"
        operands["high_if_resident"] = asked.by.high_if_resident, "bool[]"
    return operands
