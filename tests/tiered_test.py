"""Policies in the engine: one tier is what it was, several are a mixture, and nothing is missed."""

import math
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.experts import cache, cached_experts
from moejax.experts.transfer_programs import request_transfers
from moejax.policies.buddy_lists import buddy_lists, conditional_coactivation
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.make import make_policy
from pallas_kernels import expert_fetch
from tests import buddymoe_reference as reference
from tests import numpy_model, slow
from tests.pooled_test import POLICIES, PROMPTS, answers, pooled_runner, random_weights
from tests.tiered_case import CONFIG, plain, tiered_runner

TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, 16)).astype(np.int32)
NUM_LAYERS, NUM_EXPERTS = len(CONFIG.moe_layers), CONFIG.num_experts


def wide(bits: int) -> dict[str, np.ndarray]:
    """The weights of a tier in float64."""
    stored = random_weights(CONFIG, bits)
    return {name: np.asarray(plain(leaf), np.float64) for name, leaf in stored.items()}


def mixture(x, tier, ids, weights, stored, m):
    """[N, D]: each pair by the weights of its tier, none at -1."""
    out = np.zeros_like(x)
    for n, a in np.ndindex(ids.shape):
        if tier[n, a] >= 0:
            w, e = stored[tier[n, a]], ids[n, a]
            y = numpy_model.swiglu_mlp(x[n], w["moe.gate_up"][m][e], w["moe.down"][m][e])
            out[n] += weights[n, a] * y
    return out


def expected(stored, decide, tokens=TOKENS):
    """Logits [B, T, V] where `decide` gives tier, ids and weights [N, A] of a layer."""

    def run(m, x, routing, q, k):
        tier, ids, weights = decide(m, routing, q, k)
        return mixture(x, tier, ids, weights, stored, m)

    return numpy_model.forward(stored[0], CONFIG, tokens, run=run)[0]


class OneTierTest(parameterized.TestCase):
    def test_policies_run_by_the_kernels_of_their_device(self):
        kernels = make_policy("on_demand", prefetch=1)
        with mock.patch.object(cache, "with_kernels", return_value=kernels) as asked:
            _, memory = tiered_runner(make_policy("on_demand"), (4,), (4,), prefetch=1)
        self.assertIs(memory.spec.policy, kernels)
        self.assertEqual([call.args[1] for call in asked.call_args_list], ["cpu"])

    @pytest.mark.slow
    def test_on_demand_is_the_cache_to_the_bit(self):
        slots, transient, prefetch = POLICIES["25 % and prefetch"]
        plain = pooled_runner(CONFIG, random_weights(CONFIG), (slots, transient, prefetch))
        policy = make_policy("on_demand", prefetch=prefetch)
        runner, memory = tiered_runner(
            policy, (16,), (slots,), transient=transient, prefetch=prefetch
        )
        np.testing.assert_array_equal(runner.logits(TOKENS), plain.logits(TOKENS))
        self.assertEqual(answers(runner, PROMPTS[:1]), answers(plain, PROMPTS[:1]))
        counted, found = plain.memory.read_counters(), memory.read_counters()
        self.assertEqual(found.layers, counted.layers)
        self.assertEqual(found.shares, {"int16": 1.0, "skipped": 0.0, "substituted": 0.0})
        self.assertGreater(found.total("misses"), 0)


class MixtureTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_dynaexq_runs_what_is_hot_in_high_precision(self):
        policy = make_policy("dynaexq", choice="first", n_hot=3)
        runner, memory = tiered_runner(policy, (4, 2), (3, NUM_EXPERTS), first=3)
        stored = [wide(4), wide(2)]

        def decide(m, routing, q, k):
            del m, q, k
            _, weights, ids = routing
            return np.where(ids < 3, 0, 1), ids, weights

        numpy_model.assert_near(runner.logits(TOKENS), expected(stored, decide))
        shares = memory.read_counters().shares
        self.assertGreater(min(shares["int4"], shares["int2"]), 0.05)
        self.assertAlmostEqual(shares["int4"] + shares["int2"], 1, places=5)

    @parameterized.parameters(NUM_EXPERTS, 3)
    @pytest.mark.slow
    def test_dynaexq_fetches_for_no_tier_that_fills_between_steps(self, cold_slots):
        runner, memory = tiered_runner(
            make_policy("dynaexq", choice="first", n_hot=3), (4, 2), (3, cold_slots), first=3
        )
        with mock.patch.object(expert_fetch, "fetch", wraps=expert_fetch.fetch) as fetch:
            runner.logits(TOKENS)
        self.assertEqual({call.args[0][0].bits for call in fetch.call_args_list}, {2})
        self.assertGreater(memory.read_counters().shares["int4"], 0)

    @parameterized.product(low=("", "skip"), slots=((8, 8), (3, 2)))
    @pytest.mark.slow
    def test_dymoe_weighs_tokens_by_attention(self, low, slots):
        policy = make_policy(
            "dymoe", low=low, retention=0.5, schedule="equal", heavy_count=3, prefetch=0
        )
        bits = (4,) if low else (4, 2)
        runner, memory = tiered_runner(policy, bits, slots[: len(bits)])
        stored = [wide(width) for width in bits]
        critical_experts = policy.counts(NUM_LAYERS, NUM_EXPERTS)

        def decide(m, routing, q, k):
            _, weights, ids = routing
            critical = np.isin(ids, critical_by_hand(ids, q, k, 3, critical_experts[m]))
            return np.where(critical, 0, -1 if low else 1), ids, weights

        logits = expected(stored, decide)
        numpy_model.assert_near(runner.logits(TOKENS), logits)
        runner.logits(TOKENS[:, ::-1])
        # Where a copy in the high tier is left, it serves those that ask for the low one.
        if low or slots[1] == NUM_EXPERTS:
            numpy_model.assert_near(runner.logits(TOKENS), logits)
        ledger = memory.read_counters()
        self.assertGreater(ledger.shares["skipped" if low else "int2"], 0.05)
        check_exclusive(self, memory)

    @pytest.mark.slow
    def test_dymoe_decodes_by_the_gate(self):
        policy = make_policy("dymoe", retention=0.5, schedule="equal", prefetch=2, heavy_count=2)
        runner, memory = tiered_runner(policy, (4, 2), (3, NUM_EXPERTS), prefetch=2)
        stored, prompt = [wide(4), wide(2)], PROMPTS[2]
        found = answers(runner, [prompt], 5)[0]
        length = len(prompt)

        def decide(m, routing, q, k):
            _, weights, ids = routing
            prompt_ids = ids[:length]
            experts = critical_by_hand(prompt_ids, q[:, :length], k[:, :length], 2, 4)
            critical = np.isin(ids, experts)
            critical[length:] = np.arange(ids.shape[1]) < 1
            return np.where(critical, 0, 1), ids, weights

        logits = expected(stored, decide, np.asarray([[*prompt, *found[:-1]]], np.int32))
        self.assertEqual(logits[0, length - 1 :].argmax(axis=-1).tolist(), found)
        ledger = memory.read_counters()
        self.assertGreater(ledger.tiers["int4"].total("prefetched"), 0)
        check_exclusive(self, memory)

    @pytest.mark.slow
    def test_decode_is_watched_by_nobody(self):  # or kernels of a token's step would not run
        policy = make_policy("dymoe", retention=0.5, schedule="equal", heavy_count=2, prefetch=0)
        runner, memory = tiered_runner(policy, (4, 2), (3, NUM_EXPERTS))
        seen = []

        def importance(attended, *arguments):
            seen.append(attended.q.shape[1])
            return own(attended, *arguments)

        own = cached_experts.token_importance
        with mock.patch.object(cached_experts, "token_importance", importance):
            answers(runner, PROMPTS[:1], 3)
        self.assertLen(seen, CONFIG.num_layers)
        self.assertGreater(min(seen), 1)
        self.assertGreater(memory.read_counters().total("needed"), 0)

    @pytest.mark.slow
    def test_dymoe_keeps_one_copy_of_an_expert(self):
        policy = make_policy("dymoe", retention=0.5, schedule="equal", prefetch=0)
        runner, memory = tiered_runner(policy, (4, 2), (3, 3))
        answers(runner, PROMPTS[2:3], 40)
        ledger = memory.read_counters()
        self.assertGreater(min(tier.total("admitted") for tier in ledger.tiers.values()), 6)
        check_exclusive(self, memory)


