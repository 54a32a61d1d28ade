"""Pools of several tiers in a replay: residents, admissions and evictions.

One layer, one setting; axes: T tiers of falling fidelity, E experts. A tier of E slots or more
always holds every expert. Ties of last use go by id.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MAX_SEARCHED = 32  # above so many victims, sorting is cheaper than searching one after the other
_LAST = np.int32(2**31 - 1)


class Search(NamedTuple):
    """How victims are found; static.

    most: bound on the number of admitted experts.
    by_pairs: by comparing all pairs of experts, which a GPU does in one launch; a CPU, and a GPU
      with many layers and settings side by side, is faster at looking for one after the other.
    by_product: places by a product with a triangle of ones, one launch; a CPU counts on.
    """

    most: int
    by_pairs: bool
    by_product: bool = False


class Moved(NamedTuple):
    """Counts, int32[], of experts admitted, without a slot, evicted, and evicted unused."""

    admitted: jax.Array
    streamed: jax.Array
    evictions: jax.Array
    waste: jax.Array


def initial(slots: jax.Array, num_experts: int) -> jax.Array:
    """Keys int32[T, E] before any token.

    A key is 0 for an expert without a slot, else 2 x last use + (prefetched, not used yet). Tiers
    of E slots hold all. Where the tiers together have E slots, they share the experts in order of
    id, the first tier first, as two pools with one copy of each do; else they are empty.

    Args:
      slots: int32[T].
    """
    expert = jnp.arange(num_experts, dtype=jnp.int32)[None]
    full = slots[:, None] >= num_experts
    ends = jnp.cumsum(slots)[:, None]
    shares = (expert < ends) & (expert >= ends - slots[:, None])
    fits = (jnp.sum(slots) >= num_experts) & ~jnp.any(full)
    return jnp.where(full | (fits & shares), 2, 0).astype(jnp.int32)


def admit(
    key: jax.Array,
    coming: jax.Array,
    protected: jax.Array,
    slots: jax.Array,
    stamp: jax.Array,
    how: Search,
) -> tuple[jax.Array, Moved]:
    """Admits experts to one tier's slots: free ones, then victims as in `cache_plan.plan`.

    Args:
      key: int32[E], after other evictions.
      coming: bool[E], experts to admit, none resident.
      protected: bool[E], experts that may not be evicted.
      slots: int32[].
      stamp: int32[], key of the admitted.

    Returns:
      The keys and the counts.
    """
    num_experts = len(key)
    there = key > 0
    victims = there & ~protected
    num_coming, free = _num(coming), slots - _num(there)
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    fits = num_coming <= free + _num(victims)
    room = jnp.where(fits, num_coming, free)
    if how.by_pairs:
        before = _num(coming[None] & (expert[None] < expert[:, None]), axis=1)
    elif how.by_product:
        below = (expert[None] < expert[:, None]).astype(jnp.bfloat16)  # sums of ones are exact
        found = jnp.einsum(
            "ef,f->e", below, coming.astype(jnp.bfloat16), preferred_element_type=jnp.float32
        )
        before = found.astype(jnp.int32)
    else:
        ones = coming.astype(jnp.int32)
        before = jnp.cumsum(ones) - ones
    admitted = coming & (before < room)
    num_gone = jnp.maximum(room - free, 0)
    stride = 1 << (num_experts - 1).bit_length()
    order = (key >> 1) * stride + expert  # whether it was brought ahead is no reason to stay
    ranked = jnp.where(victims, order, _LAST)
    if how.by_pairs:
        gone = victims & (_num(ranked[None] < ranked[:, None], axis=1) < num_gone)
    elif how.most <= MAX_SEARCHED:
        last = below = jnp.full((), -1, jnp.int32)
        for i in range(how.most):
            below = jnp.min(jnp.where(ranked > below, ranked, _LAST))
            last = jnp.where(i < num_gone, below, last)
        gone = victims & (ranked <= last)
    else:
        last = jnp.sort(ranked)[jnp.clip(num_gone - 1, 0, num_experts - 1)]
        gone = victims & (num_gone > 0) & (ranked <= last)
    moved = Moved(
        admitted=_num(admitted),
        streamed=num_coming - _num(admitted),
        evictions=num_gone,
        waste=_num(gone & (key & 1 == 1)),
    )
    return jnp.where(admitted, stamp, jnp.where(gone, 0, key)), moved


def _num(mask: jax.Array, axis: int | None = None) -> jax.Array:
    return jnp.sum(mask, axis=axis, dtype=jnp.int32)
