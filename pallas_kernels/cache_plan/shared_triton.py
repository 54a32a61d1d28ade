"""Inside the kernel: `shared_slots`, two tiers of planes that share the slots of one pool.

Items are as there; of each pair its refinement comes first, then its base plane.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.cache_plan import slots as vectors
from pallas_kernels.cache_plan.operands import TierShape
from pallas_kernels.cache_plan.pairs import Entries, PaddedPairs
from pallas_kernels.cache_plan.slots import Ref, Refs, matches, padded_iota, pick, some, together
from pallas_kernels.triton.elements import quotient, remainder

PLANES = 2

Both = tuple[jax.Array, jax.Array]  # of refinements, and of base planes


class _Admitted(NamedTuple):
    """Slots of a layer after its missing planes have come."""

    slots: vectors.Slots  # as they were before
    coming: jax.Array  # int32[C], the item that takes a slot, -1: none
    came: jax.Array  # bool[C], whether one does
    local: Both  # int32[P], local slots of pairs' planes, -1: none
    order: Both  # int32[P], places among the planes of a kind that come, -1

    def departures(self, num_experts: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Counts of the planes of each kind that leave."""
        loaded = self.slots.loaded
        leaves, found = self.came & loaded.owned, []
        for mine in (loaded.owner < num_experts, loaded.owner >= num_experts):
            gone, unused = together(leaves & mine, leaves & mine & (loaded.ahead != 0))
            found.append({"evictions": gone, "prefetch_waste": unused})
        return found[0], found[1]


def _admitted(
    pool: Refs, layer: jax.Array, clock: jax.Array, ids: jax.Array, needs: Both, misses: Both,
    leads: Both, local: Both, *, has_waves: bool,
) -> _Admitted:  # fmt: skip
    """Gives slots to planes that are missing, base planes first.

    Args:
      needs: bool[P], pairs that need each of their planes.
      misses: bool[P], of them those whose plane is to come.
      leads: bool[P], of them the first of each expert.
      local: int32[P], local slots of their planes; -1: none.
    """
    num_experts = pool["row_of"].shape[1]
    loaded = vectors.load_slots(pool, layer, PLANES)
    items = jnp.where(needs[0], ids, -2), jnp.where(needs[1], num_experts + ids, -2)
    slots = vectors.candidates(loaded, clock, *items)
    firsts = tuple(lead & miss for lead, miss in zip(leads, misses, strict=True))
    num_refinements, num_bases = together(*firsts)
    number, victim = num_refinements + num_bases, slots.victim
    num_victims = vectors.count(victim)
    if has_waves:
        # A pass over more planes than there is room for is a scan: it evicts nothing.
        fits = number <= num_victims
        num_victims = jnp.where(fits, num_victims, vectors.count(victim & ~loaded.owned))
        victim &= ~loaded.owned | fits
    orders = [vectors.order_of(first, ids) for first in firsts]
    places = [
        jnp.where(misses[0], num_bases + orders[0], -2), jnp.where(misses[1], orders[1], -2)
    ]  # fmt: skip
    number = jnp.minimum(number, num_victims)
    taker, *took = vectors.taken(slots, victim, number, *places)
    coming = jnp.full_like(taker, -1)
    for place, item in zip(places, items, strict=True):
        coming = jnp.maximum(coming, pick(matches(taker, place), item[None, :], 1))
    after = [
        jnp.maximum(jnp.where(need, at, -1), new)
        for need, at, new in zip(needs, local, took, strict=True)
    ]
    come = [jnp.where(new >= 0, order, -1) for new, order in zip(took, orders, strict=True)]
    return _Admitted(slots, coming, coming >= 0, (after[0], after[1]), (come[0], come[1]))


