"""The arrays of a plan over several tiers.

Axes: N tokens, A pairs of a token, E experts, M layers, T tiers of falling fidelity.
"""

import dataclasses
from typing import NamedTuple

import jax

from pallas_kernels.residency_plan.operands import Fetch, Tables, num_jobs


class Wishes(NamedTuple):
    """Of every pair what a policy asks for.

    Attributes:
      tier: int32[N, A], the tier that a pair asks for; -1: it is skipped.
      at_least: bool[N, A], a tier of higher fidelity serves too.
    """

    tier: jax.Array
    at_least: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rule:
    """What says the wishes of all pairs, by the rank of their expert and what is in slots.

    A pair is critical if its expert is among the first of some active token; it asks for `high`.
    The others ask for `low`, or with `held` for `high` where that tier has a copy that serves.

    Attributes:
      critical: int32[M], how many of a token's experts are critical; None: none.
      high: int32[], a tier.
      low: int32[], a tier, or -1: skipped.
      held: bool[].
      at_least: static; a tier of higher fidelity serves too those that are not critical.
    """

    critical: jax.Array | None
    high: jax.Array
    low: jax.Array
    held: jax.Array
    at_least: bool = dataclasses.field(default=False, metadata={"static": True})


class Asked(NamedTuple):
    """What a policy asks for.

    Attributes:
      ids: int32[N, A], experts; those of a token differ. Under a rule of critical ones by falling
        importance.
      by: in which tiers.
      weights: float32[N, A], the router's gate mass, counted by what became of it.
      routed_ids: int32[N, A], what the router chose; None: `ids`.
    """

    ids: jax.Array
    by: Wishes | Rule
    weights: jax.Array
    routed_ids: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Form:
    """Static facts of a tier.

    Attributes:
      banks: arrays in which layers have their slots in turn.
      is_full: it has a slot for every expert, and no copy leaves it for that the expert is in
        another tier.
      is_complete: every expert is in its slot for ever: nothing is fetched, and its table stays as
        it is.
      streams: B, transient slots of a tier that has no others: whatever runs in it is copied there,
        at most B experts at a time; 0: it has slots of layers.
      is_fixed: of the first tier alone: what its slots hold changes between steps only, and nobody
        asks for what they do not hold.
      is_fed: of a tier that is neither full nor the first: an expert that has a slot here may have
        come to a tier of higher fidelity by other means than such plans. If it has where this is
        False, its copy here serves nobody, and stays until its slot is taken.
    """

    banks: int
    is_full: bool
    is_complete: bool
    streams: int = 0
    is_fixed: bool = False
    is_fed: bool = True

    @property
    def changes(self) -> bool:
        """Whether a step changes who has its slots of layers."""
        return not (self.is_complete or self.streams or self.is_fixed)

    @property
    def fetches(self) -> bool:
        """Whether a step may copy experts to it."""
        return not (self.is_complete or self.is_fixed)

    def num_jobs(self, num_pairs: int, num_experts: int, slots: int) -> int:
        """J."""
        return num_jobs(num_pairs, num_experts, self.streams or slots)


class Tier(NamedTuple):
    """One of T; its `Form` is given apart.

    Attributes:
      tables: changed in place.
      row_of: int32[M, E], rows of the host store; -1: none.
    """

    tables: Tables
    row_of: jax.Array


class Placed(NamedTuple):
    """A plan.

    Attributes:
      tier: int32[N, A], in which a pair runs; -1 where it does not.
      slot: int32[N, A], the global slot of its expert in that tier; -1.
      fetch: of each tier what to copy before its products, J = min(N A, E, C) jobs (B in place of
        C where it has no slots of layers); None of one that is complete or fixed.
    """

    tier: jax.Array
    slot: jax.Array
    fetch: tuple[Fetch | None, ...]
