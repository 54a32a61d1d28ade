"""The arrays of a plan, and the static facts of its tiers.

Axes: N tokens, A pairs of a token, E experts of a layer, M layers, T tiers of falling fidelity, C
cache slots of a layer, B transient slots of a bank, J jobs; -1 stands for none.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax

Columns = Mapping[str, int]  # of the counts that a call adds to, where each is in `Tables.events`

PLAN_EVENTS = (
    "steps", "needed", "hits", "misses", "admitted", "streamed", "unserved", "evictions",
    "prefetch_hits", "prefetch_waste",
)  # fmt: skip
PREDICT_EVENTS = ("prefetched", "evictions", "prefetch_waste")


class Tables(NamedTuple):
    """One tier's state, changed in place; donate it, or XLA copies it.

    Attributes:
      table: int32[M, E + 3 C], columns of a layer: the local slot of each expert, [E]; of each slot
        its owner, the clock of its last use, and whether it was brought ahead and not used yet,
        each [C]. Slots of experts and owners are inverse to each other.
      clock: int32[], may wrap.
      events: int32[M, K], counts.
      gate: float32[M, 1 + K'], gate mass of all, then of K' tiers; of which the first counts.
    """

    table: jax.Array
    clock: jax.Array
    events: jax.Array
    gate: jax.Array


class TierOperands(NamedTuple):
    """One of T; its `TierShape` is given apart.

    Attributes:
      tables: changed in place.
      row_of: int32[M, E], rows of the host store; -1: none.
    """

    tables: Tables
    row_of: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierShape:
    """Static facts of a tier.

    Attributes:
      slots: C; 0: it has transient slots alone.
      banks: arrays in which layers have their slots in turn; a slot's number counts within one.
      transient: B, slots of a bank after those of the layers.
      waves: W, in which experts that find no slot pass through the transient ones; 0: slots serve
        whatever a layer needs.
      is_full: it has a slot for every expert; copies stay, even if the expert is in another tier.
      is_complete: every expert is in its slot for ever: nothing is fetched, and its table stays.
      static_in_step: the first tier alone: transfers between steps alone change its slots, and
        steps ask only for experts that are there.
      refines: its copies are bit planes over those of the next tier, which has every expert: a
        request for the next tier reads that one alone, fewer bytes.
      shares_slots: of the first of two tiers, with `refines`: its planes and those of the next
        tier share that one's slots, whose table has 2 E items (`shared_slots`); its own is
        int32[M, 0].
      planes: of an expert that have slots of their own: 2 in tiers that share slots.
      may_be_promoted_elsewhere: of a tier that is neither full nor the first: transfers or
        look-ahead may bring a better copy of an expert that has a slot here. Where this is False
        and one came, the copy here serves nobody, and stays until its slot is taken.
    """

    slots: int
    banks: int = 1
    transient: int = 1
    waves: int = 0
    is_full: bool = False
    is_complete: bool = False
    static_in_step: bool = False
    refines: bool = False
    shares_slots: bool = False
    planes: int = 1
    may_be_promoted_elsewhere: bool = True

    @property
    def streams(self) -> bool:
        """Whether it has transient slots alone."""
        return not self.slots

    @property
    def changes(self) -> bool:
        """Whether a step changes who has its slots of layers."""
        return not (self.is_complete or self.streams or self.static_in_step)

    @property
    def fetches(self) -> bool:
        """Whether a step may copy experts to it."""
        return not (self.is_complete or self.static_in_step)

    @property
    def at_once(self) -> bool:
        """Whether the only wave is fetched with the admitted experts, and runs with them.

        With two banks its copies run beside the products of what is there instead.
        """
        alone = self.streams or self.banks == 1
        return self.waves == 1 and alone and self.planes == 1

    @property
    def later_waves(self) -> int:
        """Waves that are fetched after the products of wave 0."""
        return 0 if self.at_once else self.waves

    def num_jobs(self, num_pairs: int, num_experts: int) -> int:
        """J, of wave 0."""
        places = self.slots + (self.transient if self.at_once else 0)
        return min(num_pairs, num_experts, places)

    def first_transient(self, num_layers: int) -> int:
        """Global slot at which a bank's transient ones begin: ceil(M / banks) C."""
        return -(-num_layers // self.banks) * self.slots


class Wishes(NamedTuple):
    """The tier that a policy asks for, of every pair.

    Attributes:
      tier: int32[N, A]; -1: it is skipped.
      at_least: bool[N, A], a tier of higher fidelity serves too.
    """

    tier: jax.Array
    at_least: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rule:
    """The wishes of all pairs by the rank of their expert and what is in slots.

    A pair is critical if its expert is among the first of some active token; it asks for `high`.
    The others ask for `low`, or with `high_if_resident` for `high` where that tier has a copy that
    serves.

    Attributes:
      critical: int32[M], how many of a token's experts are critical; None: none.
      high: int32[], a tier.
      low: int32[], a tier, or -1: skipped.
      high_if_resident: bool[].
      at_least: static; a tier of higher fidelity serves too those that are not critical.
    """

    critical: jax.Array | None
    high: jax.Array
    low: jax.Array
    high_if_resident: jax.Array
    at_least: bool = dataclasses.field(default=False, metadata={"static": True})


class Asked(NamedTuple):
    """The experts that a layer runs.

    Attributes:
      ids: int32[N, A], in 0..E - 1; those of a token differ. Under a rule of critical ones by
        falling importance.
      weights: float32[N, A], the router's gate mass, counted by what became of it.
      by: in which tiers; None: all in the first, of one.
      routed_ids: int32[N, A], experts that the router chose; None: `ids`.
    """

    ids: jax.Array
    weights: jax.Array
    by: Wishes | Rule | None = None
    routed_ids: jax.Array | None = None


class Fetch(NamedTuple):
    """Rows of the host store to copy into global slots, both int32[J], padded with -1.

    `experts` are whose rows they are; None where a kernel planned.
    """

    rows: jax.Array
    slots: jax.Array
    experts: jax.Array | None = None


class SharedBase(NamedTuple):
    """Base planes of experts that run in the first of two tiers that share slots.

    Attributes:
      slot_of: int32[E], global slots; -1 where there is none.
      streamed: base planes of the first tier's later waves, as `LayerPlan.streamed`.
    """

    slot_of: jax.Array
    streamed: Fetch | None


class LayerPlan(NamedTuple):
    """Where the pairs of a layer run.

    Attributes:
      tier: int32[N, A], in which a pair runs; -1 where it does not.
      slot: int32[N, A], the global slot of its expert in that tier; -1.
      wave: int32[N, A], 0 resident or fetched before the products, 1 + w in wave w, -1 where it
        does not run; None where no tier has waves.
      fetch: of each tier what to copy before its products; None of one that never fetches.
      streamed: of each tier the copies of its later waves, int32[W, B], of which the slots are not
        padded; None where there are none.
      base: of tiers that share slots.
    """

    tier: jax.Array
    slot: jax.Array
    wave: jax.Array | None
    fetch: tuple[Fetch | None, ...]
    streamed: tuple[Fetch | None, ...]
    base: SharedBase | None = None


def num_waves(max_needed: int, slots: int, transient: int) -> int:
    """W, waves of a layer that needs up to `max_needed` experts."""
    return 0 if max_needed <= slots else -(-max_needed // transient)


def table_width(form: TierShape, num_experts: int) -> int:
    """Columns of a tier's table."""
    return 0 if form.shares_slots else form.planes * num_experts + 3 * form.slots


def num_slots(table: jax.Array | jax.ShapeDtypeStruct, num_experts: int) -> int:
    """C."""
    return (table.shape[1] - num_experts) // 3
