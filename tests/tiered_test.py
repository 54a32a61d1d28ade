"""Policies in a runner: tiers are a mixture, moved between steps, replayed, run in one launch."""

import dataclasses
import math
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.experts import cache
from moejax.experts.transfer_programs import request_transfers
from moejax.policies.base import Policy, Requests
from moejax.policies.baselines import as_routed
from moejax.policies.buddy_lists import buddy_lists, conditional_coactivation
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.dymoe import DyMoE
from moejax.policies.make import make_policy
from scripts.studies.dymoe.controls import AsAsked
from tests import buddymoe_reference as reference
from tests import numpy_model, slow
from tests.cache_model import check
from tests.cached_runners import PROMPTS, QWEN, answers, cached_runner, plain, random_weights
from tests.host_test_case import HostTestCase

TOKENS = np.random.default_rng(0).integers(0, QWEN.vocab_size, (1, 16)).astype(np.int32)
NUM_LAYERS, NUM_EXPERTS = len(QWEN.moe_layers), QWEN.num_experts


def wide(bits: int) -> dict[str, np.ndarray]:
    """The weights of a tier in float64."""
    stored = random_weights(QWEN, bits)
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

    return numpy_model.forward(stored[0], QWEN, tokens, run=run)[0]


class OneTierTest(parameterized.TestCase):
    def test_policies_run_by_the_kernels_of_their_device(self):
        kernels = make_policy("on_demand", prefetch=1)
        with mock.patch.object(cache, "with_kernels", return_value=kernels) as asked:
            _, memory = cached_runner(make_policy("on_demand"), (4,), (4,), prefetch=1)
        self.assertIs(memory.spec.policy, kernels)
        self.assertEqual([call.args[1] for call in asked.call_args_list], ["cpu"])


class MixtureTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_dynaexq_runs_what_is_hot_in_high_precision(self):
        policy = make_policy("dynaexq", choice="first", n_hot=3)
        runner, memory = cached_runner(policy, (4, 2), (3, NUM_EXPERTS), first=3)
        stored = [wide(4), wide(2)]

        def decide(m, routing, q, k):
            del m, q, k
            _, weights, ids = routing
            return np.where(ids < 3, 0, 1), ids, weights

        numpy_model.assert_near(runner.logits(TOKENS), expected(stored, decide))
        shares = memory.read_counters().shares
        self.assertGreater(min(shares["int4"], shares["int2"]), 0.05)
        self.assertAlmostEqual(shares["int4"] + shares["int2"], 1, places=5)

    @parameterized.product(low=("", "skip"), slots=((8, 8), (3, 2)))
    @pytest.mark.slow
    def test_dymoe_weighs_tokens_by_attention(self, low, slots):
        kind = AsAsked if slots[0] == NUM_EXPERTS else DyMoE
        policy = kind(low=low, retention=0.5, schedule="equal", heavy_count=3, prefetch=0)
        bits = (4,) if low else (4, 2)
        runner, memory = cached_runner(policy, bits, slots[: len(bits)])
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

    def test_dymoe_reuses_high_copies_beside_every_low_one(self):
        policy = make_policy("dymoe", retention=0.5, schedule="equal", heavy_count=3, prefetch=0)
        runner, memory = cached_runner(policy, (4, 2), (NUM_EXPERTS, NUM_EXPERTS))

        def decide(m, routing, q, k):
            _, weights, ids = routing
            return np.zeros_like(ids), ids, weights

        numpy_model.assert_near(runner.logits(TOKENS), expected([wide(4), wide(2)], decide))
        self.assertEqual(memory.read_counters().shares["int2"], 0)

    @pytest.mark.slow
    def test_dymoe_decodes_by_the_gate(self):
        policy = AsAsked(retention=0.5, schedule="equal", prefetch=2, heavy_count=2)
        runner, memory = cached_runner(policy, (4, 2), (3, NUM_EXPERTS), prefetch=2)
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
        check(tier.pool.residency, tier.spec.cache)
        if tier.spec.cache.slots < NUM_EXPERTS:
            held.append(np.asarray(tier.pool.residency.slot_of) >= 0)
    if held:
        test.assertLessEqual(int(np.sum(held, axis=0).max()), most)


