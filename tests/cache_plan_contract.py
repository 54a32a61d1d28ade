"""The contract of `pallas_kernels.cache_plan`: a kernel decides as the reference does, to the bit.

Random steps, in one compiled loop: plans, predictions, and between them arrivals of bulk transfers,
after which an expert may be in several tiers. At each step the same tables are given to the
implementation and to the reference, whose own oracle is `tests.cache_model`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.experts import residency
from moejax.experts.residency import CacheSizes, Counts, Residency, no_counts
from pallas_kernels import cache_plan as package

START = 2**31 - 60  # of the clock: it wraps


class Case(NamedTuple):
    """Sizes, and slots of each tier; a tier of all experts is complete unless it is `cold`.

    Without a policy there is one tier, for which layers may need more than it has slots: waves.
    """

    layers: int
    experts: int
    slots: tuple[int, ...]
    tokens: int
    width: int
    banks: int = 1
    transient: int = 0  # 0: all pairs of a step where there are no slots, else 1
    policy: bool = True
    cold: bool = False
    fixed: bool = False
    refines: bool = False  # the first tier, the next
    rule: str = ""  # "critical", "held", "reused" or "one": by a rule in place of wishes
    fed: bool = True
    shared: bool = False  # two tiers of planes share the slots of the second
    handed_out: bool = False  # skipped pairs are of expert 0, as where other devices run them
    host: tuple[int, ...] = ()  # `Asked.host`
    longer: tuple[int, ...] = ()  # of each tier, layers of a bank with one slot more
    limit: int = 2  # of a prediction
    steps: int = 150


def alone(*sizes: int, slots: int, transient: int, **more: Any) -> Case:
    """One tier without a policy: layers, experts, tokens, width."""
    layers, experts, tokens, width = sizes
    how = {"transient": transient, "policy": False, "cold": True, "steps": 220} | more
    return Case(layers, experts, (slots,), tokens, width, **how)


def shared(*sizes: int, slots: int, **more: Any) -> Case:
    """Two tiers of planes in one pool: layers, experts, tokens, width."""
    layers, experts, tokens, width = sizes
    how = {"shared": True, "refines": True, "cold": True, "fed": False, "transient": 2} | more
    return Case(layers, experts, (slots, slots), tokens, width, **how)


CASES = {
    "decode": alone(3, 9, 1, 4, slots=4, transient=2, banks=2),
    "decode_in_one_bank": alone(2, 12, 1, 3, slots=7, transient=2, limit=4),
    "decode_qwen": alone(2, 128, 1, 8, slots=48, transient=8, limit=8, steps=150),
    "decode_beside_the_host": alone(2, 12, 1, 4, slots=5, transient=2, host=(0, 0, 1, 2, 4)),
    "few_slots_beside_the_host": alone(2, 12, 1, 4, slots=2, transient=4, host=(0, 1, 1, 2, 2)),
    "qwen_beside_the_host": alone(
        2, 128, 1, 8, slots=13, transient=8, limit=8, host=(0, 0, 1, 2, 3, 3, 4, 4, 5)
    ),
    "scan": alone(2, 8, 4, 2, slots=3, transient=2),
    "scan_in_banks": alone(2, 7, 5, 3, slots=4, transient=3, limit=3, banks=2),
    "no_cache": alone(2, 5, 2, 2, slots=0, transient=2),
    "no_cache_at_once": alone(2, 5, 2, 2, slots=0, transient=4, banks=2),
    "one_slot": alone(2, 4, 1, 1, slots=1, transient=1),
    "all_fit": alone(2, 6, 3, 2, slots=6, transient=1),
    "many_pairs": alone(1, 40, 16, 4, slots=20, transient=7, limit=8, steps=120),
    "one": Case(3, 9, (5,), 1, 4, banks=2),
    "one_in_waves": Case(2, 9, (3,), 2, 3, transient=2),
    "one_of_all": Case(2, 6, (6,), 2, 2),
    "one_of_a_mesh": Case(2, 9, (5,), 1, 4, handed_out=True),
    "one_of_a_mesh_in_waves": Case(2, 9, (3,), 3, 3, transient=2, handed_out=True),
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
    "refines": Case(2, 9, (4, 9), 2, 4, refines=True),
    "refines_by_rule": Case(2, 9, (4, 9), 1, 4, refines=True, rule="critical", fed=False),
    "critical_over_all": Case(2, 9, (4, 9), 1, 4, rule="critical", fed=False),
    "critical_tokens": Case(2, 16, (9, 10), 3, 3, rule="critical", fed=False),
    "critical_unfed": Case(1, 128, (64, 8), 1, 8, rule="critical", fed=False),
    "skips": Case(2, 12, (6,), 1, 4, rule="skips"),
    "reused": Case(2, 12, (6,), 2, 3, rule="reused"),
    "held": Case(2, 9, (4, 9), 1, 4, banks=2, fixed=True, rule="held"),
    "held_tokens": Case(2, 9, (4, 9), 3, 3, fixed=True, rule="held"),
    "held_in_the_second": Case(2, 9, (3, 4, 9), 2, 2, rule="held"),
    "small_second": Case(2, 12, (6, 1), 1, 3, transient=3),
    "small_second_by_rule": Case(2, 8, (6, 1), 1, 2, transient=2, rule="critical", fed=False),
    "small_both": Case(2, 12, (2, 3), 2, 3, transient=6),
    "one_bank_at_once": alone(2, 12, 1, 4, slots=2, transient=4),
    "the_rest_at_once": alone(2, 9, 4, 3, slots=5, transient=4),
    "shared": shared(3, 9, 1, 4, slots=9, banks=2, rule="critical"),
    "shared_by_wishes": shared(2, 12, 2, 3, slots=14, limit=4),
    "shared_in_waves": shared(2, 12, 3, 3, slots=7, transient=5, limit=6),
    "shared_in_few_waves": shared(2, 12, 1, 4, slots=6, transient=8, banks=2, rule="critical"),
    "shared_qwen": shared(1, 128, 1, 8, slots=80, rule="critical", limit=8, steps=100),
    "shared_next": shared(1, 512, 1, 10, slots=400, rule="critical", limit=10, steps=100),
    "longer": alone(5, 9, 1, 4, slots=4, transient=2, longer=(2,)),
    "longer_in_banks": alone(5, 9, 1, 4, slots=4, transient=2, banks=2, longer=(1,)),
    "longer_scan": alone(3, 8, 4, 2, slots=3, transient=2, limit=4, longer=(2,)),
    "longer_beside_the_host": alone(
        3, 12, 1, 4, slots=4, transient=2, host=(0, 0, 1, 2, 4), longer=(1,)
    ),
    "all_in_longer": alone(3, 6, 3, 2, slots=5, transient=2, longer=(2,)),
    "one_in_longer": alone(3, 5, 1, 2, slots=0, transient=2, longer=(1,)),
    "longer_caches": Case(3, 12, (6, 6), 2, 3, longer=(1, 2)),
    "longer_second": Case(3, 12, (5, 7), 1, 3, cold=True, fixed=True, longer=(0, 1)),
    "longer_by_rule": Case(3, 12, (5, 7), 1, 4, rule="critical", fed=False, longer=(2, 0)),
    "one_by_rule": Case(3, 9, (5,), 1, 4, banks=2, rule="one"),
}


class Given(NamedTuple):
    """Operands of one layer's plan."""

    is_plan: Any  # else a prediction
    layer: Any
    ids: Any  # int32[N, A]
    tier: Any  # int32[N, A], -1: skipped
    at_least: Any
    active: Any
    weights: Any
    routed_ids: Any
    critical: Any  # int32[M]
    ahead: Any  # int32[limit]
    arrives: Any  # int32[T], an expert for each tier, -1: none


