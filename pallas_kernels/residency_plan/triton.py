"""The Pallas-Triton implementation: one launch of one program, in place on the tables."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.dequant_matmul.triton import platform_refusal
from pallas_kernels.residency_plan import slots as vectors
from pallas_kernels.residency_plan.operands import (
    Columns,
    Fetch,
    Placed,
    Tables,
    Waves,
    first_transient,
    num_jobs,
    num_slots,
)
from pallas_kernels.residency_plan.slots import Ref, iota, matches, pick, power_of_two, together
from pallas_kernels.target import Target
from pallas_kernels.triton_elements import quotient, remainder

MAX_PAIRS = 256
MAX_EXPERTS = 512
ELEMENTS = 32  # of the largest comparison of pairs, a thread's: with 64 registers spill


def default_num_warps(slots: int, num_asked: int) -> int:
    """For all pairs of what is asked for, and of it and the slots."""
    asked = power_of_two(num_asked)
    most = asked * max(asked, power_of_two(slots))
    return min(32, max(4, most // (32 * ELEMENTS)))


def refusal(num_experts: int, num_asked: int, target: Target) -> str | None:
    """Why this implementation cannot serve, or None; see `api.refusal`."""
    reasons = [platform_refusal(target)]
    if num_experts > MAX_EXPERTS:
        reasons.append(f"{num_experts} experts a layer, more than {MAX_EXPERTS}")
    if not 1 <= num_asked <= MAX_PAIRS:
        reasons.append(f"{num_asked} experts are asked for, not 1..{MAX_PAIRS}")
    return "; ".join(filter(None, reasons)) or None


def _plan_body(
    *refs: Ref,
    names: tuple[str, ...],
    waves: Waves,
    banks: int,
    columns: Columns,
    interpret: bool,
) -> None:
    # The outputs come last: of the tables, they take the place of the operands.
    of = dict(zip(names, refs, strict=True))
    layer, clock = of["layer"][()], of["clock"][()]
    num_layers, num_experts = of["row_of"].shape
    num_pairs, slots = of["ids"].shape[0], num_slots(of["table"], num_experts)
    width = num_pairs // of["active"].shape[0]
    pairs = iota(num_pairs)
    inside = pairs < num_pairs
    active = pltriton.load(of["active"].at[quotient(pairs, width)], mask=inside, other=False)
    active &= inside
    ids = pltriton.load(of["ids"].at[pairs], mask=inside, other=-1)
    weights = pltriton.load(of["weights"].at[pairs], mask=inside, other=0.0)
    # All loads come first: they wait for each other nowhere else but in the addresses.
    ids = jnp.where(active, ids, -1)
    local = vectors.load_local(of, layer, ids)
    lead, miss = vectors.leads(ids, of["active"].shape[0]), (ids >= 0) & (local < 0)
    used = jnp.where(lead, local, -1)
    ahead = vectors.load_ahead(of, layer, used) if slots else used < -1
    events, lanes = vectors.load_events(of, layer), iota(2)
    mass = of["gate"][layer, lanes]
    num_needed, num_misses, prefetch_hits = together(lead, lead & miss, ahead)
    first_slot = quotient(layer, banks) * slots
    made = [of[name] for name in ("rows", "slots", "streamed") if name in of]

    def serve() -> tuple[jax.Array, ...]:
        """All are in slots."""
        if not interpret:
            # What the tables held has been read, by every thread, before any writes.
            pltriton.debug_barrier()
        if slots:
            vectors.store_use_at(of, layer, used, clock)
        vectors.store_none(*made)
        none = num_misses  # 0: a branch must not return a literal
        return local, jnp.minimum(local, -1), none, none, none, none

    def admit() -> tuple[jax.Array, ...]:
        """Some are not: the slot of each, its number among what is streamed, and the counts."""
        order = vectors.order_of(lead & miss, ids)
        row = vectors.load_rows(of, layer, ids)
        found, victims = local, jnp.int32(0)
        admitted = evictions = waste = streamed = jnp.minimum(num_misses, 0)
        index, writes = jnp.minimum(local, -1), []
        if slots:
            loaded = vectors.load_slots(of, layer)
            table = vectors.candidates(loaded, clock, ids)
            victim = table.victim
            free = victim & ~loaded.owned
            victims, num_free = together(victim, free)
            if waves.num:
                # A pass over more experts than there is room for is a scan: it evicts nothing.
                fits = num_misses <= victims
                victim &= free | fits
                victims = jnp.where(fits, victims, num_free)
            who = jnp.where(miss, order, -2)
            taker, took = vectors.taken(table, victim, jnp.minimum(num_misses, victims), who)
            coming = pick(matches(taker, who), ids[None, :], 1)
            found = jnp.maximum(local, took)
            came = coming >= 0
            admitted, evictions, waste = together(
                came, came & loaded.owned, came & loaded.owned & (loaded.ahead != 0)
            )
            come = jnp.where(miss & (found >= 0), order, -1)
            use = table.wanted | came
            writes = [
                functools.partial(vectors.store_owners, of, layer, table, coming),
                functools.partial(vectors.store_use, of, layer, table, use, clock, 0),
                functools.partial(
                    vectors.store_jobs, of, of["rows"].shape[0], come, row, first_slot + found
                ),
            ]
        if waves.num:
            index = jnp.where(miss & (found < 0), order - victims, -1)
            index = jnp.where(index < waves.num * waves.transient, index, -1)
            streams = index >= 0
            streamed = vectors.count(lead & streams)
        if not interpret:
            pltriton.debug_barrier()  # as above
        for write in writes:
            write()
        if waves.num:
            size = waves.num * waves.transient
            jobs = iota(size)
            rows = pick(matches(jobs, index), row[None, :], 1)
            pltriton.store(of["streamed"].at[jobs], rows, mask=jobs < size)
        return found, index, admitted, evictions, waste, streamed

    local, index, admitted, evictions, waste, streamed = jax.lax.cond(num_misses > 0, admit, serve)
    slot, wave = jnp.where(local >= 0, first_slot + local, -1), jnp.where(local >= 0, 0, -1)
    if waves.num:
        first = first_transient(num_layers, slots, banks)
        slot = jnp.where(index >= 0, first + remainder(index, waves.transient), slot)
        wave = jnp.where(index >= 0, 1 + quotient(index, waves.transient), wave)
    amounts = {
        "steps": jnp.minimum(num_needed, 1), "needed": num_needed,
        "hits": num_needed - num_misses, "misses": num_misses, "admitted": admitted,
        "streamed": streamed, "unserved": num_misses - admitted - streamed,
        "evictions": evictions, "prefetch_hits": prefetch_hits, "prefetch_waste": waste,
    }  # fmt: skip
    of["clock"][()] = clock + 1
    vectors.store_events(of, layer, events, columns, amounts)
    # To the mass of all and of the first tier.
    of["gate"][layer, lanes] = mass + jnp.sum(jnp.where(ids >= 0, weights, 0.0))
    pltriton.store(of["slot"].at[pairs], slot, mask=inside)
    pltriton.store(of["wave"].at[pairs], wave, mask=inside)


def _predict_body(
    *refs: Ref, names: tuple[str, ...], banks: int, columns: Columns, interpret: bool
) -> None:
    of = dict(zip(names, refs, strict=True))
    layer, clock = of["layer"][()], of["clock"][()]
    size, tokens = of["ids"].shape[0], of["active"].shape[0]
    slots = num_slots(of["table"], of["row_of"].shape[1])
    wanted, lanes = iota(size), iota(tokens)
    mask = pltriton.load(of["active"].at[lanes], mask=lanes < tokens, other=False)
    mask = (wanted < size) & vectors.some(mask & (lanes < tokens))
    ids = pltriton.load(of["ids"].at[wanted], mask=wanted < size, other=-1)
    ids = jnp.where(mask, ids, -1)
    loaded, local = vectors.load_slots(of, layer), vectors.load_local(of, layer, ids)
    row, events = vectors.load_rows(of, layer, ids), vectors.load_events(of, layer)
    table = vectors.candidates(loaded, clock, ids)
    new = (ids >= 0) & (local < 0)
    order = vectors.order_of(vectors.leads(ids) & new, ids)
    num_new, who = vectors.count(vectors.leads(ids) & new), jnp.where(new, order, -2)
    number = jnp.minimum(num_new, vectors.count(table.victim))
    taker, took = vectors.taken(table, table.victim, number, who)
    coming = pick(matches(taker, who), ids[None, :], 1)
    came = coming >= 0
    prefetched, evictions, waste = together(
        came, came & loaded.owned, came & loaded.owned & (loaded.ahead != 0)
    )
    amounts = {"prefetched": prefetched, "evictions": evictions, "prefetch_waste": waste}
    if not interpret:
        pltriton.debug_barrier()  # as in `_plan_body`
    vectors.store_owners(of, layer, table, coming)
    vectors.store_use(of, layer, table, came, clock, 1)
    come = jnp.where(took >= 0, order, -1)
    vectors.store_jobs(of, size, come, row, quotient(layer, banks) * slots + took)
    vectors.store_events(of, layer, events, columns, amounts)


def plan_triton(
    tables: Tables,
    row_of: jax.Array,
    layer: jax.Array,
    ids: jax.Array,
    active: jax.Array,
    weights: jax.Array,
    *,
    waves: Waves,
    banks: int,
    columns: Columns,
    num_warps: int | None,
    interpret: bool,
) -> tuple[Tables, Placed]:
    """See `api.plan`."""
    num_experts, slots = row_of.shape[1], num_slots(tables.table, row_of.shape[1])
    jobs, streamed = num_jobs(ids.size, num_experts, slots), waves.num * waves.transient
    operands = {
        "layer": layer, "ids": ids.reshape(-1), "active": active, "weights": weights.reshape(-1),
        "row_of": row_of,
    }  # fmt: skip
    sizes = {"slot": ids.size, "wave": ids.size, "rows": jobs, "slots": jobs, "streamed": streamed}
    num_warps = num_warps or default_num_warps(slots, ids.size)
    body = functools.partial(
        _plan_body, waves=waves, banks=banks, columns=columns, interpret=interpret
    )
    name = f"residency_plan_{ids.size}_of_{num_experts}_in_{slots}"
    found = _launch(body, name, operands, tables._asdict(), sizes, num_warps, interpret)
    placed = Placed(
        found["slot"].reshape(ids.shape),
        found["wave"].reshape(ids.shape),
        found["rows"],
        found["slots"],
        found["streamed"].reshape(waves),
    )
    return Tables(*(found[field] for field in Tables._fields)), placed


def predict_triton(
    tables: Tables,
    row_of: jax.Array,
    layer: jax.Array,
    ids: jax.Array,
    active: jax.Array,
    *,
    banks: int,
    columns: Columns,
    num_warps: int | None,
    interpret: bool,
) -> tuple[Tables, Fetch]:
    """See `api.predict`."""
    operands = {
        "layer": layer, "ids": ids, "active": active, "row_of": row_of, "clock": tables.clock,
    }  # fmt: skip
    changed = {"table": tables.table, "events": tables.events}
    sizes = {"rows": len(ids), "slots": len(ids)}
    slots = num_slots(tables.table, row_of.shape[1])
    num_warps = num_warps or default_num_warps(slots, len(ids))
    body = functools.partial(_predict_body, banks=banks, columns=columns, interpret=interpret)
    name = f"residency_predict_{len(ids)}_of_{row_of.shape[1]}"
    found = _launch(body, name, operands, changed, sizes, num_warps, interpret)
    tables = tables._replace(table=found["table"], events=found["events"])
    return tables, Fetch(found["rows"], found["slots"])


def _launch(
    body: Callable[..., None],
    name: str,
    operands: dict[str, jax.Array],
    changed: dict[str, jax.Array],
    sizes: dict[str, int],
    num_warps: int,
    interpret: bool,
) -> dict[str, jax.Array]:
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
