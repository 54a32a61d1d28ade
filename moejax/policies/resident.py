"""The uniform baseline: every expert in one precision, wherever it lies."""

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
    """tier int32[]: in which all pairs run."""

    tier: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resident(Policy[ResidentState]):
    """What the router says, in one tier, nothing brought ahead.

    Attributes:
      tier: its name; "": that of highest fidelity.
    """

    name: ClassVar[str] = "resident"

    tier: str = ""

    def __post_init__(self) -> None:
        check_text("tier", self.tier)

    @property
    def layer_axes(self) -> Any:
        """See `Policy`."""
        return layer_axes_of(ResidentState)

    def init(self, spec: PolicySpec) -> ResidentState:
        """See `Policy`."""
        return ResidentState(jnp.asarray(tier_id(spec, self.tier, 0), jnp.int32))

    def decide(
        self, state: ResidentState, observation: Observation
    ) -> tuple[Decision, ResidentState]:
        """See `Policy`."""
        return as_routed(observation, state.tier), state

    def decode_rule(self, state: ResidentState) -> Rule:
        """See `Policy`."""
        return always(state.tier)


def always(tier: jax.Array) -> Rule:
    """One tier, int32[], for all pairs."""
    return Rule(None, tier, tier, jnp.zeros((), bool))


def as_routed(observation: Observation, tier: jax.Array) -> Decision:
    """The router's experts and weights, each pair in the tier that it is given.

    Args:
      observation: of a layer.
      tier: int32[] or int32[N, A].
    """
    ids = observation.ids
    tiers = jnp.broadcast_to(tier, ids.shape)
    return Decision(
        ids=ids,
        tier=jnp.where(observation.active[:, None], tiers, SKIPPED),
        weights=observation.weights,
        at_least=jnp.zeros(ids.shape, bool),
    )
