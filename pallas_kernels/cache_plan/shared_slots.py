"""The cache's rule where two tiers, planes of one copy, share the slots of one pool.

An *item* is a plane of an expert, and a slot holds one: item e is the refinement of expert e, item
E + e its base plane. An expert that runs in the first tier needs both, one that runs in the second
its base plane alone. Misses, base planes first, take the victims of `operands.ordered_victims`: of
items that were last used together refinements go first, their numbers are smaller.

Where misses find no slot their experts pass through the transient slots, in waves of each tier: a
wave of the first has B // 2 experts, their base planes in the first half of the slots; a wave of
the second has B.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.cache_plan.operands import (
    Fetch,
    SharedBase,
    Tables,
    TierOperands,
    TierPart,
    TierShape,
    assigned,
    at,
    brought_ahead,
    counted,
    departed,
    fetch_of,
    index_of,
    iota,
    marked,
    num,
    order_of,
    ordered_victims,
    read_row,
    write_row,
)


def resident_planes(table: jax.Array, num_experts: int) -> jax.Array:
    """bool[..., 2, E], experts that the pool has in each tier, of its table [..., 2 E + 3 C]."""
    refinement, base = (
        table[..., i * num_experts : (i + 1) * num_experts] >= 0 for i in range(2)
    )  # fmt: skip
    return jnp.stack((refinement & base, base), axis=-2)


def plan_shared(
    tiers: Sequence[TierOperands],  # of the refinements, whose table is not read, and of the pool
    layer: jax.Array,
    tier: jax.Array,  # int32[E], in which an expert runs; -1 where it does not
    pairs: jax.Array,  # int32[N, A], experts of the pairs that run; -1: none
    forms: Sequence[TierShape],
) -> tuple[tuple[TierPart, TierPart], SharedBase]:
    """Slots for the planes of the experts that a layer runs.

    Returns:
      Each tier's part, that of the first with slots of refinements, and its base planes.
    """
    (num_layers, num_experts), form = tiers[0].row_of.shape, forms[1]
    size = min(pairs.size, num_experts)
    tables, clock = tiers[1].tables, tiers[1].tables.clock
    high, runs = tier == 0, tier >= 0
    needed = jnp.concatenate((high, runs))
    before = read_row(tables.table, layer, 2 * num_experts)
    hit, miss = needed & (before.slot_of >= 0), needed & (before.slot_of < 0)
    victim, place = ordered_victims(before, clock, needed)
    if form.waves:
        victim &= (num(miss) <= num(victim)) | (before.owner < 0)
    _, row = assigned(before, miss, _bases_first(miss), victim, place)
    held, first = row.slot_of >= 0, form.first_transient(num_layers)
    come, absent = miss & held, needed & ~held
    at_slot = jnp.asarray(layer, jnp.int32) // form.banks * form.slots + row.slot_of
    at_slot = jnp.where(needed & held, at_slot, -1).reshape(2, num_experts)
    lacks = absent.reshape(2, num_experts)
    streams = jnp.any(lacks, axis=0)
    widths = forms[0].passing, form.passing
    of_plane, of_base, waves, streamed = at_slot[0], at_slot[1], [], []
    for i, (mine, width) in enumerate(zip((high, runs & ~high), widths, strict=True)):
        num_waves = forms[i].waves
        index = jnp.where(mine & streams, order_of(mine & streams), -1)
        index = jnp.where(index < num_waves * width, index, -1)
        transient = first + index % width
        of_base = jnp.where((index >= 0) & lacks[1], transient, of_base)
        if i == 0:
            of_plane = jnp.where((index >= 0) & lacks[0], transient + width, of_plane)
        later = 1 + index // width
        waves.append(jnp.where(mine, jnp.where(streams, jnp.where(index >= 0, later, -1), 0), -1))
        streamed.append(index_of(index, iota(num_waves * width)).reshape(num_waves, width))
    of_plane = jnp.where(waves[0] >= 0, of_plane, -1)
    served = jnp.concatenate([waves[0] >= 0, (waves[0] >= 0) | (waves[1] >= 0)])
    used = (row.owner >= 0) & at(needed, row.owner)
    row = row._replace(
        last_use=jnp.where(used, clock, row.last_use), prefetched=row.prefetched & ~used
    )
    after = _counted(
        tiers, layer, steps=jnp.concatenate([_first(high), _first(runs)]), needed=needed,
        hits=hit, misses=miss, admitted=come, streamed=absent & served, unserved=absent & ~served,
        prefetch_hits=hit & at(before.prefetched, before.slot_of), **departed(before, row),
    )  # fmt: skip
    after[1] = after[1]._replace(table=write_row(tables.table, layer, row))

    def admitted(i: int, slots: jax.Array) -> Fetch:
        coming = come[i * num_experts : (i + 1) * num_experts]
        jobs = iota(min(size, form.slots))
        experts = index_of(jnp.where(coming, order_of(coming), -1), jobs)
        return fetch_of(tiers[i].row_of[layer], experts, at(slots, experts))

    def passing_of(i: int, experts: jax.Array, shift: int) -> Fetch:
        slots = jnp.broadcast_to(first + shift + iota(experts.shape[1]), experts.shape)
        coming = jnp.where(at(lacks[i], experts), experts, -1)
        return fetch_of(tiers[i].row_of[layer], coming, slots)._replace(slots=slots)

    passing: list[Fetch | None] = [None, None]
    leading = None
    if form.waves:
        passing = [passing_of(0, streamed[0], widths[0]), passing_of(1, streamed[1], 0)]
        leading = passing_of(1, streamed[0], 0)
    parts = (
        TierPart(_ticked(after[0]), of_plane, waves[0], admitted(0, of_plane), passing[0]),
        TierPart(_ticked(after[1]), of_base, waves[1], admitted(1, of_base), passing[1]),
    )
    return parts, SharedBase(jnp.where(pairs >= 0, at(of_base, pairs), -1), leading)


def predict_shared(
    tiers: Sequence[TierOperands],
    layer: jax.Array,
    ids: jax.Array,
    active: jax.Array,
    refined: jax.Array,
    forms: Sequence[TierShape],
) -> tuple[tuple[Tables, Tables], tuple[Fetch, Fetch]]:
    """Computes `api.predict` of such tiers in plain JAX."""
    num_experts, (tables, form) = tiers[0].row_of.shape[1], (tiers[1].tables, forms[1])
    some = (ids >= 0) & jnp.any(active)
    wanted = [marked(ids, mask, num_experts) for mask in (some & refined, some)]
    before, needed = read_row(tables.table, layer, 2 * num_experts), jnp.concatenate(wanted)
    has_base = before.slot_of[num_experts:] >= 0
    new = needed & (before.slot_of < 0) & jnp.concatenate((has_base, jnp.ones_like(has_base)))
    _, row = brought_ahead(before, new, _bases_first(new), needed, tables.clock)
    come = new & (row.slot_of >= 0)
    after = _counted(tiers, layer, prefetched=come, **departed(before, row))
    after[1] = after[1]._replace(table=write_row(tables.table, layer, row))
    places = jnp.asarray(layer, jnp.int32) // form.banks * form.slots + row.slot_of
    jobs = []
    for i in range(2):
        mine = slice(i * num_experts, (i + 1) * num_experts)
        order = jnp.where(come[mine], order_of(come[mine]), -1)
        experts = index_of(order, iota(len(ids)))
        jobs.append(fetch_of(tiers[i].row_of[layer], experts, at(places[mine], experts)))
    return (after[0], after[1]), (jobs[0], jobs[1])


def _bases_first(new: jax.Array) -> jax.Array:
    """int32[2 E], places of new items: base planes by expert, then refinements."""
    refinements, bases = jnp.split(new, 2)
    return jnp.concatenate((num(bases) + order_of(refinements), order_of(bases)))


def _first(mask: jax.Array) -> jax.Array:
    """Mask whose first element says whether any is set."""
    return (iota(len(mask)) == 0) & jnp.any(mask)


def _counted(tiers: Sequence[TierOperands], layer: jax.Array, **items: jax.Array) -> list[Tables]:
    """Each tier's tables with its items, bool[2 E], counted."""
    found = []
    for i, tier in enumerate(tiers):
        amounts = {name: num(jnp.split(mask, 2)[i]) for name, mask in items.items()}
        events = counted(tier.tables.events, layer, **amounts)
        found.append(tier.tables._replace(events=events))
    return found


def _ticked(tables: Tables) -> Tables:
    return tables._replace(clock=tables.clock + 1)