def critical_by_hand(ids, q, k, num_heavy, num_critical):
    """DyMoE eq. 1 and 2 in loops: the experts with the most tokens among the heavy hitters."""
    length = q.shape[1]
    received = np.zeros(length)
    for t in range(length):
        for h in range(q.shape[2]):
            keys = k[0, : t + 1, h * k.shape[2] // q.shape[2]]
            scores = numpy_model.softmax(keys @ q[0, t, h] / math.sqrt(q.shape[3]))
            received[: t + 1] += scores / q.shape[2]
    received /= length - np.arange(length)
    heavy = np.argsort(-received, kind="stable")[:num_heavy]
    load = np.bincount(ids[heavy].reshape(-1), minlength=NUM_EXPERTS)
    every = np.bincount(ids.reshape(-1), minlength=NUM_EXPERTS)
    return np.lexsort((np.arange(NUM_EXPERTS), -every, -load))[:num_critical]


def check_exclusive(test, memory, most=1):
    """The tables hold, and no expert is in more pools than `most` that have not room for all."""
    held = []
    for tier in memory.tiers:
        tier.pool.residency.check(tier.spec.cache)
        if tier.spec.cache.slots < NUM_EXPERTS:
            held.append(np.asarray(tier.pool.residency.slot_of) >= 0)
    if held:
        test.assertLessEqual(int(np.sum(held, axis=0).max()), most)


class SubstitutionTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_buddymoe_runs_algorithm_1(self):
        rng = np.random.default_rng(3)
        counts = rng.integers(0, 9, (NUM_LAYERS, NUM_EXPERTS, NUM_EXPERTS))
        lists = buddy_lists(conditional_coactivation(counts), 0.7, 3)
        policy = BuddyMoe(lists=lists, fall_back="drop", rho=1, background_bytes=0.0)
        runner, memory = tiered_runner(policy, (4,), (4,), first=4)
        on_gpu = np.arange(NUM_EXPERTS) < 4
        replaced_pairs = 0

        def decide(m, routing, q, k):
            nonlocal replaced_pairs
            del q, k
            _, weights, ids = routing
            profile = [[int(j) for j in row if j >= 0] for row in lists.ids[m]]
            chosen, replaced, searched = reference.algorithm_1(ids, on_gpu, profile, 3, budget=1)
            replaced_pairs += replaced.sum()
            runs = on_gpu[chosen] | ~searched
            return np.where(runs, 0, -1), chosen, weights

        stored = [wide(4)]
        logits = expected(stored, decide)
        self.assertGreater(replaced_pairs, 3)
        numpy_model.assert_near(runner.logits(TOKENS), logits)
        self.assertGreater(memory.read_counters().shares["substituted"], 0.02)


class BetweenStepsTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.parameters(NUM_EXPERTS, NUM_EXPERTS - 3)
    def test_promotions_and_demotions_move_the_tables(self, cold_slots):
        policy = make_policy("dynaexq", period=16, max_requests=32)
        runner, memory = tiered_runner(
            policy, (4, 2), (3, cold_slots), emulated=True, first=3 if cold_slots < 8 else -1
        )
        self.assertTrue(memory.asks)
        for _ in range(3):
            runner.logits(TOKENS)
        memory.read_counters()
        pool, said = request_transfers(memory.spec, memory.pool, *memory._in_flight_and_room())
        high = np.asarray(pool.state.high)
        hot = np.asarray(pool.tiers[0].residency.slot_of) >= 0
        np.testing.assert_array_equal(hot, high)
        self.assertEqual(high.sum(), 3 * NUM_LAYERS)
        self.assertTrue((np.asarray(said.moved.layer) < 0).all() or cold_slots < NUM_EXPERTS)
        check_exclusive(
            self, memory, 2
        )  # the next step takes the copies of what came to the hot one
        self.assertGreater(memory.ledger.shares["int4"], 0.1)

    @pytest.mark.slow
    def test_a_policy_that_rests_is_not_asked(self):
        """Equal tokens lead to equal slots, whether or not the step's tokens are known."""
        policy = make_policy("dynaexq", period=5 * TOKENS.size, warmup=TOKENS.size, max_requests=32)
        found, asked = {}, {}
        for says in (True, False):
            runner, memory = tiered_runner(policy, (4, 2), (3, NUM_EXPERTS), emulated=True, first=3)
            step, get = memory.step, memory.programs.get
            how = {} if says else {"side_effect": lambda since, _, step=step: step(since)}
            with (
                mock.patch.object(memory, "step", wraps=step, **how),
                mock.patch.object(memory.programs, "get", wraps=get) as programs,
            ):
                for turn in range(12):
                    runner.logits((TOKENS + turn) % runner.config.vocab_size)
            asked[says] = sum(call.args[0] is request_transfers for call in programs.call_args_list)
            found[says] = memory.pool
        self.assertEqual(asked[False], 12)
        # First, when the warm-up is over, once more for what that led to; and so every period.
        self.assertBetween(asked[True], 4, 7)
        for a, b in zip(*map(jax.tree.leaves, found.values()), strict=True):
            np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
    absltest.main()
