"""The Pallas-Triton implementation: one launch of one program, in place on all tiers' tables."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.cache_plan import slots as vectors
from pallas_kernels.cache_plan.operands import (
    Asked,
    Fetch,
    LayerPlan,
    Rule,
    SharedBase,
    Tables,
    TierOperands,
    TierShape,
    Wishes,
)
from pallas_kernels.cache_plan.pairs import (
    MAX_TIERS,
    Entries,
    PaddedPairs,
    load_all,
    resolved_tiers,
)
from pallas_kernels.cache_plan.shared_triton import place_planes, predict_shared_body
from pallas_kernels.cache_plan.slots import (
    Ref,
    Refs,
    matches,
    padded_iota,
    pick,
    some,
    together,
)
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton.elements import power_above, quotient, remainder

MAX_PAIRS = 256
MAX_EXPERTS = 512
ELEMENTS = 32  # of the largest comparison of pairs, a thread's: with 64 registers spill


def refusal(num_experts: int, num_pairs: int, num_tiers: int, target: Target) -> str | None:
    """Reason why this implementation refuses, or None."""
    reasons = [platform_refusal(target)]
    if num_experts > MAX_EXPERTS:
        reasons.append(f"{num_experts} experts a layer, more than {MAX_EXPERTS}")
    if not 1 <= num_pairs <= MAX_PAIRS:
        reasons.append(f"{num_pairs} experts are asked for, not 1..{MAX_PAIRS}")
    if num_tiers > MAX_TIERS:
        reasons.append(f"{num_tiers} tiers, more than {MAX_TIERS}")
    return "; ".join(filter(None, reasons)) or None


def _default_num_warps(slots: int, num_pairs: int, num_tiers: int = 1) -> int:
    """For all pairs of what is asked for, and of it and the slots.

    Of several tiers, where even 32 warps spill fewer spill less: of 256 pairs in a hot tier and one
    of all experts 8 warps spill 0.1 KB of registers a thread, 32 2.5 KB; in two caches 2.4 and
    10 KB (compiled for an H100, not timed). A pool of planes has one table, as a single tier has:
    of 256 pairs 32 warps spill 5.4 KB where 8 spill 9.0, and compile in a third of the time.
    """
    if num_tiers > 1 and num_pairs > 128:
        return 8
    asked = power_above(num_pairs)
    most = asked * max(asked, power_above(slots))
    return min(32, max(4, most // (32 * ELEMENTS)))


class _Moved(NamedTuple):
    """The outcome of a tier, of either branch."""

    local: jax.Array  # int32[P], local slots of the pairs that run in it, -1: none
    stream: jax.Array  # int32[P], number among the experts that stream; -1
    admitted: jax.Array  # int32[], and the counts after it likewise
    streamed: jax.Array
    evictions: jax.Array
    waste: jax.Array


class _Tier(NamedTuple):
    """A tier in the kernel: what its branches read."""

    states: Sequence[Entries]
    number: int
    form: TierShape
    layer: jax.Array
    pairs: PaddedPairs
    runs: jax.Array  # bool[P], the pairs that run in it
    fetched: jax.Array  # bool[P], experts that any tier fetches
    num_misses: jax.Array
    interpret: bool

    @property
    def state(self) -> Entries:
        return self.states[self.number]

    @property
    def first_slot(self) -> jax.Array:
        """int32[], the global slot of the layer's local slot 0."""
        return self.form.first_slot(quotient(self.layer, self.form.banks))

    @property
    def releases(self) -> bool:
        """Whether copies leave it because their expert is in another tier."""
        return not self.form.is_full and len(self.states) > 1

    def wait(self) -> None:
        """Every thread has read the tables before any writes."""
        if not self.interpret:
            pltriton.debug_barrier()


def _leaving(tier: _Tier) -> jax.Array:
    """bool[P], the copy in a tier leaves: its expert comes in another, or is in a better one."""
    leaves = tier.fetched
    for state in tier.states[: tier.number] if tier.form.may_be_promoted_elsewhere else ():
        leaves |= state.local >= 0
    return leaves & (tier.state.local >= 0)


