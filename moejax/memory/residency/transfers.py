"""Bulk transfers between steps, and pins: the tables before, while and after bytes arrive."""

import dataclasses

import jax
import jax.numpy as jnp

from moejax.memory.residency.eviction import (
    arrives,
    at,
    departures,
    found,
    inverse,
    iota,
    num,
    order_of,
    ordered_victims,
    takers,
)
from moejax.memory.residency.tables import (
    CacheSpec,
    Counts,
    Layer,
    Residency,
    Row,
    columns_of,
    first_slot,
    read_row,
    written,
)


def reserve(
    spec: CacheSpec,
    residency: Residency,
    layer: Layer,
    experts: jax.Array,
    counts: Counts,
) -> tuple[jax.Array, Residency, Counts]:
    """Slots for a bulk transfer, between steps; until `publish` they serve nobody.

    Victims are those of `plan`, never one that is itself in the list. Refused, with slot -1: an
    expert that is resident or arriving already, one for which there is no victim, one beyond the
    `spec.held` slots that pins and transfers may take.

    Args:
      spec: the sizes; `held` is not 0.
      residency: donate it.
      layer: which.
      experts: int32[n], the most urgent first; -1 is skipped.
      counts: gets evictions and prefetch waste.

    Returns:
      Global slots int32[n], and residency and counts after it.

    Raises:
      ValueError: the spec holds no slots.
    """
    if not spec.held:
        raise ValueError("a cache that is to take bulk transfers needs `held` slots")
    row, size = read_row(residency, layer), len(experts)
    same = experts[:, None] == iota(spec.num_experts)[None]
    first = jnp.where(same, iota(size)[:, None], size).min(axis=0, initial=size)
    wanted = first < size
    new = wanted & (row.slot_of < 0) & ~arrives(row, spec.num_experts)
    order = num(new[None] & (first[None] < first[:, None]), axis=1)
    victim, place = ordered_victims(row, residency.clock, wanted, None)
    coming = takers(new & (order < _room(spec, row)), order, victim, place)
    taken = coming >= 0
    owner = jnp.where(taken, -1, row.owner)
    slot_of = inverse(owner, spec.num_experts)
    counts = counts.add(layer, **departures(row, slot_of))
    row = row._replace(
        slot_of=slot_of,
        owner=owner,
        last_use=jnp.where(taken, 0, row.last_use),
        prefetched=row.prefetched & ~taken,
        arriving=jnp.where(taken, coming, row.arriving),
    )
    # An expert that stands twice in the list gets its slot in the first place.
    leads = (experts >= 0) & (at(first, experts) == iota(size))
    local = found(coming, jnp.where(leads, experts, -2))
    slots = jnp.where(local >= 0, first_slot(spec, layer) + local, -1)
    return slots, written(residency, layer, row), counts


def publish(
    spec: CacheSpec, residency: Residency, layer: Layer, slots: jax.Array, counts: Counts
) -> tuple[Residency, Counts]:
    """The bytes of a bulk transfer are in their slots: from now on these serve.

    An expert that a step has meanwhile fetched for itself stays where it is, and the slot of the
    transfer is free again.

    Args:
      spec: the sizes.
      residency: donate it.
      layer: which.
      slots: int32[n], global, of `reserve`; -1 and slots where nothing arrives are skipped.
      counts: gets bulk, and prefetch waste.

    Returns:
      Residency and counts after it.
    """
    row = read_row(residency, layer)
    done = _chosen(spec, row, layer, slots)
    late = done & (at(row.slot_of, row.arriving) >= 0)
    new = done & ~late
    owner = jnp.where(new, row.arriving, row.owner)
    row = row._replace(
        slot_of=inverse(owner, spec.num_experts),
        owner=owner,
        last_use=jnp.where(new, residency.clock, row.last_use),
        prefetched=row.prefetched | new,
        arriving=jnp.where(done, -1, row.arriving),
    )
    counts = counts.add(layer, bulk=num(done), prefetch_waste=num(late))
    return written(residency, layer, row), counts


def cancel(spec: CacheSpec, residency: Residency, layer: Layer, slots: jax.Array) -> Residency:
    """A bulk transfer will not come: its slots are free. Arguments as of `publish`."""
    row = read_row(residency, layer)
    done = _chosen(spec, row, layer, slots)
    return written(residency, layer, row._replace(arriving=jnp.where(done, -1, row.arriving)))


def release(
    residency: Residency, layer: Layer, experts: jax.Array, counts: Counts
) -> tuple[Residency, Counts]:
    """Experts leave their slots, which are free from now on.

    Args:
      residency: donate it.
      layer: which.
      experts: bool[E]; those that are in no slot are skipped.
      counts: gets evictions and prefetch waste.
    """
    row, departed = _without(read_row(residency, layer), experts)
    return written(residency, layer, row), counts.add(layer, **departed)


def release_everywhere(
    residency: Residency, experts: jax.Array, counts: Counts
) -> tuple[Residency, Counts]:
    """As `release` for every layer at once; experts are bool[M, E]."""
    rows = Row.of(residency.table, residency.pinned)
    rows, departed = jax.vmap(_without)(rows, experts)
    residency = dataclasses.replace(residency, table=columns_of(rows))
    return residency, counts.add_everywhere(**departed)


def _without(row: Row, experts: jax.Array) -> tuple[Row, dict[str, jax.Array]]:
    """A layer's row without the experts, bool[E], and what that counts as."""
    gone = (row.owner >= 0) & at(experts, row.owner)
    owner = jnp.where(gone, -1, row.owner)
    slot_of = inverse(owner, len(row.slot_of))
    departed = departures(row, slot_of)
    row = row._replace(
        slot_of=slot_of,
        owner=owner,
        last_use=jnp.where(gone, 0, row.last_use),
        prefetched=row.prefetched & ~gone,
    )
    return row, departed


def pin(spec: CacheSpec, residency: Residency, layer: Layer, experts: jax.Array) -> Residency:
    """Makes experts, bool[E], those of the layer that are never evicted, resident or not.

    Of more than `spec.held` less what is arriving, those of the smallest ids; read `pinned`.
    """
    row = read_row(residency, layer)
    room = spec.held - num(row.arriving >= 0)
    allowed = experts & (order_of(experts) < room)
    pinned = jax.lax.dynamic_update_index_in_dim(residency.pinned, allowed, layer, 0)
    return dataclasses.replace(residency, pinned=pinned)


def _chosen(spec: CacheSpec, row: Row, layer: Layer, slots: jax.Array) -> jax.Array:
    """bool[C], the listed slots of the layer into which something arrives."""
    local = slots - first_slot(spec, layer)
    return (local[None] == iota(spec.slots)[:, None]).any(axis=1) & (row.arriving >= 0)


def _room(spec: CacheSpec, row: Row) -> jax.Array:
    """int32[], how many more slots of the layer transfers may take."""
    return jnp.maximum(spec.held - num(row.pinned) - num(row.arriving >= 0), 0)
