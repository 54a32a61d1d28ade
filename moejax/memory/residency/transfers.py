"""Changes of the tables beside plans: experts that bulk transfers brought, and those that leave."""

import dataclasses

import jax
import jax.numpy as jnp

from moejax.memory.residency.eviction import (
    at,
    departures,
    found,
    inverse,
    iota,
    num,
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


def admit(
    spec: CacheSpec,
    residency: Residency,
    layer: Layer,
    experts: jax.Array,
    counts: Counts,
) -> tuple[jax.Array, Residency, Counts]:
    """Admits experts whose bytes a bulk transfer brought, between steps.

    Victims are those of `plan`, never one that is itself in the list. Refused, with slot -1: an
    expert that is resident already, and one for which there is no victim.

    Args:
      spec: the sizes.
      residency: donate it.
      layer: which.
      experts: int32[n], the most urgent first; -1 is skipped.
      counts: gets bulk, evictions and prefetch waste.

    Returns:
      Global slots int32[n], and residency and counts after it.
    """
    row, size = read_row(residency, layer), len(experts)
    same = experts[:, None] == iota(spec.num_experts)[None]
    first = jnp.where(same, iota(size)[:, None], size).min(axis=0, initial=size)
    wanted = first < size
    new = wanted & (row.slot_of < 0)
    order = num(new[None] & (first[None] < first[:, None]), axis=1)
    victim, place = ordered_victims(row, residency.clock, wanted)
    coming = takers(new, order, victim, place)
    taken = coming >= 0
    owner = jnp.where(taken, coming, row.owner)
    slot_of = inverse(owner, spec.num_experts)
    counts = counts.add(layer, bulk=num(taken), **departures(row, slot_of))
    row = row._replace(
        slot_of=slot_of,
        owner=owner,
        last_use=jnp.where(taken, residency.clock, row.last_use),
        prefetched=row.prefetched | taken,
    )
    # An expert that stands twice in the list gets its slot in the first place.
    leads = (experts >= 0) & (at(first, experts) == iota(size))
    local = found(coming, jnp.where(leads, experts, -2))
    slots = jnp.where(local >= 0, first_slot(spec, layer) + local, -1)
    return slots, written(residency, layer, row), counts


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
    rows = Row.of(residency.table, residency.num_experts)
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
