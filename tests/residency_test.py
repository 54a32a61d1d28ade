"""The cache's rule: 100,000 decisions against a plain Python model, by example, what is refused."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.experts import ledger, residency
from moejax.experts.residency import CacheSizes, Residency
from pallas_kernels import cache_plan
from tests import slow
from tests.cache_model import ROW, CacheModel, check, columns
from tests.cache_plan_contract import ByExpert, form_of, plan_needed, predict_needed

LENGTH = 240  # decisions of a sequence
LIMIT = 2  # of what a prediction brings
LISTED = 3  # experts that a transfer brings
KINDS = ("plan", "predict", "admit")


def spec(layers: int, experts: int, slots: int, transient: int, longer: int = 0) -> CacheSizes:
    return CacheSizes(
        num_layers=layers, num_experts=experts, slots=slots, transient=transient,
        longer_layers=longer,
    )  # fmt: skip


# name: sizes, and how many experts a layer may need at once.
SPECS = {
    "decode": (spec(3, 9, 4, 2), 4),
    "many_slots": (spec(2, 9, 6, 2), 3),
    "scan": (spec(2, 8, 3, 2), 8),
    "one_wave": (spec(2, 9, 2, 4), 4),
    "one_layer": (spec(1, 5, 3, 2), 5),
    "rest_in_one_wave": (spec(2, 9, 5, 4), 9),
    "no_cache": (spec(2, 5, 0, 2), 5),
    "one_slot": (spec(2, 4, 1, 1), 1),
    "all_fit": (spec(2, 6, 6, 1), 6),
    "longer_layers": (spec(4, 9, 4, 2, 1), 4),
    "longer_layers_scan": (spec(3, 8, 3, 2, 2), 8),
    "all_fit_in_some_layers": (spec(3, 6, 5, 2, 1), 6),
    "one_slot_in_some_layers": (spec(3, 5, 0, 3, 1), 3),
}
PER_SPEC = -(-100_000 // (LENGTH * len(SPECS)))  # sequences


class Decision(NamedTuple):
    """An operand of `replay`; every kind uses some of the fields."""

    kind: Any
    layer: Any
    experts: Any  # bool[E]
    listed: Any  # int32[LISTED], experts


class Outcome(NamedTuple):
    plan: ByExpert
    prefetch: tuple[jax.Array, jax.Array]  # experts, slots
    slots: jax.Array


@functools.partial(jax.jit, static_argnums=(0, 1))
def replay(spec: CacheSizes, max_needed: int, decisions: Decision) -> Any:
    """Outcome, residency and counts after each decision of a sequence, all stacked."""
    size = form_of(spec, max_needed).num_jobs(max_needed, spec.num_experts)
    none = functools.partial(jnp.full, fill_value=-1, dtype=jnp.int32)
    shape = (form_of(spec, max_needed).later_waves, spec.transient)
    experts = (spec.num_experts,)
    nothing = Outcome(
        ByExpert(none(experts), none(experts), none((size,)), none((size,)), none(shape)),
        (none((LIMIT,)), none((LIMIT,))),
        none((LISTED,)),
    )

    def plan(state, counts, given):
        made, state, counts = plan_needed(
            spec, state, given.layer, given.experts, max_needed, counts
        )
        return nothing._replace(plan=made), state, counts

    def predict(state, counts, given):
        if not spec.most_slots:
            return nothing, state, counts
        made, state, counts = predict_needed(spec, state, given.layer, given.experts, LIMIT, counts)
        return nothing._replace(prefetch=(made.experts, made.slots)), state, counts

    def admit(state, counts, given):
        layers = jnp.full_like(given.listed, given.layer)
        made, state, counts = residency.admit(spec, state, layers, given.listed, counts)
        return nothing._replace(slots=made), state, counts

    branches = (plan, predict, admit)

    def decide(carry, given):
        outcome, *carry = jax.lax.switch(given.kind, branches, *carry, given)
        return carry, (outcome, *carry)

    start = [residency.empty(spec), residency.no_counts(spec.num_layers)]
    return jax.lax.scan(decide, start, decisions)[1]


def random_decisions(model: CacheModel, rng: np.random.Generator, skew: float) -> Decision:
    """A sequence as a program might make it, with calls now and then that none should make."""
    spec = model.spec
    shares = np.array([8, 3, 3 * (spec.most_slots > 0)])
    kinds = rng.choice(len(shares), LENGTH, p=shares / shares.sum())
    most = np.where(kinds < 1, model.max_needed, spec.num_experts)
    number = rng.integers(most + 1)
    # The experts of the largest keys: a draw without replacement, popular ones more often.
    keys = rng.gumbel(size=(LENGTH, spec.num_experts))
    keys -= skew * np.log(np.arange(1, spec.num_experts + 1))
    rank = (-keys).argsort(1).argsort(1)
    return Decision(
        kinds.astype(np.int32),
        rng.integers(spec.num_layers, size=LENGTH, dtype=np.int32),
        rank < number[:, None],
        rng.integers(-1, spec.num_experts, (LENGTH, LISTED), dtype=np.int32),
    )


def blank(spec: CacheSizes, max_needed: int) -> dict[str, np.ndarray]:
    """The fields of `LENGTH` outcomes, by name, all -1."""
    form = form_of(spec, max_needed)
    size, waves = form.num_jobs(max_needed, spec.num_experts), form.later_waves
    shapes = {
        "slot": (spec.num_experts,),
        "wave": (spec.num_experts,),
        "admitted": (size,),
        "admitted_slots": (size,),
        "streamed": (waves * spec.transient,),
        "experts": (LIMIT,),
        "slots": (LIMIT,),
        "brought": (LISTED,),
    }
    return {name: np.full((LENGTH, *shape), -1) for name, shape in shapes.items()}


def decide(model: CacheModel, given: Decision, i: int, wanted: dict[str, np.ndarray]) -> None:
    """Lets the model take decision i, and writes what the outcome should be."""
    layer, kind = int(given.layer[i]), KINDS[given.kind[i]]
    experts, listed = set(np.flatnonzero(given.experts[i]).tolist()), given.listed[i].tolist()
    if kind == "plan":
        found = model.plan(layer, experts)
        for e, (wave, slot) in found["places"].items():
            wanted["wave"][i, e], wanted["slot"][i, e] = wave, slot
        for j, (e, slot) in enumerate(found["admitted"]):
            wanted["admitted"][i, j], wanted["admitted_slots"][i, j] = e, slot
        wanted["streamed"][i, : len(found["streamed"])] = found["streamed"]
    elif kind == "predict":
        for j, (e, slot) in enumerate(model.predict(layer, experts, LIMIT)):
            wanted["experts"][i, j], wanted["slots"][i, j] = e, slot
    else:
        wanted["brought"][i] = model.admit(layer, listed)


def fields_of(outcome: Outcome) -> dict[str, np.ndarray]:
    """By the names of `expected`."""
    prefetch = dict(zip(("experts", "slots"), outcome.prefetch, strict=True))
    return {**outcome.plan._asdict(), **prefetch, "brought": outcome.slots}


def rows_of(state: Residency, counts: residency.Counts) -> np.ndarray:
    """int[LENGTH, M, ...], rows of `CacheModel.row`."""
    tables = (getattr(columns(state), name) for name in ROW)
    return np.concatenate([*tables, counts.events], axis=2)


def follow_bytes(spec: CacheSizes, given: Decision, found: dict[str, np.ndarray]) -> None:
    """Fetches what one is told to, and looks whether each needed expert's bytes are in its slot."""
    pool: dict[int, tuple[int, int]] = {}
    lists = {name: values.tolist() for name, values in found.items()}

    def fetch(layer, experts, slots):
        for e, slot in zip(experts, slots, strict=False):
            if e >= 0 and slot >= 0:
                pool[slot] = (layer, e)

    transient = list(range(spec.first_transient(spec.num_layers), spec.num_slots))
    for i, (kind, layer) in enumerate(zip(given.kind.tolist(), given.layer.tolist(), strict=True)):
        one = {name: values[i] for name, values in lists.items()}
        fetch(layer, one["experts"], one["slots"])
        fetch(layer, given.listed[i].tolist(), one["brought"])
        if KINDS[kind] != "plan":
            continue
        fetch(layer, one["admitted"], one["admitted_slots"])
        for wave, streamed in enumerate([[], *one["streamed"]]):
            fetch(layer, streamed, transient)
            for e, (slot, its_wave) in enumerate(zip(one["slot"], one["wave"], strict=True)):
                if its_wave == wave and pool.get(slot) != (layer, e):
                    raise AssertionError(f"decision {i}: slot {slot} has not expert {e}")
        needed = given.experts[i]
        np.testing.assert_array_equal(found["wave"][i] >= 0, needed)
        np.testing.assert_array_equal(found["slot"][i] >= 0, needed)


