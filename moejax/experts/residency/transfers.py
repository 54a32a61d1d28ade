"""Updates the tables between plans: admits bulk transfers, frees slots."""

import dataclasses

import jax
import jax.numpy as jnp

from moejax.experts.residency.tables import CacheSpec, Counts, Layer, Residency, first_slot
from pallas_kernels.cache_plan.reference import (
    Row,
    assigned,
    departures,
    index_of,
    ordered_victims,
    read_row,
    without,
    write_row,
)


def admit(
    spec: CacheSpec,
    residency: Residency,
    layer: Layer,
    experts: jax.Array,
    counts: Counts,
) -> tuple[jax.Array, Residency, Counts]:
    """Admits experts whose bytes a bulk transfer brought, between steps.

    Victims are those of a plan, never one that is itself in the list. Refused, with slot -1: an
    expert that is resident already, and one for which there is no victim.

    Args:
      residency: donate it.
      experts: int32[n], the most urgent first; -1 is skipped.
      counts: gets bulk, evictions and prefetch waste.

    Returns:
      Global slots int32[n], and residency and counts after it.
    """
    before, size = read_row(residency.table, layer, spec.num_experts), len(experts)
    index = jnp.arange(size, dtype=jnp.int32)
    same = experts[:, None] == jnp.arange(spec.num_experts, dtype=jnp.int32)[None]
    first = jnp.where(same, index[:, None], size).min(axis=0, initial=size)
    wanted = first < size
    new = wanted & (before.slot_of < 0)
    order = jnp.sum(new[None] & (first[None] < first[:, None]), axis=1, dtype=jnp.int32)
    victims = ordered_victims(before, residency.clock, wanted)
    coming, row = assigned(before, new, order, *victims)
    taken = coming >= 0
    bulk = jnp.sum(taken, dtype=jnp.int32)
    counts = counts.add(layer, bulk=bulk, **departures(before, row))
    row = row._replace(
        last_use=jnp.where(taken, residency.clock, row.last_use),
        prefetched=row.prefetched | taken,
    )
    # An expert that stands twice in the list gets its slot in the first place.
    leads = (experts >= 0) & (first.at[experts].get(mode="clip") == index)
    local = index_of(coming, jnp.where(leads, experts, -2))
    slots = jnp.where(local >= 0, first_slot(spec, layer) + local, -1)
    table = write_row(residency.table, layer, row)
    return slots, dataclasses.replace(residency, table=table), counts


def release_everywhere(
    residency: Residency, experts: jax.Array, counts: Counts
) -> tuple[Residency, Counts]:
    """Frees the slots of experts, bool[M, E].

    Args:
      residency: donate it.
      experts: those that are in no slot are skipped.
      counts: gets evictions and prefetch waste.
    """
    before = Row.of(residency.table, residency.num_experts)
    after = jax.vmap(without)(before, experts)
    counts = counts.add_everywhere(**jax.vmap(departures)(before, after))
    return dataclasses.replace(residency, table=after.columns), counts
