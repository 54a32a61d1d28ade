"""Pool changes of one layer under one setting, when it prefetches or runs.

Axes: T tiers of falling fidelity, E experts.
"""

import jax
import jax.numpy as jnp

from moejax.policies.base import SKIPPED, Decision, Observation
from moejax.routing.simulate import pools
from pallas_kernels import cache_plan
from pallas_kernels.cache_plan import Wishes


def prefetch_experts(
    slots: jax.Array, key: jax.Array, ahead: jax.Array, clock: jax.Array, how: pools.Search
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Prefetches the predicted experts: keys int32[T, E] and counts [T]."""
    num_tiers, num_experts = key.shape
    tier = jnp.arange(num_tiers, dtype=jnp.int32)[:, None]
    wanted = ahead[None] == tier
    # A copy as good or better serves.
    there = key > 0
    served = jnp.stack([jnp.any(there[: t + 1], axis=0) for t in range(num_tiers)])
    new = wanted & ~served
    keys, moved = admit_each(key, new, wanted, slots, 2 * clock + 1, how)
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
    how: pools.Search,
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
        "needed": _num(runs),
        "hits": _num(hits),
        "reused": _num(hits & found.reused[None]),
        "misses": _num(misses),
        "prefetch_hits": _num(hits & (key & 1 == 1)),
    }
    key = jnp.where(hits, 2 * clock, key)
    key, sums = admit_each(key, misses, runs, slots, 2 * clock, how)
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
    how: pools.Search,
) -> tuple[jax.Array, pools.Moved]:
    """Runs `pools.admit` for every tier; the first four operands have its axis."""

    def admit(
        key: jax.Array, coming: jax.Array, protected: jax.Array, slots: jax.Array
    ) -> tuple[jax.Array, pools.Moved]:
        return pools.admit(key, coming, protected, slots, stamp, how)

    return jax.vmap(admit)(key, coming, protected, slots)


def _num(mask: jax.Array) -> jax.Array:
    """Counts bool[T, E] as int32[T]."""
    return jnp.sum(mask, axis=1, dtype=jnp.int32)
