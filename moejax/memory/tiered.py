"""Experts in several tiers under a policy: what steps share, and what moves between them.

What a step does is in `moejax.memory.tiered_experts`. Between steps `ask` hands over what the
policy wants moved in bulk.

Axes: M sparse layers, E experts, T tiers of falling fidelity.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moejax.memory import residency as tables
from moejax.memory.expert_pool import ExpertPool, PoolSpec
from moejax.memory.residency import CacheSpec
from moejax.policies.interface import (
    AnyPolicy,
    Requests,
    asks_again,
    foreseen,
    pairs_with_room,
)

SKIPPED_MASS, SUBSTITUTED_MASS, ALL_MASS = 0, 1, 2  # columns of `TieredPool.gate` after the tiers'


@dataclasses.dataclass(frozen=True)
class TieredSpec:
    """Static facts.

    Attributes:
      policy: who decides.
      names: of the tiers, of falling fidelity.
      pools: one for each, of the same layers and experts.
    """

    policy: AnyPolicy
    names: tuple[str, ...]
    pools: tuple[PoolSpec, ...]

    @property
    def cache(self) -> CacheSpec:
        """Of the tier of highest fidelity."""
        return self.pools[0].cache

    @property
    def read(self) -> Any:
        """Whether experts of any tier may be on the disk alone: what reads them, or None."""
        return next((pool.read for pool in self.pools if pool.read is not None), None)

    @property
    def full(self) -> tuple[bool, ...]:
        """Which pools have a slot for every expert, which is never taken from it."""
        return tuple(pool.cache.slots >= pool.cache.num_experts for pool in self.pools)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TieredPool:
    """The pools of all tiers and the policy's state; donated through every step.

    Invariants: shapes never change; an expert is in at most one of the pools that are not `full`
    while a layer runs.

    Attributes:
      pools: of the tiers.
      state: of the policy.
      gate: float32[M, T + 3], the router's gate mass that each tier served, that was skipped, that
        another expert served (which is in its tier's too), and of all; since it was last taken.
    """

    pools: tuple[ExpertPool, ...]
    state: Any
    gate: jax.Array


def no_gate(num_layers: int, num_tiers: int) -> jax.Array:
    """`TieredPool.gate` before any token."""
    return jnp.zeros((num_layers, num_tiers + 3), jnp.float32)


def released(pool: ExpertPool, layer: int | jax.Array, gone: jax.Array) -> ExpertPool:
    """Experts, bool[E], leave their slots of a layer."""
    residency, counts = tables.release(pool.residency, layer, gone, pool.counts)
    return dataclasses.replace(pool, residency=residency, counts=counts)


def ask(
    spec: TieredSpec, pool: TieredPool, coming: jax.Array, room: jax.Array
) -> tuple[TieredPool, Requests, Requests]:
    """What the policy wants moved before the next step; a program of its own between steps.

    A demotion frees the slot of the higher tier here; what is to come is fetched by
    `moejax.memory.transfers`. Where the pools are emulated it has come when this returns.

    Args:
      spec: static.
      pool: donated.
      coming: bool[M, T, E], on its way already.
      room: int32[], experts that may set out now. Of a policy that asks again
        (`interface.asks_again`) pairs of requests are carried out while there is room before them;
        else a demotion would leave a slot empty for as long as its promotion waits. Other
        policies' requests all are.

    Returns:
      The pool; the requests that were carried out, -1 in the place of the others; and what is to
      be read ahead (`interface.foreseen`).
    """
    num_experts = spec.cache.num_experts
    held = [p.residency.table[:, :num_experts] >= 0 for p in pool.pools]
    resident = jnp.stack(held, axis=1) | coming
    requests, state = spec.policy.transfers(pool.state, resident)
    ahead = foreseen(spec.policy, state, resident)
    if len(requests.layer) and asks_again(spec.policy):
        moves = (requests.layer >= 0) & ~resident[requests.layer, requests.tier, requests.expert]
        sets_out = pairs_with_room(moves, room)
        requests = Requests(*(jnp.where(sets_out, field, -1) for field in requests))
    expert = jnp.arange(num_experts, dtype=jnp.int32)

    def one(index: jax.Array, pools: tuple[ExpertPool, ...]) -> tuple[ExpertPool, ...]:
        layer, tier = requests.layer[index], requests.tier[index]
        asked = (expert == requests.expert[index]) & (layer >= 0)
        layer, found = jnp.maximum(layer, 0), list(pools)
        for i, is_full in enumerate(spec.full):
            if not is_full and len(pools) > 1:
                found[i] = released(found[i], layer, asked & (tier > i))
            if spec.pools[i].emulated:
                comes = jnp.where(jnp.any(asked) & (tier == i), requests.expert[index], -1)
                found[i] = _landed(spec.pools[i].cache, found[i], layer, comes[None])
        return tuple(found)

    pools, number = pool.pools, len(requests.layer)
    if number:
        pools = jax.lax.fori_loop(0, number, one, pools)
    return dataclasses.replace(pool, pools=pools, state=state), requests, ahead


def _landed(cache: CacheSpec, pool: ExpertPool, layer: jax.Array, experts: jax.Array) -> ExpertPool:
    """Experts get slots as by `moejax.memory.landing.land`, without bytes."""
    if not cache.slots:
        return pool
    sized = dataclasses.replace(cache, held=cache.slots)
    slots, residency, counts = tables.reserve(sized, pool.residency, layer, experts, pool.counts)
    residency, counts = tables.publish(sized, residency, layer, slots, counts)
    return dataclasses.replace(pool, residency=residency, counts=counts)