def sizes(case: Case) -> list[tuple[int, int]]:
    """Slots of each tier, and its longer layers."""
    return list(zip(case.slots, case.longer or (0,) * len(case.slots), strict=True))


def forms(case: Case) -> tuple[package.TierShape, ...]:
    found, pairs = [], case.tokens * case.width
    for i, slots in enumerate(case.slots if case.shared else ()):
        most, planes = min(pairs, case.experts), 2
        experts = case.transient // (1 if i else planes)
        found.append(
            package.TierShape(
                slots=slots, banks=case.banks, transient=case.transient, refines=i == 0,
                shares_slots=i == 0, planes=planes, is_full=slots == planes * case.experts,
                waves=0 if planes * most <= slots else -(-most // experts),
            )
        )  # fmt: skip
    for i, (slots, longer) in enumerate(() if case.shared else sizes(case)):
        transient = case.transient or (1 if slots else pairs)
        has_waves = not case.policy or not slots or len(case.slots) == 1 or case.transient > 0
        found.append(
            package.TierShape(
                slots=slots,
                banks=case.banks,
                longer_layers=longer,
                transient=transient,
                waves=has_waves
                * package.num_waves(min(pairs, case.experts), case.experts, slots, transient),
                is_full=slots == case.experts,
                is_complete=slots == case.experts and not case.cold,
                static_in_step=case.fixed and i == 0,
                refines=case.refines and i == 0,
                may_be_promoted_elsewhere=case.fed,
            )
        )
    return tuple(found)


def held_alone(case: Case, given: Given, tables: Any) -> Given:
    """Moves requests for experts that a fixed first tier does not hold to the next tier."""
    if not case.fixed:
        return given
    absent = tables[0].table[given.layer, : case.experts][given.ids] < 0
    return given._replace(tier=jnp.where(absent & (given.tier == 0), 1, given.tier))


def random_steps(case: Case, seed: int) -> Given:
    rng, n, size = np.random.default_rng(seed), case.steps, (case.tokens, case.width)
    keys = rng.gumbel(size=(n, case.tokens, case.experts))
    keys -= rng.uniform(0, 1.5) * np.log(np.arange(1, case.experts + 1))
    ids = (-keys).argsort(2)[..., : case.width].astype(np.int32)
    ahead = (-keys[:, 0]).argsort(1)[:, 1 : 1 + case.limit].astype(np.int32)
    others = np.where(rng.random(ids.shape) < 0.8, ids, (ids + 1) % case.experts)
    arrives = rng.integers(case.experts, size=(n, len(case.slots)), dtype=np.int32)
    full = np.isin(case.slots, (0, case.experts if case.policy else -1))
    arrives[(rng.random(arrives.shape) < 0.7) | full | (not case.fed)] = -1
    predicts = case.shared or (not case.policy and case.slots[0] > 0)
    made = Given(
        rng.random(n) >= 0.25 * predicts,
        rng.integers(case.layers, size=n, dtype=np.int32),
        ids,
        rng.integers(-1, len(case.slots), (n, *size), dtype=np.int32),
        rng.random((n, *size)) < 0.5,
        rng.random((n, case.tokens)) < 0.85,
        rng.integers(0, 9, (n, *size)).astype(np.float32) / 8,
        others.astype(np.int32),
        rng.integers(case.width + 1, size=(n, case.layers), dtype=np.int32),
        np.where(rng.random(ahead.shape) < 0.2, -1, ahead),
        arrives,
    )
    elsewhere = case.handed_out & (made.tier < 0)
    return made._replace(ids=np.where(elsewhere, 0, ids).astype(np.int32))


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


def wishes_pair_by_pair(case: Case, given: Given, serves: jax.Array) -> package.Wishes:
    """The wishes of a case's rule, each pair by itself."""
    rule, tier, at_least = rule_of(case, given), given.tier, given.at_least
    pairs = [(n, a) for n in range(case.tokens) for a in range(case.width)]
    for n, a in pairs:
        is_critical = jnp.bool_(False)
        for m, b in pairs if rule.critical is not None else ():
            same = given.active[m] & (given.ids[m, b] == given.ids[n, a])
            is_critical |= same & (b < rule.critical[given.layer])
        is_high = is_critical | (rule.high_if_resident & serves[rule.high, given.ids[n, a]])
        tier = tier.at[n, a].set(jnp.where(is_high, rule.high, rule.low))
        at_least = at_least.at[n, a].set(~is_critical & rule.at_least)
    return package.Wishes(tier, at_least)


def arrived(case: Case, given: Given, tables: Any) -> Any:
    """With what bulk transfers bring, in whatever tier the expert is already."""
    after: list[Any] = []
    if case.shared:
        return list(tables)
    for i, of in enumerate(tables):
        slots, longer = sizes(case)[i]
        spec = CacheSizes(
            num_layers=case.layers, num_experts=case.experts, slots=slots, transient=1,
            banks=case.banks, longer_layers=longer,
        )  # fmt: skip
        state = Residency(of.table, of.clock, case.experts)
        if case.slots[i]:
            counts = Counts(of.events, of.gate)
            coming = given.arrives[i][None]
            layers = jnp.full_like(coming, given.layer)
            _, state, counts = residency.admit(spec, state, layers, coming, counts)
            of = package.Tables(state.table, state.clock, counts.events, counts.gate)
        after.append(of)
    return after


def plan(case: Case, given: Given, tables: Any, row_of: Any, *, by_pairs: bool, **how: Any) -> Any:
    """A plan without whose experts are copied, which a kernel does not say."""
    asked, gate = package.Asked(given.ids, given.weights), None
    if case.host:
        asked = asked._replace(host=jnp.asarray(case.host, jnp.int32))
    if case.policy:
        by: Any = package.Wishes(given.tier, given.at_least)
        if case.rule and by_pairs:
            if case.shared:
                serves = package.resident_planes(tables[1].table[given.layer], case.experts)
            else:
                copies = jnp.stack([of.table[given.layer, : case.experts] >= 0 for of in tables])
                serves = package.servable(copies, [form.is_full for form in forms(case)])
            by = wishes_pair_by_pair(case, given, serves)
        elif case.rule:
            by = rule_of(case, given)
        asked = package.Asked(given.ids, given.weights, by, given.routed_ids)
        gate = jnp.ones((case.layers, len(tables) + 3), jnp.float32)
    tiers = [package.TierOperands(of, row_of) for of in tables]
    after, gate, made = package.plan(
        tiers, gate, given.layer, asked, given.active, forms=forms(case), **how
    )

    def copies_of(fetch: Any) -> Any:
        return [of and of._replace(experts=None) for of in fetch]

    made = made._replace(fetch=copies_of(made.fetch), streamed=copies_of(made.streamed))
    if made.base is not None:
        [leading] = copies_of([made.base.streamed])
        made = made._replace(base=made.base._replace(streamed=leading))
    return list(after), gate, made


def predict(case: Case, given: Given, tables: Any, row_of: Any, **how: Any) -> Any:
    operands, ids = [package.TierOperands(of, row_of) for of in tables], given.ahead
    if case.shared:
        how["refined"] = given.tier.reshape(-1)[: case.limit] == 0
        ids = ids[: len(how["refined"])]
    after, found = package.predict(
        operands, given.layer, ids, given.active, forms=forms(case), **how
    )
    return list(after), [jobs._replace(experts=None) for jobs in found]


@functools.partial(jax.jit, static_argnums=(0, 2))
def replay(case: Case, steps: Given, how: Any, row_of: jax.Array) -> Any:
    """(found, expected) after each step, stacked."""
    reference = {"implementation": "reference"}

    def step(tables: Any, given: Given) -> Any:
        tables = arrived(case, given, tables)
        given = held_alone(case, given, tables)
        expected = [plan(case, given, tables, row_of, by_pairs=True, **reference)]
        found = [plan(case, given, tables, row_of, by_pairs=False, **dict(how))]
        after = expected[0][0]
        if case.shared or (not case.policy and case.slots[0]):
            expected.append(predict(case, given, tables, row_of, **reference))
            found.append(predict(case, given, tables, row_of, **dict(how)))
            after = jax.tree.map(lambda a, b: jnp.where(given.is_plan, a, b), after, expected[1][0])
        return after, (found, expected)

    start = []
    for slots, form in zip(case.slots, forms(case), strict=True):
        spec = CacheSizes(
            num_layers=case.layers, num_experts=case.experts, slots=slots, transient=1,
            planes=form.planes, banks=form.banks, longer_layers=form.longer_layers,
        )  # fmt: skip
        state, counts = residency.empty(spec), no_counts(case.layers)
        table = state.table[:, :0] if form.shares_slots else state.table
        if form.is_complete:
            every = np.tile(np.arange(case.experts, dtype=np.int32)[::-1], (case.layers, 1))
            table = residency.seeded(spec, every).table
        clock = jnp.int32(START)
        start.append(package.Tables(table, clock, counts.events, counts.gate))
    return jax.lax.scan(step, start, steps)[1]


def check(case: Case, seed: int, **how: Any) -> Any:
    """Raises AssertionError at a difference; returns the tables, gate and plan of every step."""
    shape = (case.layers, case.experts)
    row_of = np.random.default_rng(seed).permutation(np.prod(shape)).reshape(shape)
    if not case.policy:
        row_of = np.where(row_of % 11 == 10, -1, row_of)
    row_of = jnp.asarray(row_of, jnp.int32)
    found, expected = replay(case, random_steps(case, seed), tuple(how.items()), row_of)
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, array), wanted in pairs:
        np.testing.assert_array_equal(array, wanted, jax.tree_util.keystr(path))
    return found[0]


