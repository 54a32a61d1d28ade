"""The cache's rule in plain jnp: what every implementation must do, and what a CPU runs."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache_plan.operands import (
    Asked,
    Fetch,
    LayerPlan,
    Rule,
    Tables,
    TierOperands,
    TierPart,
    TierShape,
    Wishes,
    assigned,
    at,
    brought_ahead,
    counted,
    departures,
    fetch_of,
    index_of,
    iota,
    marked,
    num,
    order_of,
    ordered_victims,
    read_row,
    without,
    write_row,
)
from pallas_kernels.cache_plan.shared_slots import plan_shared, predict_shared, resident_planes


class _ResolvedTiers(NamedTuple):
    """Tiers, misses and reuse of a layer's experts in a step."""

    tier: jax.Array  # int32[E], in which an expert runs; -1 where nobody asks for it
    fetched: jax.Array  # bool[E], it is a miss, and comes in that tier
    reused: jax.Array  # bool[E], a hit in a tier of higher fidelity than was asked for
    leaving: jax.Array  # bool[T, E], copies that go because their expert comes in another tier


def servable(copies: jax.Array, full: Sequence[bool]) -> jax.Array:
    """bool[T, E], copies that may serve: none that leaves because a better one has come.

    Look-ahead and transfers bring an expert while it is still in a tier of lower fidelity; that
    copy leaves when its layer runs next.

    Args:
      copies: bool[T, E], where experts are.
      full: static, of each tier whether it holds every expert for ever.
    """
    rows = [
        row if is_full else row & ~jnp.any(copies[:tier], axis=0)
        for tier, (row, is_full) in enumerate(zip(copies, full, strict=True))
    ]
    return jnp.stack(rows)


def resolve_tiers(
    resident: jax.Array,  # bool[T, E], of `servable`
    ids: jax.Array,
    # of each pair. A copy of higher fidelity serves where all active pairs of the tier that an
    # expert is asked for in allow it (`at_least`).
    wishes: Wishes,
    active: jax.Array,
    # static, of each tier whether its copies refine those of the next one, which has every expert;
    # (): none does
    refines: Sequence[bool] = (),
) -> _ResolvedTiers:
    """Which tier serves each expert, by the rules of DyMoE's mixed-precision cache (section 4.4.2).

      * No duplication: an expert is stored in one format only.
      * Precision promotion: low precision is there, high is asked for: a miss; the high copy is
        loaded and the low one leaves.
      * Conservative reuse: high precision is there, low is asked for: a hit, the high copy serves,
        whether or not a low one is there too, in a tier that holds every expert. It costs no load
        and loses nothing. Where high precision is low precision refined, the low copy serves, of
        which the high one is made: it has fewer bytes to read.

    Returns:
      See `_ResolvedTiers`; no expert is both reused and fetched.
    """
    num_tiers, num_experts = resident.shape
    expert, tier = iota(num_experts), iota(num_tiers)[:, None]
    asks = active[:, None] & (wishes.tier >= 0)
    pairs = (ids[None] == expert[:, None, None]) & asks[None]
    best = jnp.min(jnp.where(pairs, wishes.tier[None], num_tiers), axis=(1, 2))
    asked = jnp.where(best == num_tiers, -1, best)
    strict = pairs & (wishes.tier[None] == asked[:, None, None]) & ~wishes.at_least[None]
    better = resident & (tier < asked[None]) & ~jnp.any(strict, axis=(1, 2))[None]
    if any(refines):
        better &= ~np.asarray(refines)[:, None]
    reused = jnp.any(better, axis=0)
    there = jnp.max(jnp.where(better, tier, -1), axis=0)
    exact = jnp.any(resident & (tier == asked[None]), axis=0)
    fetched = (asked >= 0) & ~exact & ~reused
    return _ResolvedTiers(
        jnp.where(reused, there, asked), fetched, reused, resident & fetched[None]
    )


def _wishes_of(
    rule: Rule, ids: jax.Array, active: jax.Array, layer: jax.Array, resident: jax.Array
) -> Wishes:
    """The wishes of a rule; `resident` bool[T, E], of `servable`."""
    num_experts, width = resident.shape[1], ids.shape[1]
    critical = jnp.zeros(num_experts, bool)
    if rule.critical is not None:
        first = active[:, None] & (iota(width)[None] < rule.critical[layer])
        critical = marked(ids, first, num_experts)
    high = critical | (rule.high_if_resident & resident[rule.high])
    return Wishes(jnp.where(high[ids], rule.high, rule.low), ~critical[ids] & rule.at_least)


