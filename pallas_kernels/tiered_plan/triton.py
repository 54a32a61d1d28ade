"""The Pallas-Triton implementation: one launch of one program, in place on all tiers' tables."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.residency_plan import slots as vectors
from pallas_kernels.residency_plan import triton as one_tier
from pallas_kernels.residency_plan.operands import Columns, Fetch, Tables, num_slots
from pallas_kernels.residency_plan.slots import Ref, Refs, iota, matches, pick, some, together
from pallas_kernels.target import Target
from pallas_kernels.tiered_plan.operands import Asked, Form, Placed, Tier
from pallas_kernels.triton_elements import quotient

MAX_TIERS = 4
NO_TIER = MAX_TIERS  # in a least, where nothing is asked for


def refusal(num_experts: int, num_pairs: int, num_tiers: int, target: Target) -> str | None:
    """Why this implementation cannot serve, or None; see `api.refusal`."""
    reasons = [one_tier.refusal(num_experts, num_pairs, target)]
    if num_tiers > MAX_TIERS:
        reasons.append(f"{num_tiers} tiers, more than {MAX_TIERS}")
    return "; ".join(filter(None, reasons)) or None


class _Pairs(NamedTuple):
    """Of the pairs, padded to a power of two."""

    number: jax.Array
    inside: jax.Array
    active: jax.Array
    ids: jax.Array  # -1 where nothing is asked for
    leads: jax.Array  # the first of those with its id, who all run in one tier
    tier: jax.Array  # of highest fidelity that is asked for of the expert, or `NO_TIER`
    strict: jax.Array  # no better one will do
    weights: jax.Array


class _State(NamedTuple):
    """What a tier's tables say, read before anything is written."""

    of: Refs
    clock: jax.Array
    asked: vectors.Asked
    slots: vectors.Loaded | None  # None of a tier that is complete
    better: jax.Array | None  # bool[C], the owner is in a tier of higher fidelity
    events: jax.Array
    mass: jax.Array


class _Change(NamedTuple):
    """What becomes of a tier's slots."""

    table: vectors.Slots
    gone: jax.Array | None  # bool[C], copies that leave for good; None: none ever do
    owner: jax.Array  # int32[C], before that
    coming: jax.Array
    come: jax.Array  # int32[P], order of the jobs, or -1
    ids: jax.Array  # of the pairs that run here
    first_slot: jax.Array
    local: jax.Array


def _load_pairs(of: Refs) -> _Pairs:
    num_pairs = of["ids"].shape[0]
    width = num_pairs // of["active"].shape[0]
    number = iota(num_pairs)
    inside = number < num_pairs

    def load(name: str, other: Any) -> jax.Array:
        return pltriton.load(of[name].at[number], mask=inside, other=other)

    place = quotient(number, width)
    active = pltriton.load(of["active"].at[place], mask=inside, other=False) & inside
    ids, tier, at_least = load("ids", -1), load("tier", -1), load("at_least", False)
    asks = active & (tier >= 0)
    ids = jnp.where(asks, ids, -1)
    # Two reductions over pairs of pairs: of a tier, that no better one will do comes first.
    same = matches(ids, ids)
    wish = jnp.where(asks, 2 * tier + at_least.astype(jnp.int32), 2 * NO_TIER)
    least = jnp.min(jnp.where(same, wish[None, :], 2 * NO_TIER), axis=1)
    best = jnp.where(asks, least >> 1, NO_TIER)
    leads = jnp.min(jnp.where(same, number[None, :], len(number)), axis=1) == number
    strict = asks & (least & 1 == 0)
    return _Pairs(number, inside, active, ids, asks & leads, best, strict, load("weights", 0.0))


def _load_tier(
    tiers: Sequence[Refs], index: int, form: Form, layer: jax.Array, pairs: _Pairs
) -> _State:
    of = tiers[index]
    loaded, better = None, None
    if form.changes:
        loaded = vectors.load_slots(of, layer)
        if index and not form.is_full:
            expert, better = jnp.maximum(loaded.owner, 0), loaded.owner < -1
            for other in tiers[:index]:
                there = pltriton.load(other["table"].at[layer, expert], mask=loaded.owned, other=-1)
                better |= there >= 0
    return _State(
        of, of["clock"][()], vectors.load_asked(of, layer, pairs.ids), loaded, better,
        vectors.load_events(of, layer), of["gate"][layer, iota(2)],
    )  # fmt: skip


