"""Controls of BuddyMoE's experiments: nobody, random experts, or buddies that serve twice.

Each is a policy of its own that a command takes by name, such as
`--config.policy.name=scripts.studies.buddymoe.controls:RandomExpert`.

Axes: N tokens, A experts a token, E experts of a layer, H places of a buddy list that are searched.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from moejax.policies.base import SKIPPED, Decision, Observation
from moejax.policies.buddymoe import BuddyMoe, BuddyState, Candidates, Substitution
from moejax.policies.settings import check_number
from pallas_kernels.cache_plan import Rule


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
    """The paper's baseline "random": a resident expert drawn uniformly stands in.

    Attributes:
      seed: of the draws.
    """

    name: ClassVar[str] = "buddymoe_random"
    has_kernel: ClassVar[bool] = False

    seed: int = 0

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
        return substitute_randomly(
            o.ids, resident, wanted, state.settings.budget, self.draw_key(state, o)
        )

    def draw_key(self, state: BuddyState, o: Observation) -> jax.Array:
        """A key that differs between any two layers or steps in which something is replaced."""
        key = jax.random.fold_in(jax.random.key(self.seed), o.layer)
        return jax.random.fold_in(key, jnp.sum(state.replaced))


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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SoftBuddies(BuddyMoe):
    """Buddies that may serve a token twice, at a discount; 0 is the hard rule of Algorithm 1.

    Attributes:
      discount: of Psi for each earlier use of a buddy by the same token.
    """

    name: ClassVar[str] = "buddymoe_soft"
    has_kernel: ClassVar[bool] = False

    discount: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("discount", self.discount, 0, 1)

    @property
    def _is_scored(self) -> bool:
        """True: a discount changes the order of candidates."""
        return True

    def search(
        self, state: BuddyState, o: Observation, resident: jax.Array, wanted: jax.Array
    ) -> Substitution:
        """Searches the lists like `BuddyMoe`; a token may take a buddy twice."""
        return substitute_softly(
            o.ids, self.candidates(state, o, resident), wanted, state.settings.budget,
            jnp.float32(self.discount), last_first=self.spend_on == "last",
        )  # fmt: skip

    def decide(
        self, state: BuddyState, observation: Observation, runs: jax.Array | None = None
    ) -> tuple[Decision, BuddyState]:
        """Decides like `BuddyMoe`; the first pair of a buddy takes the weights of its others."""
        decision, state = super().decide(state, observation, runs)
        ids, last_first = observation.ids, self.spend_on == "last"
        rank = first_ranks(decision.ids, decision.ids != ids, last_first=last_first)
        weights, tier = merge_duplicate_buddies(decision.weights, decision.tier, rank, SKIPPED)
        ids = jnp.where(rank >= 0, ids, decision.ids)
        return decision._replace(ids=ids, weights=weights, tier=tier), state

    def decode_rule(self, state: BuddyState) -> Rule | None:
        """None: which pairs run depends on what is resident."""
        return None


def substitute_softly(
    ids: jax.Array,
    candidates: Candidates,
    wanted: jax.Array,
    budget: jax.Array,
    discount: jax.Array,
    *,
    last_first: bool = False,
) -> Substitution:
    """Lets a buddy serve a token again, at Psi times `discount` for each earlier use.

    The router's own choices stay barred. Discount 0 is the hard rule.

    Args:
      ids: int32[N, A], by falling weight.
      candidates: of every pair, with priorities.
      wanted: bool[N, A].
      budget: int32[].
      discount: float32[] in [0, 1].
      last_first: see `substitute`.

    Returns:
      The substitution, in whose `ids` a buddy may come twice.
    """
    num_tokens, width, depth = candidates.ids.shape
    assert candidates.priority is not None
    place = jnp.arange(depth, dtype=jnp.int32)[None]
    num_replaced = jnp.zeros(num_tokens, jnp.int32)
    taken: list[jax.Array] = []
    ranks = list(reversed(range(width))) if last_first else list(range(width))
    buddies, searched = [num_replaced] * width, [num_replaced > 0] * width
    for rank in ranks:
        mine, value = candidates.ids[:, rank], candidates.priority[:, rank]
        for buddy in taken:
            value = jnp.where(mine == buddy[:, None], value * discount, value)
        asks = wanted[:, rank] & (num_replaced < budget)
        free = (mine >= 0) & (value > 0) & asks[:, None]
        best = jnp.max(jnp.where(free, value, 0.0), axis=-1, keepdims=True)
        first = jnp.min(jnp.where(free & (value == best), place, depth), axis=-1, keepdims=True)
        buddy = jnp.max(jnp.where(place == first, mine, -1), axis=-1)
        buddies[rank], searched[rank] = buddy, asks
        num_replaced += (buddy >= 0).astype(jnp.int32)
        taken.append(buddy)
    chosen = jnp.stack(buddies, axis=1)
    return Substitution(
        jnp.where(chosen >= 0, chosen, ids), chosen >= 0, jnp.stack(searched, axis=1)
    )


def first_ranks(ids: jax.Array, replaced: jax.Array, *, last_first: bool) -> jax.Array:
    """int32[N, A], the first rank visited whose buddy is the same; -1 where it is this one.

    Args:
      ids: int32[N, A], after substitution.
      replaced: bool[N, A].
      last_first: the order in which ranks are visited.
    """
    width = ids.shape[1]
    rank = jnp.arange(width, dtype=jnp.int32)
    same = (ids[:, :, None] == ids[:, None, :]) & replaced[:, :, None] & replaced[:, None, :]
    if last_first:
        first = jnp.max(jnp.where(same, rank[None, None], -1), axis=-1)
    else:
        first = jnp.min(jnp.where(same, rank[None, None], width), axis=-1)
    return jnp.where(replaced & (first != rank[None]), first, -1)


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


def merge_duplicate_buddies(
    weights: jax.Array, tier: jax.Array, first_rank: jax.Array, skipped: int
) -> tuple[jax.Array, jax.Array]:
    """Moves the weight of a pair to the pair at `first_rank`, whose buddy is the same.

    Args:
      weights: float32[N, A].
      tier: int32[N, A].
      first_rank: int32[N, A], -1 where a pair keeps its weight.
      skipped: the tier of a pair that is not computed.
    """
    rank = jnp.arange(weights.shape[1], dtype=jnp.int32)
    to = first_rank[:, :, None] == rank[None, None]
    gained = jnp.sum(jnp.where(to, weights[:, :, None], 0.0), axis=1)
    moved = first_rank >= 0
    return jnp.where(moved, 0.0, weights + gained), jnp.where(moved, skipped, tier)
