"""The arrays of a plan, the static facts of its tiers, and what one layer's row of a table says.

A row is handled by comparisons of all pairs: on a GPU each small operation costs 1 to 2 us, and
XLA fuses these comparisons into a few reductions, which sorts, prefix sums and scatters it does
not.

Axes: N tokens, A pairs of a token, E experts of a layer, M layers, T tiers of falling fidelity, C
cache slots of a layer, B transient slots of a bank, J jobs; -1 stands for none.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

iota = functools.partial(jax.lax.iota, jnp.int32)  # int32[count] of a count: 0, 1, ...

# Counts of experts, but for `steps`; the order is that of the columns of `Tables.events`.
EVENTS = (
    "steps",  # times that the layer ran for some token; of a tier, that it served some pair
    "needed",  # experts that its tokens were routed to
    "hits",  # of them, those in a slot already
    "misses",  # of them, those that were not: admitted, streamed or unserved
    "admitted",  # misses fetched into a slot of the cache
    "streamed",  # misses fetched into a transient slot
    "unserved",  # misses for which there was no slot: a broken contract of the caller
    "evictions",  # experts that left a slot for another one
    "prefetched",  # experts that a prediction brought
    "bulk",  # experts that a bulk transfer brought, which the caller counts
    "prefetch_hits",  # of what was brought ahead, experts whose first use found them there
    "prefetch_waste",  # of what was brought ahead, experts that went unused
    "waits",  # experts that a step had to ask the host for, which the caller counts
)
COLUMNS = {name: column for column, name in enumerate(EVENTS)}


class Tables(NamedTuple):
    """One tier's state, changed in place; donate it, or XLA copies it."""

    # int32[M, E + 3 C], columns of a layer: the local slot of each expert, [E]; of each slot its
    # owner, the clock of its last use, and whether it was brought ahead and not used yet, each [C].
    # Slots of experts and owners are inverse to each other.
    table: jax.Array
    clock: jax.Array  # int32[], may wrap
    events: jax.Array  # int32[M, len(EVENTS)], counts
    # float32[M, 1 + K'], gate mass of all, then of K' tiers; of which the first counts. What the
    # host's cores multiply is in the first alone.
    gate: jax.Array


class TierOperands(NamedTuple):
    """One of T; its `TierShape` is given apart."""

    tables: Tables  # changed in place
    row_of: jax.Array  # int32[M, E], rows of the host store; -1: none