def _serve(
    pairs: _Pairs, states: list[_State], forms: Sequence[Form]
) -> tuple[jax.Array, jax.Array]:
    """int32[P], in which tier each pair's expert runs, or -1; whether it is fetched for it."""
    exact, there = pairs.ids < -1, jnp.full_like(pairs.ids, -1)
    better = exact
    for i, (state, form) in enumerate(zip(states, forms, strict=True)):
        resident = state.asked.local >= 0
        if not form.is_full:  # a copy that leaves because a better one is there serves nobody
            resident &= ~better
        better |= resident
        exact |= resident & (pairs.tier == i)
        there = jnp.where(resident & (pairs.tier > i) & ~pairs.strict, i, there)
    asks = pairs.ids >= 0
    reused = asks & ~exact & (there >= 0)
    served = jnp.where(reused, there, pairs.tier)
    return jnp.where(asks, served, -1), asks & ~exact & ~reused


def _change(
    state: _State, form: Form, layer: jax.Array, pairs: _Pairs, runs: jax.Array,
    fetched: jax.Array, gone_pairs: jax.Array, is_only: bool,
) -> tuple[_Change, dict[str, Any]]:  # fmt: skip
    """Of a tier that is not complete; `runs`: the pairs that run in it."""
    loaded, local = state.slots, state.asked.local
    assert loaded is not None
    ids, owner, left, gone = jnp.where(runs, pairs.ids, -1), loaded.owner, loaded, None
    released = unused = jnp.int32(0)
    if not (form.is_full or is_only):
        gone = loaded.owned & some(matches(owner, jnp.where(fetched, pairs.ids, -2)), axis=1)
        if state.better is not None:
            gone |= loaded.owned & state.better
        local = jnp.where(gone_pairs, -1, local)
        released, unused = together(gone, gone & (loaded.ahead != 0))
        left = loaded._replace(
            owner=jnp.where(gone, -1, owner),
            owned=loaded.owned & ~gone,
            last_use=jnp.where(gone, 0, loaded.last_use),
            ahead=jnp.where(gone, 0, loaded.ahead),
        )
    table = vectors.candidates(left, state.clock, ids)
    lead, miss = runs & pairs.leads, (ids >= 0) & (local < 0)
    order = vectors.order_of(lead & miss, ids)
    num_needed, num_misses = together(lead, lead & miss)
    number, who = jnp.minimum(num_misses, vectors.count(table.victim)), jnp.where(miss, order, -2)
    taker, took = vectors.taken(table, table.victim, number, who)
    coming = pick(matches(taker, who), ids[None, :], 1)
    local = jnp.maximum(jnp.where(ids >= 0, local, -1), took)
    came = coming >= 0
    admitted, evictions, waste = together(
        came, came & left.owned, came & left.owned & (left.ahead != 0)
    )
    amounts = {
        "steps": jnp.minimum(num_needed, 1), "needed": num_needed,
        "hits": num_needed - num_misses, "misses": num_misses,
        "admitted": admitted, "unserved": num_misses - admitted,
        "evictions": evictions + released, "prefetch_waste": waste + unused,
        "prefetch_hits": vectors.count(table.wanted & (left.ahead != 0)),
    }  # fmt: skip
    come = jnp.where(miss & (local >= 0), order, -1)
    first = quotient(layer, form.banks) * num_slots(state.of["table"], state.of["pinned"].shape[1])
    return _Change(table, gone, owner, coming, come, ids, first, local), amounts