def _has_better(tier: _Tier, loaded: vectors.Loaded) -> jax.Array | None:
    """bool[C], owners that are in a tier of higher fidelity; None where none can be."""
    if not tier.number or not tier.form.may_be_promoted_elsewhere:
        return None
    expert, better = jnp.maximum(loaded.owner, 0), loaded.owner < -1
    for state in tier.states[: tier.number]:
        place = state.of["table"].at[tier.layer, expert]
        better |= pltriton.load(place, mask=loaded.owned, other=-1) >= 0
    return better


def _moves(tier: _Tier, forms: Sequence[TierShape]) -> jax.Array:
    """bool[], whether experts come to a tier, or copies leave it."""
    if not tier.releases:
        return tier.num_misses > 0
    moves = some((tier.runs & tier.fetched) | _leaving(tier))
    for better, of in zip(tier.states[: tier.number], forms[: tier.number], strict=True):
        if tier.form.may_be_promoted_elsewhere and not of.streams:
            owners = vectors.load_owners(better.of, tier.layer)
            moves |= some(vectors.load_local(tier.state.of, tier.layer, owners) >= 0)
    return moves


def _still(tier: _Tier) -> _Moved:
    """A tier in which nothing moves."""
    state = tier.state
    used = jnp.where(tier.runs & tier.pairs.leads, state.local, -1)
    tier.wait()
    if state.ahead is not None:
        vectors.store_use_at(state.of, tier.layer, used, state.clock)
    names = ("rows", "slots", "streamed")
    _store_none(*(state.of[name] for name in names if name in state.of))
    local = jnp.where(tier.runs, state.local, -1)
    none = jnp.minimum(tier.num_misses, 0)  # 0: a branch must not return a literal
    return _Moved(local, jnp.minimum(local, -1), none, none, none, none)


def _transient(tier: _Tier) -> _Moved:
    """A tier without slots of layers: all that runs in it streams."""
    form, leads = tier.form, tier.runs & tier.pairs.leads
    row = vectors.load_rows(tier.state.of, tier.layer, tier.pairs.ids)
    index = jnp.where(tier.runs, vectors.order_of(leads, tier.pairs.ids), -1)
    index = jnp.where(index < form.waves * form.transient, index, -1)
    streamed = vectors.count(leads & (index >= 0))
    tier.wait()
    _store_streamed(tier, index, row)
    none = jnp.minimum(tier.num_misses, 0)
    return _Moved(jnp.full_like(index, -1), index, none, streamed, none, none)


def _store_streamed(tier: _Tier, index: jax.Array, row: jax.Array) -> None:
    """Writes the copies of a tier's only experts, which stream: in waves, or all at once."""
    of, form = tier.state.of, tier.form
    if form.later_waves:
        jobs = padded_iota(of["streamed"].shape[0])
        rows = pick(matches(jobs, index), row[None, :], 1)
        pltriton.store(of["streamed"].at[jobs], rows, mask=jobs < of["streamed"].shape[0])
    else:
        first = form.first_transient(of["row_of"].shape[0])
        vectors.store_jobs(of, of["rows"].shape[0], index, row, first + index)


