"""What every implementation of `pallas_kernels.tiered_plan` must do: as the engine's own rules.

Random steps, in one compiled loop: a policy's decisions, and between them arrivals of bulk
transfers, after which an expert may be in several tiers. At each step the tables are given to the
implementation and to `moejax.policies.mixed_cache` and `moejax.memory.residency`, whose decisions
must be equal: all integers to the bit.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.ledger import EVENTS, no_counts
from moejax.memory import residency
from moejax.memory.residency import CacheSpec
from moejax.policies import mixed_cache
from moejax.policies.base import Decision
from pallas_kernels import residency_plan
from pallas_kernels import tiered_plan as package

COLUMNS = {name: i for i, name in enumerate(EVENTS)}


class Case(NamedTuple):
    """Sizes, and slots of each tier; a tier of all experts is complete unless it is `cold`.

    One without slots has transient ones for all pairs of a step.
    """

    layers: int
    experts: int
    slots: tuple[int, ...]
    tokens: int
    width: int
    banks: int = 1
    cold: bool = False
    fixed: bool = False
    rule: str = ""  # "critical", "held", "reused" or "one": by a rule in place of wishes
    fed: bool = True
    steps: int = 150


CASES = {
    "one": Case(3, 9, (5,), 1, 4, banks=2),
    "one_of_all": Case(2, 6, (6,), 2, 2),
    "hot_and_all": Case(2, 9, (4, 9), 1, 4, banks=2),
    "hot_and_all_cold": Case(2, 9, (5, 9), 1, 4, cold=True),
    "two_caches": Case(2, 12, (6, 7), 2, 3),
    "three": Case(2, 10, (4, 6, 10), 2, 2, banks=2),
    "qwen": Case(1, 128, (32, 48), 1, 8, steps=100),
    "hot_alone": Case(3, 9, (5, 0), 1, 4, banks=2),
    "streams": Case(2, 12, (6, 0, 8), 2, 3),
    "tokens": Case(1, 24, (20, 24), 6, 3, steps=100),
    "fixed": Case(2, 9, (4, 9), 2, 4, banks=2, fixed=True),
    "fixed_over_caches": Case(2, 12, (5, 7, 6), 2, 3, fixed=True),
    "fixed_over_cold": Case(1, 24, (8, 24), 6, 3, cold=True, fixed=True),
    "unfed": Case(2, 12, (6, 7), 2, 3, fed=False),
    "unfed_qwen": Case(1, 128, (48, 32), 1, 8, fed=False, steps=100),
    "unfed_three": Case(2, 10, (6, 5, 7), 1, 3, banks=2, fed=False),
    "unfed_over_streams": Case(2, 12, (9, 0), 1, 3, fed=False),
    "critical": Case(2, 12, (6, 7), 1, 4, rule="critical"),
    "critical_tokens": Case(2, 16, (9, 10), 3, 3, rule="critical", fed=False),
    "critical_unfed": Case(1, 128, (64, 8), 1, 8, rule="critical", fed=False),
    "skips": Case(2, 12, (6,), 1, 4, rule="skips"),
    "reused": Case(2, 12, (6,), 2, 3, rule="reused"),
    "held": Case(2, 9, (4, 9), 1, 4, banks=2, fixed=True, rule="held"),
    "held_tokens": Case(2, 9, (4, 9), 3, 3, fixed=True, rule="held"),
    "held_in_the_second": Case(2, 9, (3, 4, 9), 2, 2, rule="held"),
    "one_by_rule": Case(3, 9, (5,), 1, 4, banks=2, rule="one"),
}


class Given(NamedTuple):
    """Of one step."""

    layer: Any
    ids: Any  # int32[N, A]
    tier: Any  # int32[N, A], -1: skipped
    at_least: Any
    active: Any
    weights: Any
    routed_ids: Any
    critical: Any  # int32[M]
    arrives: Any  # int32[T], an expert for each tier, -1: none


def caches(case: Case) -> tuple[CacheSpec, ...]:
    return tuple(
        CacheSpec(
            num_layers=case.layers,
            num_experts=case.experts,
            slots=slots,
            transient=1 if slots else case.tokens * case.width,
            banks=case.banks,
        )
        for slots in case.slots
    )


def is_complete(case: Case, spec: CacheSpec) -> bool:
    return spec.slots == case.experts and not case.cold


def forms(case: Case) -> tuple[package.Form, ...]:
    return tuple(
        package.Form(
            case.banks,
            spec.slots == case.experts,
            is_complete(case, spec),
            0 if spec.slots else spec.transient,
            case.fixed and i == 0,
            case.fed,
        )
        for i, spec in enumerate(caches(case))
    )


def held_alone(case: Case, given: Given, states: Any) -> Given:
    """Of a tier that is fixed nobody asks for what it does not hold."""
    if not case.fixed:
        return given
    absent = states[0][0].table[given.layer, : case.experts][given.ids] < 0
    return given._replace(tier=jnp.where(absent & (given.tier == 0), 1, given.tier))


def random_steps(case: Case, seed: int) -> Given:
    rng, n, size = np.random.default_rng(seed), case.steps, (case.tokens, case.width)
    keys = rng.gumbel(size=(n, case.tokens, case.experts))
    keys -= rng.uniform(0, 1.5) * np.log(np.arange(1, case.experts + 1))
    ids = (-keys).argsort(2)[..., : case.width].astype(np.int32)
    others = np.where(rng.random(ids.shape) < 0.8, ids, (ids + 1) % case.experts)
    arrives = rng.integers(case.experts, size=(n, len(case.slots)), dtype=np.int32)
    full = np.isin(case.slots, (0, case.experts))
    arrives[(rng.random(arrives.shape) < 0.7) | full | (not case.fed)] = -1
    eighths = rng.integers(0, 9, (n, *size)).astype(np.float32) / 8
    return Given(
        rng.integers(case.layers, size=n, dtype=np.int32),
        ids,
        rng.integers(-1, len(case.slots), (n, *size), dtype=np.int32),
        rng.random((n, *size)) < 0.5,
        rng.random((n, case.tokens)) < 0.85,
        eighths,
        others.astype(np.int32),
        rng.integers(case.width + 1, size=(n, case.layers), dtype=np.int32),
        arrives,
    )


def rule_of(case: Case, given: Given) -> package.Rule:
    lowest, first = jnp.int32(len(case.slots) - 1), jnp.int32(0)
    yes, no = jnp.bool_(True), jnp.bool_(False)
    return {
        "critical": lambda: package.Rule(given.critical, first, lowest, no, at_least=True),
        "skips": lambda: package.Rule(given.critical, first, jnp.int32(-1), no, at_least=True),
        "reused": lambda: package.Rule(given.critical, first, jnp.int32(-1), yes, at_least=True),
        "held": lambda: package.Rule(None, lowest - 1, lowest, yes),
        "one": lambda: package.Rule(None, first, first, no),
    }[case.rule]()


def with_wishes(case: Case, given: Given, serves: jax.Array) -> Given:
    """By what a rule says, pair by pair."""
    if not case.rule:
        return given
    rule, tier, at_least = rule_of(case, given), given.tier, given.at_least
    pairs = [(n, a) for n in range(case.tokens) for a in range(case.width)]
    for n, a in pairs:
        is_critical = jnp.bool_(False)
        for m, b in pairs if rule.critical is not None else ():
            same = given.active[m] & (given.ids[m, b] == given.ids[n, a])
            is_critical |= same & (b < rule.critical[given.layer])
        is_high = is_critical | (rule.held & serves[rule.high, given.ids[n, a]])
        tier = tier.at[n, a].set(jnp.where(is_high, rule.high, rule.low))
        at_least = at_least.at[n, a].set(~is_critical & rule.at_least)
    return given._replace(tier=tier, at_least=at_least)


def by_rules(case: Case, given: Given, states: Any, row_of: Any) -> Any:
    """Step by step, as `moejax.memory.tiered_experts` does it without the kernel."""
    num = case.experts
    resident = jnp.stack([state.table[given.layer, :num] >= 0 for state, _ in states])
    serves = mixed_cache.serving(resident, [spec.slots == num for spec in caches(case)])
    given = with_wishes(case, given, serves)
    decision = Decision(given.ids, given.tier, given.weights, given.at_least)
    found = mixed_cache.served(serves, decision, given.active)
    runs = given.active[:, None] & (given.tier >= 0)
    tier = jnp.where(runs, found.tier[given.ids], -1)
    slot, after, fetch = jnp.full_like(tier, -1), [], []
    for i, (spec, (state, counts)) in enumerate(zip(caches(case), states, strict=True)):
        is_full, before = spec.slots == num, state.table
        is_fixed = case.fixed and i == 0
        if len(states) > 1 and not (is_full or is_fixed):
            gone = found.leaving[i] | (resident[i] & jnp.any(resident[:i], axis=0))
            state, counts = residency.release(state, given.layer, gone, counts)
        mine = tier == i
        places = jnp.where(mine, given.ids, num).reshape(-1)
        needed = jnp.zeros(num, bool).at[places].set(True, mode="drop")
        bound = min(mine.size, num)
        made, state, counts = residency.plan(spec, state, given.layer, needed, bound, counts)
        mass = jnp.sum(jnp.where(mine, given.weights, 0.0)).reshape(1)
        counts = counts.add_gate_mass(given.layer, mass)
        slot = jnp.where(mine, made.slot[given.ids], slot)
        if is_complete(case, spec):
            state, jobs = dataclasses.replace(state, table=before), None
        elif is_fixed:
            jobs = None
        else:
            come, to = made.admitted, made.admitted_slots
            if not spec.slots:
                come = made.streamed[0, :bound]
                to = spec.first_transient + jnp.arange(len(come), dtype=jnp.int32)
            rows = jnp.where(come >= 0, row_of[given.layer, jnp.maximum(come, 0)], -1)
            jobs = residency_plan.Fetch(rows, jnp.where(come >= 0, to, -1))
        after.append((state, counts))
        fetch.append(jobs)
    kinds = [tier == i for i in range(len(states))]
    kinds += [tier < 0, (tier >= 0) & (given.ids != given.routed_ids), jnp.ones_like(runs)]
    mass = jnp.where(given.active[:, None], given.weights, 0.0)
    gate = jnp.stack([jnp.sum(jnp.where(kind, mass, 0.0)) for kind in kinds])
    return after, gate, package.Placed(jnp.where(slot >= 0, tier, -1), slot, tuple(fetch))


def tables_of(state: Any, counts: Any) -> residency_plan.Tables:
    return residency_plan.Tables(state.table, state.clock, counts.events, counts.gate)


def arrived(case: Case, given: Given, states: Any) -> Any:
    """With what bulk transfers bring, in whatever tier the expert is already."""
    after = []
    for i, (spec, (state, counts)) in enumerate(zip(caches(case), states, strict=True)):
        if not spec.slots:
            after.append((state, counts))
            continue
        coming = given.arrives[i][None]
        after.append(residency.admit(spec, state, given.layer, coming, counts)[1:])
    return after


@functools.partial(jax.jit, static_argnums=(0, 2))
def replay(case: Case, steps: Given, how: Any, row_of: jax.Array) -> Any:
    """(found, expected) after each step, stacked."""

    def step(states: Any, given: Given) -> Any:
        states = arrived(case, given, states)
        given = held_alone(case, given, states)
        after, gate, placed = by_rules(case, given, states, row_of)
        tiers = [package.Tier(tables_of(*one), row_of) for one in states]
        asked = package.Asked(
            given.ids,
            rule_of(case, given) if case.rule else package.Wishes(given.tier, given.at_least),
            given.weights,
            given.routed_ids,
        )
        start = jnp.ones((case.layers, len(states) + 3), jnp.float32)
        found = package.place(
            tiers,
            start,
            given.layer,
            asked,
            given.active,
            forms=forms(case),
            columns=COLUMNS,
            **dict(how),
        )
        expected = tuple(tables_of(*one) for one in after), start.at[given.layer].add(gate), placed
        return [tuple(one) for one in after], (found, expected)

    start = []
    for spec in caches(case):
        state = residency.empty(spec)
        if is_complete(case, spec):
            every = np.tile(np.arange(case.experts, dtype=np.int32)[::-1], (case.layers, 1))
            state = residency.seeded(spec, every)
        start.append((state, no_counts(case.layers)))
    return jax.lax.scan(step, start, steps)[1]


def check(case: Case, seed: int, **how: Any) -> Any:
    """Raises AssertionError at a difference; returns what was found of every step."""
    shape = (case.layers, case.experts)
    row_of = np.random.default_rng(seed).permutation(np.prod(shape)).reshape(shape)
    row_of = jnp.asarray(row_of, jnp.int32)
    found, expected = replay(case, random_steps(case, seed), tuple(how.items()), row_of)
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, array), wanted in pairs:
        np.testing.assert_array_equal(array, wanted, jax.tree_util.keystr(path))
    return found
