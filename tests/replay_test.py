"""Policies replayed over traces, against pools in plain Python that follow the same decisions."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.errors import MoejaxError
from moejax.policies.base import SKIPPED, Observation
from moejax.policies.dymoe import DyMoE
from moejax.policies.make import make_policy
from moejax.routing.simulate import runs
from moejax.routing.simulate.replay import CALL_STEPS, EVENTS, segments
from moejax.routing.simulate.runs import Run, RunResult, _ProgramKeys, _spec_of, run_policies
from moejax.routing.trace import Trace
from tests import slow
from tests.simulated_traces import random_trace

NUM_EXPERTS = 12
TRACE = random_trace(
    step_sizes=[9, *[1] * 21, 9, *[1] * 18], num_layers=3, num_experts=NUM_EXPERTS, width=3,
    foreseen=4,
)  # fmt: skip
TIERS: dict[str, Any] = {"tiers": ("int4", "int2"), "expert_bytes": (20, 12)}


def one_tier(slots: int, **settings: Any) -> Run:
    policy = make_policy("on_demand", **settings)
    return Run(policy=policy, tiers=("int4",), expert_bytes=(20,), slots=(slots,), bulk=64)


def two_tiers(name: str, slots: tuple[int, int], bulk: int = 64, **settings: Any) -> Run:
    return Run(policy=make_policy(name, **settings), slots=slots, bulk=bulk, **TIERS)


@functools.cache
def jitted(kind: type, num_tiers: int, selection: str | None) -> tuple[Any, Any]:
    """The functions of a policy, whose settings are in its state."""
    run = next(
        run for run in RUNS.values()
        if isinstance(run.policy, kind) and len(run.tiers) == num_tiers
        and getattr(run.policy, "selection", None) == selection
    )  # fmt: skip
    return jax.jit(run.policy.decide), jax.jit(run.policy.transfers)


class PlainPools:
    """Pools of one run: experts per layer and tier, with last use and an unused mark."""

    def __init__(self, trace: Trace, run: Run, delay: int = 0):
        self.trace, self.run, self.clock = trace, run, 1
        tiers = range(len(run.tiers))
        self.held: list[list[dict[int, tuple[float, bool]]]] = [
            [{} for _ in tiers] for _ in range(trace.num_layers)
        ]
        everyone = range(trace.num_experts)
        is_full = [slots >= trace.num_experts for slots in run.slots]
        self.is_full, self.refines = is_full, run.refines or (False,) * len(run.slots)
        for layer, t in itertools.product(self.held, tiers):
            if is_full[t]:
                layer[t] |= dict.fromkeys(everyone, (1, False))
        self.events = np.zeros((2, len(EVENTS), len(run.tiers)), int)
        self.gate = np.zeros((2, len(run.tiers) + 3))
        self.state = run.policy.init(_spec_of(trace, run))
        self.delay = delay
        # Layer, tier and expert of what is on its way, and the calls since it was asked for.
        self.coming: dict[tuple[int, int, int], int] = {}
        self.decide, self.transfers = jitted(
            type(run.policy), len(run.tiers), getattr(run.policy, "selection", None)
        )

    def count(self, phase: int, name: str, tier: int, amount: int = 1) -> None:
        self.events[phase, EVENTS.index(name), tier] += amount

    def resident(self) -> np.ndarray:
        found = np.zeros((len(self.held), len(self.run.tiers), self.trace.num_experts), bool)
        for layer, tiers in enumerate(self.held):
            for t, held in enumerate(tiers):
                found[layer, t, list(held)] = True
        return found

    def leave_other_tiers(self, layer: int, tier: int, experts: set[int]) -> None:
        for t, held in enumerate(self.held[layer]):
            if t != tier and not self.is_full[t]:
                for expert in experts & held.keys():
                    del held[expert]

    def admit(self, phase: int, layer: int, t: int, coming: set[int], safe: set[int],
              mark: bool, between_steps: bool = False) -> set[int]:  # fmt: skip
        held, slots = self.held[layer][t], self.run.slots[t]
        victims = sorted((use, e, mark_) for e, (use, mark_) in held.items() if e not in safe)
        free = slots - len(held)
        num = len(coming) if len(coming) <= free + len(victims) else free
        for _, expert, unused in victims[: max(0, num - free)]:
            del held[expert]
            self.count(phase, "evictions", t)
            self.count(phase, "prefetch_waste", t, int(unused))
        came = sorted(coming)[:num]
        held.update(dict.fromkeys(came, (self.clock + between_steps / 2, mark)))
        return set(came)

    def replay(self) -> None:
        for segment in segments(self.trace):
            phase = int(not segment.is_prefill)
            calls = segment.tokens.active.shape[0]
            for c, s in itertools.product(range(calls), range(segment.tokens.active.shape[1])):
                if not s:
                    self.transfer(phase)
                self.step(phase, jax.tree.map(lambda a, c=c, s=s: a[c, s], segment.tokens))

    def step(self, phase: int, tokens: Any) -> None:
        self.clock += 1
        ahead = np.full(self.trace.num_experts, -1)
        for layer in range(self.trace.num_layers):
            for t in range(len(self.run.tiers)):
                wanted = set(np.flatnonzero(ahead == t).tolist())
                there = set().union(*(held.keys() for held in self.held[layer][: t + 1]))
                came = self.admit(phase, layer, t, wanted - there, wanted, True)
                self.leave_other_tiers(layer, t, came)
                self.count(phase, "prefetched", t, len(came))
            ahead = self.layer(phase, layer, tokens)

    def layer(self, phase: int, layer: int, tokens: Any) -> np.ndarray:
        of_layer = jax.tree.map(lambda a: a[:, layer], tokens.layers)
        ids, weights, probabilities, _, predicted = of_layer.dense(self.trace.num_experts)
        looks = self.run.policy.needs.predicted
        observation = Observation(
            layer=jnp.int32(layer), probabilities=jnp.asarray(probabilities),
            ids=jnp.asarray(ids), weights=jnp.asarray(weights), active=jnp.asarray(tokens.active),
            resident=jnp.asarray(self.resident()[layer]), predicted=predicted if looks else None,
            is_prefill=phase == 0,
        )  # fmt: skip
        decision, self.state = self.decide(self.state, observation)
        asked: dict[int, int] = {}
        strict: dict[int, bool] = {}
        pairs = [
            (n, a)
            for n, a in itertools.product(*map(range, np.shape(ids)))
            if tokens.active[n] and int(decision.tier[n, a]) != SKIPPED
        ]
        for n, a in pairs:
            expert, tier = int(decision.ids[n, a]), int(decision.tier[n, a])
            asked[expert] = min(asked.get(expert, tier), tier)
        for n, a in pairs:
            expert = int(decision.ids[n, a])
            if int(decision.tier[n, a]) == asked[expert]:
                strict[expert] = strict.get(expert, False) or not bool(decision.at_least[n, a])
        held, runs, misses = self.held[layer], dict(asked), set()
        for expert, tier in asked.items():
            better = [t for t in range(tier) if expert in held[t] and not self.refines[t]]
            if better and not strict[expert]:
                runs[expert] = better[-1]
                self.count(phase, "reused", better[-1])
            elif expert not in held[tier]:
                misses.add(expert)
        for expert, tier in runs.items():
            self.count(phase, "needed", tier)
            self.count(phase, "misses" if expert in misses else "hits", tier)
            if expert not in misses:
                self.count(phase, "prefetch_hits", tier, int(held[tier][expert][1]))
                held[tier][expert] = (self.clock, False)
            else:
                self.leave_other_tiers(layer, tier, {expert})
        for t in range(len(held)):
            mine = {e for e, tier in runs.items() if tier == t}
            came = self.admit(phase, layer, t, mine & misses, mine, False)
            self.count(phase, "admitted", t, len(came))
            self.count(phase, "streamed", t, len(mine & misses) - len(came))
        for n, a in itertools.product(*map(range, np.shape(ids))):
            weight = float(weights[n, a]) * bool(tokens.active[n])
            self.gate[phase, -1] += weight
            if (n, a) in pairs:
                self.gate[phase, runs[int(decision.ids[n, a])]] += weight
            else:
                self.gate[phase, -3] += weight
        if decision.ahead is None:
            return np.full(self.trace.num_experts, -1)
        return np.asarray(decision.ahead)

    def transfer(self, phase: int) -> None:
        left = self.run.bulk - len(self.coming)
        self.coming = {key: calls + 1 for key, calls in self.coming.items()}
        if self.delay:
            self.arrive(phase)
        there = self.resident()
        for layer, t, expert in self.coming:
            there[layer, t, expert] = True
        requests, self.state = self.transfers(self.state, jnp.asarray(there))
        rows = np.stack([np.asarray(field) for field in requests], axis=1)
        done = []
        for layer, expert, tier in rows[rows[:, 0] >= 0].tolist():
            if left <= 0:
                break
            left -= not there[layer, tier, expert]
            done.append((layer, tier, expert))
        for layer, tier, expert in done:
            for t in range(tier):
                if not self.is_full[t]:
                    self.held[layer][t].pop(expert, None)
        for layer, tier, expert in done:
            if expert not in self.held[layer][tier]:
                self.coming.setdefault((layer, tier, expert), 0)
        self.leave(done)
        if not self.delay:
            self.arrive(phase)

    def arrive(self, phase: int) -> None:
        arrived = {key for key, calls in self.coming.items() if calls == self.delay}
        for layer, t in itertools.product(range(self.trace.num_layers), range(len(self.run.tiers))):
            mine = {e for where, tier, e in arrived if (where, tier) == (layer, t)}
            new = mine - self.held[layer][t].keys()
            came = self.admit(phase, layer, t, new, new, True, True)
            self.count(phase, "bulk", t, len(came))
        self.leave(arrived)
        self.coming = {key: calls for key, calls in self.coming.items() if key not in arrived}

    def leave(self, come: Iterable[tuple[int, int, int]]) -> None:
        """Lower copies of experts that are in a better tier."""
        for layer, tier, expert in sorted(come):
            if expert in self.held[layer][tier]:
                for t in range(tier + 1, len(self.run.tiers)):
                    if not self.is_full[t]:
                        self.held[layer][t].pop(expert, None)


RUNS = {
    "on demand": one_tier(0),
    "cache": one_tier(4),
    "cache that a token overflows": one_tier(2),
    "cache and prefetch": one_tier(5, prefetch=2),
    "dymoe 4/2": two_tiers("dymoe", (3, 4), retention=0.6, selection="load"),
    "dymoe 4/0": two_tiers("dymoe", (4, 0), retention=0.7, selection="load", low="skip"),
    "dymoe, another r": two_tiers("dymoe", (5, 2), retention=0.9, selection="load"),
    "dymoe and prefetch": two_tiers("dymoe", (4, 3), retention=0.7, selection="load", prefetch=2),
    "dymoe over all in low": two_tiers("dymoe", (4, 12), selection="load", prefetch=1),
    "dymoe by planes": dataclasses.replace(
        two_tiers("dymoe", (4, 12), selection="load", prefetch=1), refines=(True, False)
    ),
    "dymoe, shared slots": dataclasses.replace(
        two_tiers("dymoe", (9, 9), selection="load", prefetch=1),
        refines=(True, False),
        shares_slots=True,
    ),
    "dymoe 4/0, few shared slots": dataclasses.replace(
        two_tiers("dymoe", (4, 4), selection="load", prefetch=0, low="skip", reuse_skipped=True),
        refines=(True, False),
        shares_slots=True,
    ),
    "dymoe, random": two_tiers("dymoe", (3, 4), selection="random", prefetch=0),
    "dynaexq and dymoe": two_tiers(
        "compose", (4, 12), period=4, selection="load", prefetch=0, retention=0.6
    ),
    "dynaexq, one copy": two_tiers("dynaexq", (3, 9), period=8),
    "dynaexq, low always there": two_tiers("dynaexq", (3, 12), period=4, bulk=3),
}


FAST = ("dymoe 4/2",)
APART = [name for name, run in RUNS.items() if not run.shares_slots]  # refining_tiers_test.py


def in_turn(run: Run) -> Run:
    """Makes a run whose layers go one after the other."""
    kind = type(run.policy)
    fields = {field.name: getattr(run.policy, field.name) for field in dataclasses.fields(kind)}
    policy = type(kind.__name__, (kind,), {"layer_axes": None})(**fields)
    return dataclasses.replace(run, policy=policy)


@functools.cache
def result(name: str) -> RunResult:
    return run_policies(TRACE, [RUNS[name]], delay=0)[0]


def decoded(name: str, event: str) -> np.ndarray:
    """Counts of an event in decode steps, int[T]."""
    return result(name).events[1, EVENTS.index(event)]


class ReplayTest(parameterized.TestCase):
    @slow.where(lambda name: name not in FAST)
    @parameterized.parameters(*APART)
    def test_events_are_those_of_plain_python(self, name):
        found = result(name)
        self.compare(found, PlainPools(TRACE, RUNS[name]))
        np.testing.assert_array_equal(found.steps, [2, 39])
        np.testing.assert_allclose(found.gate[:, :-2].sum(1), found.gate[:, -1], rtol=1e-4)

    @parameterized.parameters(1, 2)
    @pytest.mark.slow
    def test_transfers_that_take_calls(self, delay):
        names = [name for name in RUNS if name.startswith("dynaexq")]
        found = run_policies(TRACE, [RUNS[name] for name in names], delay=delay)
        for name, one in zip(names, found, strict=True):
            self.compare(one, PlainPools(TRACE, RUNS[name], delay))
            brought = one.events[:, EVENTS.index("bulk")].sum()
            self.assertBetween(brought, 1, result(name).events[:, EVENTS.index("bulk")].sum())

    def compare(self, found, plain):
        plain.replay()
        for i, event in enumerate(EVENTS):
            np.testing.assert_array_equal(found.events[:, i], plain.events[:, i], event)
        np.testing.assert_allclose(found.gate, plain.gate, rtol=1e-4)

    @pytest.mark.slow
    def test_layers_one_by_one_have_the_same_outcome(self):
        ahead = two_tiers("compose", (4, 12), period=4, selection="load", retention=0.6)
        chosen = [*RUNS.values(), ahead]
        together = run_policies(TRACE, chosen, delay=0)
        apart = run_policies(TRACE, [in_turn(run) for run in chosen], delay=0)
        for found, expected in zip(together, apart, strict=True):
            for name in ("events", "steps", "fetches", "ahead"):
                np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
            np.testing.assert_allclose(found.gate, expected.gate, rtol=1e-6)

    @pytest.mark.slow
    def test_blocks_of_settings_have_the_same_outcome(self):
        chosen = [run for run in RUNS.values() if isinstance(run.policy, DyMoE)]
        whole = run_policies(TRACE, chosen)
        with mock.patch.object(runs, "BLOCK_BYTES", 2**14):
            self.assertEqual(runs._block_size(5, np.zeros(100), TRACE, 2), 2)
            blocks = run_policies(TRACE, chosen)
        for a, b in zip(whole, blocks, strict=True):
            np.testing.assert_array_equal(a.events, b.events)

    def test_formulas_are_traced_once_for_what_is_read(self):
        keys, spec = _ProgramKeys(), _spec_of(TRACE, RUNS["dymoe 4/2"])
        with mock.patch.object(jax, "make_jaxpr", wraps=jax.make_jaxpr) as traced:

            def formula(name: str, **settings: Any) -> tuple[str, ...]:
                policy = make_policy(name, **settings)
                return keys.key_of(policy, policy.init(spec), spec)

            first = formula("dymoe", retention=0.6)
            self.assertEqual(formula("dymoe", retention=0.9, prefetch=0, seed=3), first)
            self.assertEqual(traced.call_count, 3)
            self.assertNotEqual(formula("dymoe", selection="random"), first)
            self.assertEqual(traced.call_count, 6)
            both = formula("compose", retention=0.6, period=3)
            self.assertEqual(formula("compose", retention=0.7, period=5), both)
            self.assertEqual(traced.call_count, 9)
            self.assertNotEqual(formula("compose", selection="random"), both)
            self.assertNotEqual(formula("compose", max_requests=8), both)
            self.assertEqual(traced.call_count, 15)

    @pytest.mark.slow
    def test_what_is_expected_of_the_policies(self):
        self.assertGreater(decoded("dymoe 4/2", "reused")[0], 0)
        self.assertGreater(decoded("dynaexq, low always there", "bulk")[0], 0)
        self.assertEqual(decoded("dynaexq, low always there", "misses").sum(), 0)

    def test_what_the_trace_lacks_is_said(self):
        blind = dataclasses.replace(TRACE, predicted_ids=None, predicted_probabilities=None)
        with self.assertRaisesRegex(MoejaxError, "the trace foresees nothing"):
            run_policies(blind, [RUNS["cache and prefetch"]])
        with self.assertRaisesRegex(MoejaxError, "selection='load'"):
            run_policies(TRACE, [two_tiers("dymoe", (3, 4))])

    def test_more_experts_ahead_than_the_trace_foresees(self):
        alike: dict[str, Any] = {"schedule": "equal", "selection": "load"}
        said = r"looks at {} experts ahead, the trace foresees {}: .*record_foreseen={}, or set"
        decodes = random_trace(
            step_sizes=[1] * 4, num_layers=3, num_experts=NUM_EXPERTS, width=3, foreseen=2
        )
        prompts = dataclasses.replace(
            TRACE, predicted_ids=TRACE.predicted_ids[..., :2],
            predicted_probabilities=TRACE.predicted_probabilities[..., :2],
        )  # fmt: skip
        for trace, run, asked, has in (
            (TRACE, two_tiers("dymoe", (8, 8), prefetch=5, **alike), 5, 4),
            (TRACE, one_tier(8, prefetch=5), 5, 4),
            (TRACE, two_tiers("compose", (8, 8), prefetch=6, **alike), 6, 4),
            (decodes, two_tiers("dymoe", (8, 8), retention=1.0, **alike), 3, 2),
            (prompts, one_tier(8, prefetch=1), 3, 2),  # a prompt's tokens ask for their top 3
        ):
            with self.assertRaisesRegex(MoejaxError, said.format(asked, has, asked)):
                run_policies(trace, [run])
        slots = two_tiers("dymoe", (2, 8), prefetch=5, **alike)  # no more than there are slots
        run_policies(decodes, [slots])

    def test_segments_hold_every_token_once(self):
        cut = list(segments(TRACE))
        self.assertEqual([segment.is_prefill for segment in cut], [True, False, True, False])
        self.assertEqual(cut[1].tokens.active.shape, (2, CALL_STEPS, 1))
        ids = [s.tokens.layers.ids[s.tokens.active] for s in cut]
        np.testing.assert_array_equal(np.concatenate(ids), TRACE.ids)