class StressTest(parameterized.TestCase):
    @slow.where(lambda name: name != "scan")
    @parameterized.named_parameters(*((name, name) for name in SPECS))
    def test_100_000_random_decisions_in_all(self, name):
        @settings(max_examples=PER_SPEC, deadline=None, derandomize=True, database=None)
        @given(seed=st.integers(0, 2**32 - 1), skew=st.floats(0, 2))
        def sequence(seed, skew):
            self.follow(*SPECS[name], np.random.default_rng(seed), skew)
            decisions.append(LENGTH)

        decisions: list[int] = []
        sequence()
        self.assertGreaterEqual(sum(decisions) * len(SPECS), 100_000)

    def follow(self, spec, max_needed, rng, skew):
        model, wanted, rows = CacheModel(spec, max_needed), blank(spec, max_needed), []
        given = random_decisions(model, rng, skew)
        for i in range(LENGTH):
            decide(model, given, i, wanted)
            rows.append(model.row(int(given.layer[i])))
        outcome, state, counts = jax.device_get(replay(spec, max_needed, given))
        found = fields_of(outcome)
        for name, values in wanted.items():
            self.assert_same(found[name].reshape(values.shape), values, name, given)
        tables = rows_of(state, counts)
        mine = given.layer[:, None] == np.arange(spec.num_layers)
        self.assert_same(tables[mine], np.array(rows), "tables of the layer", given)
        changed = (tables[1:] != tables[:-1]).any(2) & ~mine[1:]
        self.assertFalse(changed.any(), "a decision changed the tables of another layer")
        follow_bytes(spec, given, found)

    def assert_same(self, found, wanted, name, given):
        if not np.array_equal(found, wanted):
            i = int((found != wanted).any(1).argmax())
            one = Decision(*(field[i] for field in given))
            self.fail(f"{name}, decision {i}: {found[i]}, expected {wanted[i]}; {one}")


