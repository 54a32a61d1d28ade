"""Pools of one layer in a replay: residents, admissions, evictions; prefetch and a layer's run.

One setting; axes: T tiers of falling fidelity, E experts. A tier of E slots or more always holds
every expert. Ties of last use go by id.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.policies.base import SKIPPED, Decision, Observation
from pallas_kernels import cache_plan
from pallas_kernels.cache_plan import Wishes

MAX_SEARCHED = 32  # above so many victims, sorting is cheaper than searching one after the other
_LAST = np.int32(2**31 - 1)


class Moved(NamedTuple):
    """Counts, int32[], of experts admitted, without a slot, evicted, and evicted unused."""

    admitted: jax.Array
    streamed: jax.Array
    evictions: jax.Array
    waste: jax.Array


def initial(slots: jax.Array, num_experts: int) -> jax.Array:
    """Keys int32[T, E] before any token, of slots int32[T].

    A key is 0 for an expert without a slot, else 2 x last use + (prefetched, not used yet). Tiers
    of E slots hold all. Where the tiers together have E slots, they share the experts in order of
    id, the first tier first, as two pools with one copy of each do; else they are empty.
    """
    expert = jnp.arange(num_experts, dtype=jnp.int32)[None]
    full = slots[:, None] >= num_experts
    ends = jnp.cumsum(slots)[:, None]
    shares = (expert < ends) & (expert >= ends - slots[:, None])
    fits = (jnp.sum(slots) >= num_experts) & ~jnp.any(full)
    return jnp.where(full | (fits & shares), 2, 0).astype(jnp.int32)


def admit(
    key: jax.Array,  # int32[E], after other evictions
    coming: jax.Array,  # bool[E], experts to admit, none resident
    protected: jax.Array,  # bool[E], experts that may not be evicted
    slots: jax.Array,
    stamp: jax.Array,  # int32[], key of the admitted
    most: int,  # static, the most experts that are admitted
) -> tuple[jax.Array, Moved]:
    """Admits experts to one tier's slots: free ones, then victims as in `cache_plan.plan`."""
    num_experts = len(key)
    there = key > 0
    victims = there & ~protected
    num_coming, free = _num(coming), slots - _num(there)
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    fits = num_coming <= free + _num(victims)
    room = jnp.where(fits, num_coming, free)
    ones = coming.astype(jnp.int32)
    before = jnp.cumsum(ones) - ones
    admitted = coming & (before < room)
    num_gone = jnp.maximum(room - free, 0)
    stride = 1 << (num_experts - 1).bit_length()
    order = (key >> 1) * stride + expert  # whether it was brought ahead is no reason to stay
    ranked = jnp.where(victims, order, _LAST)
    last = jnp.full((), -1, jnp.int32)  # rank of the last victim
    if most <= MAX_SEARCHED:
        below = last
        for i in range(most):
            below = jnp.min(jnp.where(ranked > below, ranked, _LAST))
            last = jnp.where(i < num_gone, below, last)
    else:
        place = jnp.clip(num_gone - 1, 0, num_experts - 1)
        last = jnp.where(num_gone > 0, jnp.sort(ranked)[place], last)
    gone = victims & (ranked <= last)
    moved = Moved(
        admitted=_num(admitted),
        streamed=num_coming - _num(admitted),
        evictions=num_gone,
        waste=_num(gone & (key & 1 == 1)),
    )
    return jnp.where(admitted, stamp, jnp.where(gone, 0, key)), moved


def prefetch_experts(
    slots: jax.Array, key: jax.Array, ahead: jax.Array, clock: jax.Array, most: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Prefetches the predicted experts: keys int32[T, E] and counts [T]."""
    num_tiers, num_experts = key.shape
    tier = jnp.arange(num_tiers, dtype=jnp.int32)[:, None]
    wanted = ahead[None] == tier
    # A copy as good or better serves.
    there = key > 0
    served = jnp.stack([jnp.any(there[: t + 1], axis=0) for t in range(num_tiers)])
    new = wanted & ~served
    keys, moved = admit_each(key, new, wanted, slots, 2 * clock + 1, most)
    came = new & (keys > 0)
    leaving = jnp.any(came, axis=0)[None] & ~came & (slots[:, None] < num_experts)
    counts = {
        "prefetched": moved.admitted,
        "evictions": moved.evictions,
        "prefetch_waste": moved.waste,
    }
    return jnp.where(leaving, 0, keys), counts


def serve(
    slots: jax.Array,
    key: jax.Array,
    decision: Decision,
    observation: Observation,
    clock: jax.Array,
    most: int,
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    """Runs a layer as decided: keys, counts [T] by name, gate mass float32[T + 3]."""
    num_tiers, num_experts = key.shape
    active = observation.active
    wishes = Wishes(decision.tier, decision.at_least)
    found = cache_plan.resolve_tiers(key > 0, decision.ids, wishes, active)
    tier = jnp.arange(num_tiers, dtype=jnp.int32)[:, None]
    runs = found.tier[None] == tier  # bool[T, E]
    misses = runs & found.fetched[None]
    hits = runs & ~found.fetched[None]
    key = jnp.where(found.leaving & (slots[:, None] < num_experts), 0, key)
    events = {
        "needed": _num(runs, axis=1),
        "hits": _num(hits, axis=1),
        "reused": _num(hits & found.reused[None], axis=1),
        "misses": _num(misses, axis=1),
        "prefetch_hits": _num(hits & (key & 1 == 1), axis=1),
    }
    key = jnp.where(hits, 2 * clock, key)
    key, sums = admit_each(key, misses, runs, slots, 2 * clock, most)
    events |= {
        "admitted": sums.admitted,
        "streamed": sums.streamed,
        "evictions": sums.evictions,
        "prefetch_waste": sums.waste,
    }
    weights = jnp.where(active[:, None], observation.weights, 0.0)
    computed = decision.tier != SKIPPED
    at = jnp.where(computed, found.tier[decision.ids], -1)
    by_tier = jnp.sum(jnp.where(at[None] == tier[:, :, None], weights[None], 0.0), axis=(1, 2))
    skipped = jnp.sum(jnp.where(computed, 0.0, weights))
    other = computed & (decision.ids != observation.ids)
    replaced = jnp.sum(jnp.where(other, weights, 0.0))
    gate = jnp.concatenate([by_tier, jnp.stack([skipped, replaced, jnp.sum(weights)])])
    return key, events, gate


def admit_each(
    key: jax.Array,
    coming: jax.Array,
    protected: jax.Array,
    slots: jax.Array,
    stamp: jax.Array,
    most: int,
) -> tuple[jax.Array, Moved]:
    """Runs `admit` for every tier; the first four operands have its axis."""
    one = functools.partial(admit, stamp=stamp, most=most)
    return jax.vmap(one)(key, coming, protected, slots)


def _num(mask: jax.Array, axis: int | None = None) -> jax.Array:
    return jnp.sum(mask, axis=axis, dtype=jnp.int32)
