"""Public calls of the cache plan, and their operations."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.cache_plan import triton
from pallas_kernels.cache_plan.operands import (
    PLAN_EVENTS,
    PREDICT_EVENTS,
    Asked,
    Columns,
    Fetch,
    LayerPlan,
    Rule,
    Tables,
    TierOperands,
    TierShape,
    Wishes,
)
from pallas_kernels.cache_plan.reference import plan_reference, predict_reference
from pallas_kernels.cache_plan.shared_slots import predict_shared as predict_shared_reference
from pallas_kernels.op import Implementation, Operation

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
    abstract=lambda tier, layer, ids, *_, **__: (tier.row_of.shape[-1], ids.size, 1),
)
PREDICT_SHARED = Operation(
    "cache_plan.predict_shared",
    kernels=(Implementation("triton", triton.refusal, triton.predict_shared_triton),),
    reference=predict_shared_reference,
    abstract=lambda tiers, layer, ids, *_, **__: (tiers[0].row_of.shape[-1], ids.size, 2),
)


def plan(
    tiers: Sequence[TierOperands],
    gate: jax.Array | None,
    layer: int | jax.Array,
    asked: Asked,
    active: jax.Array,
    *,
    forms: Sequence[TierShape],
    columns: Columns,
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
      layer: int or int32[] in 0..M - 1; an array lets all layers share a trace.
      asked: of N tokens; wishes, or a rule by which the call itself finds them: a launch less.
      active: bool[N], tokens that count.
      columns: of `Tables.events`, by the names of `PLAN_EVENTS`.
      implementation: "triton" or "reference"; None for the kernel where it does not refuse.

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
        raise ValueError(f"cache_plan.plan: {'; '.join(reasons)}")
    return PLAN(
        tuple(tiers), gate, jnp.asarray(layer, jnp.int32), asked, active, forms=forms,
        columns=columns, implementation=implementation, interpret=interpret,
    )  # fmt: skip


def predict(
    tier: TierOperands,
    layer: int | jax.Array,
    ids: jax.Array,
    active: jax.Array,
    *,
    form: TierShape,
    columns: Columns,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Tables, Fetch]:
    """Admits experts that a layer to come will probably need, ahead of its `plan`.

    Those that are not resident, in order of id, take victims as in `plan`, never one that is itself
    listed. The clock stands, and nothing is added to `gate`.

    Args:
      tier: donate its tables; C > 0.
      ids: int32[L], experts; -1: none.
      active: bool[N]; nothing is admitted if no token is.
      columns: of `Tables.events`, by the names of `PREDICT_EVENTS`.

    Returns:
      The tables, and what to fetch before that layer's products.

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    reasons = _misfits_of_tier(0, tier, form, tier.row_of.shape)
    if ids.ndim != 1 or ids.dtype != jnp.int32:
        reasons.append(f"ids are {ids.dtype}{ids.shape}, not int32[L]")
    if not form.slots:
        reasons.append("there are no slots")
    if missing := sorted(set(PREDICT_EVENTS) - set(columns)):
        reasons.append(f"no column for {', '.join(missing)}")
    if reasons:
        raise ValueError(f"cache_plan.predict: {'; '.join(reasons)}")
    return PREDICT(
        tier, jnp.asarray(layer, jnp.int32), ids, active, form=form, columns=columns,
        implementation=implementation, interpret=interpret,
    )  # fmt: skip


