"""The residency rules: against textbook LRU, by example, and what is refused."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.experts import ledger, residency
from moejax.experts.residency import CacheSizes
from pallas_kernels import cache_plan
from tests import slow
from tests.cache_plan_contract import form_of, plan_needed, predict_needed


def spec(layers: int, experts: int, slots: int, transient: int) -> CacheSizes:
    return CacheSizes(num_layers=layers, num_experts=experts, slots=slots, transient=transient)


PLAN = jax.jit(plan_needed, static_argnums=(0, 4))


def mask(num_experts: int, *experts: int) -> jax.Array:
    return jnp.zeros(num_experts, bool).at[jnp.array(experts, jnp.int32)].set(True)


def planned(spec, state, needed, max_needed=4, layer=0, counts=None):
    counts = counts or residency.no_counts(spec.num_layers)
    needed = mask(spec.num_experts, *needed)
    return PLAN(spec, state, layer, needed, max_needed, counts)


class RulesTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.parameters(1, 3, 8)
    def test_one_expert_at_a_time_is_the_textbook_lru(self, slots):
        one = spec(1, 12, slots, 1)
        rng = np.random.default_rng(slots)
        trace = np.minimum(rng.geometric(0.2, 240) - 1, 11)

        def step(carry, needed):
            return plan_needed(one, carry[0], 0, needed, 1, carry[1])[1:], None

        start = residency.empty(one), residency.no_counts(1)
        (_, counts), _ = jax.lax.scan(step, start, jnp.eye(12, dtype=bool)[trace])
        book, hits = collections.OrderedDict(), 0
        for expert in trace.tolist():
            hits += expert in book
            book[expert] = None
            book.move_to_end(expert)
            if len(book) > slots:
                book.popitem(last=False)
        self.assertEqual(int(counts.hits[0]), hits)
        self.assertBetween(hits, 1, 240 - 1)

    def test_what_is_released_is_free(self):
        one = spec(2, 8, 3, 1)
        state = residency.seeded(one, np.array([[5, 1, 2], [1, 2, 3]]))
        gone = jnp.stack([mask(8, 1, 2, 7), mask(8)])
        state, counts = residency.release_everywhere(state, gone, residency.no_counts(2))
        state.check(one)
        np.testing.assert_array_equal(state.owner, [[5, -1, -1], [1, 2, 3]])
        np.testing.assert_array_equal(counts.evictions, [2, 0])
        made, state, _ = planned(one, state, (0,))
        self.assertIn(int(made.admitted_slots[0]), (1, 2))
        self.assertGreaterEqual(int(state.slot_of[0, 5]), 0)

    def test_all_layers_release_at_once(self):
        one, rng = spec(5, 8, 3, 1), np.random.default_rng(0)
        state, counts = residency.empty(one), residency.no_counts(5)
        for step in range(16):
            layer, experts = step % 5, rng.choice(8, 2, replace=False)
            if step % 3:
                _, state, counts = planned(one, state, experts, layer=layer, counts=counts)
            else:
                wanted = mask(8, *experts)
                _, state, counts = predict_needed(one, state, layer, wanted, 2, counts)
        gone = jnp.asarray(rng.random((5, 8)) < 0.5)
        found, told = residency.release_everywhere(state, gone, counts)
        found.check(one)
        left = np.where(gone, -1, state.slot_of)
        np.testing.assert_array_equal(found.slot_of, left)
        departed = np.asarray((state.slot_of >= 0) & gone)
        np.testing.assert_array_equal(told.evictions - counts.evictions, departed.sum(axis=1))
        owned = np.take_along_axis(np.asarray(gone), np.maximum(state.owner, 0), axis=1)
        unused = np.asarray(state.prefetched) & owned & (np.asarray(state.owner) >= 0)
        self.assertGreater(unused.sum(), 0)
        np.testing.assert_array_equal(
            told.prefetch_waste - counts.prefetch_waste, unused.sum(axis=1)
        )

    def test_a_scan_evicts_nothing(self):
        one = spec(1, 8, 3, 2)
        state = residency.seeded(one, np.array([[5, 1]]))
        plan, after, counts = planned(one, state, range(8), 8)
        np.testing.assert_array_equal(after.owner, [[5, 1, 0]])
        np.testing.assert_array_equal(plan.wave, [0, 0, 1, 1, 2, 0, 2, 3])
        np.testing.assert_array_equal(plan.streamed, [[2, 3], [4, 6], [7, -1], [-1, -1]])
        np.testing.assert_array_equal(plan.slot, [2, 1, 3, 4, 3, 0, 4, 3])
        self.assertEqual(int(counts.evictions[0]), 0)
        # One expert less than too many, and they are admitted.
        plan, after, _ = planned(one, state, (0, 2, 3), 8)
        np.testing.assert_array_equal(after.owner, [[3, 2, 0]])
        np.testing.assert_array_equal(plan.admitted, [0, 2, 3])

    def test_recent_use_survives_a_clock_that_wraps(self):
        one = spec(1, 5, 3, 1)
        state = residency.seeded(one, np.array([[0, 1, 2]]))
        state = dataclasses.replace(state, clock=jnp.int32(2**31 - 1))
        for expert in (1, 2, 0):
            _, state, _ = planned(one, state, (expert,), 3)
        self.assertLess(int(state.clock), 0)
        _, state, _ = planned(one, state, (3,), 3)
        np.testing.assert_array_equal(state.owner, [[0, 3, 2]])

    @pytest.mark.slow
    def test_eager_equals_jit_and_a_layer_may_be_traced(self):
        two, needed = spec(2, 6, 3, 2), mask(6, 1, 4)
        state = residency.seeded(two, np.array([[0, 1], [2, 3]]))
        run = functools.partial(plan_needed, two)
        compiled = jax.jit(run, static_argnums=3)
        eager = run(state, 1, needed, 3, residency.no_counts(2))
        for layer in (1, jnp.int32(1)):
            found = compiled(state, layer, needed, 3, residency.no_counts(2))
            jax.tree.map(np.testing.assert_array_equal, found, eager)

    def test_more_than_the_bound_is_counted_and_stops_the_run(self):
        one = spec(1, 8, 3, 2)
        tables = residency.empty(one)
        counts = residency.no_counts(1)
        tier = cache_plan.Tier(
            cache_plan.Tables(tables.table, tables.clock, counts.events, counts.gate),
            jnp.zeros((1, 8), jnp.int32),
        )
        asked = cache_plan.Asked(jnp.arange(5, dtype=jnp.int32)[None], jnp.zeros((1, 5)))
        [after], _, _ = cache_plan.plan(
            [tier],
            None,
            0,
            asked,
            jnp.ones(1, bool),
            forms=[form_of(one, 3)],
            columns=residency.COLUMNS,
        )
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
        for max_needed, waves in ((6, 0), (7, 4), (9, 5)):
            self.assertEqual(cache_plan.num_waves(max_needed, 6, 2), waves)


class ChecksTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"num_layers": 0}, "0 layers"),
        ({"slots": 9}, "9 slots for 8"),
        ({"slots": -1}, "-1 slots"),
        ({"transient": 0}, "0 transient"),
    )
    def test_impossible_sizes(self, change, said):
        with self.assertRaisesRegex(ValueError, said):
            dataclasses.replace(spec(2, 8, 3, 2), **change)

    @parameterized.parameters(
        ([[1, 2, 3, 4]], "shape"), ([[8]], "none of 8"), ([[-1]], "none of 8"), ([[2, 2]], "twice")
    )
    def test_impossible_seeds(self, experts, said):
        with self.assertRaisesRegex(ValueError, said):
            residency.seeded(spec(1, 8, 3, 2), np.array(experts))

    # Columns: 4 of slot_of, 2 each of owner, last_use, prefetched.
    @parameterized.parameters(
        ({0: 1}, "inverse"),
        ({4: 9}, "no expert"),
        ({5: 3}, "twice in owner"),
        ({9: 1}, "prefetched"),
    )
    def test_broken_tables(self, change, said):
        one = spec(1, 4, 2, 1)
        state = residency.seeded(one, np.array([[3]]))
        state.check(one)
        table = np.array(state.table)
        for column, value in change.items():
            table[0, column] = value
        with self.assertRaisesRegex(ValueError, said):
            dataclasses.replace(state, table=jnp.asarray(table)).check(one)

    def test_wrong_shapes(self):
        one = spec(1, 4, 2, 1)
        state = residency.empty(one)
        with self.assertRaisesRegex(ValueError, "table is int32"):
            state.check(spec(1, 4, 1, 1))


if __name__ == "__main__":
    absltest.main()
