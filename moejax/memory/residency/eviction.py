"""Who leaves, who comes, and into which slot: comparisons of all pairs, on one layer's row.

On a GPU each small operation costs 1 to 2 us. XLA fuses these comparisons into a few reductions,
which sorts, prefix sums and scatters it does not.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.memory.residency.tables import Row


def ordered_victims(row: Row, clock: jax.Array, needed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which slots, bool[C], may be given to others, and each one's place in that order, int32[C].

    Free ones come first, then those of the oldest use, of the smallest expert.
    Places are right for victims only.
    """
    owned = row.owner >= 0
    victim = ~(owned & at(needed, row.owner))
    # Modulo 2^32, so that a wrapped clock does no harm.
    age = jax.lax.bitcast_convert_type(clock - row.last_use, jnp.uint32)
    age = jnp.where(owned, age, np.uint32(2**32 - 1))
    # Of one use the smaller id first, in whatever slot: what is hit says nothing of slots.
    tie = jnp.where(owned, len(age) + row.owner, iota(len(age)))
    before = (age[None] > age[:, None]) | ((age[None] == age[:, None]) & (tie[None] < tie[:, None]))
    return victim, num(victim[None] & before, axis=1)


def order_of(mask: jax.Array) -> jax.Array:
    """int32[n], how many before each element are set."""
    index = iota(len(mask))
    return num(mask[None] & (index[None] < index[:, None]), axis=1)


def takers(new: jax.Array, order: jax.Array, victim: jax.Array, place: jax.Array) -> jax.Array:
    """int32[C], the new expert that takes each slot: the n-th of them takes the n-th victim."""
    return found(jnp.where(new, order, -2), jnp.where(victim, place, -1))


def found(values: jax.Array, wanted: jax.Array) -> jax.Array:
    """int32[n], for each wanted value the largest index i of which values[i] equals it, or -1."""
    index = jnp.where(values[None] == wanted[:, None], iota(len(values))[None], -1)
    # Not `max(initial=-1)`, which is one operation more.
    return jax.lax.reduce(index, np.int32(-1), jax.lax.max, (1,))


def inverse(owner: jax.Array, num_experts: int) -> jax.Array:
    """int32[E], the inverse of a layer's `owner`."""
    return found(owner, iota(num_experts))


def departures(row: Row, slot_of: jax.Array) -> dict[str, jax.Array]:
    """Counts of the experts that have left their slots in the new `slot_of`."""
    gone = (row.slot_of >= 0) & (slot_of < 0)
    return {
        "evictions": num(gone),
        "prefetch_waste": num(gone & at(row.prefetched, row.slot_of)),
    }


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
