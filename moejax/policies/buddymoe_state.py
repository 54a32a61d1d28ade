"""State of BuddyMoE.

Axes: M sparse layers, E experts of a layer, K places of a buddy list.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.policies import buddy_gates
from moejax.policies.base import Observation, Requests, layer_axes_of


class Settings(NamedTuple):
    """Settings that a sweep may vary: leaves of the state."""

    tau: jax.Array  # float32[M], of the TAE gate
    margin: jax.Array  # float32[], gamma
    temperature: jax.Array  # float32[], of p~
    beta: jax.Array  # float32[], of the distribution gate
    bypass_bytes: jax.Array  # float32[], from which beta follows where it is used
    eta: jax.Array  # float32[], weight of the token's own logits in eq. 3.
    kappa: jax.Array  # float32[], penalty of a hop in eq. 3.
    budget: jax.Array  # int32[], rho
    depth: jax.Array  # int32[], H
    background_bytes: jax.Array  # float32[], of background transfers, a step
    expert_bytes: jax.Array  # float32[], of one expert
    retention: jax.Array  # float32[], of the counts of misses, a step
    least_misses: jax.Array  # float32[], from which on an expert is brought


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BuddyState:
    """State of BuddyMoE; shapes and dtypes never change."""

    settings: Settings
    lists: jax.Array  # int32[M, E, K]
    q: jax.Array  # float32[M, E, K]
    gains: jax.Array | None  # float32[M, E, E], or None
    hops: jax.Array  # float32[E], partitions between an expert and the tokens' device
    replaced: jax.Array  # int32[M, E], pairs of each expert that a buddy served, so far
    dropped: jax.Array  # int32[M, E], pairs of each expert that nobody served, so far
    counted: jax.Array  # int32[M, E], how many of both `missed` knows of
    # float32[M, E], pairs replaced or dropped since the expert was last asked for, fading
    missed: jax.Array
    requested: jax.Array  # int32[], experts that background transfers were asked for
    credit: jax.Array  # float32[], bytes of background transfers that are saved up
    # float32[DELTA_BINS + 1], experts that decode steps asked for in vain, by the delta of their
    # layer (`buddy_gates.delta_bin`), fading; 0 where beta does not follow from it
    missing: jax.Array
    steps: jax.Array  # float32[], the steps of that, fading alike


def layer_axes(has_gains: bool) -> BuddyState:
    """Layer axes of a state with gains, or without; see `Policy`."""
    rows = dict.fromkeys(("lists", "q", "replaced", "dropped", *("gains",) * has_gains), 0)
    shared: dict[str, Any] = {field.name: None for field in dataclasses.fields(BuddyState)}
    return BuddyState(**shared | rows | {"settings": layer_axes_of(Settings, tau=0)})


def with_missing(state: BuddyState, o: Observation, asked: jax.Array) -> BuddyState:
    """Counts a decode layer's misses, as if no buddy replaced them.

    Args:
      state: before the layer.
      asked: bool[N, A], pairs to compute.
    """
    requested = buddy_gates.requested_experts(o.ids, asked, o.resident.shape[1])
    count = jnp.sum(requested & ~o.resident[0], dtype=jnp.int32).astype(jnp.float32)
    place = buddy_gates.delta_bin(buddy_gates.missing_share(requested, o.resident[0]))
    bins = jnp.arange(buddy_gates.DELTA_BINS + 1, dtype=jnp.int32)
    begins = (o.layer == 0) & jnp.any(o.active)
    return dataclasses.replace(
        state,
        missing=state.missing + jnp.where(bins == place, count, 0.0),
        steps=state.steps + begins.astype(jnp.float32),
    )


def most_missed(
    state: BuddyState, resident: jax.Array, max_requests: int
) -> tuple[Requests, BuddyState]:
    """Requests the most missed experts, as many as the saved bytes allow.

    A requested expert is counted from 0 again; credit beyond the cost of `max_requests` is lost.

    Args:
      state: after a step.
      resident: bool[M, 1, E].
    """
    settings, num_experts = state.settings, state.missed.shape[1]
    size, limit = settings.expert_bytes, min(max_requests, state.missed.size)
    credit = jnp.minimum(state.credit + settings.background_bytes, size * limit)
    counted = state.replaced + state.dropped
    new = (counted - state.counted).astype(jnp.float32)
    missed = state.missed * settings.retention + new
    eligible = (missed >= settings.least_misses) & (missed > 0) & ~jnp.any(resident, axis=1)
    most, at = jax.lax.top_k(jnp.where(eligible, missed, 0.0).reshape(-1), limit)
    affordable = jnp.floor(credit / size).astype(jnp.int32)
    asked = (most > 0) & (jnp.arange(limit, dtype=jnp.int32) < affordable)
    num_asked = jnp.sum(asked, dtype=jnp.int32)
    cleared = missed.reshape(-1).at[jnp.where(asked, at, missed.size)].set(0.0, mode="drop")
    at = jnp.where(asked, at.astype(jnp.int32), -1)
    requests = Requests(
        layer=jnp.where(asked, at // num_experts, -1),
        expert=jnp.where(asked, at % num_experts, -1),
        tier=jnp.where(asked, 0, -1),
    )
    return requests, dataclasses.replace(
        state,
        counted=counted,
        missed=cleared.reshape(missed.shape),
        requested=state.requested + num_asked,
        credit=credit - size * num_asked.astype(jnp.float32),
        missing=state.missing * settings.retention,
        steps=state.steps * settings.retention,
    )
