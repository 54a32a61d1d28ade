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
from pallas_kernels.tiered_plan.operands import Asked, Form, Placed, Rule, Tier
from pallas_kernels.tiered_plan.pairs import MAX_TIERS, Pairs, State, load, serve
from pallas_kernels.triton_elements import quotient


def refusal(num_experts: int, num_pairs: int, num_tiers: int, target: Target) -> str | None:
    """Why this implementation cannot serve, or None; see `api.refusal`."""
    reasons = [one_tier.refusal(num_experts, num_pairs, target)]
    if num_tiers > MAX_TIERS:
        reasons.append(f"{num_tiers} tiers, more than {MAX_TIERS}")
    return "; ".join(filter(None, reasons)) or None


def default_num_warps(slots: int, num_pairs: int) -> int:
    """As of one tier, but where even 32 warps spill fewer spill less.

    Of 256 pairs in a hot tier and one of all experts 8 warps spill 0.1 KB of registers a thread, 32
    2.5 KB; in two caches 2.4 and 10 KB (compiled for an H100, not timed).
    """
    return 8 if num_pairs > 128 else one_tier.default_num_warps(slots, num_pairs)


class _Change(NamedTuple):
    """What becomes of a tier's slots; see `_changed`."""

    table: vectors.Slots
    gone: jax.Array | None  # bool[C], copies that leave for good; None: none ever do
    owner: jax.Array  # int32[C], before that
    coming: jax.Array
    come: jax.Array  # int32[P], order of the jobs, or -1
    ids: jax.Array  # of the pairs that run here
    row: jax.Array  # of them, in the host store
    first_slot: jax.Array
    local: jax.Array


def _has_better(
    tiers: Sequence[State], index: int, form: Form, layer: jax.Array, loaded: vectors.Loaded
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
    states: Sequence[State], index: int, form: Form, layer: jax.Array, pairs: Pairs,
    runs: jax.Array, fetched: jax.Array,
) -> tuple[_Change, dict[str, Any]]:  # fmt: skip
    """Of a tier in which something moves; `runs`: the pairs that run in it."""
    state = states[index]
    loaded, local = vectors.load_slots(state.of, layer), state.local
    row = vectors.load_rows(state.of, layer, pairs.ids)
    better = _has_better(states, index, form, layer, loaded)
    ids, owner, left, gone = jnp.where(runs, pairs.ids, -1), loaded.owner, loaded, None
    released = unused = jnp.int32(0)
    if not form.is_full and len(states) > 1:
        gone = loaded.owned & some(matches(owner, jnp.where(fetched, pairs.ids, -2)), axis=1)
        if better is not None:
            gone |= loaded.owned & better
        local = jnp.where(_gone(states, index, form, fetched), -1, local)
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
    first = _first_slot(state, form, layer)
    return _Change(table, gone, owner, coming, come, ids, row, first, local), amounts


def _store(change: _Change, state: State, layer: jax.Array) -> None:
    """Writes a tier's slots and jobs."""
    of, table, coming = state.of, change.table, change.coming
    num_experts, beyond = of["row_of"].shape[1], of["table"].shape[1]
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
    place = change.first_slot + change.local
    vectors.store_jobs(of, of["rows"].shape[0], change.come, change.row, place)


def _gone(states: Sequence[State], index: int, form: Form, fetched: jax.Array) -> jax.Array:
    """bool[P], the copy in a tier leaves: its expert comes in another, or is in a better one."""
    leaves = fetched
    for state in states[:index] if form.is_fed else ():
        leaves |= state.local >= 0
    return leaves & (states[index].local >= 0)


def _first_slot(state: State, form: Form, layer: jax.Array) -> jax.Array:
    """int32[], of a layer, global in its bank."""
    return quotient(layer, form.banks) * num_slots(state.of["table"], state.of["row_of"].shape[1])


def _all_read(interpret: bool) -> None:
    """What the tables held has been read, by every thread, before any writes."""
    if not interpret:
        pltriton.debug_barrier()