def _plan_one(
    tier: TierOperands,
    layer: jax.Array,
    needed: jax.Array,
    size: int,
    form: TierShape,
) -> TierPart:
    """Slots for the experts of one tier that a layer needs, bool[E]; at most `size` of them."""
    tables, row_of = tier
    (num_layers, num_experts), clock = row_of.shape, tables.clock
    before = read_row(tables.table, layer, num_experts)
    hit, miss = needed & (before.slot_of >= 0), needed & (before.slot_of < 0)
    order, jobs = order_of(miss), min(size, form.most_slots)
    victim, place = ordered_victims(before, clock, needed, form.longer_layers > 0)
    if form.waves:
        fits = num(miss) <= num(victim)
        victim &= fits | (before.owner < 0)
    _, row = assigned(before, miss & (order < jobs), order, victim, place)
    cached, come = needed & (row.slot_of >= 0), miss & (row.slot_of >= 0)
    width, index = form.transient, jnp.full_like(order, -1)
    if form.waves:
        index = jnp.where(needed & ~cached, order - num(victim), -1)
        index = jnp.where(index < form.waves * width, index, -1)
    streams = index >= 0
    first = form.first_transient(num_layers)
    places = form.first_slot(jnp.asarray(layer, jnp.int32) // form.banks) + row.slot_of
    slot = jnp.where(cached, places, jnp.where(streams, first + index % width, -1))
    wave = jnp.where(cached, 0, jnp.where(streams, 0 if form.at_once else 1 + index // width, -1))
    streamed = index_of(index, iota(form.waves * width)).reshape(form.waves, width)
    first_copied = come | streams if form.at_once else come
    admitted = index_of(jnp.where(first_copied, order, -1), iota(form.num_jobs(size, num_experts)))
    used = (row.owner >= 0) & at(needed, row.owner)
    row = row._replace(
        last_use=jnp.where(used, clock, row.last_use), prefetched=row.prefetched & ~used
    )
    events = counted(
        tables.events, layer, steps=jnp.any(needed), needed=num(needed), hits=num(hit),
        misses=num(miss), admitted=num(come), streamed=num(streams),
        unserved=num(needed & ~cached & ~streams),
        prefetch_hits=num(hit & at(before.prefetched, before.slot_of)),
        **departures(before, row),
    )  # fmt: skip
    table = tables.table if form.is_complete else write_row(tables.table, layer, row)
    rows, later = row_of[layer], None
    if form.later_waves:
        transient = jnp.broadcast_to(first + iota(width), streamed.shape)
        later = fetch_of(rows, streamed, transient)._replace(slots=transient)
    tables = tables._replace(table=table, clock=clock + 1, events=events)
    return TierPart(tables, slot, wave, fetch_of(rows, admitted, at(slot, admitted)), later)


def plan_reference(
    tiers: Sequence[TierOperands],
    gate: jax.Array | None,
    layer: jax.Array,
    asked: Asked,
    active: jax.Array,
    *,
    forms: Sequence[TierShape],
) -> tuple[tuple[Tables, ...], jax.Array | None, LayerPlan]:
    """Computes `api.plan` in plain JAX."""
    ids, weights = asked.ids, asked.weights
    num_experts, num_tiers = tiers[0].row_of.shape[1], len(tiers)
    size = min(ids.size, num_experts)
    is_shared, base = forms[0].shares_slots, None
    chosen, gone = jnp.where(active[:, None], 0, jnp.full_like(ids, -1)), None
    if asked.by is not None:
        if is_shared:
            resident = copies = resident_planes(tiers[1].tables.table[layer], num_experts)
        else:
            copies = jnp.stack([tier.tables.table[layer, :num_experts] >= 0 for tier in tiers])
            resident = servable(copies, [form.is_full for form in forms])
        wishes = asked.by
        if isinstance(wishes, Rule):
            wishes = _wishes_of(wishes, ids, active, layer, resident)
        refines = [form.refines for form in forms]
        found = resolve_tiers(resident, ids, wishes, active, refines)
        chosen = jnp.where(active[:, None] & (wishes.tier >= 0), found.tier[ids], -1)
        better = [jnp.any(copies[:i], axis=0) for i in range(num_tiers)]
        gone = [copies[i] & (found.fetched | better[i]) for i in range(num_tiers)]
    hosted = None
    if asked.host is not None:
        hosted, chosen = _hosted(tiers[0], layer, ids, chosen, asked.host)
    parts: list[TierPart] = []
    if is_shared:
        pairs = jnp.where(chosen >= 0, ids, -1)
        parts[:], base = plan_shared(tiers, layer, found.tier, pairs, forms)
    slot, wave, after, fetch, streamed = jnp.full_like(ids, -1), jnp.full_like(ids, -1), [], [], []
    for i, (tier, form) in enumerate(zip(tiers, forms, strict=True)):
        mine = chosen == i
        if is_shared:
            made = parts[i]
        else:
            if gone is not None and num_tiers > 1 and not (form.is_full or form.static_in_step):
                tier = tier._replace(tables=_released(tier.tables, layer, gone[i]))
            made = _plan_one(tier, layer, marked(ids, mine, num_experts), size, form)
        slot = jnp.where(mine, made.slot[ids], slot)
        wave = jnp.where(mine, made.wave[ids], wave)
        mass = jnp.sum(jnp.where(mine, weights, 0.0))
        if hosted is not None:
            made = made._replace(tables=_with_hosted(made.tables, layer, hosted, mine))
            mass = jnp.stack([jnp.sum(jnp.where(mine | (hosted >= 0), weights, 0.0)), mass])
        after.append(made.tables._replace(gate=made.tables.gate.at[layer, :2].add(mass)))
        fetch.append(made.fetch if form.fetches else None)
        streamed.append(made.streamed)
    if gate is not None:
        routed = ids if asked.routed_ids is None else asked.routed_ids
        index = iota(num_tiers)[:, None, None]
        other = (chosen >= 0) & (ids != routed)
        kinds = [chosen[None] == index, (chosen < 0)[None], other[None], jnp.ones_like(other)[None]]
        mass = jnp.where(active[:, None], weights, 0.0)
        sums = jnp.sum(jnp.where(jnp.concatenate(kinds), mass[None], 0.0), axis=(1, 2))
        gate = jax.lax.dynamic_update_index_in_dim(gate, gate[layer] + sums, layer, 0)
    waves = wave if any(form.later_waves for form in forms) else None
    runs = jnp.where(slot >= 0, chosen, -1)
    made_plan = LayerPlan(runs, slot, waves, tuple(fetch), tuple(streamed), base, hosted)
    return tuple(after), gate, made_plan


def _hosted(
    tier: TierOperands, layer: jax.Array, ids: jax.Array, chosen: jax.Array, host: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rows int32[1, A] that the host multiplies, and the tiers of the other pairs."""
    row = tier.row_of[layer][ids]
    miss = (chosen == 0) & (tier.tables.table[layer][ids] < 0) & (row >= 0)
    at_host = last_misses(miss, host)
    return jnp.where(at_host, row, -1), jnp.where(at_host, -1, chosen)


def last_misses(miss: jax.Array, host: jax.Array) -> jax.Array:
    """Mask bool[1, A] of the misses that the host multiplies.

    Args:
      miss: bool[1, A], in the order of a token's pairs.
      host: int32[A + 1], as `Asked.host`.
    """
    ones = miss.astype(jnp.int32)
    later = jnp.cumsum(ones[:, ::-1], axis=1)[:, ::-1] - ones
    return miss & (later < host[num(miss)])


def _with_hosted(tables: Tables, layer: jax.Array, hosted: jax.Array, others: jax.Array) -> Tables:
    """Counts experts that the host multiplies, beside those of the slots."""
    count = num(hosted >= 0)
    steps = (count > 0) & ~jnp.any(others)
    events = counted(tables.events, layer, steps=steps, needed=count, misses=count)
    return tables._replace(events=events)


def predict_reference(
    tiers: Sequence[TierOperands],
    layer: jax.Array,
    ids: jax.Array,
    active: jax.Array,
    refined: jax.Array | None,
    *,
    forms: Sequence[TierShape],
) -> tuple[tuple[Tables, ...], tuple[Fetch, ...]]:
    """Computes `api.predict` in plain JAX."""
    if refined is not None:
        return predict_shared(tiers, layer, ids, active, refined, forms)
    [tier], [form] = tiers, forms
    tables, num_experts = tier.tables, tier.row_of.shape[1]
    before = read_row(tables.table, layer, num_experts)
    wanted = marked(ids, (ids >= 0) & jnp.any(active), num_experts)
    new = wanted & (before.slot_of < 0)
    order = order_of(new)
    _, row = brought_ahead(before, new, order, wanted, tables.clock, form.longer_layers > 0)
    come = new & (row.slot_of >= 0)
    events = counted(tables.events, layer, prefetched=num(come), **departures(before, row))
    places = form.first_slot(jnp.asarray(layer, jnp.int32) // form.banks) + row.slot_of
    experts = index_of(jnp.where(come, order, -1), iota(len(ids)))
    tables = tables._replace(table=write_row(tables.table, layer, row), events=events)
    return (tables,), (fetch_of(tier.row_of[layer], experts, at(places, experts)),)


def _released(tables: Tables, layer: jax.Array, gone: jax.Array) -> Tables:
    """Without the experts `gone`, bool[E], of a layer."""
    if tables.table.shape[1] == len(gone):  # no slots
        return tables
    before = read_row(tables.table, layer, len(gone))
    row = without(before, gone)
    events = counted(tables.events, layer, **departures(before, row))
    return tables._replace(table=write_row(tables.table, layer, row), events=events)
