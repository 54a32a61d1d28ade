"""A control of DyMoE's experiments: every pair runs in the precision that it asks for.

A command takes it by name, `--config.policy.name=scripts.studies.dymoe.controls:AsAsked`.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from moejax.policies.base import Decision, Observation, PolicySpec
from moejax.policies.dymoe import DyMoE
from pallas_kernels.cache_plan import Rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsAsked(DyMoE):
    """DyMoE without conservative reuse, for figures by the share of critical experts.

    Where every copy of every expert is on the device, DyMoE runs all of them in high precision.
    """

    name: ClassVar[str] = "dymoe_as_asked"

    def first_alone(self, spec: PolicySpec) -> bool:
        """False: no other copy will do."""
        return False

    def decide(self, state: Any, observation: Observation) -> tuple[Decision, Any]:
        """Decides like DyMoE; no other copy will do."""
        decision, state = super().decide(state, observation)
        return decision._replace(at_least=jnp.zeros_like(decision.at_least)), state

    def decode_rule(self, state: Any) -> Rule | None:
        """Gives DyMoE's rule; no other copy will do."""
        rule = super().decode_rule(state)
        return rule and dataclasses.replace(rule, at_least=False)
