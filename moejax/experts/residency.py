"""Residency of experts in slots, and counts of what happens to them: pure, of fixed shapes.

Axes: M sparse layers, E experts of a layer, C cache slots of a layer, B transient slots that all
layers share; `CacheSizes` numbers the slots of a bank. -1 stands for none.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache_plan.operands import (
    CLOSED,
    COLUMNS,
    EVENTS,
    LayerSlots,
    LayerTables,
    brought_ahead,
    counted,
    departures,
    index_of,
    num,
    read_row,
    without,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """Events of the layers since the last reading; two arrays, to be donated.

    Every name in `EVENTS` is also a property, int32[M].
    """

    # int32[M, len(EVENTS)]; a step adds to one row at once, one operation a layer
    events: jax.Array
    # float32[M, 2], gate mass of all (token, expert) pairs, and of those of the tier
    gate: jax.Array

    def __getattr__(self, name: str) -> jax.Array:
        if name not in COLUMNS:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return self.events[..., COLUMNS[name]]

    def add(self, layer: int | jax.Array | slice, **amounts: jax.Array | int) -> "Counts":
        """Adds int32[] amounts to events of a layer, or of several, by the names of `EVENTS`."""
        return dataclasses.replace(self, events=counted(self.events, layer, **amounts))


def no_counts(num_layers: int) -> Counts:
    """Zeros for M layers."""
    return Counts(
        jnp.zeros((num_layers, len(EVENTS)), jnp.int32), jnp.zeros((num_layers, 2), jnp.float32)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSizes(LayerSlots):
    """Static sizes of a cache.

    With `planes` 2 a slot holds an item, the refinement of expert e (item e) or its base plane
    (item E + e), and the tables are of these items (`pallas_kernels.cache_plan.shared_slots`).

    `banks`: arrays that the layers' slots lie in, layer l in bank l mod `banks`. A slot's global
    number counts within its bank, which has the same number of slots as the others: with two, what
    is copied into the next layer's slots touches no array that this layer's products read.

    `apart`: of the transient slots, those in an array of their own, for the same end: a prompt's
    waves fill it and the rest of the bank's in turn, and other steps use the latter alone.
    """

    num_layers: int  # M
    num_experts: int  # E
    transient: int  # B
    apart: int = 0
    planes: int = 1  # of an expert that have slots of their own

    @property
    def num_items(self) -> int:
        """Items of a layer that slots may hold: its experts, or their planes."""
        return self.planes * self.num_experts

    @property
    def num_slots(self) -> int:
        """Slots of a bank, S."""
        return self.first_transient(self.num_layers) + self.transient - self.apart


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residency:
    """Residency of every layer's slots; donated through steps with the pools.

    `table` int32[M, E + 3 C] has the columns of `cache_plan.operands.LayerTables` of each layer;
    `clock` int32[] counts the steps of layers from 1 on and may wrap; `num_experts` is E.

    Invariants (`tests.cache_model.check`): `slot_of` and `owner` are inverse to each other; a slot
    without an owner is not `prefetched`.
    """

    table: jax.Array
    clock: jax.Array
    num_experts: int = dataclasses.field(metadata={"static": True})

    @property
    def slot_of(self) -> jax.Array:
        """int32[M, E], local slot of an expert."""
        return LayerTables.of(self.table, self.num_experts).slot_of


def empty(spec: CacheSizes) -> Residency:
    """Returns tables with nothing resident."""
    return seeded(spec, np.zeros((spec.num_layers, 0), np.int32))


def seeded(spec: CacheSizes, experts: np.ndarray | jax.Array) -> Residency:
    """Returns tables in which local slot c of layer l owns experts[l, c], int32[M, n], n <= C.

    Of layers that are not longer than others the last of `most_slots` experts is left out.
    """
    given = np.asarray(experts)
    slot_of = np.full((spec.num_layers, spec.num_items), -1, np.int32)
    owner = np.full((spec.num_layers, spec.most_slots), -1, np.int32)
    owner[:, : given.shape[1]] = given
    if spec.longer_layers:
        owner[spec.slots_by_layer(spec.num_layers) < spec.most_slots, -1] = CLOSED
    layers, slots = np.nonzero(owner >= 0)
    slot_of[layers, owner[layers, slots]] = slots
    unset = np.zeros_like(owner)
    table = np.concatenate([slot_of, owner, unset, unset], axis=1)
    return Residency(jnp.asarray(table), jnp.asarray(1, jnp.int32), spec.num_items)


def admit(
    spec: CacheSizes, residency: Residency, layers: jax.Array, experts: jax.Array, counts: Counts
) -> tuple[jax.Array, Residency, Counts]:
    """Admits experts whose bytes a bulk transfer brought, between steps.

    Victims are those of a plan, never one that is itself in the list. Refused, with slot -1: an
    expert that is resident already, and one for which there is no victim.

    Each layer by the first of its experts, for all of them, so that none takes another one's slot;
    and all layers at once: one after the other took longer than the step beside it.

    Args:
      layers: int32[n], of the experts; -1 is skipped.
      experts: int32[n], the most urgent of a layer first; -1 is skipped.

    Returns:
      Global slots int32[n], and residency and counts after it.
    """
    size = len(experts)
    index = jnp.arange(size, dtype=jnp.int32)

    def one(table: jax.Array, experts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        before = read_row(table[None], 0, spec.num_experts)
        same = experts[:, None] == jnp.arange(spec.num_experts, dtype=jnp.int32)[None]
        first = jnp.where(same, index[:, None], size).min(axis=0, initial=size)
        wanted = first < size
        new = wanted & (before.slot_of < 0)
        order = jnp.sum(new[None] & (first[None] < first[:, None]), axis=1, dtype=jnp.int32)
        coming, row = brought_ahead(
            before, new, order, wanted, residency.clock, spec.longer_layers > 0
        )
        events = no_counts(1).add(0, bulk=num(coming >= 0), **departures(before, row)).events[0]
        # An expert that stands twice in the list gets its slot in the first place.
        leads = (experts >= 0) & (first.at[experts].get(mode="clip") == index)
        return row.columns, index_of(coming, jnp.where(leads, experts, -2)), events

    same = (layers[:, None] == layers[None]) & (layers >= 0)[None]
    leads = (jnp.argmax(same, axis=1) == index) & (layers >= 0)
    rows = jnp.maximum(layers, 0)
    mine = jnp.where(same & leads[:, None], experts, -1)
    table, local, events = jax.vmap(one)(residency.table[rows], mine)
    local = jnp.max(local, axis=0)
    slots = jnp.where(local >= 0, spec.first_slot(rows // spec.banks) + local, -1)
    places = jnp.where(leads, layers, spec.num_layers)
    table = residency.table.at[places].set(table, mode="drop")
    counts = dataclasses.replace(counts, events=counts.events.at[places].add(events, mode="drop"))
    return slots, dataclasses.replace(residency, table=table), counts


def release_everywhere(
    residency: Residency, experts: jax.Array, counts: Counts
) -> tuple[Residency, Counts]:
    """Frees the slots of experts, bool[M, E]; counts evictions and prefetch waste."""
    before = LayerTables.of(residency.table, residency.num_experts)
    after = jax.vmap(without)(before, experts)
    counts = counts.add(slice(None), **jax.vmap(departures)(before, after))
    return dataclasses.replace(residency, table=after.columns), counts