def _store(change: _Change, state: _State, layer: jax.Array) -> None:
    """Writes a tier's slots and jobs."""
    of, table, coming = state.of, change.table, change.coming
    num_experts, beyond = of["pinned"].shape[1], of["table"].shape[1]
    slots = num_slots(of["table"], num_experts)
    if change.gone is not None:
        # An expert that comes again has its new slot written below: no column is written twice.
        again = some(matches(change.owner, jnp.where(change.come >= 0, change.ids, -2)), axis=1)
        leaves = change.gone & ~again
        none = jnp.full_like(coming, -1)
        place = jnp.where(leaves, change.owner, beyond)
        pltriton.store(of["table"].at[layer, place], none, mask=leaves)
        empty = change.gone & (coming < 0)
        number = table.loaded.number + num_experts
        pltriton.store(of["table"].at[layer, number], none, mask=empty)
        pltriton.store(of["table"].at[layer, number + slots], none + 1, mask=empty)
        pltriton.store(of["table"].at[layer, number + 2 * slots], none + 1, mask=empty)
    vectors.store_owners(of, layer, table, coming)
    vectors.store_use(of, layer, table, table.wanted | (coming >= 0), state.clock, 0)
    size = of["rows"].shape[0]
    vectors.store_jobs(of, size, change.come, state.asked.row, change.first_slot + change.local)


def _use_of(state: _State, layer: jax.Array, used: jax.Array, column: int) -> Any:
    """Of pairs' slots in a tier that is fixed: the clock of last use (0), whether brought ahead."""
    table, num_experts = state.of["table"], state.of["pinned"].shape[1]
    first = num_experts + (1 + column) * num_slots(table, num_experts)
    return table.at[layer, jnp.where(used, first + state.asked.local, table.shape[1])]


def _store_gate(of: Refs, layer: jax.Array, pairs: _Pairs, tier: jax.Array, num: int) -> None:
    """Adds the router's mass by what became of it."""

    def load(name: str, other: Any) -> jax.Array:
        return pltriton.load(of[name].at[pairs.number], mask=pairs.inside, other=other)

    mass = jnp.where(pairs.active, load("routed_weights", 0.0), 0.0)
    other = (tier >= 0) & (pairs.ids != load("routed_ids", -1))
    lanes = iota(num + 3)
    inside = lanes < num + 3
    total = pltriton.load(of["mass"].at[layer, lanes], mask=inside, other=0.0)
    for lane, mask in enumerate([*(tier == i for i in range(num)), tier < 0, other, pairs.inside]):
        total = jnp.where(lanes == lane, total + jnp.sum(jnp.where(mask, mass, 0.0)), total)
    pltriton.store(of["mass"].at[layer, lanes], total, mask=inside)


def _body(
    *refs: Ref, names: tuple[str, ...], forms: tuple[Form, ...], columns: Columns, interpret: bool
) -> None:
    # The outputs come last: of what changes, they take the place of the operands.
    of = dict(zip(names, refs, strict=True))
    layer, number = of["layer"][()], len(forms)
    tiers = [
        {name[:-1]: ref for name, ref in of.items() if name.endswith(str(i))} for i in range(number)
    ]
    pairs = _load_pairs(of)
    # All loads come first: they wait for each other nowhere else but in the addresses.
    states = [_load_tier(tiers, i, form, layer, pairs) for i, form in enumerate(forms)]
    tier, fetched = _serve(pairs, states, forms)
    found, better = [], pairs.ids < -1
    slot = jnp.full_like(tier, -1)
    for i, (state, form) in enumerate(zip(states, forms, strict=True)):
        runs, resident = tier == i, state.asked.local >= 0
        if not form.changes:
            change, leads = None, runs & pairs.leads
            needed, missing = together(leads, leads & ~resident)
            amounts = {"steps": jnp.minimum(needed, 1), "needed": needed}
            if form.streams:
                amounts |= {"misses": needed, "streamed": needed}
            else:
                amounts |= {"hits": needed - missing, "misses": missing, "unserved": missing}
            if form.is_fixed:
                used = leads & resident
                ahead = pltriton.load(_use_of(state, layer, used, 1), mask=used, other=0)
                amounts["prefetch_hits"] = vectors.count(used & (ahead != 0))
            slots = num_slots(state.of["table"], state.of["pinned"].shape[1])
            first, local = quotient(layer, form.banks) * slots, state.asked.local
            if form.streams:
                local = jnp.where(runs, vectors.order_of(leads, pairs.ids), -1)
        else:
            gone = resident & (fetched | better)
            change, amounts = _change(state, form, layer, pairs, runs, fetched, gone, number == 1)
            first, local = change.first_slot, change.local
        slot = jnp.where(runs & (local >= 0), first + local, slot)
        better |= resident
        found.append((state, change, amounts, local))
    if not interpret:
        # What the tables held has been read, by every thread, before any writes.
        pltriton.debug_barrier()
    for i, (state, change, amounts, local) in enumerate(found):
        if change is not None:
            _store(change, state, layer)
        elif forms[i].is_fixed:
            used = (tier == i) & pairs.leads & (local >= 0)
            now = jnp.zeros_like(local) + state.clock
            pltriton.store(_use_of(state, layer, used, 0), now, mask=used)
            pltriton.store(_use_of(state, layer, used, 1), jnp.zeros_like(local), mask=used)
        elif forms[i].streams:
            size = state.of["rows"].shape[0]
            vectors.store_jobs(state.of, size, local, state.asked.row, local)
        state.of["clock"][()] = state.clock + 1
        vectors.store_events(state.of, layer, state.events, columns, amounts)
        mass = state.mass + jnp.sum(jnp.where(tier == i, pairs.weights, 0.0))
        state.of["gate"][layer, iota(2)] = mass
    _store_gate(of, layer, pairs, tier, number)
    runs = jnp.where(slot >= 0, tier, -1)
    pltriton.store(of["runs"].at[pairs.number], runs, mask=pairs.inside)
    pltriton.store(of["slot"].at[pairs.number], slot, mask=pairs.inside)


