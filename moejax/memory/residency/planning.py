"""What a step decides for a layer: hits, admissions and waves, and what it brings ahead."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.memory.residency.eviction import (
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
    first_slot,
    read_row,
    written,
)


class Plan(NamedTuple):
    """Of one layer in one step; J = min(max_needed, C), W = `num_waves`.

    slot: int32[E], global slot from which a needed expert is computed.
    wave: int32[E], 0 resident or admitted, 1 + w in transient wave w.
    admitted: int32[J], experts to fetch before wave 0.
    admitted_slots: int32[J], the global slots for them.
    streamed: int32[W, B], experts of each wave; streamed[w, b] goes to global slot M C + b.
    """

    slot: jax.Array
    wave: jax.Array
    admitted: jax.Array
    admitted_slots: jax.Array
    streamed: jax.Array


class Prefetch(NamedTuple):
    """experts int32[limit] to fetch into the global slots int32[limit]."""

    experts: jax.Array
    slots: jax.Array


def num_waves(spec: CacheSpec, max_needed: int) -> int:
    """W, transient waves for a layer that needs up to `max_needed` experts."""
    return 0 if max_needed <= spec.slots else -(-max_needed // spec.transient)


def plan(
    spec: CacheSpec,
    residency: Residency,
    layer: Layer,
    needed: jax.Array,
    max_needed: int,
    counts: Counts,
) -> tuple[Plan, Residency, Counts]:
    """Where each needed expert of a layer is computed, and what is fetched for that.

    Misses, in order of id, take the victims: free slots, then those of experts that are not needed,
    least recently used first, of one step the smaller id first. If the victims are too few, this is
    a scan of the layer, which evicts nothing: misses take the free slots, and the rest is streamed
    through the transient slots, in waves. What was used gets the clock, which then advances.

    Args:
      spec: the sizes.
      residency: donate it.
      layer: which.
      needed: bool[E].
      max_needed: static bound on the number of needed experts, 1..E.
      counts: gets steps (if anything is needed), needed, hits, misses, admitted, streamed,
        evictions, prefetch hits and waste, and the unserved, of which there are none as long as
        `max_needed` holds and `Residency.check` passes.

    Returns:
      The plan, and residency and counts after the step.
    """
    row, clock = read_row(residency, layer), residency.clock
    size, waves = min(max_needed, spec.slots), num_waves(spec, max_needed)
    hit, miss = needed & (row.slot_of >= 0), needed & (row.slot_of < 0)
    order = order_of(miss)
    victim, place = ordered_victims(row, clock, needed)
    if waves:
        fits = num(miss) <= num(victim)
        victim &= fits | (row.owner < 0)
    coming = takers(miss & (order < size), order, victim, place)
    owner = jnp.where(coming >= 0, coming, row.owner)
    slot_of = inverse(owner, spec.num_experts)
    cached = needed & (slot_of >= 0)
    come = miss & (slot_of >= 0)

    width = spec.transient
    index = (
        jnp.where(needed & ~cached, order - num(victim), -1) if waves else jnp.full_like(order, -1)
    )
    index = jnp.where(index < waves * width, index, -1)
    streams = index >= 0
    transient = jnp.where(streams, spec.first_transient + index % width, -1)
    places = first_slot(spec, layer) + slot_of
    admitted = found(jnp.where(come, order, -1), iota(size))
    made = Plan(
        slot=jnp.where(cached, places, transient),
        wave=jnp.where(cached, 0, jnp.where(streams, 1 + index // width, -1)),
        admitted=admitted,
        admitted_slots=jnp.where(admitted >= 0, at(places, admitted), -1),
        streamed=found(index, iota(waves * width)).reshape(waves, width),
    )
    counts = counts.add(
        layer,
        steps=jnp.any(needed),  # none in a step in which all rows rest
        needed=num(needed),
        hits=num(hit),
        misses=num(miss),
        admitted=num(come),
        streamed=num(streams),
        unserved=num(needed & ~cached & ~streams),
        prefetch_hits=num(hit & at(row.prefetched, row.slot_of)),
        **departures(row, slot_of),
    )
    used = (owner >= 0) & at(needed, owner)
    row = row._replace(
        slot_of=slot_of,
        owner=owner,
        last_use=jnp.where(used, clock, row.last_use),
        prefetched=row.prefetched & ~used,
    )
    residency = written(residency, layer, row)
    return made, dataclasses.replace(residency, clock=clock + 1), counts


def predict(
    spec: CacheSpec,
    residency: Residency,
    layer: Layer,
    wanted: jax.Array,
    limit: int,
    counts: Counts,
) -> tuple[Prefetch, Residency, Counts]:
    """Admits experts that a layer to come will probably need, ahead of its `plan`.

    Those of them that are not resident, in order of id, take victims as in `plan`, never one that
    is itself wanted. The caller fetches them before that layer's products.

    Args:
      spec: the sizes.
      residency: donate it.
      layer: the layer to come.
      wanted: bool[E].
      limit: static, at most so many are admitted.
      counts: gets prefetched, evictions and prefetch waste.

    Returns:
      What to fetch, and residency and counts after it.
    """
    row, clock = read_row(residency, layer), residency.clock
    new = wanted & (row.slot_of < 0)
    order = order_of(new)
    victim, place = ordered_victims(row, clock, wanted)
    coming = takers(new & (order < limit), order, victim, place)
    owner = jnp.where(coming >= 0, coming, row.owner)
    slot_of = inverse(owner, spec.num_experts)
    come = new & (slot_of >= 0)
    counts = counts.add(layer, prefetched=num(come), **departures(row, slot_of))
    row = row._replace(
        slot_of=slot_of,
        owner=owner,
        last_use=jnp.where(coming >= 0, clock, row.last_use),
        prefetched=row.prefetched | (coming >= 0),
    )
    experts = found(jnp.where(come, order, -1), iota(limit))
    places = first_slot(spec, layer) + slot_of
    fetch = Prefetch(experts, jnp.where(experts >= 0, at(places, experts), -1))
    return fetch, written(residency, layer, row), counts