def predict_shared(
    tiers: Sequence[TierOperands],
    layer: int | jax.Array,
    ids: jax.Array,
    refined: jax.Array,
    active: jax.Array,
    *,
    forms: Sequence[TierShape],
    columns: Columns,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[tuple[Tables, Tables], tuple[Fetch, Fetch]]:
    """Admits planes of experts that a layer to come will probably need, to slots that tiers share.

    As `predict`. Base planes come first, then refinements, of experts whose base plane was there: a
    guess that is wrong moves one plane alone.

    Args:
      tiers: of refinements, whose table stays, and of base planes; donate their tables.
      ids: int32[L], experts whose base plane is to come; -1: none.
      refined: bool[L], those that will run in the first tier.
      active: bool[N]; nothing is admitted if no token is.
      columns: of `Tables.events`, by the names of `PREDICT_EVENTS`.

    Returns:
      The tables of each tier, and what to fetch of each, int32[L].

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    reasons = _misfits_of_tiers(tiers, forms)
    if not (forms and forms[0].shares_slots):
        reasons.append("no tiers share slots")
    if ids.ndim != 1 or ids.dtype != jnp.int32 or refined.shape != ids.shape:
        reasons.append(f"ids are {ids.dtype}{ids.shape}, not int32[L], refined {refined.shape}")
    if missing := sorted(set(PREDICT_EVENTS) - set(columns)):
        reasons.append(f"no column for {', '.join(missing)}")
    if reasons:
        raise ValueError(f"cache_plan.predict_shared: {'; '.join(reasons)}")
    return PREDICT_SHARED(
        tuple(tiers), jnp.asarray(layer, jnp.int32), ids, refined, active, forms=tuple(forms),
        columns=columns, implementation=implementation, interpret=interpret,
    )  # fmt: skip


def _misfits_of_tier(
    i: int, tier: TierOperands, form: TierShape, shape: tuple[int, ...]
) -> list[str]:
    if len(shape) != 2:
        return [f"row_of of tier {i} is {tier.row_of.shape}, not [M, E]"]
    (num_layers, num_experts), reasons = shape, []
    table, clock, events, gate = tier.tables
    if tier.row_of.shape != shape:
        reasons.append(f"tier {i} is of {tier.row_of.shape}, the first of {shape}")
    if table.shape != (num_layers, _table_width(form, num_experts)):
        reasons.append(f"the table of tier {i} is {table.shape}, of {form.slots} slots")
    for name, of in (("events", events), ("gate", gate)):
        if of.ndim != 2 or of.shape[0] != num_layers:
            reasons.append(f"{name} of tier {i} is {of.shape}, of {num_layers} layers")
    if clock.shape or gate.shape[-1] < 2:
        reasons.append(f"tier {i}: clock is {clock.shape}, gate {gate.shape}")
    for name, of, dtype in (
        ("table", table, jnp.int32), ("clock", clock, jnp.int32), ("events", events, jnp.int32),
        ("gate", gate, jnp.float32), ("row_of", tier.row_of, jnp.int32),
    ):  # fmt: skip
        if of.dtype != dtype:
            reasons.append(f"{name} of tier {i} is {of.dtype}, not {jnp.dtype(dtype).name}")
    return reasons


def _misfits_of_tiers(tiers: Sequence[TierOperands], forms: Sequence[TierShape]) -> list[str]:
    reasons = []
    if not tiers or len(forms) != len(tiers):
        return [f"{len(forms)} forms of {len(tiers)} tiers"]
    shape = tiers[0].row_of.shape
    for i, (tier, form) in enumerate(zip(tiers, forms, strict=True)):
        reasons += _misfits_of_tier(i, tier, form, shape)
        if form.waves < 0 or form.transient < 1 or (form.streams and not form.waves):
            reasons.append(f"tier {i}: {form.slots} slots, {form.waves} waves of {form.transient}")
        if form.shares_slots and (i or len(tiers) != 2 or form.planes != 2 or form.transient < 2):
            reasons.append(
                "slots are shared by the first of two tiers, which refines the second, with two "
                "transient ones or more"
            )
        if form.static_in_step and (i or not form.slots):
            reasons.append(f"tier {i} is fixed: the first one may be, with slots")
        if (form.is_full or form.is_complete) and form.slots < shape[-1]:
            reasons.append(f"tier {i} is not full: it has {form.slots} slots")
    return reasons


def _misfits(
    tiers: Sequence[TierOperands],
    gate: jax.Array | None,
    asked: Asked,
    active: jax.Array,
    forms: Sequence[TierShape],
) -> list[str]:
    reasons = _misfits_of_tiers(tiers, forms)
    if not tiers:
        return reasons
    if len(tiers) > 1 and asked.by is None:
        reasons.append(f"{len(tiers)} tiers, and nobody says which")
    shape = tiers[0].row_of.shape
    wanted = (shape[0], len(tiers) + 3)
    if gate is not None and (gate.shape != wanted or gate.dtype != jnp.float32):
        reasons.append(f"gate is {gate.dtype}{gate.shape}, of {len(tiers)} tiers")
    if asked.host is not None:
        of, alone = asked.host, len(tiers) == 1 and asked.by is None and gate is None
        if not alone or active.shape != (1,):
            reasons.append("the host multiplies misses of one token and one tier")
        if of.shape != (asked.ids.shape[-1] + 1,) or of.dtype != jnp.int32:
            reasons.append(f"host is {of.dtype}{of.shape}, ids {asked.ids.shape}")
    arrays = {"ids": (asked.ids, jnp.int32), "weights": (asked.weights, jnp.float32)}
    if asked.routed_ids is not None:
        arrays["routed_ids"] = asked.routed_ids, jnp.int32
    if isinstance(asked.by, Wishes):
        arrays |= {"tier": (asked.by.tier, jnp.int32), "at_least": (asked.by.at_least, jnp.bool_)}
    for name, (of, dtype) in arrays.items():
        if of.ndim != 2 or of.shape[:1] != active.shape or of.dtype != dtype:
            reasons.append(f"{name} is {of.dtype}{of.shape}, active {active.shape}")
        elif of.shape != asked.ids.shape:
            reasons.append(f"{name} is {of.shape}, ids {asked.ids.shape}")
    if active.dtype != jnp.bool_:
        reasons.append(f"active is {active.dtype}, not bool")
    if isinstance(asked.by, Rule):
        reasons += _misfits_of_rule(asked.by, shape[0])
    return reasons


def _misfits_of_rule(rule: Rule, num_layers: int) -> list[str]:
    numbers = {
        "critical": (rule.critical, jnp.int32, (num_layers,)), "high": (rule.high, jnp.int32, ()),
        "low": (rule.low, jnp.int32, ()),
        "high_if_resident": (rule.high_if_resident, jnp.bool_, ()),
    }  # fmt: skip
    return [
        f"{name} is {of.dtype}{of.shape}, not {jnp.dtype(dtype).name}{shape}"
        for name, (of, dtype, shape) in numbers.items()
        if of is not None and (of.dtype != dtype or of.shape != shape)
    ]


def _table_width(form: TierShape, num_experts: int) -> int:
    """Columns of a tier's table."""
    return 0 if form.shares_slots else form.planes * num_experts + 3 * form.slots
