"""A layer's row of the tables in plain jnp: its slots, victims and counts.

A row is handled by comparisons of all pairs: on a GPU each small operation costs 1 to 2 us, and
XLA fuses these comparisons into a few reductions, which sorts, prefix sums and scatters it does
not.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache_plan.operands import Columns, Fetch, Tables


class LayerTables(NamedTuple):
    """The tables of one layer, or of all of them.

    Attributes:
      slot_of: int32[..., E], local slot of an expert.
      owner: int32[..., C], expert of a slot; -1 if it is free.
      last_use: int32[..., C], clock of the last use; 0 never.
      prefetched: bool[..., C], brought ahead and not used yet.
    """

    slot_of: jax.Array
    owner: jax.Array
    last_use: jax.Array
    prefetched: jax.Array

    @classmethod
    def of(cls, table: jax.Array, num_experts: int) -> "LayerTables":
        """The columns of a table [..., E + 3 C]."""
        slots = (table.shape[-1] - num_experts) // 3
        owner, last_use, prefetched = (
            table[..., num_experts + i * slots : num_experts + (i + 1) * slots] for i in range(3)
        )
        return cls(table[..., :num_experts], owner, last_use, prefetched != 0)

    @property
    def columns(self) -> jax.Array:
        """int32[..., E + 3 C], the part of a table that `of` reads."""
        flags = self.prefetched.astype(jnp.int32)
        return jnp.concatenate((self.slot_of, self.owner, self.last_use, flags), axis=-1)


def read_row(table: jax.Array, layer: int | jax.Array, num_experts: int) -> LayerTables:
    """The row of a layer."""
    row = jax.lax.dynamic_index_in_dim(table, layer, keepdims=False)
    # One copy of the row, or XLA copies columns one by one, and at times the whole table, before
    # it overwrites the row in place.
    return LayerTables.of(jax.lax.optimization_barrier(row), num_experts)


def write_row(table: jax.Array, layer: int | jax.Array, row: LayerTables) -> jax.Array:
    """The table with a layer's row replaced."""
    return jax.lax.dynamic_update_index_in_dim(table, row.columns, layer, 0)


def ordered_victims(
    row: LayerTables, clock: jax.Array, needed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Orders the slots that may be taken: masks them, bool[C], and numbers them, int32[C].

    Free ones come first, then the least recently used; ties go to the smaller expert id. Numbers
    are right for victims only.
    """
    owned = row.owner >= 0
    victim = ~(owned & at(needed, row.owner))
    # Modulo 2^32, so that a wrapped clock does no harm.
    age = jax.lax.bitcast_convert_type(clock - row.last_use, jnp.uint32)
    age = jnp.where(owned, age, np.uint32(2**32 - 1))
    # Equal uses go by the smaller id, whatever the slot: hits do not depend on slots.
    tie = jnp.where(owned, len(age) + row.owner, iota(len(age)))
    before = (age[None] > age[:, None]) | ((age[None] == age[:, None]) & (tie[None] < tie[:, None]))
    return victim, num(victim[None] & before, axis=1)


def order_of(mask: jax.Array) -> jax.Array:
    """int32[n], how many before each element are set."""
    index = iota(len(mask))
    return num(mask[None] & (index[None] < index[:, None]), axis=1)


def assigned(
    row: LayerTables, new: jax.Array, order: jax.Array, victim: jax.Array, place: jax.Array
) -> tuple[jax.Array, LayerTables]:
    """The n-th new expert takes the n-th victim: int32[C] who takes each slot, and the row after.

    Uses and flags of the slots are as before.
    """
    coming = index_of(jnp.where(new, order, -2), jnp.where(victim, place, -1))
    owner = jnp.where(coming >= 0, coming, row.owner)
    return coming, row._replace(owner=owner, slot_of=index_of(owner, iota(len(new))))


def index_of(values: jax.Array, wanted: jax.Array) -> jax.Array:
    """int32[n], for each wanted value the largest index i of which values[i] equals it, or -1."""
    index = jnp.where(values[None] == wanted[:, None], iota(len(values))[None], -1)
    # Not `max(initial=-1)`, which is one operation more.
    return jax.lax.reduce(index, np.int32(-1), jax.lax.max, (1,))


def without(row: LayerTables, experts: jax.Array) -> LayerTables:
    """The row without experts, bool[E], whose slots are free from now on."""
    gone = (row.owner >= 0) & at(experts, row.owner)
    owner = jnp.where(gone, -1, row.owner)
    return LayerTables(
        slot_of=index_of(owner, iota(len(row.slot_of))),
        owner=owner,
        last_use=jnp.where(gone, 0, row.last_use),
        prefetched=row.prefetched & ~gone,
    )


def departures(before: LayerTables, after: LayerTables) -> dict[str, jax.Array]:
    """Counts of the experts that have left their slots."""
    gone = (before.slot_of >= 0) & (after.slot_of < 0)
    return {
        "evictions": num(gone),
        "prefetch_waste": num(gone & at(before.prefetched, before.slot_of)),
    }


class TierPart(NamedTuple):
    """A tier's part of a plan; slot and wave int32[E], -1 where an expert does not run."""

    tables: Tables
    slot: jax.Array
    wave: jax.Array
    fetch: Fetch
    streamed: Fetch | None


def marked(ids: jax.Array, mask: jax.Array, num_experts: int) -> jax.Array:
    """bool[E]: those among the ids where the mask is set."""
    places = jnp.where(mask, ids, num_experts).reshape(-1)
    return jnp.zeros(num_experts, bool).at[places].set(True, mode="drop")


def fetch_of(row_of: jax.Array, experts: jax.Array, slots: jax.Array) -> Fetch:
    """The copies of experts of a layer, -1 for none, into slots."""
    some = experts >= 0
    return Fetch(jnp.where(some, at(row_of, experts), -1), jnp.where(some, slots, -1), experts)


def counted(
    events: jax.Array, layer: jax.Array, columns: Columns, **amounts: jax.Array
) -> jax.Array:
    """The counts with amounts added to a layer, by one operation."""
    zero = jnp.zeros((), jnp.int32)
    by_column = {columns[name]: jnp.asarray(amount, jnp.int32) for name, amount in amounts.items()}
    row = jnp.stack([by_column.get(i, zero) for i in range(events.shape[1])])
    return events.at[layer].add(row)


def at(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], of indices that may be outside, where anything is returned."""
    if not len(values):
        return jnp.zeros(index.shape, values.dtype)
    return values.at[index].get(mode="clip")


def num(mask: jax.Array, axis: int | None = None) -> jax.Array:
    """int32, how many are set."""
    return mask.sum(axis=axis, dtype=jnp.int32)


def iota(size: int) -> jax.Array:
    """int32[size], 0, 1, ..."""
    return jax.lax.iota(jnp.int32, size)