class SubstitutionTest(parameterized.TestCase):
    @parameterized.parameters(False, True)
    @pytest.mark.slow
    def test_buddymoe_runs_algorithm_1(self, keeps):
        rng = np.random.default_rng(3)
        counts = rng.integers(0, 9, (NUM_LAYERS, NUM_EXPERTS, NUM_EXPERTS))
        lists = buddy_lists(conditional_coactivation(counts), 0.7, 3)
        how = {"fall_back": "drop", "rho": 1, "background_bytes": 0.0, "keep_fetched": keeps}
        policy = BuddyMoe(lists=lists, **how)
        runner, memory = cached_runner(policy, (4,), (4,), first=4)
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
            if keeps:  # what is fetched for a pair that was not searched
                kept = ~on_gpu[ids] & np.isin(ids, ids[~on_gpu[ids] & ~searched])
                chosen, runs = np.where(kept, ids, chosen), runs | kept
            return np.where(runs, 0, -1), chosen, weights

        stored = [wide(4)]
        logits = expected(stored, decide)
        self.assertGreater(replaced_pairs, 3)
        numpy_model.assert_near(runner.logits(TOKENS), logits)
        substituted = memory.read_counters().shares["substituted"]
        self.assertGreater(substituted, 0.0 if keeps else 0.02)


class BetweenStepsTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_a_policy_that_rests_is_not_asked(self):
        """Equal tokens lead to equal slots, whether or not the step's tokens are known."""
        policy = make_policy("dynaexq", period=5 * TOKENS.size, warmup=TOKENS.size, max_requests=32)
        found, asked = {}, {}
        for says in (True, False):
            runner, memory = cached_runner(policy, (4, 2), (3, NUM_EXPERTS), emulated=True, first=3)
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


HOT, COLD = 0, 1
# Each demotion makes room for the promotion after it; experts 0 to 3 are hot at first.
ASKED = [(0, 0, COLD), (0, 5, HOT), (1, 2, COLD), (1, 6, HOT), (1, 3, HOT), (1, 1, COLD)]


@dataclasses.dataclass(frozen=True)
class Asking(Policy[Any]):
    """Asks for the same again and again."""

    name: ClassVar[str] = "asking"
    repeats_requests: bool = True

    def init(self, spec):
        return jnp.zeros((), jnp.int32)

    def decide(self, state, observation):
        return as_routed(observation, jnp.int32(COLD)), state

    def transfers(self, state, resident):
        layer, expert, tier = (
            jnp.asarray(numbers, jnp.int32) for numbers in zip(*ASKED, strict=True)
        )
        return Requests(layer, expert, tier), state


class AskTest(HostTestCase, parameterized.TestCase):
    # Promotions of two pairs move bytes; where nothing is in any slot, all of them, and demotions.
    @slow.repeats()
    @parameterized.parameters(
        (0, 0), (1, 2), (2, 4), (9, 6), (1, 2, False), (2, 2, False), (3, 4, False), (5, 6, False),
    )  # fmt: skip
    def test_pairs_set_out_while_there_is_room(self, room, carried_out, low_is_full=True):
        self.check(Asking(), room, carried_out, low_is_full)

    @parameterized.parameters(0, 1)
    @pytest.mark.slow
    def test_all_is_carried_out_of_a_policy_that_does_not_ask_again(self, room):
        self.check(Asking(repeats_requests=False), room, len(ASKED), True)

    def check(self, policy, room, carried_out, low_is_full):
        first = 4 if low_is_full else 0
        _, memory = cached_runner(policy, (4, 2), (4, QWEN.num_experts), first=first)
        everyone = np.arange(QWEN.num_experts, dtype=np.int32)
        held = memory.tiers[COLD].pool.residency.table[:, : len(everyone)]
        coming = np.zeros((len(QWEN.moe_layers), 2, len(everyone)), bool)
        coming[:, COLD] = low_is_full  # the low tier has all of them, or will
        self.assertEqual(held.shape[0], len(QWEN.moe_layers))
        pool, said = jax.jit(request_transfers, static_argnums=0)(
            memory.spec, memory.pool, jnp.asarray(coming), jnp.int32(room)
        )
        self.assertEqual(said.ahead.layer.shape, (0,))
        rows = np.stack([np.asarray(numbers) for numbers in said.moved], axis=1).tolist()
        wanted = [list(row) for row in ASKED[:carried_out]] + [[-1] * 3] * (6 - carried_out)
        self.assertEqual(rows, wanted)
        hot = np.asarray(pool.tiers[HOT].residency.table)[:, : len(everyone)] >= 0
        expected = np.zeros_like(hot)
        expected[:, :first] = True
        for layer, expert, tier in ASKED[:carried_out]:
            expected[layer, expert] &= tier == HOT
        np.testing.assert_array_equal(hot, expected)
