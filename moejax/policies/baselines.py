"""Baselines: every expert in one precision, on the device or loaded on demand.

Rows 1 to 3 of DyMoE Table 3 are `OnDemand`: row 1 on a memory without cache slots, row 2 with them,
an LRU cache, row 3 with `prefetch`.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from moejax.policies.base import (
    SKIPPED,
    Decision,
    Needs,
    Observation,
    Policy,
    PolicySpec,
    experts_ahead,
    layer_axes_of,
    prefetch_limits,
    tier_id,
)
from moejax.policies.settings import check_number, check_text
from pallas_kernels.cache_plan import Rule


def always(tier: jax.Array) -> Rule:
    """Rule that gives one tier, int32[], to all pairs."""
    return Rule(None, tier, tier, jnp.zeros((), bool))


def as_routed(observation: Observation, tier: jax.Array) -> Decision:
    """Decision for the router's experts and weights, in a tier int32[] or one of each pair."""
    ids = observation.ids
    tiers = jnp.broadcast_to(tier, ids.shape)
    return Decision(
        ids=ids,
        tier=jnp.where(observation.active[:, None], tiers, SKIPPED),
        weights=observation.weights,
        at_least=jnp.zeros(ids.shape, bool),
    )


class _OnDemandState(NamedTuple):
    """Tier and prefetch limits that `decide` reads."""

    tier: jax.Array  # int32[], in which all pairs run
    # int32[M], experts of the next layer that each layer prefetches; 0 for the last
    limit: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnDemand(Policy[_OnDemandState]):
    """Runs the router's choice in one tier and fetches misses when they are needed."""

    name: ClassVar[str] = "on_demand"
    tier: str = ""  # its name; "": the one of highest fidelity
    # t of DyMoE eq. 7 and 8, experts of the next layer to prefetch; at most as many as the layer
    # has slots.
    prefetch: int = 0

    def __post_init__(self) -> None:
        check_text("tier", self.tier)
        check_number("prefetch", self.prefetch, 0, integer=True)

    @property
    def partition_refusal(self) -> None:
        """Serves experts that are handed out."""

    @property
    def needs(self) -> Needs:
        """Names what the engine must compute, as `Policy.needs`."""
        return Needs(predicted=self.prefetch > 0)

    @property
    def layer_axes(self) -> Any:
        """Names the state's layer axes, as `Policy.layer_axes`."""
        return layer_axes_of(_OnDemandState, limit=0)

    def first_alone(self, spec: PolicySpec) -> bool:
        """Whether all ask for the first tier, as `Policy.first_alone`."""
        return tier_id(spec, self.tier, 0) == 0

    def init(self, spec: PolicySpec) -> _OnDemandState:
        """Makes the first state, as `Policy.init`."""
        tier = tier_id(spec, self.tier, 0)
        limits = prefetch_limits(spec, tier, self.prefetch)
        return _OnDemandState(jnp.asarray(tier, jnp.int32), limits)

    def decide(
        self, state: _OnDemandState, observation: Observation
    ) -> tuple[Decision, _OnDemandState]:
        """Chooses tiers and experts, as `Policy.decide`."""
        decision = as_routed(observation, state.tier)
        ahead = experts_ahead(observation, state.limit[observation.layer])
        if ahead is not None:
            decision = decision._replace(ahead=jnp.where(ahead, state.tier, -1))
        return decision, state

    def decode_rule(self, state: _OnDemandState) -> Rule:
        """Gives the rule of decode steps, as `Policy.decode_rule`."""
        return always(state.tier)

    def max_prefetch(self, state: _OnDemandState) -> int:
        """Bounds the look-ahead, as `Policy.max_prefetch`."""
        return int(state.limit.max())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resident(OnDemand):
    """Runs the router's choice in one tier, as `OnDemand`: the name of a baseline."""

    name: ClassVar[str] = "resident"
