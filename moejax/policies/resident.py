"""The uniform baseline: every expert in one precision, wherever it is stored."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from moejax.policies.base import (
    SKIPPED,
    Decision,
    Observation,
    Policy,
    PolicySpec,
    layer_axes_of,
    tier_id,
)
from moejax.policies.settings import check_text
from pallas_kernels.cache_plan import Rule


class ResidentState(NamedTuple):
    """State of Resident: the tier, int32[], in which all pairs run."""

    tier: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resident(Policy[ResidentState]):
    """Runs the router's choice in one tier, without prefetch."""

    name: ClassVar[str] = "resident"

    tier: str = ""  # its name; "": the one of highest fidelity

    def __post_init__(self) -> None:
        check_text("tier", self.tier)

    @property
    def layer_axes(self) -> Any:
        """Names the state's layer axes, as `Policy.layer_axes`."""
        return layer_axes_of(ResidentState)

    def init(self, spec: PolicySpec) -> ResidentState:
        """Makes the first state, as `Policy.init`."""
        return ResidentState(jnp.asarray(tier_id(spec, self.tier, 0), jnp.int32))

    def decide(
        self, state: ResidentState, observation: Observation
    ) -> tuple[Decision, ResidentState]:
        """Chooses tiers and experts, as `Policy.decide`."""
        return as_routed(observation, state.tier), state

    def decode_rule(self, state: ResidentState) -> Rule:
        """Gives the rule of decode steps, as `Policy.decode_rule`."""
        return always(state.tier)


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