def place_planes(
    of: Refs, states: Sequence[Entries], forms: Sequence[TierShape], layer: jax.Array,
    pairs: PaddedPairs, tier: jax.Array, interpret: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Places a layer's pairs: int32[P], slots of their tiers and waves."""
    (pool, form), ids = (states[1].of, forms[1]), pairs.ids
    num_layers, num_experts = pool["row_of"].shape
    high, runs = tier == 0, tier >= 0
    needs, leads = (high, runs), (high & pairs.leads, runs & pairs.leads)
    local = states[0].local, states[1].local
    rows = [vectors.load_rows(state.of, layer, ids) for state in states]
    absent = high & (local[0] < 0), runs & (local[1] < 0)
    done = _admitted(
        pool, layer, states[1].clock, ids, needs, absent, leads, local, has_waves=form.waves > 0
    )
    lacks = [need & (at < 0) for need, at in zip(needs, done.local, strict=True)]
    streams = lacks[0] | lacks[1]
    first = quotient(layer, form.banks) * form.slots
    plane, base = (jnp.where(at >= 0, first + at, -1) for at in done.local)
    wave = jnp.where(runs & ~streams, 0, -1)
    passing, transient = [], form.first_transient(num_layers)
    widths = (form.transient // 2, form.transient) if form.waves else ()
    for i, (mine, width) in enumerate(zip((high, runs & ~high), widths, strict=False)):
        mine &= streams
        index = jnp.where(mine, vectors.order_of(mine & pairs.leads, ids), -1)
        index = jnp.where(index < forms[i].waves * width, index, -1)
        later, place = index >= 0, transient + remainder(index, width)
        base = jnp.where(later & lacks[1], place, base)
        if i == 0:
            plane = jnp.where(later & lacks[0], place + width, plane)
        wave = jnp.where(later, 1 + quotient(index, width), wave)
        passing.append(index)
    plane = jnp.where(wave >= 0, plane, -1)
    if not interpret:
        pltriton.debug_barrier()  # as in `triton._Tier.wait`
    vectors.store_owners(pool, layer, done.slots, done.coming, PLANES)
    used = done.slots.wanted | done.came
    vectors.store_use(pool, layer, done.slots, used, states[1].clock, 0, PLANES)
    gone = done.departures(num_experts)
    for i, (state, at) in enumerate(zip(states, (plane, base), strict=True)):
        assert state.ahead is not None
        num_jobs = state.of["rows"].shape[0]
        vectors.store_jobs(state.of, num_jobs, done.order[i], rows[i], at)
        needed, misses, brought = together(
            leads[i], leads[i] & (local[i] < 0), leads[i] & (local[i] >= 0) & state.ahead
        )
        admitted, streamed, unserved = together(
            leads[i] & (done.order[i] >= 0), leads[i] & lacks[i] & (wave >= 0),
            leads[i] & lacks[i] & (wave < 0),
        )  # fmt: skip
        amounts: Mapping[str, Any] = {
            "steps": jnp.minimum(needed, 1), "needed": needed, "hits": needed - misses,
            "misses": misses, "admitted": admitted, "streamed": streamed, "unserved": unserved,
            "prefetch_hits": brought, **gone[i],
        }  # fmt: skip
        vectors.store_events(state.of, layer, state.events, amounts)
    if passing:
        _store_streamed(states[0].of["streamed"], passing[0], lacks[0], rows[0])
        _store_streamed(states[1].of["streamed"], passing[1], lacks[1], rows[1])
        _store_streamed(of["leading"], passing[0], lacks[1], rows[1])
    pltriton.store(of["base"].at[pairs.number], base, mask=pairs.inside)
    return jnp.where(high, plane, jnp.where(runs, base, -1)), wave


def _store_streamed(jobs: Ref, index: jax.Array, lacks: jax.Array, row: jax.Array) -> None:
    """Writes the rows of planes that pass through transient slots, by their numbers."""
    number = padded_iota(jobs.shape[0])
    found = pick(matches(number, jnp.where(lacks, index, -1)), row[None, :], 1)
    pltriton.store(jobs.at[number], found, mask=number < jobs.shape[0])


def predict_shared_body(
    *refs: Ref, names: tuple[str, ...], form: TierShape, interpret: bool
) -> None:
    """The body of `api.predict` where tiers share slots."""
    of = dict(zip(names, refs, strict=True))
    tiers = [{name[:-1]: ref for name, ref in of.items() if name.endswith(str(i))} for i in (0, 1)]
    pool, layer, clock = tiers[1], of["layer"][()], of["clock"][()]
    size, tokens = of["ids"].shape[0], of["active"].shape[0]
    wanted, lanes = padded_iota(size), padded_iota(tokens)
    mask = pltriton.load(of["active"].at[lanes], mask=lanes < tokens, other=False)
    mask = (wanted < size) & some(mask & (lanes < tokens))
    ids = pltriton.load(of["ids"].at[wanted], mask=wanted < size, other=-1)
    refined = pltriton.load(of["refined"].at[wanted], mask=wanted < size, other=False)
    ids = jnp.where(mask, ids, -1)
    needs = (ids >= 0) & refined, ids >= 0
    num_experts = pool["row_of"].shape[1]
    items = jnp.where(needs[0], ids, -1), jnp.where(needs[1], num_experts + ids, -1)
    local = tuple(vectors.load_local(pool, layer, item) for item in items)
    leads = tuple(vectors.leads(jnp.where(need, ids, -1)) for need in needs)
    rows = [vectors.load_rows(tier, layer, ids) for tier in tiers]
    events = [vectors.load_events(tier, layer) for tier in tiers]
    has_base = local[1] >= 0
    misses = needs[0] & (local[0] < 0) & has_base, needs[1] & ~has_base
    done = _admitted(
        pool, layer, clock, ids, needs, misses, (leads[0], leads[1]), (local[0], local[1]),
        has_waves=False,
    )  # fmt: skip
    if not interpret:
        pltriton.debug_barrier()
    vectors.store_owners(pool, layer, done.slots, done.coming, PLANES)
    vectors.store_use(pool, layer, done.slots, done.came, clock, 1, PLANES)
    first, gone = quotient(layer, form.banks) * form.slots, done.departures(num_experts)
    for i, tier in enumerate(tiers):
        place = first + done.local[i]
        vectors.store_jobs(tier, size, done.order[i], rows[i], place)
        prefetched = vectors.count(leads[i] & (done.order[i] >= 0))
        amounts = {"prefetched": prefetched, **gone[i]}
        vectors.store_events(tier, layer, events[i], amounts)
