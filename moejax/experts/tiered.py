"""The expert cache of T >= 1 tiers: shared state and the policy's requests.

`moejax.experts.cache_step` uses it inside a step. Between steps `ask` returns the bulk transfers
that a policy requests.

Axes: M sparse layers, E experts, T tiers of falling fidelity.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.experts import residency as tables
from moejax.experts.expert_pool import ExpertPool, PoolSpec
from moejax.experts.residency import CacheSpec
from moejax.policies.base import (
    AnyPolicy,
    Requests,
    pairs_with_room,
)

SKIPPED_MASS, SUBSTITUTED_MASS, ALL_MASS = 0, 1, 2  # columns of `ExpertCache.gate` after the tiers'


@dataclasses.dataclass(frozen=True)
class ExpertCacheSpec:
    """Static facts.

    Attributes:
      policy: None: the router alone decides, with one tier.
      names: names of the tiers, in order of falling fidelity.
      pools: one for each, of the same layers and experts.
    """

    policy: AnyPolicy | None
    names: tuple[str, ...]
    pools: tuple[PoolSpec, ...]

    @property
    def cache(self) -> CacheSpec:
        """Cache spec of the tier of highest fidelity."""
        return self.pools[0].cache

    @property
    def read(self) -> Any:
        """Reader of experts that are on the disk alone in any tier, or None."""
        return next((pool.read for pool in self.pools if pool.read is not None), None)

    @property
    def full(self) -> tuple[bool, ...]:
        """Whether each pool has a slot for every expert, never to be evicted."""
        return tuple(pool.cache.slots >= pool.cache.num_experts for pool in self.pools)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertCache:
    """The slots of all tiers and the policy's state; donated through every step.

    Invariants: shapes never change; an expert is in at most one of the pools that are not `full`
    while a layer runs.

    Attributes:
      state: the policy's; () without one.
      gate: float32[M, T + 3], the router's gate mass that each tier served, that was skipped, that
        another expert served (which is in its tier's too), and of all; since it was last taken.
        None without a policy.
    """

    pools: tuple[ExpertPool, ...]
    state: Any
    gate: jax.Array | None


def no_gate(num_layers: int, num_tiers: int) -> jax.Array:
    """`ExpertCache.gate` before any token."""
    return jnp.zeros((num_layers, num_tiers + 3), jnp.float32)


class Asked(NamedTuple):
    """Requests of a policy between two steps.

    Attributes:
      moved: requests that are carried out, -1 in the place of the others.
      ahead: experts to read from the disk (`Policy.disk_prefetch`).
      idle: int32[], see `Policy.tokens_until_change`; 0 also where something has been asked for.
    """

    moved: Requests
    ahead: Requests
    idle: jax.Array


def ask(
    spec: ExpertCacheSpec, pool: ExpertCache, coming: jax.Array, room: jax.Array
) -> tuple[ExpertCache, Asked]:
    """Applies the policy's requests before the next step.

    It is a program of its own between steps. A demotion frees the slot of the higher tier here;
    `moejax.experts.transfers` fetches promoted experts, but emulated pools have them on return.

    Args:
      pool: donated.
      coming: bool[M, T, E], experts in flight.
      room: int32[], experts whose transfer may start now. Pairs of requests that a policy repeats
        (`Policy.repeats_requests`) are carried out while there is room before them; else a demotion
        would leave a slot empty for as long as its promotion waits. Other requests all are.

    Returns:
      The pool, and the policy's requests.
    """
    assert spec.policy is not None
    num_experts = spec.cache.num_experts
    held = [p.residency.table[:, :num_experts] >= 0 for p in pool.pools]
    resident = jnp.stack(held, axis=1) | coming
    requests, state = spec.policy.transfers(pool.state, resident)
    ahead = spec.policy.disk_prefetch(state, resident)
    rests = spec.policy.tokens_until_change(state, resident)
    if len(requests.layer) and spec.policy.repeats_requests:
        moves = (requests.layer >= 0) & ~resident[requests.layer, requests.tier, requests.expert]
        sets_out = pairs_with_room(moves, room)
        requests = Requests(*(jnp.where(sets_out, field, -1) for field in requests))
    if not len(requests.layer):
        return dataclasses.replace(pool, state=state), Asked(requests, ahead, rests)
    pools = tuple(
        _drop_higher_copies(p, i, requests) if not is_full and len(pool.pools) > 1 else p
        for i, (p, is_full) in enumerate(zip(pool.pools, spec.full, strict=True))
    )
    if any(of.emulated for of in spec.pools):
        pools = _insert_all_emulated(spec, pools, requests)
    rests = jnp.where(jnp.any(requests.layer >= 0), 0, rests)
    return dataclasses.replace(pool, pools=pools, state=state), Asked(requests, ahead, rests)


def _drop_higher_copies(pool: ExpertPool, tier: int, requests: Requests) -> ExpertPool:
    """Evicts from a tier's pool the experts requested in a lower tier."""
    shape = (len(pool.residency.table), pool.residency.num_experts)
    layer = jnp.where((requests.layer >= 0) & (requests.tier > tier), requests.layer, shape[0])
    gone = jnp.zeros(shape, bool).at[layer, requests.expert].set(True, mode="drop")
    residency, counts = tables.release_everywhere(pool.residency, gone, pool.counts)
    return dataclasses.replace(pool, residency=residency, counts=counts)


def _insert_all_emulated(
    spec: ExpertCacheSpec, pools: tuple[ExpertPool, ...], requests: Requests
) -> tuple[ExpertPool, ...]:
    """Admits requested experts to emulated pools, in the order of requests."""

    def one(index: jax.Array, pools: tuple[ExpertPool, ...]) -> tuple[ExpertPool, ...]:
        layer, expert, tier = (numbers[index] for numbers in requests)
        found = list(pools)
        for i, of in enumerate(spec.pools):
            if of.emulated:
                comes = jnp.where((layer >= 0) & (tier == i), expert, -1)
                found[i] = _insert_emulated(of.cache, found[i], jnp.maximum(layer, 0), comes[None])
        return tuple(found)

    return jax.lax.fori_loop(0, len(requests.layer), one, pools)


def _insert_emulated(
    cache: CacheSpec, pool: ExpertPool, layer: jax.Array, experts: jax.Array
) -> ExpertPool:
    """Admits experts as `moejax.experts.transfer_programs.insert_experts` does, without bytes."""
    if not cache.slots:
        return pool
    _, residency, counts = tables.admit(cache, pool.residency, layer, experts, pool.counts)
    return dataclasses.replace(pool, residency=residency, counts=counts)