def _served(
    state: State, layer: jax.Array, pairs: Pairs, runs: jax.Array, columns: Columns,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """A tier in which nothing moves: int32[P], the local slots of the pairs that run in it."""
    leads = runs & pairs.leads
    used = jnp.where(leads, state.local, -1)
    missing = leads & (used < 0)  # of one that is complete or fixed: its caller's mistake
    if state.ahead is None:
        needed, missed = together(leads, missing)
        amounts = {}
    else:
        needed, missed, ahead = together(leads, missing, (used >= 0) & state.ahead)
        amounts = {"prefetch_hits": ahead}
    amounts |= {
        "steps": jnp.minimum(needed, 1), "needed": needed, "hits": needed - missed,
        "misses": missed, "unserved": missed,
    }  # fmt: skip
    _all_read(interpret)
    if state.ahead is not None:
        vectors.store_use_at(state.of, layer, used, state.clock)
    vectors.store_events(state.of, layer, state.events, columns, amounts)
    vectors.store_none(*(state.of[name] for name in ("rows", "slots") if name in state.of))
    return jnp.where(runs, state.local, -1)


def _streamed(
    state: State, layer: jax.Array, pairs: Pairs, runs: jax.Array, columns: Columns,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """A tier whose experts pass through transient slots; likewise."""
    leads = runs & pairs.leads
    row, needed = vectors.load_rows(state.of, layer, pairs.ids), vectors.count(leads)
    local = jnp.where(runs, vectors.order_of(leads, pairs.ids), -1)
    amounts = {
        "steps": jnp.minimum(needed, 1), "needed": needed, "misses": needed, "streamed": needed
    }  # fmt: skip
    _all_read(interpret)
    vectors.store_jobs(state.of, state.of["rows"].shape[0], local, row, local)
    vectors.store_events(state.of, layer, state.events, columns, amounts)
    return local


def _changed(
    states: Sequence[State], index: int, form: Form, layer: jax.Array, pairs: Pairs,
    runs: jax.Array, fetched: jax.Array, columns: Columns, interpret: bool,
) -> jax.Array:  # fmt: skip
    """A tier to which experts come, or which copies leave; likewise."""
    change, amounts = _change(states, index, form, layer, pairs, runs, fetched)
    _all_read(interpret)
    _store(change, states[index], layer)
    vectors.store_events(states[index].of, layer, states[index].events, columns, amounts)
    return change.local


def _moves(
    states: Sequence[State], index: int, forms: Sequence[Form], layer: jax.Array,
    runs: jax.Array, fetched: jax.Array,
) -> jax.Array:  # fmt: skip
    """bool[], whether experts come to a tier, or copies leave it."""
    form, state, mask = forms[index], states[index], runs & fetched
    if form.is_full or len(states) == 1:
        return some(mask)
    moves = some(mask | _gone(states, index, form, fetched))
    for better, of in zip(states[:index], forms[:index], strict=True):
        if form.is_fed and not of.streams:
            owners = vectors.load_owners(better.of, layer)
            moves |= some(vectors.load_local(state.of, layer, owners) >= 0)
    return moves


def _load_gate(of: Refs, layer: jax.Array) -> jax.Array:
    num = of["mass"].shape[1]
    lanes = iota(num)
    return pltriton.load(of["mass"].at[layer, lanes], mask=lanes < num, other=0.0)


def _store_gate(
    of: Refs, states: Sequence[State], layer: jax.Array, pairs: Pairs, tier: jax.Array,
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
        for column, before in enumerate(state.mass):
            # Of the one lane that is stored; the others' places are beyond the end.
            place = state.of["gate"].at[layer, jnp.where(lanes == i, column, lanes + 2)]
            pltriton.store(place, before + sums, mask=lanes == i)


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
    pairs, states = load(of, tiers, forms, layer, at_least)
    weights = pltriton.load(of["weights"].at[pairs.number], mask=pairs.inside, other=0.0)
    total, routed = _load_gate(of, layer), None
    if "routed_ids" in of:
        routed = pltriton.load(of["routed_ids"].at[pairs.number], mask=pairs.inside, other=-1)
    tier, fetched = serve(pairs, states)
    moves = [
        _moves(states, i, forms, layer, tier == i, fetched) if form.changes else None
        for i, form in enumerate(forms)
    ]
    slot = jnp.full_like(tier, -1)
    # Of falling fidelity the last first: what leaves a tier is told by the tables of better ones.
    for i in reversed(range(number)):
        state, form, runs = states[i], forms[i], tier == i
        common = (layer, pairs, runs)
        if form.streams:
            local = _streamed(state, *common, columns, interpret)
        else:
            found = functools.partial(_served, state, *common, columns, interpret)
            changed = functools.partial(
                _changed, states, i, form, *common, fetched, columns, interpret
            )
            local = found() if moves[i] is None else jax.lax.cond(moves[i], changed, found)
        slot = jnp.where(runs & (local >= 0), _first_slot(state, form, layer) + local, slot)
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
    num_pairs, num_experts = asked.ids.size, tiers[0].row_of.shape[1]
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
        operands |= {f"row_of{i}": tier.row_of}
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
        num_warps=num_warps or default_num_warps(most, num_pairs),
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
