"""BuddyMoE with prefetch: what the prefetch missed is missing, in the replay and in the engine."""

import collections
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.experts.tiering import Tiering
from moejax.policies.base import Observation
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.compose import Compose
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from moejax.policies.make import make_policy
from moejax.routing.simulate.replay import EVENTS
from moejax.routing.simulate.runs import Run, RunResult, run_policies
from moejax.routing.trace import PREFILL, Trace, read_trace
from tests import buddymoe_reference as paper
from tests import tiny_engine
from tests.buddymoe_cases import EXPERTS, LISTS, SPEC, WIDTH, random_lists, softmax, steps
from tests.buddymoe_policy_test import expected_decision
from tests.simulated_traces import random_trace

TRACE = random_trace(
    step_sizes=[9, *[1] * 30, 9, *[1] * 20], num_layers=3, num_experts=EXPERTS, width=3, foreseen=5
)
OF_TRACE: dict[str, Any] = {
    "lists": random_lists(np.random.default_rng(2), 3), "max_requests": 0,
}  # fmt: skip
OF_ENGINE: dict[str, Any] = {
    "lists": random_lists(np.random.default_rng(3), 2, tiny_engine.CONFIG.num_experts),
    "max_requests": 0, "prefetch": 2, "rho": 1, "beta": 0.8,
}  # fmt: skip
COUNTED = ("needed", "hits", "misses", "admitted", "streamed", "prefetched", "prefetch_hits",
           "prefetch_waste", "evictions")  # fmt: skip


def by_loops(trace: Trace, policy: BuddyMoe, slots: int) -> list[collections.Counter[str]]:
    """Counts of prompts and of decode: a prefetch lands, then the paper's loops see the slots."""
    layers = [paper.LayerSlots(slots) for _ in range(trace.num_layers)]
    counts: list[collections.Counter[str]] = [collections.Counter(), collections.Counter()]
    tau = np.broadcast_to(policy.tae_tau, trace.num_layers)
    most = trace.width if policy.prefetch < 0 else policy.prefetch
    for clock, step in enumerate(np.unique(trace.step), start=1):
        rows = np.flatnonzero(trace.step == step)
        is_prefill = bool(trace.phase[rows[0]] == PREFILL)
        count = counts[int(not is_prefill)]
        for m, held in enumerate(layers):
            held.counts = count
            if m:
                predicted = np.zeros((len(rows), trace.num_experts))
                np.put_along_axis(
                    predicted, trace.predicted_ids[rows, m - 1].astype(int),
                    trace.predicted_probabilities[rows, m - 1].astype(float), axis=1,
                )  # fmt: skip
                held.prefetch(
                    paper.likely_experts(
                        predicted, trace.width, min(most, slots), is_prefill=is_prefill
                    ),
                    clock,
                )
            on_gpu = np.isin(np.arange(trace.num_experts), list(held.last_use))
            seen = (
                trace.probabilities[rows, m].astype(np.float32), trace.ids[rows, m].astype(int),
                trace.weights[rows, m].astype(np.float32), np.ones(len(rows), bool), on_gpu[None],
            )  # fmt: skip
            o = Observation(jnp.int32(m), *map(jnp.asarray, seen))
            chosen, replaced, _ = expected_decision(policy, tau, o)
            held.run(set(chosen.ravel().tolist()), clock)
            count.update(replaced=int(replaced.sum()))
    return counts


def replay(trace: Trace, policy: BuddyMoe, slots: int, **how: Any) -> RunResult:
    run = Run(policy=policy, tiers=("int4",), expert_bytes=(20,), slots=(slots,), bulk=64)
    return run_policies(trace, [run], **how)[0]


def event(found: RunResult, name: str) -> list[int]:
    return found.events[:, EVENTS.index(name), 0].tolist()