class ByExpert(NamedTuple):
    """A plan of one tier by expert: slot and wave int32[E], -1; the experts that are copied."""

    slot: jax.Array
    wave: jax.Array
    admitted: jax.Array  # int32[J]
    admitted_slots: jax.Array
    streamed: jax.Array  # int32[W, B]


def form_of(spec: CacheSizes, max_needed: int) -> package.TierShape:
    waves = package.num_waves(max_needed, spec.num_experts, spec.slots, spec.transient)
    return package.TierShape(
        slots=spec.slots, banks=spec.banks, transient=spec.transient, waves=waves,
        longer_layers=spec.longer_layers,
    )  # fmt: skip


def plan_needed(
    spec: CacheSizes,
    state: Residency,
    layer: Any,
    needed: jax.Array,
    max_needed: int,
    counts: Counts,
) -> tuple[ByExpert, Residency, Counts]:
    """The reference's plan for needed experts, bool[E], at most `max_needed` of them."""
    form, num_experts = form_of(spec, max_needed), spec.num_experts
    ids = jnp.argsort(~needed, stable=True)[:max_needed].astype(jnp.int32)
    asked = package.Asked(ids[:, None], jnp.zeros((max_needed, 1)))
    rows = jnp.zeros((spec.num_layers, num_experts), jnp.int32)
    tier = package.TierOperands(
        package.Tables(state.table, state.clock, counts.events, counts.gate), rows
    )
    (of,), _, made = package.plan(
        [tier], None, layer, asked, needed[ids], forms=[form],
        implementation="reference",
    )  # fmt: skip
    state = Residency(of.table, of.clock, num_experts)
    places = jnp.where(needed[ids], ids, num_experts)

    def by_expert(values: jax.Array) -> jax.Array:
        none = jnp.full(num_experts, -1, jnp.int32)
        return none.at[places].set(values[:, 0], mode="drop")

    [fetch], [streamed] = made.fetch, made.streamed
    assert fetch is not None and fetch.experts is not None
    later = jnp.full((0, spec.transient), -1, jnp.int32)
    if streamed is not None:
        assert streamed.experts is not None
        later = streamed.experts
    wave = made.tier if made.wave is None else made.wave
    found = ByExpert(by_expert(made.slot), by_expert(wave), fetch.experts, fetch.slots, later)
    return found, state, Counts(of.events, of.gate)


def predict_needed(
    spec: CacheSizes, state: Residency, layer: Any, wanted: jax.Array, limit: int, counts: Counts
) -> tuple[package.Fetch, Residency, Counts]:
    """The reference's prediction of wanted experts, bool[E]; the first `limit` that are absent."""
    num_experts = spec.num_experts
    ids = jnp.where(wanted, jnp.arange(num_experts, dtype=jnp.int32), -1)
    absent = wanted & (state.slot_of[layer] < 0)
    ones = absent.astype(jnp.int32)
    place = jnp.cumsum(ones) - ones
    ids = jnp.where(absent & (place >= limit), -1, ids)
    rows = jnp.zeros((spec.num_layers, num_experts), jnp.int32)
    tier = package.TierOperands(
        package.Tables(state.table, state.clock, counts.events, counts.gate), rows
    )
    (of,), (fetch,) = package.predict(
        [tier], layer, ids, jnp.ones(1, bool), forms=[form_of(spec, spec.slots)],
        implementation="reference",
    )  # fmt: skip
    fetch = jax.tree.map(lambda values: values[:limit], fetch)
    return fetch, Residency(of.table, of.clock, num_experts), Counts(of.events, of.gate)