def _changed(tier: _Tier) -> _Moved:
    """A tier to which experts come, or which copies leave."""
    state, form, layer, pairs = tier.state, tier.form, tier.layer, tier.pairs
    of, local = state.of, state.local
    loaded = vectors.load_slots(of, layer, has_closed=form.longer_layers > 0)
    row = vectors.load_rows(of, layer, pairs.ids)
    ids, left, gone = jnp.where(tier.runs, pairs.ids, -1), loaded, None
    released = unused = jnp.minimum(tier.num_misses, 0)
    if tier.releases:
        comes = jnp.where(tier.fetched, pairs.ids, -2)
        gone = loaded.owned & some(matches(loaded.owner, comes), axis=1)
        if (better := _has_better(tier, loaded)) is not None:
            gone |= loaded.owned & better
        local = jnp.where(_leaving(tier), -1, local)
        released, unused = together(gone, gone & (loaded.ahead != 0))
        left = loaded._replace(
            owner=jnp.where(gone, -1, loaded.owner),
            owned=loaded.owned & ~gone,
            last_use=jnp.where(gone, 0, loaded.last_use),
            ahead=jnp.where(gone, 0, loaded.ahead),
        )
    table = vectors.candidates(left, state.clock, ids)
    lead, miss = tier.runs & pairs.leads, (ids >= 0) & (local < 0)
    order, victim = vectors.order_of(lead & miss, ids), table.victim
    if form.waves:
        victims, num_free = together(victim, victim & ~left.owned)
        # A pass over more experts than there is room for is a scan: it evicts nothing.
        fits = tier.num_misses <= victims
        victim &= ~left.owned | fits
        victims = jnp.where(fits, victims, num_free)
    else:
        victims = vectors.count(victim)
    who = jnp.where(miss, order, -2)
    number = jnp.minimum(tier.num_misses, victims)
    taker, took = vectors.taken(table, victim, number, who)
    coming = pick(matches(taker, who), ids[None, :], 1)
    local = jnp.maximum(jnp.where(ids >= 0, local, -1), took)
    came = coming >= 0
    admitted, evictions, waste = together(
        came, came & left.owned, came & left.owned & (left.ahead != 0)
    )
    index, streamed = jnp.minimum(local, -1), jnp.minimum(tier.num_misses, 0)
    if form.waves:
        index = jnp.where(miss & (local < 0), order - victims, -1)
        index = jnp.where(index < form.waves * form.transient, index, -1)
        streamed = vectors.count(lead & (index >= 0))
    come, place = jnp.where(miss & (local >= 0), order, -1), tier.first_slot + local
    copied = come
    if form.at_once:
        first = form.first_transient(of["row_of"].shape[0])
        copied = jnp.where(miss & ((local >= 0) | (index >= 0)), order, -1)
        place = jnp.where(index >= 0, first + index, place)
    tier.wait()
    if gone is not None:
        _store_released(tier, loaded, gone, coming, jnp.where(come >= 0, ids, -2))
    vectors.store_owners(of, layer, table, coming)
    vectors.store_use(of, layer, table, table.wanted | came, state.clock, 0)
    vectors.store_jobs(of, of["rows"].shape[0], copied, row, place)
    if form.later_waves:
        _store_streamed(tier, index, row)
    return _Moved(local, index, admitted, streamed, evictions + released, waste + unused)


def _store_released(
    tier: _Tier, loaded: vectors.Loaded, gone: jax.Array, coming: jax.Array, again: jax.Array
) -> None:
    """Frees the slots of copies that leave; `again` int32[P], experts that come to a slot here."""
    of, slots = tier.state.of, tier.form.most_slots
    num_experts, beyond = of["row_of"].shape[1], of["table"].shape[1]
    # An expert that comes again has its new slot written later: no column is written twice.
    leaves = gone & ~some(matches(loaded.owner, again), axis=1)
    none = jnp.full_like(coming, -1)
    place = jnp.where(leaves, loaded.owner, beyond)
    pltriton.store(of["table"].at[tier.layer, place], none, mask=leaves)
    empty = gone & (coming < 0)
    number = loaded.number + num_experts
    pltriton.store(of["table"].at[tier.layer, number], none, mask=empty)
    pltriton.store(of["table"].at[tier.layer, number + slots], none + 1, mask=empty)
    pltriton.store(of["table"].at[tier.layer, number + 2 * slots], none + 1, mask=empty)


