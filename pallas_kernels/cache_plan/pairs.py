"""Inside the kernel: the pairs of a layer, what they ask for, and what is there for them.

All loads but those of slots are here: they wait for each other nowhere else but in the addresses.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.cache_plan import slots as vectors
from pallas_kernels.cache_plan.operands import TierShape
from pallas_kernels.cache_plan.slots import Refs, matches, padded_iota, some
from pallas_kernels.triton.elements import quotient, remainder

MAX_TIERS = 4
NO_TIER = MAX_TIERS  # in a least, where nothing is asked for


class PaddedPairs(NamedTuple):
    """Pairs of a layer, padded to a power of two."""

    number: jax.Array
    inside: jax.Array
    active: jax.Array
    ids: jax.Array  # -1 where nothing is asked for
    leads: jax.Array  # the first of those with its id, who all run in one tier
    tier: jax.Array  # of highest fidelity that is asked for of the expert, or `NO_TIER`
    strict: jax.Array  # no better one will do


class Entries(NamedTuple):
    """Entries of a tier's tables for the pairs' experts, read before any write."""

    of: Refs
    clock: jax.Array
    local: jax.Array  # local slots, -1: none
    serves: jax.Array  # bool[P], a copy is there, and does not leave for that a better one is
    ahead: jax.Array | None  # bool[P], it was brought ahead; None of a tier where nothing is
    events: jax.Array
    mass: tuple[jax.Array, ...]  # the two columns of its gate


def _entries_of_tiers(
    tiers: Sequence[Refs], forms: Sequence[TierShape], layer: jax.Array, ids: jax.Array
) -> list[Entries]:
    """Entries of tiers that have slots of their own."""
    states, better = [], ids < -1
    for tables, form in zip(tiers, forms, strict=True):
        local = vectors.load_local(tables, layer, ids)
        resident = local >= 0
        serves = resident if form.is_full else resident & ~better
        better |= resident
        is_used = form.changes or form.static_in_step
        ahead = vectors.load_ahead(tables, layer, local) if is_used else None
        states.append(_entries(tables, layer, local, serves, ahead))
    return states


def _entries_of_planes(
    tiers: Sequence[Refs], forms: Sequence[TierShape], layer: jax.Array, ids: jax.Array
) -> list[Entries]:
    """Entries of two tiers that share slots: a refinement serves where its base plane is."""
    pool, planes = tiers[1], forms[1].planes
    num_experts = pool["row_of"].shape[1]
    items = ids, jnp.where(ids >= 0, num_experts + ids, -1)
    local = [vectors.load_local(pool, layer, of_plane) for of_plane in items]
    ahead = [vectors.load_ahead(pool, layer, at, planes) for at in local]
    has_base = local[1] >= 0
    serves = (local[0] >= 0) & has_base, has_base
    return [_entries(tiers[i], layer, local[i], serves[i], ahead[i]) for i in range(2)]


def _entries(
    tables: Refs, layer: jax.Array, local: jax.Array, serves: jax.Array, ahead: jax.Array | None
) -> Entries:
    mass = tuple(tables["gate"][layer, column] for column in range(2))
    events = vectors.load_events(tables, layer)
    return Entries(tables, tables["clock"][()], local, serves, ahead, events, mass)


def load_all(
    of: Refs, tiers: Sequence[Refs], forms: Sequence[TierShape], layer: jax.Array, at_least: bool
) -> tuple[PaddedPairs, list[Entries]]:
    """The pairs, and each tier's entries for them."""
    num_pairs = of["ids"].shape[0]
    width = num_pairs // of["active"].shape[0]
    number = padded_iota(num_pairs)
    inside = number < num_pairs
    place = quotient(number, width)
    active = pltriton.load(of["active"].at[place], mask=inside, other=False) & inside
    ids = pltriton.load(of["ids"].at[number], mask=inside, other=-1)
    ids = jnp.where(active, ids, -1)
    entries = _entries_of_planes if forms[0].shares_slots else _entries_of_tiers
    states = entries(tiers, forms, layer, ids)
    if "high" in of:
        tier, strict = _by_rule(of, layer, ids, states, at_least)
        asks = active & (tier >= 0)
    elif "tier" not in of:  # all in the first, of one
        tier, strict, asks = jnp.zeros_like(ids), ids >= 0, active
    else:
        tier = pltriton.load(of["tier"].at[number], mask=inside, other=-1)
        allows = pltriton.load(of["at_least"].at[number], mask=inside, other=False)
        # Among the pairs of a tier, those that accept no better one come first.
        asks = active & (tier >= 0)
        least = jnp.where(asks, 2 * tier + allows.astype(jnp.int32), 2 * NO_TIER)
        if num_pairs > width:
            least = jnp.min(jnp.where(matches(ids, ids), least[None, :], 2 * NO_TIER), axis=1)
        tier, strict = least >> 1, least & 1 == 0
    ids = jnp.where(asks, ids, -1)
    pairs = PaddedPairs(
        number, inside, active, ids, vectors.leads(ids, num_pairs // width),
        jnp.where(asks, tier, NO_TIER), asks & strict,
    )  # fmt: skip
    return pairs, [
        state._replace(local=jnp.where(asks, state.local, -1), serves=state.serves & asks)
        for state in states
    ]


def _by_rule(
    of: Refs, layer: jax.Array, ids: jax.Array, states: Sequence[Entries], at_least: bool
) -> tuple[jax.Array, jax.Array]:
    """int32[P], the tiers that pairs ask for; bool[P], no better one will do."""
    critical = ids < -1
    width = of["ids"].shape[0] // of["active"].shape[0]
    if "critical" in of:
        rank = remainder(jax.lax.iota(jnp.int32, len(ids)), width)
        critical = (ids >= 0) & (rank < of["critical"][layer])
        if of["active"].shape[0] > 1:  # an expert is critical for all of its pairs
            critical = some(matches(ids, ids) & critical[None, :], axis=1)
    high, resident = of["high"][()], ids < -1
    for i, state in enumerate(states):
        resident |= state.serves & (high == i)
    tier = jnp.where(critical | (resident & of["high_if_resident"][()]), high, of["low"][()])
    return tier, critical if at_least else ids >= 0


def resolved_tiers(
    pairs: PaddedPairs, states: Sequence[Entries], forms: Sequence[TierShape]
) -> tuple[jax.Array, jax.Array]:
    """int32[P], in which tier each pair's expert runs, or -1; whether it is fetched for it."""
    if len(states) == 1:  # whatever is asked for, the one tier serves
        asks = pairs.ids >= 0
        return jnp.where(asks, 0, -1), asks & ~states[0].serves
    exact, there = pairs.ids < -1, jnp.full_like(pairs.ids, -1)
    for i, (state, form) in enumerate(zip(states, forms, strict=True)):
        exact |= state.serves & (pairs.tier == i)
        if not form.refines:
            there = jnp.where(state.serves & (pairs.tier > i) & ~pairs.strict, i, there)
    asks = pairs.ids >= 0
    reused = asks & (there >= 0)
    served = jnp.where(reused, there, pairs.tier)
    return jnp.where(asks, served, -1), asks & ~exact & ~reused
