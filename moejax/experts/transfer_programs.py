"""Requests of a policy between two steps, as one program."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.experts import residency as tables
from moejax.experts.state import CacheSpec, ExpertCache, TierSlots, TierSpec
from moejax.policies.base import Requests, pairs_with_room


def is_ready(array: jax.Array) -> bool:
    """Whether an array is computed, so that reading it waits for nothing."""
    return bool(array.is_ready())  # type: ignore[attr-defined]


class TransferRequests(NamedTuple):
    """Requests of a policy between two steps."""

    moved: Requests  # requests that are carried out, -1 in the place of the others
    ahead: Requests  # experts to read from the disk (`Policy.disk_prefetch`)
    # int32[], see `Policy.tokens_until_change`; 0 also where something is requested
    idle: jax.Array


def request_transfers(
    spec: CacheSpec, cache: ExpertCache, in_flight: jax.Array, room: jax.Array
) -> tuple[ExpertCache, TransferRequests]:
    """Asks the policy for transfers before the next step, and applies its demotions.

    A demotion frees the slot of the higher tier; `moejax.experts.transfers` fetches promoted
    experts, but emulated tiers have them on return.

    Args:
      cache: donated.
      in_flight: bool[M, T, E].
      room: int32[], experts whose transfer may start now. Pairs of requests that a policy repeats
        (`Policy.repeats_requests`) are carried out while there is room before them; else a demotion
        would leave a slot empty for as long as its promotion waits. Other requests all are.
    """
    assert spec.policy is not None
    resident = spec.resident([tier.residency.table for tier in cache.tiers]) | in_flight
    requests, state = spec.policy.transfers(cache.state, resident)
    ahead = spec.policy.disk_prefetch(state, resident)
    idle = spec.policy.tokens_until_change(state, resident)
    if len(requests.layer) and spec.policy.repeats_requests:
        moves = (requests.layer >= 0) & ~resident[requests.layer, requests.tier, requests.expert]
        sets_out = pairs_with_room(moves, room)
        requests = Requests(*(jnp.where(sets_out, field, -1) for field in requests))
    if not len(requests.layer):
        return dataclasses.replace(cache, state=state), TransferRequests(requests, ahead, idle)
    pools = tuple(
        tier if is_full or len(cache.tiers) == 1 else _drop_higher_copies(tier, i, requests)
        for i, (tier, is_full) in enumerate(zip(cache.tiers, spec.full, strict=True))
    )
    pools = tuple(
        _insert_emulated(of, pool, i, requests) if of.emulated and of.cache.most_slots else pool
        for i, (of, pool) in enumerate(zip(spec.tiers, pools, strict=True))
    )
    idle = jnp.where(jnp.any(requests.layer >= 0), 0, idle)
    cache = dataclasses.replace(cache, tiers=pools, state=state)
    return cache, TransferRequests(requests, ahead, idle)


def _drop_higher_copies(pool: TierSlots, tier: int, requests: Requests) -> TierSlots:
    """Evicts from a tier the experts requested in a lower one."""
    shape = (len(pool.residency.table), pool.residency.num_experts)
    layer = jnp.where((requests.layer >= 0) & (requests.tier > tier), requests.layer, shape[0])
    gone = jnp.zeros(shape, bool).at[layer, requests.expert].set(True, mode="drop")
    residency, counts = tables.release_everywhere(pool.residency, gone, pool.counts)
    return dataclasses.replace(pool, residency=residency, counts=counts)


def _insert_emulated(spec: TierSpec, pool: TierSlots, tier: int, requests: Requests) -> TierSlots:
    """Admits requested experts to an emulated tier, as bulk transfers do, without bytes."""
    layers = jnp.where(requests.tier == tier, requests.layer, -1)
    _, residency, counts = tables.admit(
        spec.cache, pool.residency, layers, requests.expert, pool.counts
    )
    return dataclasses.replace(pool, residency=residency, counts=counts)