def _place(
    of: Refs, states: Sequence[Entries], forms: Sequence[TierShape], layer: jax.Array,
    pairs: PaddedPairs, tier: jax.Array, fetched: jax.Array, interpret: bool,
    num_hosted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Places a layer's pairs in tiers with slots of their own: their slots, and waves if any.

    `num_hosted`: int32[], misses that are in no tier since the host multiplies them.
    """
    parts, counts, moves = [], [], []
    for i, (state, form) in enumerate(zip(states, forms, strict=True)):
        runs = tier == i
        leads, misses = runs & pairs.leads, runs & pairs.leads & fetched
        masks = [leads, misses]
        if state.ahead is not None:
            masks.append(leads & ~fetched & state.ahead)
        needed, num_misses, *ahead = together(*masks)
        counts.append((needed, num_misses, *ahead))
        part = _Tier(states, i, form, layer, pairs, runs, fetched, num_misses, interpret)
        parts.append(part)
        moves.append(_moves(part, forms) if form.changes else None)
    slot, wave = jnp.full_like(tier, -1), jnp.full_like(tier, -1) if "wave" in of else None
    # The lowest fidelity comes first: better tiers' tables decide what leaves a tier.
    for i in reversed(range(len(forms))):
        part, form = parts[i], forms[i]
        if form.streams:
            done = _transient(part)
        elif moves[i] is None:
            done = _still(part)
        else:
            changed, still = functools.partial(_changed, part), functools.partial(_still, part)
            done = jax.lax.cond(moves[i], changed, still)
        is_placed = part.runs & (done.local >= 0)
        slot = jnp.where(is_placed, part.first_slot + done.local, slot)
        wave = None if wave is None else jnp.where(is_placed, 0, wave)
        if form.waves:
            first, streams = form.first_transient(of["row_of0"].shape[0]), done.stream >= 0
            slot = jnp.where(streams, first + remainder(done.stream, form.transient), slot)
            if wave is not None:
                later = 1 + quotient(done.stream, form.transient) if form.later_waves else 0
                wave = jnp.where(streams, later, wave)
        needed, misses, *ahead = counts[i]
        all_needed, all_misses = needed, misses
        if num_hosted is not None:
            all_needed, all_misses = needed + num_hosted, misses + num_hosted
        amounts = {
            "steps": jnp.minimum(all_needed, 1), "needed": all_needed, "hits": needed - misses,
            "misses": all_misses, "admitted": done.admitted, "streamed": done.streamed,
            "unserved": misses - done.admitted - done.streamed, "evictions": done.evictions,
            "prefetch_waste": done.waste,
        }  # fmt: skip
        amounts |= {"prefetch_hits": ahead[0]} if ahead else {}
        vectors.store_events(part.state.of, layer, part.state.events, amounts)
    return slot, wave


def _hosted_rows(
    of: Refs, state: Entries, layer: jax.Array, pairs: PaddedPairs, fetched: jax.Array
) -> jax.Array:
    """int32[P], rows of the last misses, which the host multiplies; -1: none."""
    row = vectors.load_rows(state.of, layer, pairs.ids)
    miss = fetched & (row >= 0)
    later = vectors.count(miss[None, :] & (pairs.number[None, :] > pairs.number[:, None]), axis=1)
    return jnp.where(miss & (later < of["host"][vectors.count(miss)]), row, -1)


def _plan_body(
    *refs: Ref, names: tuple[str, ...], forms: tuple[TierShape, ...],
    at_least: bool, interpret: bool,
) -> None:  # fmt: skip
    # The outputs come last: of what changes, they take the place of the operands.
    of = dict(zip(names, refs, strict=True))
    layer = of["layer"][()]
    tiers = [
        {name[:-1]: ref for name, ref in of.items() if name.endswith(str(i))}
        for i in range(len(forms))
    ]
    # All loads come first: they wait for each other nowhere else but in the addresses.
    pairs, states = load_all(of, tiers, forms, layer, at_least)
    weights = pltriton.load(of["weights"].at[pairs.number], mask=pairs.inside, other=0.0)
    total, routed = _load_gate(of, layer) if "mass" in of else None, None
    if "routed_ids" in of:
        routed = pltriton.load(of["routed_ids"].at[pairs.number], mask=pairs.inside, other=-1)
    tier, fetched = resolved_tiers(pairs, states, forms)
    all_pairs, num_hosted = tier, None
    if "host" in of:
        hosted = _hosted_rows(of, states[0], layer, pairs, fetched)
        num_hosted = vectors.count(hosted >= 0)
        tier, fetched = jnp.where(hosted >= 0, -1, tier), fetched & (hosted < 0)
        pltriton.store(of["hosted"].at[pairs.number], hosted, mask=pairs.inside)
    wave: jax.Array | None
    if forms[0].shares_slots:
        slot, wave = place_planes(of, states, forms, layer, pairs, tier, interpret)
        wave = wave if "wave" in of else None
    else:
        slot, wave = _place(of, states, forms, layer, pairs, tier, fetched, interpret, num_hosted)
    for state in states:
        state.of["clock"][()] = state.clock + 1
    if total is not None:
        _store_gate(of, states, layer, pairs, tier, total, weights, routed)
    else:
        # To the mass of all and of the first tier.
        mass = jnp.sum(jnp.where(all_pairs >= 0, weights, 0.0))
        in_slots = mass if num_hosted is None else jnp.sum(jnp.where(tier >= 0, weights, 0.0))
        for column, before in enumerate(states[0].mass):
            states[0].of["gate"][layer, column] = before + (in_slots if column else mass)
    runs = jnp.where(slot >= 0, tier, -1)
    for name, values in (("runs", runs), ("slot", slot), ("wave", wave)):
        if values is not None:
            pltriton.store(of[name].at[pairs.number], values, mask=pairs.inside)


def _predict_body(*refs: Ref, names: tuple[str, ...], form: TierShape, interpret: bool) -> None:
    of = {name.removesuffix("0"): ref for name, ref in zip(names, refs, strict=True)}
    layer, clock = of["layer"][()], of["clock"][()]
    size, tokens = of["ids"].shape[0], of["active"].shape[0]
    wanted, lanes = padded_iota(size), padded_iota(tokens)
    mask = pltriton.load(of["active"].at[lanes], mask=lanes < tokens, other=False)
    mask = (wanted < size) & some(mask & (lanes < tokens))
    ids = pltriton.load(of["ids"].at[wanted], mask=wanted < size, other=-1)
    ids = jnp.where(mask, ids, -1)
    loaded = vectors.load_slots(of, layer, has_closed=form.longer_layers > 0)
    local = vectors.load_local(of, layer, ids)
    row, events = vectors.load_rows(of, layer, ids), vectors.load_events(of, layer)
    table = vectors.candidates(loaded, clock, ids)
    new = (ids >= 0) & (local < 0)
    leads = vectors.leads(ids) & new
    order = vectors.order_of(leads, ids)
    who = jnp.where(new, order, -2)
    number = jnp.minimum(vectors.count(leads), vectors.count(table.victim))
    taker, took = vectors.taken(table, table.victim, number, who)
    coming = pick(matches(taker, who), ids[None, :], 1)
    came = coming >= 0
    prefetched, evictions, waste = together(
        came, came & loaded.owned, came & loaded.owned & (loaded.ahead != 0)
    )
    amounts = {"prefetched": prefetched, "evictions": evictions, "prefetch_waste": waste}
    if not interpret:
        pltriton.debug_barrier()  # as in `_Tier.wait`
    vectors.store_owners(of, layer, table, coming)
    vectors.store_use(of, layer, table, came, clock, 1)
    come = jnp.where(took >= 0, order, -1)
    first = form.first_slot(quotient(layer, form.banks))
    vectors.store_jobs(of, size, come, row, first + took)
    vectors.store_events(of, layer, events, amounts)


def plan_triton(
    tiers: Sequence[TierOperands],
    gate: jax.Array | None,
    layer: jax.Array,
    asked: Asked,
    active: jax.Array,
    *,
    forms: Sequence[TierShape],
    target: Target,
) -> tuple[tuple[Tables, ...], jax.Array | None, LayerPlan]:
    """Computes `api.plan` by Triton."""
    num_pairs, num_experts = asked.ids.size, tiers[0].row_of.shape[1]
    operands = {"layer": layer, "active": active}
    by_pair = {"ids": asked.ids, "weights": asked.weights, "routed_ids": asked.routed_ids}
    at_least = False
    if isinstance(asked.by, Rule):
        rule, at_least = asked.by, asked.by.at_least
        operands |= {"high": rule.high, "low": rule.low, "high_if_resident": rule.high_if_resident}
        operands |= {} if rule.critical is None else {"critical": rule.critical}
    elif isinstance(asked.by, Wishes):
        by_pair |= asked.by._asdict()
    operands |= {name: of.reshape(-1) for name, of in by_pair.items() if of is not None}
    changed = {} if gate is None else {"mass": gate}
    sizes, most = {"runs": num_pairs, "slot": num_pairs}, 1
    if asked.host is not None:
        operands["host"], sizes["hosted"] = asked.host, num_pairs
    if has_waves := any(form.later_waves for form in forms):
        sizes["wave"] = num_pairs
    shares = forms[0].shares_slots
    for i, (tier, form) in enumerate(zip(tiers, forms, strict=True)):
        operands[f"row_of{i}"] = tier.row_of
        if form.shares_slots:
            pass  # the next tier's table has its items
        elif form.changes or form.static_in_step:
            changed[f"table{i}"] = tier.tables.table
            most = max(most, form.most_slots) if form.changes else most
        else:
            operands[f"table{i}"] = tier.tables.table
        if form.fetches:
            jobs = form.num_jobs(num_pairs, num_experts)
            sizes |= {f"rows{i}": jobs, f"slots{i}": jobs}
            sizes[f"streamed{i}"] = form.later_waves * form.passing
        rest = tier.tables._asdict()
        changed |= {f"{name}{i}": rest[name] for name in ("clock", "events", "gate")}
    if shares:
        sizes |= {"base": num_pairs, "leading": sizes["streamed0"]}
    interpret = target.simulated
    body = functools.partial(_plan_body, forms=tuple(forms), at_least=at_least, interpret=interpret)
    name = f"cache_plan_{num_pairs}_of_{num_experts}_in_{'_'.join(str(f.slots) for f in forms)}"
    num_warps = _default_num_warps(most, num_pairs, 1 if shares else len(tiers))
    found = operands | _launch(body, name, operands, changed, sizes, num_warps, interpret)
    num_layers, tables, fetch, streamed = tiers[0].row_of.shape[0], [], [], []

    def passing(form: TierShape, rows: Any, after: int = 0) -> Fetch | None:
        if not (form.fetches and form.later_waves):
            return None
        rows = rows.reshape(form.later_waves, form.passing)
        first = form.first_transient(num_layers) + after
        places = first + jnp.arange(form.passing, dtype=jnp.int32)
        return Fetch(rows, jnp.broadcast_to(places, rows.shape))

    for i, (tier, form) in enumerate(zip(tiers, forms, strict=True)):
        own = found | ({f"table{i}": tier.tables.table} if form.shares_slots else {})
        tables.append(Tables(*(own[f"{field}{i}"] for field in Tables._fields)))
        fetch.append(Fetch(found[f"rows{i}"], found[f"slots{i}"]) if form.fetches else None)
        after = form.passing if form.shares_slots else 0  # their base planes come first
        streamed.append(passing(form, found.get(f"streamed{i}"), after))
    shape, base = asked.ids.shape, None
    if shares:
        base = SharedBase(found["base"].reshape(shape), passing(forms[0], found["leading"]))
    made = LayerPlan(
        found["runs"].reshape(shape),
        found["slot"].reshape(shape),
        found["wave"].reshape(shape) if has_waves else None,
        tuple(fetch),
        tuple(streamed),
        base,
        None if asked.host is None else found["hosted"].reshape(shape),
    )
    return tuple(tables), found.get("mass"), made


def predict_triton(
    tiers: Sequence[TierOperands],
    layer: jax.Array,
    ids: jax.Array,
    active: jax.Array,
    refined: jax.Array | None,
    *,
    forms: Sequence[TierShape],
    target: Target,
) -> tuple[tuple[Tables, ...], tuple[Fetch, ...]]:
    """Computes `api.predict` by Triton."""
    pool, form, last, interpret = tiers[-1].tables, forms[-1], len(tiers) - 1, target.simulated
    operands = {"layer": layer, "ids": ids}
    operands |= {} if refined is None else {"refined": refined}
    operands |= {"active": active, "clock": pool.clock}
    operands |= {f"row_of{i}": tier.row_of for i, tier in enumerate(tiers)}
    changed = {f"table{last}": pool.table}
    changed |= {f"events{i}": tier.tables.events for i, tier in enumerate(tiers)}
    sizes = {f"{name}{i}": len(ids) for name in ("rows", "slots") for i in range(len(tiers))}
    num_warps = _default_num_warps(form.most_slots, len(ids))
    kernel, planes = (_predict_body, "") if refined is None else (predict_shared_body, "planes_")
    body = functools.partial(kernel, form=form, interpret=interpret)
    name = f"cache_predict_{planes}{len(ids)}_of_{tiers[0].row_of.shape[1]}"
    found = _launch(body, name, operands, changed, sizes, num_warps, interpret)
    after = [tier.tables._replace(events=found[f"events{i}"]) for i, tier in enumerate(tiers)]
    after[-1] = after[-1]._replace(table=found[f"table{last}"])
    jobs = (Fetch(found[f"rows{i}"], found[f"slots{i}"]) for i in range(len(tiers)))
    return tuple(after), tuple(jobs)


def _launch(
    body: Callable[..., None],
    name: str,
    operands: dict[str, jax.Array],
    changed: dict[str, jax.Array],
    sizes: dict[str, int],
    num_warps: int,
    interpret: bool,
) -> dict[str, Any]:
    """One program; what is changed in place, and int32 vectors of these sizes, by name."""
    made = [field for field, size in sizes.items() if size]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in changed.values()]
    shapes += [jax.ShapeDtypeStruct((sizes[field],), jnp.int32) for field in made]
    found = launch.triton_call(
        functools.partial(body, names=(*operands, *changed, *changed, *made)),
        name=name,
        grid=(1,),
        out_shape=shapes,
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        aliases={len(operands) + i: i for i in range(len(changed))},
    )(*operands.values(), *changed.values())
    none = {field: jnp.zeros(0, jnp.int32) for field in sizes}
    return none | dict(zip((*changed, *made), found, strict=True))


def _store_none(*refs: Ref) -> None:
    """-1 everywhere."""
    for ref in refs:
        lanes = padded_iota(ref.shape[0])
        pltriton.store(ref.at[lanes], jnp.full_like(lanes, -1), mask=lanes < ref.shape[0])


def _load_gate(of: Refs, layer: jax.Array) -> jax.Array:
    """The router's mass of a layer, by what became of it."""
    num = of["mass"].shape[1]
    lanes = padded_iota(num)
    return pltriton.load(of["mass"].at[layer, lanes], mask=lanes < num, other=0.0)


def _store_gate(
    of: Refs, states: Sequence[Entries], layer: jax.Array, pairs: PaddedPairs, tier: jax.Array,
    total: jax.Array, weights: jax.Array, routed: jax.Array | None,
) -> None:  # fmt: skip
    """Adds the router's mass by what became of it; and to each tier's own count."""
    num, lanes = len(states), padded_iota(of["mass"].shape[1])
    mass, lane = jnp.where(pairs.active, weights, 0.0), lanes[:, None]
    kinds = (tier[None, :] == lane) | ((tier < 0)[None, :] & (lane == num)) | (lane == num + 2)
    if routed is not None:
        kinds |= ((tier >= 0) & (pairs.ids != routed))[None, :] & (lane == num + 1)
    sums = jnp.sum(jnp.where(kinds, mass[None, :], 0.0), axis=1)
    inside = lanes < of["mass"].shape[1]
    pltriton.store(of["mass"].at[layer, lanes], total + sums, mask=inside)
    for i, state in enumerate(states):
        for column, before in enumerate(state.mass):
            # Only one lane is stored; the others' indices are beyond the end.
            place = state.of["gate"].at[layer, jnp.where(lanes == i, column, lanes + 2)]
            pltriton.store(place, before + sums, mask=lanes == i)
