"""The operation in plain jnp; never optimised."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.residency_plan.operands import Columns, Fetch, Tables, Waves, num_slots
from pallas_kernels.residency_plan.operands import Placed as Plan
from pallas_kernels.residency_plan.reference import plan_reference
from pallas_kernels.tiered_plan.operands import Asked, Form, Placed, Rule, Tier, Wishes


class _Served(NamedTuple):
    """Of each expert: the tier in which it runs, or -1, and whether it is fetched for that."""

    tier: jax.Array
    fetched: jax.Array


def wishes_of(
    rule: Rule, ids: jax.Array, active: jax.Array, layer: jax.Array, resident: jax.Array
) -> Wishes:
    """What a rule says; `resident` bool[T, E], copies that serve."""
    num_experts, width = resident.shape[1], ids.shape[1]
    critical = jnp.zeros(num_experts, bool)
    if rule.critical is not None:
        first = active[:, None] & (jnp.arange(width)[None] < rule.critical[layer])
        places = jnp.where(first, ids, num_experts)
        critical = critical.at[places.reshape(-1)].set(True, mode="drop")
    high = critical | (rule.held & resident[rule.high])
    tier = jnp.where(high[ids], rule.high, rule.low)
    return Wishes(tier, ~critical[ids] & rule.at_least)


def _served(resident: jax.Array, ids: jax.Array, asked: Wishes, asks: jax.Array) -> _Served:
    """The rules of a mixed-precision cache, by expert; `resident` bool[T, E], `asks` bool[N, A]."""
    num_tiers, num_experts = resident.shape
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    tier = jnp.arange(num_tiers, dtype=jnp.int32)[:, None]
    pairs = (ids[None] == expert[:, None, None]) & asks[None]
    best = jnp.min(jnp.where(pairs, asked.tier[None], num_tiers), axis=(1, 2))
    is_asked = best < num_tiers
    strict = pairs & (asked.tier[None] == best[:, None, None]) & ~asked.at_least[None]
    better = resident & (tier < best[None]) & ~jnp.any(strict, axis=(1, 2))[None]
    exact = jnp.any(resident & (tier == best[None]), axis=0)
    reused = is_asked & jnp.any(better, axis=0) & ~exact
    there = jnp.max(jnp.where(better, tier, -1), axis=0)
    served = jnp.where(is_asked, jnp.where(reused, there, best), -1)
    return _Served(served, is_asked & ~exact & ~reused)


def _released(
    tables: Tables, layer: jax.Array, gone: jax.Array, columns: Columns, num_experts: int
) -> Tables:
    """Without the experts `gone`, bool[E], of a layer."""
    row, slots = tables.table[layer], num_slots(tables.table, num_experts)
    slot_of, owner, last_use, ahead = jnp.split(row, [num_experts + i * slots for i in range(3)])
    leaves = (owner >= 0) & gone[jnp.maximum(owner, 0)]
    waste = jnp.sum(leaves & (ahead != 0), dtype=jnp.int32)
    events = tables.events.at[layer, columns["evictions"]].add(jnp.sum(leaves, dtype=jnp.int32))
    events = events.at[layer, columns["prefetch_waste"]].add(waste)
    columns_of_row = (
        jnp.where(gone, -1, slot_of), jnp.where(leaves, -1, owner),
        jnp.where(leaves, 0, last_use), jnp.where(leaves, 0, ahead),
    )  # fmt: skip
    table = tables.table.at[layer].set(jnp.concatenate(columns_of_row))
    return tables._replace(table=table, events=events)


def _fetch(form: Form, placed: Plan, num_pairs: int, num_experts: int) -> Fetch | None:
    """What a tier copies."""
    if not form.fetches:
        return None
    if not form.streams:
        return Fetch(placed.rows, placed.slots)
    rows = placed.streamed[0, : form.num_jobs(num_pairs, num_experts, 0)]
    return Fetch(rows, jnp.where(rows >= 0, jnp.arange(len(rows), dtype=jnp.int32), -1))


def place_reference(
    tiers: Sequence[Tier],
    gate: jax.Array,
    layer: jax.Array,
    asked: Asked,
    active: jax.Array,
    *,
    forms: Sequence[Form],
    columns: Columns,
) -> tuple[tuple[Tables, ...], jax.Array, Placed]:
    """See `api.place`."""
    num_experts, num_tiers = tiers[0].row_of.shape[1], len(tiers)
    resident = jnp.stack([tier.tables.table[layer, :num_experts] >= 0 for tier in tiers])
    # A copy that leaves because a better one is there serves nobody.
    held = [
        copies if form.is_full else copies & ~jnp.any(resident[:i], axis=0)
        for i, (copies, form) in enumerate(zip(resident, forms, strict=True))
    ]
    wishes = asked.by
    if isinstance(wishes, Rule):
        wishes = wishes_of(wishes, asked.ids, active, layer, jnp.stack(held))
    asks = active[:, None] & (wishes.tier >= 0)
    served = _served(jnp.stack(held), asked.ids, wishes, asks)
    chosen = jnp.where(asks, served.tier[asked.ids], -1)
    slot, tables_after, fetch = jnp.full_like(chosen, -1), [], []
    for i, (tier, form) in enumerate(zip(tiers, forms, strict=True)):
        tables = tier.tables
        if not (form.is_full or form.is_fixed) and num_tiers > 1:
            gone = resident[i] & (served.fetched | jnp.any(resident[:i], axis=0))
            tables = _released(tables, layer, gone, columns, num_experts)
        mine = chosen == i
        after, placed = plan_reference(
            tables, tier.row_of, layer, asked.ids.reshape(-1, 1), mine.reshape(-1),
            asked.weights.reshape(-1, 1), banks=form.banks, columns=columns,
            waves=Waves(1, form.streams) if form.streams else Waves(0, 1),
        )  # fmt: skip
        slot = jnp.where(mine, placed.slot.reshape(slot.shape), slot)
        if form.is_complete:
            after = after._replace(table=tables.table)
        tables_after.append(after)
        fetch.append(_fetch(form, placed, asked.ids.size, num_experts))
    routed_ids = asked.ids if asked.routed_ids is None else asked.routed_ids
    other = (chosen >= 0) & (asked.ids != routed_ids)
    masks = [chosen == i for i in range(num_tiers)]
    masks += [chosen < 0, other, jnp.ones_like(other)]
    mass = jnp.where(active[:, None], asked.weights, 0.0)
    sums = jnp.stack([jnp.sum(jnp.where(mask, mass, 0.0)) for mask in masks])
    placed_all = Placed(jnp.where(slot >= 0, chosen, -1), slot, tuple(fetch))
    return tuple(tables_after), gate.at[layer].add(sums), placed_all