def place_triton(
    tiers: tuple[Tier, ...],
    gate: jax.Array,
    layer: jax.Array,
    asked: Asked,
    active: jax.Array,
    *,
    forms: tuple[Form, ...],
    columns: Columns,
    num_warps: int | None,
    interpret: bool,
) -> tuple[tuple[Tables, ...], jax.Array, Placed]:
    """See `api.place`."""
    num_pairs, num_experts = asked.ids.size, tiers[0].pinned.shape[1]
    operands = {"layer": layer, "active": active}
    operands |= {name: array.reshape(-1) for name, array in asked._asdict().items()}
    changed, sizes, most = {"mass": gate}, {"runs": num_pairs, "slot": num_pairs}, 1
    for i, (tier, form) in enumerate(zip(tiers, forms, strict=True)):
        operands |= {f"pinned{i}": tier.pinned, f"row_of{i}": tier.row_of}
        slots = num_slots(tier.tables.table, num_experts)
        if form.changes or form.is_fixed:
            changed[f"table{i}"] = tier.tables.table
            most = max(most, slots) if form.changes else most
        else:
            operands[f"table{i}"] = tier.tables.table
        if form.fetches:
            jobs = form.num_jobs(num_pairs, num_experts, slots)
            sizes |= {f"rows{i}": jobs, f"slots{i}": jobs}
        rest = tier.tables._asdict() | {}
        changed |= {f"{name}{i}": rest[name] for name in ("clock", "events", "gate")}
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in changed.values()]
    shapes += [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes.values()]
    body = functools.partial(
        _body, names=(*operands, *changed, *changed, *sizes), forms=forms, columns=columns,
        interpret=interpret,
    )  # fmt: skip
    outputs = launch.triton_call(
        body,
        name=f"tiered_plan_{num_pairs}_of_{num_experts}_in_{len(tiers)}",
        grid=(1,),
        out_shape=shapes,
        num_warps=num_warps or one_tier.default_num_warps(most, num_pairs),
        num_stages=1,
        interpret=interpret,
        aliases={len(operands) + i: i for i in range(len(changed))},
    )(*operands.values(), *changed.values())
    found = operands | dict(zip((*changed, *sizes), outputs, strict=True))
    tables = tuple(
        Tables(*(found[f"{name}{i}"] for name in Tables._fields)) for i in range(len(tiers))
    )
    fetch = tuple(
        Fetch(found[f"rows{i}"], found[f"slots{i}"]) if form.fetches else None
        for i, form in enumerate(forms)
    )
    runs, slot = (found[name].reshape(asked.ids.shape) for name in ("runs", "slot"))
    return tables, found["mass"], Placed(runs, slot, fetch)
