"""The public calls: which implementation runs, and why one is refused."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.residency_plan.operands import PLAN_EVENTS, Columns, Tables, num_slots
from pallas_kernels.target import SIMULATED, Target, current_target
from pallas_kernels.tiered_plan import triton
from pallas_kernels.tiered_plan.operands import Asked, Form, Placed, Rule, Tier, Wishes
from pallas_kernels.tiered_plan.reference import place_reference

IMPLEMENTATIONS = ("triton", "reference")  # in order of preference; the reference refuses nothing


def refusal(
    implementation: str,
    num_experts: int,
    num_pairs: int,
    num_tiers: int,
    target: Target | None = None,
) -> str | None:
    """Why an implementation cannot serve on a target, or None.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      num_experts: E.
      num_pairs: N A.
      num_tiers: T.
      target: None for the default device.
    """
    if implementation == "reference":
        return None
    return triton.refusal(num_experts, num_pairs, num_tiers, target or current_target())


def place(
    tiers: Sequence[Tier],
    gate: jax.Array,
    layer: int | jax.Array,
    asked: Asked,
    active: jax.Array,
    *,
    forms: Sequence[Form],
    columns: Columns,
    implementation: str | None = None,
    num_warps: int | None = None,
    interpret: bool = False,
) -> tuple[tuple[Tables, ...], jax.Array, Placed]:
    """Where each pair of a layer runs, of experts that are stored in several tiers.

    By the rules of DyMoE's mixed-precision cache (section 4.4.2): of an expert the tier of highest
    fidelity counts that an active pair asks for; a copy there serves, else the nearest better one
    where all pairs that ask for that tier allow it (`at_least`), else it is fetched, and its copies
    in tiers that are not full leave. Copies leave too for which a better one is there. Then each
    tier places the experts that run in it as `residency_plan.plan` does without waves: the caller
    knows that its slots serve whatever a layer needs. Of a tier without slots of layers, it is all
    copied to its transient ones, in the order of the ids.

    What is asked for are wishes, or a rule by which the call itself finds them: a launch less.

    Args:
      tiers: of falling fidelity; donate their tables.
      gate: float32[M, T + 3], donated: the router's gate mass that each tier served, that was
        skipped, that another expert served, and of all.
      layer: int or int32[] in 0..M - 1.
      asked: of N tokens.
      active: bool[N], tokens that count.
      forms: static facts of each tier.
      columns: of `Tables.events`, by the names of `residency_plan.PLAN_EVENTS`.
      implementation: "triton" or "reference"; None for the kernel where it does not refuse.
      num_warps: of the kernel; None for a number that goes with the sizes.
      interpret: runs the kernel on the CPU, for tests.

    Returns:
      The tables of each tier and the gate mass, in the same places in memory if they were donated,
      and the plan.

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    reasons = _misfits(tiers, gate, asked, active, forms)
    if missing := sorted(set(PLAN_EVENTS) - set(columns)):
        reasons.append(f"no column for {', '.join(missing)}")
    if reasons:
        raise ValueError(f"tiered_plan.place: {'; '.join(reasons)}")
    target = SIMULATED if interpret else current_target()
    refused = refusal("triton", tiers[0].row_of.shape[1], asked.ids.size, len(tiers), target)
    chosen = implementation or ("reference" if refused else "triton")
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {chosen!r} is none of {', '.join(IMPLEMENTATIONS)}")
    if chosen == "triton" and refused:
        raise ValueError(f"tiered_plan.place by triton refuses: {refused}")
    given = (tuple(tiers), gate, jnp.asarray(layer, jnp.int32), asked, active)
    if chosen == "reference":
        return place_reference(*given, forms=forms, columns=columns)
    return triton.place_triton(
        *given, forms=tuple(forms), columns=columns, num_warps=num_warps, interpret=interpret
    )


def _misfits(
    tiers: Sequence[Tier],
    gate: jax.Array,
    asked: Asked,
    active: jax.Array,
    forms: Sequence[Form],
) -> list[str]:
    reasons = []
    if not tiers or len(forms) != len(tiers):
        return [f"{len(forms)} forms of {len(tiers)} tiers"]
    num_layers, num_experts = tiers[0].row_of.shape
    for i, (tier, form) in enumerate(zip(tiers, forms, strict=True)):
        shape, table = tier.row_of.shape, tier.tables.table
        slots = num_slots(table, num_experts)
        if shape != (num_layers, num_experts):
            reasons.append(f"tier {i} is of {shape}")
        either = (slots > 0) != (form.streams > 0)
        if table.shape != (num_layers, num_experts + 3 * slots) or not either:
            reasons.append(f"the table of tier {i} is {table.shape}; it has slots or streams")
        if form.streams and form.streams < min(asked.ids.size, num_experts):
            reasons.append(f"tier {i} streams {form.streams} experts, fewer than may be asked for")
        if form.is_fixed and (i or not slots):
            reasons.append(f"tier {i} is fixed: the first one may be, with slots")
        if (form.is_full or form.is_complete) and slots < num_experts:
            reasons.append(f"tier {i} is not full: it has {slots} slots")
    if gate.shape != (num_layers, len(tiers) + 3) or gate.dtype != jnp.float32:
        reasons.append(f"gate is {gate.dtype}{gate.shape}, of {len(tiers)} tiers")
    arrays = {"ids": (asked.ids, jnp.int32), "weights": (asked.weights, jnp.float32)}
    if asked.routed_ids is not None:
        arrays["routed_ids"] = asked.routed_ids, jnp.int32
    if isinstance(asked.by, Wishes):
        arrays |= {"tier": (asked.by.tier, jnp.int32), "at_least": (asked.by.at_least, jnp.bool_)}
    for name, (of, dtype) in arrays.items():
        if of.shape != (*active.shape, asked.ids.shape[-1]) or of.dtype != dtype:
            reasons.append(f"{name} is {of.dtype}{of.shape}, active {active.shape}")
    if isinstance(asked.by, Rule):
        reasons += _misfits_of_rule(asked.by, num_layers)
    return reasons


def _misfits_of_rule(rule: Rule, num_layers: int) -> list[str]:
    numbers = {
        "critical": (rule.critical, jnp.int32, (num_layers,)), "high": (rule.high, jnp.int32, ()),
        "low": (rule.low, jnp.int32, ()), "held": (rule.held, jnp.bool_, ()),
    }  # fmt: skip
    return [
        f"{name} is {of.dtype}{of.shape}, not {jnp.dtype(dtype).name}{shape}"
        for name, (of, dtype, shape) in numbers.items()
        if of is not None and (of.dtype != dtype or of.shape != shape)
    ]