CLOSED = -2  # owner of a slot that a layer does not have, where others have it


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSlots:
    """Where layers have their slots."""

    slots: int  # C, of each layer; 0: it has transient slots alone, but for longer layers
    # arrays in which layers have their slots in turn; a slot's number counts within one
    banks: int = 1
    longer_layers: int = 0  # the first layers of a bank, which have one slot more

    @property
    def most_slots(self) -> int:
        """Slots of the layer that has the most; others' last one is `CLOSED` in the tables."""
        return self.slots + (self.longer_layers > 0)

    def first_slot(self, index: jax.Array) -> jax.Array:
        """Global slots at which layers begin, int32 as `index`, their numbers in their bank."""
        first = index * self.slots
        return first + jnp.minimum(index, self.longer_layers) if self.longer_layers else first

    def slots_by_layer(self, num_layers: int) -> np.ndarray:
        """int[M], slots of each layer."""
        return self.slots + (np.arange(num_layers) // self.banks < self.longer_layers).astype(int)

    def first_transient(self, num_layers: int) -> int:
        """Global slot at which a bank's transient ones begin, after those of its layers."""
        return -(-num_layers // self.banks) * self.slots + self.longer_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierShape(LayerSlots):
    """Static facts of a tier."""

    transient: int = 1  # B, slots of a bank after those of the layers
    # W, in which experts that find no slot pass through the transient ones; 0: slots serve whatever
    # a layer needs
    waves: int = 0
    beside: bool = False  # waves are fetched beside products; none runs with what is there before
    # it has a slot for every expert; copies stay, even if the expert is in another tier
    is_full: bool = False
    # every expert is in its slot for ever: nothing is fetched, and its table stays
    is_complete: bool = False
    # the first tier alone: transfers between steps alone change its slots, and steps ask only for
    # experts that are there
    static_in_step: bool = False
    # its copies are bit planes over those of the next tier, which has every expert: a request for
    # the next tier reads that one alone, fewer bytes
    refines: bool = False
    # of the first of two tiers, with `refines`: its planes and those of the next tier share that
    # one's slots, whose table has 2 E items (`shared_slots`); its own is int32[M, 0]
    shares_slots: bool = False
    planes: int = 1  # of an expert that have slots of their own: 2 in tiers that share slots
    # of a tier that is neither full nor the first: transfers or look-ahead may bring a better copy
    # of an expert that has a slot here. Where this is False and one came, the copy here serves
    # nobody, and stays until its slot is taken.
    may_be_promoted_elsewhere: bool = True

    @property
    def streams(self) -> bool:
        """Whether it has transient slots alone."""
        return not self.most_slots

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
        """Whether the only wave is fetched with the admitted experts, and runs with them."""
        return self.waves == 1 and not self.beside and self.planes == 1

    @property
    def later_waves(self) -> int:
        """Waves that are fetched after the products of wave 0."""
        return 0 if self.at_once else self.waves

    @property
    def passing(self) -> int:
        """Experts of a wave; of planes that share slots both have one of the transient ones."""
        return self.transient // 2 if self.shares_slots else self.transient

    def num_jobs(self, num_pairs: int, num_experts: int) -> int:
        """J, of wave 0."""
        places = self.most_slots + (self.transient if self.at_once else 0)
        return min(num_pairs, num_experts, places)


class Wishes(NamedTuple):
    """The tier that a policy asks for, of every pair."""

    tier: jax.Array  # int32[N, A]; -1: it is skipped
    at_least: jax.Array  # bool[N, A], a tier of higher fidelity serves too


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rule:
    """The wishes of all pairs by the rank of their expert and what is in slots.

    A pair is critical if its expert is among the first of some active token; it asks for `high`.
    The others ask for `low`, or with `high_if_resident` for `high` where that tier has a copy that
    serves.
    """

    critical: jax.Array | None  # int32[M], how many of a token's experts are critical; None: none
    high: jax.Array  # int32[], a tier
    low: jax.Array  # int32[], a tier, or -1: skipped
    high_if_resident: jax.Array  # bool[]
    # static; a tier of higher fidelity serves too those that are not critical
    at_least: bool = dataclasses.field(default=False, metadata={"static": True})


class Asked(NamedTuple):
    """The experts that a layer runs."""

    # int32[N, A], in 0..E - 1; those of a token differ, but for skipped ones. Under a rule of
    # critical ones by falling importance.
    ids: jax.Array
    weights: jax.Array  # float32[N, A], the router's gate mass, counted by what became of it
    by: Wishes | Rule | None = None  # in which tiers; None: all in the first, of one
    routed_ids: jax.Array | None = None  # int32[N, A], experts that the router chose; None: `ids`
    # int32[A + 1], by the number of misses how many the host's cores multiply, of one token and one
    # tier; None: none. They are the last misses of the token, which weigh least where pairs come by
    # falling weight, and get no slot.
    host: jax.Array | None = None


class Fetch(NamedTuple):
    """Rows of the host store to copy into global slots, both int32[J], padded with -1.

    `experts` are whose rows they are; None where a kernel planned.
    """

    rows: jax.Array
    slots: jax.Array
    experts: jax.Array | None = None


class SharedBase(NamedTuple):
    """Base planes of two tiers that share slots."""

    # int32[N, A], the global slots of pairs' base planes, those of the second tier too; -1
    slot: jax.Array
    streamed: Fetch | None  # those of the first tier's later waves, as `LayerPlan.streamed`


class LayerPlan(NamedTuple):
    """Where the pairs of a layer run."""

    tier: jax.Array  # int32[N, A], in which a pair runs; -1 where it does not
    slot: jax.Array  # int32[N, A], the global slot of its expert in that tier; -1
    # int32[N, A], 0 resident or fetched before the products, 1 + w in wave w, -1 where it does not
    # run; None where no tier has waves
    wave: jax.Array | None
    # of each tier what to copy before its products; None of one that never fetches
    fetch: tuple[Fetch | None, ...]
    # of each tier the copies of its later waves, int32[W, B], of which the slots are not padded;
    # None where there are none
    streamed: tuple[Fetch | None, ...]
    base: SharedBase | None = None  # of tiers that share slots
    # int32[1, A], rows of the host store that the host's cores multiply, -1: none; None without
    # `Asked.host`
    hosted: jax.Array | None = None


def num_waves(max_needed: int, num_experts: int, slots: int, transient: int) -> int:
    """W, waves of a layer that needs up to `max_needed` experts.

    Of its slots some hold experts, and the free ones are filled first: E - C pass at most.
    """
    if max_needed <= slots:
        return 0
    return -(-min(max_needed, num_experts - slots) // transient)


class LayerTables(NamedTuple):
    """The tables of one layer, or of all of them."""

    slot_of: jax.Array  # int32[..., E], local slot of an expert
    owner: jax.Array  # int32[..., C], expert of a slot; -1 if it is free, or `CLOSED`
    last_use: jax.Array  # int32[..., C], clock of the last use; 0 never
    prefetched: jax.Array  # bool[..., C], brought ahead and not used yet

    @classmethod
    def of(cls, table: jax.Array, num_experts: int) -> "LayerTables":
        """The columns of a table [..., E + 3 C]."""
        slots = (table.shape[-1] - num_experts) // 3
        owner, last_use, prefetched = (
            table[..., num_experts + i * slots : num_experts + (i + 1) * slots] for i in range(3)
        )
        return cls(table[..., :num_experts], owner, last_use, prefetched != 0)

    @property
    def columns(self) -> jax.Array:
        """int32[..., E + 3 C], the part of a table that `of` reads."""
        flags = self.prefetched.astype(jnp.int32)
        return jnp.concatenate((self.slot_of, self.owner, self.last_use, flags), axis=-1)


def read_row(table: jax.Array, layer: int | jax.Array, num_experts: int) -> LayerTables:
    """The row of a layer."""
    row = jax.lax.dynamic_index_in_dim(table, layer, keepdims=False)
    # One copy of the row, or XLA copies columns one by one, and at times the whole table, before
    # it overwrites the row in place.
    return LayerTables.of(jax.lax.optimization_barrier(row), num_experts)


def write_row(table: jax.Array, layer: int | jax.Array, row: LayerTables) -> jax.Array:
    """The table with a layer's row replaced."""
    return jax.lax.dynamic_update_index_in_dim(table, row.columns, layer, 0)


def ordered_victims(
    row: LayerTables, clock: jax.Array, needed: jax.Array, has_closed: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Orders the slots that may be taken: masks them, bool[C], and numbers them, int32[C].

    Free ones come first, then the least recently used; ties go to the smaller expert id. Numbers
    are right for victims only. `has_closed`: a slot may be `CLOSED`, and is none of them.
    """
    owned = row.owner >= 0
    victim = ~(owned & at(needed, row.owner))
    if has_closed:
        victim &= row.owner != CLOSED
    # Modulo 2^32, so that a wrapped clock does no harm.
    age = jax.lax.bitcast_convert_type(clock - row.last_use, jnp.uint32)
    age = jnp.where(owned, age, np.uint32(2**32 - 1))
    # Equal uses go by the smaller id, whatever the slot: hits do not depend on slots.
    tie = jnp.where(owned, len(age) + row.owner, iota(len(age)))
    before = (age[None] > age[:, None]) | ((age[None] == age[:, None]) & (tie[None] < tie[:, None]))
    return victim, num(victim[None] & before, axis=1)


def order_of(mask: jax.Array) -> jax.Array:
    """int32[n], how many before each element are set."""
    index = iota(len(mask))
    return num(mask[None] & (index[None] < index[:, None]), axis=1)


def assigned(
    row: LayerTables, new: jax.Array, order: jax.Array, victim: jax.Array, place: jax.Array
) -> tuple[jax.Array, LayerTables]:
    """The n-th new expert takes the n-th victim: int32[C] who takes each slot, and the row after.

    Uses and flags of the slots are as before.
    """
    coming = index_of(jnp.where(new, order, -2), jnp.where(victim, place, -1))
    owner = jnp.where(coming >= 0, coming, row.owner)
    return coming, row._replace(owner=owner, slot_of=index_of(owner, iota(len(new))))


def brought_ahead(
    row: LayerTables, new: jax.Array, order: jax.Array, wanted: jax.Array, clock: jax.Array,
    has_closed: bool = False,
) -> tuple[jax.Array, LayerTables]:  # fmt: skip
    """Assigns victims to experts that nobody has asked for yet; no wanted one is a victim."""
    coming, after = assigned(row, new, order, *ordered_victims(row, clock, wanted, has_closed))
    return coming, after._replace(
        last_use=jnp.where(coming >= 0, clock, after.last_use),
        prefetched=after.prefetched | (coming >= 0),
    )


def index_of(values: jax.Array, wanted: jax.Array) -> jax.Array:
    """int32[n], for each wanted value the largest index i of which values[i] equals it, or -1."""
    index = jnp.where(values[None] == wanted[:, None], iota(len(values))[None], -1)
    # Not `max(initial=-1)`, which is one operation more.
    return jax.lax.reduce(index, np.int32(-1), jax.lax.max, (1,))


def without(row: LayerTables, experts: jax.Array) -> LayerTables:
    """The row without experts, bool[E], whose slots are free from now on."""
    gone = (row.owner >= 0) & at(experts, row.owner)
    owner = jnp.where(gone, -1, row.owner)
    return LayerTables(
        slot_of=index_of(owner, iota(len(row.slot_of))),
        owner=owner,
        last_use=jnp.where(gone, 0, row.last_use),
        prefetched=row.prefetched & ~gone,
    )


def departed(before: LayerTables, after: LayerTables) -> dict[str, jax.Array]:
    """Masks bool[E] of experts that have left their slots, by the names of `EVENTS`."""
    gone = (before.slot_of >= 0) & (after.slot_of < 0)
    return {"evictions": gone, "prefetch_waste": gone & at(before.prefetched, before.slot_of)}


def departures(before: LayerTables, after: LayerTables) -> dict[str, jax.Array]:
    """Counts of the experts that have left their slots."""
    return {name: num(mask) for name, mask in departed(before, after).items()}


class TierPart(NamedTuple):
    """A tier's part of a plan; slot and wave int32[E], -1 where an expert does not run."""

    tables: Tables
    slot: jax.Array
    wave: jax.Array
    fetch: Fetch
    streamed: Fetch | None


def marked(ids: jax.Array, mask: jax.Array, num_experts: int) -> jax.Array:
    """bool[E]: those among the ids where the mask is set."""
    places = jnp.where(mask, ids, num_experts).reshape(-1)
    return jnp.zeros(num_experts, bool).at[places].set(True, mode="drop")


def fetch_of(row_of: jax.Array, experts: jax.Array, slots: jax.Array) -> Fetch:
    """The copies of experts of a layer, -1 for none, into slots."""
    some = experts >= 0
    return Fetch(jnp.where(some, at(row_of, experts), -1), jnp.where(some, slots, -1), experts)


def counted(
    events: jax.Array, layer: int | jax.Array | slice, **amounts: int | jax.Array
) -> jax.Array:
    """The counts with amounts added to a layer, or to several, by one operation.

    Raises:
      ValueError: an amount is of none of `EVENTS`.
    """
    if unknown := sorted(set(amounts) - set(EVENTS)):
        raise ValueError(f"no events {', '.join(unknown)}; there are {', '.join(EVENTS)}")
    given = [jnp.asarray(amounts.get(name, 0), jnp.int32) for name in EVENTS]
    return events.at[layer].add(jnp.stack(jnp.broadcast_arrays(*given), axis=-1))


def at(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], of indices that may be outside, where anything is returned."""
    if not len(values):
        return jnp.zeros(index.shape, values.dtype)
    return values.at[index].get(mode="clip")


def num(mask: jax.Array, axis: int | None = None) -> jax.Array:
    """int32, how many are set."""
    return mask.sum(axis=axis, dtype=jnp.int32)