PLAN = jax.jit(plan_needed, static_argnums=(0, 4))
PREDICT = jax.jit(predict_needed, static_argnums=(0, 4))
RELEASE = jax.jit(residency.release_everywhere)


def mask(num_experts: int, *experts: int) -> jax.Array:
    return jnp.asarray(np.isin(np.arange(num_experts), experts))


def planned(spec, state, needed, max_needed=4, layer=0, counts=None):
    counts = counts or residency.no_counts(spec.num_layers)
    needed = mask(spec.num_experts, *needed)
    return PLAN(spec, state, layer, needed, max_needed, counts)


class RulesTest(parameterized.TestCase):
    def test_what_is_released_is_free(self):
        one = spec(2, 8, 3, 1)
        state = residency.seeded(one, np.array([[5, 1, 2], [1, 2, 3]]))
        gone = jnp.stack([mask(8, 1, 2, 7), mask(8)])
        state, counts = RELEASE(state, gone, residency.no_counts(2))
        check(state, one)
        np.testing.assert_array_equal(columns(state).owner, [[5, -1, -1], [1, 2, 3]])
        np.testing.assert_array_equal(counts.evictions, [2, 0])
        made, state, _ = planned(one, state, (0,))
        self.assertIn(int(made.admitted_slots[0]), (1, 2))
        self.assertGreaterEqual(int(state.slot_of[0, 5]), 0)

    def test_recent_use_survives_a_clock_that_wraps(self):
        one = spec(1, 5, 3, 1)
        state = residency.seeded(one, np.array([[0, 1, 2]]))
        state = dataclasses.replace(state, clock=jnp.int32(2**31 - 1))
        for expert in (1, 2, 0):
            _, state, _ = planned(one, state, (expert,), 3)
        self.assertLess(int(state.clock), 0)
        _, state, _ = planned(one, state, (3,), 3)
        np.testing.assert_array_equal(columns(state).owner, [[0, 3, 2]])

    def test_more_than_the_bound_is_counted_and_stops_the_run(self):
        one = spec(1, 8, 3, 2)
        tables = residency.empty(one)
        counts = residency.no_counts(1)
        tier = cache_plan.TierOperands(
            cache_plan.Tables(tables.table, tables.clock, counts.events, counts.gate),
            jnp.zeros((1, 8), jnp.int32),
        )
        asked = cache_plan.Asked(jnp.arange(5, dtype=jnp.int32)[None], jnp.zeros((1, 5)))
        how = {"forms": [form_of(one, 3)]}
        plan = jax.jit(lambda *given: cache_plan.plan([given[0]], None, 0, *given[1:], **how))
        [after], _, _ = plan(tier, asked, jnp.ones(1, bool))
        counts = residency.Counts(after.events, after.gate)
        self.assertEqual(int(counts.unserved[0]), 2)
        with self.assertRaisesRegex(RuntimeError, "2 needed experts had no slot"):
            ledger.TierLedger(expert_bytes=1).add(counts)

    def test_tables_are_updated_in_place(self):
        one = spec(48, 128, 80, 16)
        args = residency.empty(one), residency.no_counts(48)
        step = jax.jit(
            lambda state, counts, needed: plan_needed(one, state, 3, needed, 8, counts)[1:],
            donate_argnums=(0, 1),
        )
        memory = step.lower(*args, mask(128)).compile().memory_analysis()
        self.assertEqual(memory.alias_size_in_bytes, sum(a.nbytes for a in jax.tree.leaves(args)))

    def test_waves_are_for_more_than_there_are_slots(self):
        for max_needed, num_experts, waves in ((6, 99, 0), (7, 99, 4), (9, 99, 5), (9, 9, 2)):
            self.assertEqual(cache_plan.num_waves(max_needed, num_experts, 6, 2), waves)

    def test_all_layers_release_at_once(self):
        one, rng = spec(5, 8, 3, 1), np.random.default_rng(0)
        state, counts = residency.empty(one), residency.no_counts(5)
        for step in range(16):
            layer, experts = step % 5, rng.choice(8, 2, replace=False)
            if step % 3:
                _, state, counts = planned(one, state, experts, layer=layer, counts=counts)
            else:
                wanted = mask(8, *experts)
                _, state, counts = PREDICT(one, state, layer, wanted, 2, counts)
        gone = jnp.asarray(rng.random((5, 8)) < 0.5)
        found, told = RELEASE(state, gone, counts)
        check(found, one)
        left = np.where(gone, -1, state.slot_of)
        np.testing.assert_array_equal(found.slot_of, left)
        departed = np.asarray((state.slot_of >= 0) & gone)
        np.testing.assert_array_equal(told.evictions - counts.evictions, departed.sum(axis=1))
        held = columns(state)
        owned = np.take_along_axis(np.asarray(gone), np.maximum(held.owner, 0), axis=1)
        unused = np.asarray(held.prefetched) & owned & (np.asarray(held.owner) >= 0)
        self.assertGreater(unused.sum(), 0)
        np.testing.assert_array_equal(
            told.prefetch_waste - counts.prefetch_waste, unused.sum(axis=1)
        )
