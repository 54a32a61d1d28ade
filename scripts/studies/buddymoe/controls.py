"""Controls of BuddyMoE's experiments: nobody, or random experts.

Each is a policy of its own that a command takes by name, such as
`--config.policy.name=scripts.studies.buddymoe.controls:RandomExpert`.

Axes: N tokens, A experts a token, E experts of a layer.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from moejax.policies.base import SKIPPED, Decision, Observation
from moejax.policies.buddymoe import BuddyMoe, BuddyState, Substitution
from moejax.policies.settings import check_number


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Original(BuddyMoe):
    """The paper's baseline "original": every missing expert is fetched."""

    name: ClassVar[str] = "buddymoe_original"
    has_kernel: ClassVar[bool] = False

    def decide(
        self, state: BuddyState, observation: Observation, runs: jax.Array | None = None
    ) -> tuple[Decision, BuddyState]:
        """Decides to run every pair as the router chose it."""
        o = observation
        asked = jnp.broadcast_to(o.active[:, None], o.ids.shape)
        asked = asked if runs is None else asked & runs
        tier = jnp.where(asked, 0, SKIPPED)
        given = jnp.zeros(o.ids.shape, bool), self.ahead(state, o)
        return Decision(o.ids, tier, o.weights, *given), state


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RandomExpert(BuddyMoe):
    """The paper's baseline "random": a resident expert drawn uniformly stands in."""

    name: ClassVar[str] = "buddymoe_random"
    has_kernel: ClassVar[bool] = False

    seed: int = 0  # of the draws

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("seed", self.seed, 0, 2**32 - 1, integer=True)

    @property
    def layer_axes(self) -> Any:
        """None: draws are numbered by what was replaced in all layers."""
        return None

    def search(
        self, state: BuddyState, o: Observation, resident: jax.Array, wanted: jax.Array
    ) -> Substitution:
        """Draws a resident expert for each wanted pair."""
        # It differs between any two layers or steps in which something is replaced.
        key = jax.random.fold_in(jax.random.key(self.seed), o.layer)
        key = jax.random.fold_in(key, jnp.sum(state.replaced))
        return substitute_randomly(o.ids, resident, wanted, state.settings.budget, key)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MatchedRandom(RandomExpert):
    """Random experts for exactly the pairs that buddies would have replaced."""

    name: ClassVar[str] = "buddymoe_matched_random"

    def search(
        self, state: BuddyState, o: Observation, resident: jax.Array, wanted: jax.Array
    ) -> Substitution:
        """Draws resident experts for the pairs that `BuddyMoe` would replace."""
        found = BuddyMoe.search(self, state, o, resident, wanted)
        drawn = super().search(state, o, resident, found.replaced)
        return drawn._replace(searched=found.searched)


def substitute_randomly(
    ids: jax.Array, resident: jax.Array, wanted: jax.Array, budget: jax.Array, key: jax.Array
) -> Substitution:
    """Draws a resident expert uniformly, none that serves the token already.

    Args:
      ids: int32[N, A].
      resident: bool[E].
      wanted: bool[N, A].
      budget: int32[].
      key: of the draw.
    """
    num_tokens, width = ids.shape
    num_experts = len(resident)
    chosen = jnp.any(
        ids[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None], axis=1
    )
    free = resident[None] & ~chosen
    draws = jax.random.uniform(key, (num_tokens, num_experts), jnp.float32)
    # A token's n-th replacement takes the n-th of the free experts in a random order.
    drawn, pool = jax.lax.top_k(jnp.where(free, draws, -1.0), min(width, num_experts))
    index = jnp.cumsum(wanted, axis=-1, dtype=jnp.int32) - wanted.astype(jnp.int32)
    num_free = jnp.sum(free, axis=-1, dtype=jnp.int32, keepdims=True)
    searched = wanted & (jnp.minimum(index, num_free) < budget)
    at = jnp.minimum(index, pool.shape[-1] - 1)
    found = searched & (jnp.take_along_axis(drawn, at, axis=-1, mode="clip") >= 0)
    buddies = jnp.take_along_axis(pool, at, axis=-1, mode="clip")
    return Substitution(jnp.where(found, buddies, ids), found, searched)
