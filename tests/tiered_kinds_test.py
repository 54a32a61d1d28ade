"""Policies over layers that are not all alike: whose importance a layer has, and which weights."""

import dataclasses
import tempfile
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.experts import cached_experts
from moejax.inference.recorder import RecordSpec, recording
from moejax.models.config import RouterRule
from moejax.models.moe import routing_of
from moejax.models.transformer import Transformer
from moejax.policies.buddy_lists import BuddyLists
from moejax.policies.dymoe import DyMoE
from moejax.policies.make import make_policy
from moejax.routing.simulate.replay import EVENTS
from moejax.routing.simulate.runs import Run, run_policies
from moejax.routing.trace import Trace, read_trace
from tests import model_kinds, slow
from tests.cached_runners import answers, cached_runner
from tests.invisible_residency_test import FOUR

DYMOE = {"retention": 0.5, "schedule": "linear", "heavy_count": 3, "prefetch": 0}
TOKENS = np.random.default_rng(0).integers(0, 160, (1, 16)).astype(np.int32)
# The attention of the layer between is the importance of its own tokens and of the last layer's.
THREE = model_kinds.config_of("delta", num_experts=8, num_layers=3, moe_layers=(0, 1, 2))
THREE = dataclasses.replace(THREE, delta_net=dataclasses.replace(THREE.delta_net, layers=(0, 2)))
# Settings, bits and slots (None: all experts) of the tiers, and how they are held.
POLICIES = {
    "dynaexq": ({"n_hot": 2, "period": 4}, (4, 2), (2, None), {}),
    "buddymoe": ({"rho": 2, "tae_tau": -1.0}, (4,), (2,), {"first": 2}),
    "dymoe": ({**DYMOE, "prefetch": 2}, (4, 2), (2, 2), {"prefetch": 2}),
    "compose": (
        {**DYMOE, "n_hot": 2, "period": 4, "prefetch": 2}, (4, 2), (2, None), {"prefetch": 2},
    ),
    "compose with buddies": (
        {**DYMOE, "parts": "dymoe+buddymoe", "rho": 2, "tae_tau": -1.0}, (4, 2), (2, 2),
        {"first": 2},
    ),
    "on_demand": ({}, (4,), (2,), {}),
    "resident": ({}, (4,), (None,), {}),
}  # fmt: skip


def runner_of(config, **settings):
    slots = (3, config.num_experts)
    policy = make_policy("dymoe", **DYMOE, **settings)
    return cached_runner(policy, (4, 2), slots, config=config)


def recorded(runner, prompts, num_tokens) -> tuple[list[list[int]], Trace]:
    """Some answers and their trace, with what DyMoE reads of it."""
    spec = RecordSpec(foreseen=runner.config.num_experts, probabilities=True, importance=True)
    with tempfile.TemporaryDirectory() as folder:
        with recording(runner, Path(folder) / "trace", spec):
            said = [answers(runner, [prompt], num_tokens)[0] for prompt in prompts]
        return said, read_trace(Path(folder) / "trace")


