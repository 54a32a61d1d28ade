"""The operation in plain jnp, with sorts; never optimised."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.residency_plan.operands import (
    Columns,
    Fetch,
    Placed,
    Tables,
    Waves,
    first_transient,
    num_jobs,
    num_slots,
)


class _Row(NamedTuple):
    """Of one layer."""

    slot_of: jax.Array
    owner: jax.Array
    last_use: jax.Array
    ahead: jax.Array


def _row(table: jax.Array, layer: jax.Array, num_experts: int) -> _Row:
    row, slots = table[layer], num_slots(table, num_experts)
    bounds = [num_experts + i * slots for i in range(3)]
    return _Row(*jnp.split(row, bounds))


def _order(row: _Row, clock: jax.Array, safe: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[C], which slots may be given away, and int32[C], the place of each in that order."""
    owned, index = row.owner >= 0, jnp.arange(len(row.owner), dtype=jnp.int32)
    owner = jnp.maximum(row.owner, 0)
    victim = ~(owned & safe[owner])
    # Modulo 2^32, 2^32 - 1 less the age.
    youth = (row.last_use - clock).astype(jnp.uint32) - np.uint32(1)
    youth = jnp.where(owned, youth, 0)
    keys = [jnp.where(owned, len(index) + owner, index), youth]  # of one use the smaller id
    first = jnp.lexsort((*keys, ~victim))  # the last key is the first one
    return victim, jnp.zeros_like(index).at[first].set(index)


def _given(new: jax.Array, victim: jax.Array, place: jax.Array) -> jax.Array:
    """int32[C]: the n-th new expert, by id, for the n-th victim."""
    experts = jnp.flatnonzero(new, size=len(new), fill_value=-1).astype(jnp.int32)
    return jnp.where(victim, experts[jnp.minimum(place, len(new) - 1)], -1)


def _inverse(owner: jax.Array, num_experts: int) -> jax.Array:
    index = jnp.where(owner >= 0, owner, num_experts)
    slots = jnp.arange(len(owner), dtype=jnp.int32)
    return jnp.full(num_experts, -1, jnp.int32).at[index].set(slots, mode="drop")


def _counted(
    events: jax.Array, layer: jax.Array, columns: Columns, **amounts: jax.Array | int
) -> jax.Array:
    for name, amount in amounts.items():
        events = events.at[layer, columns[name]].add(jnp.asarray(amount, jnp.int32))
    return events


def _num(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.int32)


def _jobs(
    mask: jax.Array, rows: jax.Array, places: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """The masked experts by id, at most `size`: their rows and their global slots."""
    experts = jnp.flatnonzero(mask, size=size, fill_value=-1)
    some = experts >= 0
    return jnp.where(some, rows[experts], -1), jnp.where(some, places[experts], -1)


def plan_reference(
    tables: Tables,
    row_of: jax.Array,
    layer: jax.Array,
    ids: jax.Array,
    active: jax.Array,
    weights: jax.Array,
    *,
    waves: Waves,
    banks: int,
    columns: Columns,
) -> tuple[Tables, Placed]:
    """See `api.plan`."""
    (num_layers, num_experts), clock = row_of.shape, tables.clock
    row = _row(tables.table, layer, num_experts)
    slots, rows = len(row.owner), row_of[layer]
    chosen = jnp.where(active[:, None], ids, num_experts)
    needed = jnp.zeros(num_experts, bool).at[chosen.reshape(-1)].set(True, mode="drop")
    hit, miss = needed & (row.slot_of >= 0), needed & (row.slot_of < 0)
    victim, place = _order(row, clock, needed)
    if waves.num:
        victim &= (_num(miss) <= _num(victim)) | (row.owner < 0)
    coming = _given(miss, victim, place)
    owner = jnp.where(coming >= 0, coming, row.owner)
    slot_of = _inverse(owner, num_experts)
    cached, come = needed & (slot_of >= 0), miss & (slot_of >= 0)
    streams = needed & ~cached if waves.num else jnp.zeros_like(needed)
    index = jnp.cumsum(streams, dtype=jnp.int32) - 1
    places = layer // banks * slots + slot_of
    first = first_transient(num_layers, slots, banks)
    transient = jnp.where(streams, first + index % waves.transient, -1)
    wave = jnp.where(streams, 1 + index // waves.transient, -1)
    gone, brought = (row.slot_of >= 0) & (slot_of < 0), jnp.zeros(num_experts, bool)
    if slots:
        brought = (row.slot_of >= 0) & (row.ahead[jnp.maximum(row.slot_of, 0)] != 0)
    events = _counted(
        tables.events, layer, columns, steps=jnp.any(needed), needed=_num(needed), hits=_num(hit),
        misses=_num(miss), admitted=_num(come), streamed=_num(streams),
        unserved=_num(needed & ~cached & ~streams), evictions=_num(gone),
        prefetch_hits=_num(hit & brought), prefetch_waste=_num(gone & brought),
    )  # fmt: skip
    used = (owner >= 0) & needed[jnp.maximum(owner, 0)]
    last_use, ahead = jnp.where(used, clock, row.last_use), jnp.where(used, 0, row.ahead)
    table = tables.table.at[layer].set(jnp.concatenate([slot_of, owner, last_use, ahead]))
    mass = jnp.sum(jnp.where(active[:, None], weights, 0.0))
    tables = Tables(table, clock + 1, events, tables.gate.at[layer, :2].add(mass))

    def by_pair(values: jax.Array) -> jax.Array:
        return jnp.where(active[:, None], values[ids], -1)

    size = num_jobs(ids.size, num_experts, slots)
    streamed = jnp.flatnonzero(streams, size=waves.num * waves.transient, fill_value=-1)
    return tables, Placed(
        by_pair(jnp.where(cached, places, transient)),
        by_pair(jnp.where(cached, 0, wave)),
        *_jobs(come, rows, places, size),
        jnp.where(streamed >= 0, rows[streamed], -1).reshape(waves),
    )


def predict_reference(
    tables: Tables,
    row_of: jax.Array,
    layer: jax.Array,
    ids: jax.Array,
    active: jax.Array,
    *,
    banks: int,
    columns: Columns,
) -> tuple[Tables, Fetch]:
    """See `api.predict`."""
    num_experts, clock = row_of.shape[1], tables.clock
    row = _row(tables.table, layer, num_experts)
    chosen = jnp.where((ids >= 0) & jnp.any(active), ids, num_experts)
    wanted = jnp.zeros(num_experts, bool).at[chosen].set(True, mode="drop")
    new = wanted & (row.slot_of < 0)
    coming = _given(new, *_order(row, clock, wanted))
    came = coming >= 0
    owner = jnp.where(came, coming, row.owner)
    slot_of = _inverse(owner, num_experts)
    come, gone = new & (slot_of >= 0), (row.slot_of >= 0) & (slot_of < 0)
    events = _counted(
        tables.events, layer, columns, prefetched=_num(come), evictions=_num(gone),
        prefetch_waste=_num(gone & (row.ahead[jnp.maximum(row.slot_of, 0)] != 0)),
    )  # fmt: skip
    last_use, ahead = jnp.where(came, clock, row.last_use), jnp.where(came, 1, row.ahead)
    table = tables.table.at[layer].set(jnp.concatenate([slot_of, owner, last_use, ahead]))
    places = layer // banks * len(owner) + slot_of
    fetch = Fetch(*_jobs(come, row_of[layer], places, len(ids)))
    return tables._replace(table=table, events=events), fetch