class DecisionTest(parameterized.TestCase):
    @parameterized.product(prefetch=(-1, 3), is_prefill=(False, True))
    def test_the_likely_experts_of_the_next_layer_are_prefetched(self, prefetch, is_prefill):
        policy = BuddyMoe(lists=LISTS, prefetch=prefetch, in_prefill=False)
        self.assertTrue(policy.needs.predicted)
        state, decide = policy.init(SPEC), jax.jit(policy.decide)
        count = WIDTH if prefetch < 0 else prefetch
        self.assertEqual(policy.max_prefetch(state), count)
        rng = np.random.default_rng(5)
        for o in steps(4, 6):
            predicted = softmax(rng.standard_normal((len(o.ids), EXPERTS)))
            o = dataclasses.replace(o, predicted=jnp.asarray(predicted), is_prefill=is_prefill)
            decision, state = decide(state, o)
            expected = paper.likely_experts(
                predicted[np.asarray(o.active)], WIDTH, count, is_prefill=is_prefill
            )
            is_last = int(o.layer) == SPEC.num_layers - 1
            found = np.flatnonzero(np.asarray(decision.ahead) == 0).tolist()
            self.assertEqual(found, [] if is_last else sorted(expected))

    def test_never_more_than_there_are_slots(self):
        spec = dataclasses.replace(SPEC, slots=(1,))
        np.testing.assert_array_equal(
            BuddyMoe(lists=LISTS, prefetch=3).init(spec).settings.ahead, [1, 0]
        )

    def test_none_by_default(self):
        policy = BuddyMoe(lists=LISTS)
        self.assertFalse(policy.needs.predicted)
        decision, _ = jax.eval_shape(policy.decide, policy.init(SPEC), steps(4, 1)[0])
        self.assertIsNone(decision.ahead)

    @pytest.mark.slow
    def test_what_the_prefetch_brings_counts_in_delta(self):
        # Two of three experts are missing in the second layer; the prefetch brings one of them.
        row = {"weights": [0.4, 0.3, 0.2], "predicted_probabilities": [0.9]}
        trace = Trace(
            num_experts=6, step=np.int32([0, 1]), sequence=np.int32([0, 0]),
            position=np.int32([0, 1]), phase=np.uint8([1, 1]),
            ids=np.uint8([[[0, 1, 2], [0, 3, 4]], [[0, 1, 2], [0, 1, 2]]]),
            predicted_ids=np.uint8([[[5]], [[1]]]),
            **{name: np.broadcast_to(np.float16(of), (2, 2 - (len(of) == 1), len(of)))
               for name, of in row.items()},
            probabilities=np.full((2, 2, 6), 0.15, np.float16), facts={},
        )  # fmt: skip
        lists = random_lists(np.random.default_rng(0), 2, 6)
        lists.ids[:], lists.q[:] = -1, 0
        lists.ids[1, 2, 0], lists.q[1, 2, 0] = 4, 1
        # Without a prefetch both would be missing, too many to be replaced.
        found = replay(trace, BuddyMoe(lists=lists, beta=0.5, max_requests=0, prefetch=1), 5)
        self.assertAlmostEqual(float(found.gate[1, -2]), 0.2, places=3)

    def test_with_others_importance_prefetches_or_buddies_do(self):
        buddies = BuddyMoe(lists=LISTS, prefetch=2)
        tiers = dataclasses.replace(
            SPEC, tiers=("int4", "int2"), expert_bytes=(100, 50), slots=(3, 9)
        )
        o = steps(4, 1)[0]
        o = dataclasses.replace(
            o, predicted=o.probabilities, resident=jnp.concatenate([o.resident, ~o.resident])
        )
        for policy, most, tier in (
            (Compose(hotness=DynaExq(), buddies=buddies), 2, 1),
            (Compose(importance=DyMoE(prefetch=1), buddies=buddies), 1, 0),
        ):
            state = policy.init(tiers)
            self.assertTrue(policy.needs.predicted)
            self.assertEqual(policy.max_prefetch(state), most)
            ahead = np.asarray(jax.jit(policy.decide)(state, o)[0].ahead)
            self.assertEqual(ahead[ahead >= 0].tolist(), [tier] * most)
        make_policy("compose", parts="dymoe+buddymoe", lists=LISTS, prefetch=-1)


class ReplayTest(parameterized.TestCase):
    @parameterized.parameters(
        {"prefetch": 2},
        {"prefetch": -1, "rho": 1},
        {"prefetch": 0},
        {"prefetch": 2, "beta": 0.6},
        {"prefetch": 3, "beta": 0.4, "rho": 2, "spend_on": "last", "tae_tau": 0.7},
        {"prefetch": 5, "slots": 2},
    )
    @pytest.mark.slow
    def test_counts_of_a_trace_are_those_of_the_papers_loops(self, slots=4, **settings):
        policy = BuddyMoe(**OF_TRACE, **settings)
        expected, found = by_loops(TRACE, policy, slots), replay(TRACE, policy, slots)
        for name in COUNTED:
            self.assertEqual(event(found, name), [of[name] for of in expected], name)
        looks = settings["prefetch"] != 0
        self.assertEqual(event(found, "prefetch_hits")[1] > 0, looks)
        self.assertGreater(expected[1]["replaced"], 0)


class EngineTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_the_engine_counts_as_the_loops_and_the_replay_do(self):
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        prompts = np.random.default_rng(0).integers(3, tiny_engine.VOCAB_SIZE, (3, 6)).tolist()
        tokens, ledgers = [], []
        for emulate in (True, False):
            tiering = Tiering(
                policy="buddymoe", settings=OF_ENGINE, slots=(4,), tiers=("int4",),
                quantizer="rtn", group_size=16, emulate=emulate,
            )  # fmt: skip
            engine = tiny_engine.load_tiny_engine(folder / "model", policy=tiering)
            self.assertEqual(engine.budget.tiers[0].banks, 2)
            with engine.recording(folder / "trace", probabilities=True, foreseen=8):
                found = [
                    engine.generate(prompt, max_new_tokens=100, temperature=1.0, ignore_eos=True)
                    for prompt in prompts
                ]
            tokens.append([answer.tokens for answers in found for answer in answers])
            ledgers.append(engine.ledger)
            trace = read_trace(folder / "trace")
            (folder / "trace").unlink()
        self.assertEqual(*tokens)
        self.assertEqual(ledgers[0].layers, ledgers[1].layers)
        np.testing.assert_array_equal(ledgers[0].gate, ledgers[1].gate)
        policy = BuddyMoe(**OF_ENGINE)
        expected = sum(by_loops(trace, policy, 4), collections.Counter())
        replayed = replay(trace, policy, 4)
        for name in COUNTED:
            self.assertEqual(ledgers[1].total(name), expected[name], name)
            self.assertEqual(sum(event(replayed, name)), expected[name], name)
        gate = replayed.gate.sum(axis=0)
        self.assertAlmostEqual(ledgers[1].shares["substituted"], gate[-2] / gate[-1], places=4)
        self.assertGreater(min(expected["prefetch_hits"], expected["replaced"]), 50)
