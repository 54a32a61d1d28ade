"""The Pallas-Triton implementation: one launch of one program, in place on all tiers' tables."""

import functools
import operator
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
from pallas_kernels.tiered_plan.operands import Asked, Form, Placed, Rule, Tier
from pallas_kernels.triton_elements import quotient, remainder

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


class _State(NamedTuple):
    """What a tier's tables say of the pairs' experts, read before anything is written."""

    of: Refs
    clock: jax.Array
    local: jax.Array  # local slots, -1: none
    serves: jax.Array  # bool[P], a copy is there, and does not leave for that a better one is
    ahead: jax.Array | None  # bool[P], it was brought ahead; None of a tier where nothing is
    events: jax.Array
    mass: jax.Array


class _Change(NamedTuple):
    """What becomes of a tier's slots; see `_placed`."""

    table: vectors.Slots
    gone: jax.Array | None  # bool[C], copies that leave for good; None: none ever do
    owner: jax.Array  # int32[C], before that
    coming: jax.Array
    come: jax.Array  # int32[P], order of the jobs, or -1
    ids: jax.Array  # of the pairs that run here
    first_slot: jax.Array
    local: jax.Array


def _load(
    of: Refs, tiers: Sequence[Refs], forms: Sequence[Form], layer: jax.Array, at_least: bool
) -> tuple[_Pairs, list[_State]]:
    """All that is read but slots: loads wait for each other nowhere else but in the addresses."""
    num_pairs = of["ids"].shape[0]
    width = num_pairs // of["active"].shape[0]
    number = iota(num_pairs)
    inside = number < num_pairs
    place = quotient(number, width)
    active = pltriton.load(of["active"].at[place], mask=inside, other=False) & inside
    ids = pltriton.load(of["ids"].at[number], mask=inside, other=-1)
    ids = jnp.where(active, ids, -1)
    states, better = [], ids < -1
    for tier, form in zip(tiers, forms, strict=True):
        local = vectors.load_local(tier, layer, ids)
        resident = local >= 0
        serves = resident if form.is_full else resident & ~better
        better |= resident
        is_used = form.changes or form.is_fixed
        ahead = vectors.load_ahead(tier, layer, local) if is_used else None
        events, mass = vectors.load_events(tier, layer), tier["gate"][layer, iota(2)]
        states.append(_State(tier, tier["clock"][()], local, serves, ahead, events, mass))
    if "high" in of:
        tier, strict = _by_rule(of, layer, ids, states, at_least)
        asks = active & (tier >= 0)
    else:
        tier = pltriton.load(of["tier"].at[number], mask=inside, other=-1)
        allows = pltriton.load(of["at_least"].at[number], mask=inside, other=False)
        # Of the pairs of a tier, that no better one will do comes first.
        asks = active & (tier >= 0)
        least = jnp.where(asks, 2 * tier + allows.astype(jnp.int32), 2 * NO_TIER)
        if num_pairs > width:
            least = jnp.min(jnp.where(matches(ids, ids), least[None, :], 2 * NO_TIER), axis=1)
        tier, strict = least >> 1, least & 1 == 0
    ids = jnp.where(asks, ids, -1)
    pairs = _Pairs(
        number, inside, active, ids, vectors.leads(ids, num_pairs // width),
        jnp.where(asks, tier, NO_TIER), asks & strict,
    )  # fmt: skip
    return pairs, [
        state._replace(local=jnp.where(asks, state.local, -1), serves=state.serves & asks)
        for state in states
    ]


def _by_rule(
    of: Refs, layer: jax.Array, ids: jax.Array, states: Sequence[_State], at_least: bool
) -> tuple[jax.Array, jax.Array]:
    """int32[P], the tiers that pairs ask for; bool[P], no better one will do."""
    critical = ids < -1
    width = of["ids"].shape[0] // of["active"].shape[0]
    if "critical" in of:
        rank = remainder(jax.lax.iota(jnp.int32, len(ids)), width)
        critical = (ids >= 0) & (rank < of["critical"][layer])
        if of["active"].shape[0] > 1:  # an expert is critical for all of its pairs
            critical = some(matches(ids, ids) & critical[None, :], axis=1)
    high, held = of["high"][()], ids < -1
    for i, state in enumerate(states):
        held |= state.serves & (high == i)
    tier = jnp.where(critical | (held & of["held"][()]), high, of["low"][()])
    return tier, critical if at_least else ids >= 0


def _serve(pairs: _Pairs, states: Sequence[_State]) -> tuple[jax.Array, jax.Array]:
    """int32[P], in which tier each pair's expert runs, or -1; whether it is fetched for it."""
    exact, there = pairs.ids < -1, jnp.full_like(pairs.ids, -1)
    for i, state in enumerate(states):
        exact |= state.serves & (pairs.tier == i)
        there = jnp.where(state.serves & (pairs.tier > i) & ~pairs.strict, i, there)
    asks = pairs.ids >= 0
    reused = asks & ~exact & (there >= 0)
    served = jnp.where(reused, there, pairs.tier)
    return jnp.where(asks, served, -1), asks & ~exact & ~reused


def _has_better(
    tiers: Sequence[_State], index: int, form: Form, layer: jax.Array, loaded: vectors.Loaded
) -> jax.Array | None:
    """bool[C], owners that are in a tier of higher fidelity; None where none can be."""
    if not index or form.is_full or not form.is_fed:
        return None
    expert, better = jnp.maximum(loaded.owner, 0), loaded.owner < -1
    for state in tiers[:index]:
        place = state.of["table"].at[layer, expert]
        better |= pltriton.load(place, mask=loaded.owned, other=-1) >= 0
    return better


def _change(
    states: Sequence[_State], index: int, form: Form, layer: jax.Array, pairs: _Pairs,
    runs: jax.Array, fetched: jax.Array, gone_pairs: jax.Array,
) -> tuple[_Change, dict[str, Any]]:  # fmt: skip
    """Of a tier that is not complete; `runs`: the pairs that run in it."""
    state = states[index]
    loaded, local = vectors.load_slots(state.of, layer), state.local
    better = _has_better(states, index, form, layer, loaded)
    ids, owner, left, gone = jnp.where(runs, pairs.ids, -1), loaded.owner, loaded, None
    released = unused = jnp.int32(0)
    if not form.is_full and len(states) > 1:
        gone = loaded.owned & some(matches(owner, jnp.where(fetched, pairs.ids, -2)), axis=1)
        if better is not None:
            gone |= loaded.owned & better
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
    row, size = vectors.load_rows(of, layer, change.ids), of["rows"].shape[0]
    vectors.store_jobs(of, size, change.come, row, change.first_slot + change.local)


def _load_gate(of: Refs, layer: jax.Array) -> jax.Array:
    num = of["mass"].shape[1]
    lanes = iota(num)
    return pltriton.load(of["mass"].at[layer, lanes], mask=lanes < num, other=0.0)


def _store_gate(
    of: Refs, states: Sequence[_State], layer: jax.Array, pairs: _Pairs, tier: jax.Array,
    total: jax.Array, weights: jax.Array, routed: jax.Array | None,
) -> None:  # fmt: skip
    """Adds the router's mass by what became of it; and to each tier's own count."""
    num, lanes = len(states), iota(of["mass"].shape[1])
    mass, lane = jnp.where(pairs.active, weights, 0.0), lanes[:, None]
    kinds = (tier[None, :] == lane) | ((tier < 0)[None, :] & (lane == num)) | (lane == num + 2)
    if routed is not None:
        kinds |= ((tier >= 0) & (pairs.ids != routed))[None, :] & (lane == num + 1)
    sums = jnp.sum(jnp.where(kinds, mass[None, :], 0.0), axis=1)
    inside = lanes < of["mass"].shape[1]
    pltriton.store(of["mass"].at[layer, lanes], total + sums, mask=inside)
    for i, state in enumerate(states):
        own = jnp.sum(jnp.where(lanes == i, sums, 0.0))
        state.of["gate"][layer, iota(2)] = state.mass + own


def _found(
    states: Sequence[_State], forms: Sequence[Form], layer: jax.Array, pairs: _Pairs,
    tier: jax.Array, columns: Columns, interpret: bool,
) -> jax.Array:  # fmt: skip
    """Where nothing is fetched and nothing leaves: int32[P], the slots, -1: none."""
    if not interpret:
        # What the tables held has been read, by every thread, before any writes.
        pltriton.debug_barrier()
    slot = jnp.full_like(tier, -1)
    for i, (state, form) in enumerate(zip(states, forms, strict=True)):
        runs = tier == i
        used = jnp.where(runs & pairs.leads, state.local, -1)
        if state.ahead is not None:
            needed, ahead = together(used >= 0, (used >= 0) & state.ahead)
            amounts = {"prefetch_hits": ahead}
            vectors.store_use_at(state.of, layer, used, state.clock)
        else:
            needed, amounts = vectors.count(used >= 0), {}
        amounts |= {"steps": jnp.minimum(needed, 1), "needed": needed, "hits": needed}
        vectors.store_events(state.of, layer, state.events, columns, amounts)
        vectors.store_none(*(state.of[name] for name in ("rows", "slots") if name in state.of))
        slots = num_slots(state.of["table"], state.of["pinned"].shape[1])
        slot = jnp.where(runs, quotient(layer, form.banks) * slots + state.local, slot)
    return slot


def _placed(
    states: Sequence[_State], forms: Sequence[Form], layer: jax.Array, pairs: _Pairs,
    tier: jax.Array, fetched: jax.Array, columns: Columns, interpret: bool,
) -> jax.Array:  # fmt: skip
    """Likewise, with what is fetched and what leaves."""
    found, better = [], pairs.ids < -1
    slot = jnp.full_like(tier, -1)
    for i, (state, form) in enumerate(zip(states, forms, strict=True)):
        runs, resident = tier == i, state.local >= 0
        if not form.changes:
            change, leads = None, runs & pairs.leads
            needed, missing = together(leads, leads & ~resident)
            amounts = {"steps": jnp.minimum(needed, 1), "needed": needed}
            if form.streams:
                amounts |= {"misses": needed, "streamed": needed}
            else:
                amounts |= {"hits": needed - missing, "misses": missing, "unserved": missing}
            if state.ahead is not None:
                amounts["prefetch_hits"] = vectors.count(leads & resident & state.ahead)
            slots = num_slots(state.of["table"], state.of["pinned"].shape[1])
            first, local = quotient(layer, form.banks) * slots, state.local
            if form.streams:
                local = jnp.where(runs, vectors.order_of(leads, pairs.ids), -1)
        else:
            gone = resident & (fetched | better)
            change, amounts = _change(states, i, form, layer, pairs, runs, fetched, gone)
            first, local = change.first_slot, change.local
        slot = jnp.where(runs & (local >= 0), first + local, slot)
        better |= resident
        found.append((state, change, amounts, local))
    if not interpret:
        pltriton.debug_barrier()  # as in `_found`
    for i, (state, change, amounts, local) in enumerate(found):
        if change is not None:
            _store(change, state, layer)
        elif forms[i].is_fixed:
            used = jnp.where((tier == i) & pairs.leads, local, -1)
            vectors.store_use_at(state.of, layer, used, state.clock)
        elif forms[i].streams:
            row, size = vectors.load_rows(state.of, layer, pairs.ids), state.of["rows"].shape[0]
            vectors.store_jobs(state.of, size, local, row, local)
        vectors.store_events(state.of, layer, state.events, columns, amounts)
    return slot


def _any_double(
    states: Sequence[_State], forms: Sequence[Form], layer: jax.Array
) -> jax.Array | None:
    """bool[], copies leave for that a better one is there; None where there can be none."""
    found: list[jax.Array] = []
    for i, (state, form) in enumerate(zip(states, forms, strict=True)):
        if not form.changes or form.is_full or not form.is_fed:
            continue
        for better, of in zip(states[:i], forms[:i], strict=True):
            if of.streams:
                continue
            there = vectors.load_local(state.of, layer, vectors.load_owners(better.of, layer)) >= 0
            found.append(some(there))
    return functools.reduce(operator.or_, found) if found else None


def _body(
    *refs: Ref, names: tuple[str, ...], forms: tuple[Form, ...], columns: Columns, at_least: bool,
    interpret: bool,
) -> None:  # fmt: skip
    # The outputs come last: of what changes, they take the place of the operands.
    of = dict(zip(names, refs, strict=True))
    layer, number = of["layer"][()], len(forms)
    tiers = [
        {name[:-1]: ref for name, ref in of.items() if name.endswith(str(i))} for i in range(number)
    ]
    pairs, states = _load(of, tiers, forms, layer, at_least)
    weights = pltriton.load(of["weights"].at[pairs.number], mask=pairs.inside, other=0.0)
    total, routed = _load_gate(of, layer), None
    if "routed_ids" in of:
        routed = pltriton.load(of["routed_ids"].at[pairs.number], mask=pairs.inside, other=-1)
    tier, fetched = _serve(pairs, states)
    found = functools.partial(_found, states, forms, layer, pairs, tier, columns, interpret)
    placed = functools.partial(
        _placed, states, forms, layer, pairs, tier, fetched, columns, interpret
    )
    moves = some(fetched)
    if (leaves := _any_double(states, forms, layer)) is not None:
        moves |= leaves
    slot = jax.lax.cond(moves, placed, found)
    for state in states:
        state.of["clock"][()] = state.clock + 1
    _store_gate(of, states, layer, pairs, tier, total, weights, routed)
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
    by_pair = {"ids": asked.ids, "weights": asked.weights, "routed_ids": asked.routed_ids}
    at_least = False
    if isinstance(asked.by, Rule):
        rule, at_least = asked.by, asked.by.at_least
        operands |= {"high": rule.high, "low": rule.low, "held": rule.held}
        operands |= {} if rule.critical is None else {"critical": rule.critical}
    else:
        by_pair |= asked.by._asdict()
    operands |= {name: of.reshape(-1) for name, of in by_pair.items() if of is not None}
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
        at_least=at_least, interpret=interpret,
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