class ImportanceTest(parameterized.TestCase):
    def seen(self, config, **settings):
        """Importance that each layer's decision received, and importance that was computed."""
        told, computed = [], []
        decide, received = DyMoE.decide, cached_experts.attention_received

        def spied(self, state, observation):
            told.append(observation.importance)
            return decide(self, state, observation)

        def counted(*arguments, **options):
            computed.append(options)
            return received(*arguments, **options)

        runner, memory = runner_of(config, **settings)
        with (
            mock.patch.object(Transformer, "loops", lambda *_: False),
            mock.patch.object(DyMoE, "decide", spied),
            mock.patch.object(cached_experts, "attention_received", counted),
        ):
            runner.logits(TOKENS)
        memory.read_counters()
        return told, computed

    @pytest.mark.slow
    def test_layers_without_attention_have_that_of_the_last_which_attended(self):
        told, computed = self.seen(FOUR)
        self.assertLen(told, 4)
        self.assertLen(computed, 2)
        first, second, third = told[0], told[1], told[3]
        self.assertIsNotNone(first)
        for layer, expected in enumerate([first, second, second, third]):
            self.assertIs(told[layer], expected, layer)
        self.assertIsNot(first, second)
        self.assertIsNot(second, third)

    @pytest.mark.slow
    def test_a_trace_through_the_policy_gives_the_counts_of_the_engine(self):
        policy = make_policy("dymoe", **DYMOE)
        runner, memory = cached_runner(policy, (4, 2), (3, 8), config=THREE, emulated=True)
        prompts = np.random.default_rng(1).integers(0, 160, (8, 13)).tolist()
        _, trace = recorded(runner, prompts, 4)
        memory.read_counters()
        run = Run(policy=policy, tiers=("int4", "int2"), expert_bytes=(2, 1), slots=(3, 8))

        def counts(trace: Trace) -> np.ndarray:
            return np.sum(run_policies(trace, [run])[0].events, axis=0)

        events, names = counts(trace), ("needed", "hits", "misses", "admitted", "streamed")
        for i, tier in enumerate(memory.tiers):
            for name in names:
                self.assertEqual(tier.ledger.total(name), events[EVENTS.index(name), i], name)
        self.assertGreater(memory.tiers[0].ledger.total("misses"), 10)
        alike = dataclasses.replace(trace, importance=np.ones_like(trace.importance))
        self.assertTrue((counts(alike) != events).any())  # what is recorded decides

    @pytest.mark.slow
    def test_scores_are_the_models_own(self):
        config = model_kinds.config_of("latent")
        told, computed = self.seen(config, aggregation="last_query")
        self.assertEqual([one["aggregation"] for one in computed], ["last_query"] * 2)
        self.assertLen(told, 2)  # the first layer is dense
        self.assertEqual([one["scale"] for one in computed], [config.score_scale] * 2)
        self.assertNotAlmostEqual(config.score_scale, config.head_dim**-0.5)


class PoliciesTest(parameterized.TestCase):
    """Each policy on each kind of model, experts of several precisions, prompts and decode."""

    @parameterized.product(kind=tuple(model_kinds.KINDS), name=tuple(POLICIES))
    @pytest.mark.slow
    def test_it_decides_and_its_ledger_is_whole(self, kind, name):
        config = model_kinds.config_of(kind)
        num_layers, num_experts = len(config.moe_layers), config.num_experts
        settings, bits, slots, how = POLICIES[name]
        replaces = "rho" in settings
        if replaces:
            others = (np.arange(num_experts)[:, None] + [1, 2]) % num_experts
            ids = np.tile(others.astype(np.int32), (num_layers, 1, 1))
            lists = BuddyLists(ids, np.full(ids.shape, 0.5, np.float32))
            settings = {**settings, "lists": lists}
        policy = make_policy(name.split()[0], **settings)
        slots = [num_experts if of is None else of for of in slots]
        runner, memory = cached_runner(policy, bits, slots, config=config, **how)
        self.assertLen(answers(runner, [[1, 2, 3]], 8)[0], 8)
        memory.read_counters()
        shares = memory.ledger.shares
        self.assertAlmostEqual(sum(shares.values()) - shares.get("substituted", 0), 1, places=5)
        for event in ("unserved", "hits", "prefetched"):
            count = sum(tier.ledger.total(event) for tier in memory.tiers)
            asked = event == "hits" or (event == "prefetched" and "prefetch" in how)
            self.assertEqual(count > 0, asked, event)
        self.assertEqual(shares.get("substituted", 0) > 0, replaces, shares)


class WeightsTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.parameters(
        (RouterRule(), True),
        (RouterRule(scale=2.5), False),
        (RouterRule(scale=16.0, num_groups=2, top_groups=1), False),
        (RouterRule(scoring="sigmoid", scale=2.5, has_bias=True), True),
    )
    def test_are_the_scores_of_the_chosen_experts(self, rule, normalises):
        config = model_kinds.config_of("shared", router=rule, norm_topk_prob=normalises)
        logits = jnp.asarray(np.random.default_rng(0).standard_normal((7, 4)), jnp.float32)
        bias = jnp.asarray([0.3, -0.2, 0.1, 0.0], jnp.float32) if rule.has_bias else None
        found = routing_of(logits, config, bias)
        chosen = np.take_along_axis(np.asarray(found.probabilities), np.asarray(found.ids), 1)
        if normalises:
            chosen /= chosen.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(found.weights, rule.scale * chosen, rtol=1e-5)
        total = np.asarray(found.weights).sum(axis=1)
        if normalises:
            np.testing.assert_allclose(total, rule.scale, rtol=1e-5)
        else:
            self.assertGreater(abs(total - 1).min(), 1e-3)
