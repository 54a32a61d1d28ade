"""Cache-aware routing beside its equations in numpy, and in the engine."""

import dataclasses
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.errors import MoejaxError
from moejax.experts.tiering import Tiering
from moejax.policies.base import Observation, PolicySpec
from moejax.policies.make import make_policy
from tests import policies_cases, policies_contract, tiny_engine

NAME = "scripts.studies.quality.resident_bonus:CacheAware"  # as any command takes it
E, A, N = 12, 4, 3
SPEC = PolicySpec(
    num_layers=2, num_experts=E, width=A, tiers=("int4",), expert_bytes=(8,), slots=(6,)
)


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def observed(logits, resident, *, is_prefill=False, active=None):
    probabilities = softmax(logits).astype(np.float32)
    ids = np.argsort(-probabilities, axis=-1)[:, :A].astype(np.int32)
    chosen = np.take_along_axis(probabilities, ids, axis=-1)
    active = np.ones(len(logits), bool) if active is None else active
    return jax.tree.map(
        jnp.asarray,
        Observation(
            np.int32(1), probabilities, ids, chosen / chosen.sum(-1, keepdims=True), active,
            resident[None], is_prefill=is_prefill,
        ),
    )  # fmt: skip


class CacheAwareTest(parameterized.TestCase):
    @parameterized.product(strength=(0.0, 0.1, 0.4, 1.5), kept=(0, 1, 3))
    def test_the_equations(self, strength, kept):
        rng = np.random.default_rng(0)
        policy = make_policy(NAME, strength=strength, kept=kept)
        state, decide = policy.init(SPEC), jax.jit(policy.decide)
        spans = []
        for _ in range(20):
            logits, resident = rng.normal(size=(N, E)) * 2, rng.random(E) < 0.4
            seen = observed(logits, resident)
            decision, state = decide(state, seen)
            spans += list(logits.max(-1) - logits.min(-1))
            bonus = strength * np.mean(spans) * resident
            ids, weights = np.asarray(decision.ids), np.asarray(decision.weights)
            for row in range(N):
                first = np.argsort(-logits[row])[:kept].tolist()
                rest = [e for e in np.argsort(-(logits[row] + bonus)).tolist() if e not in first]
                expected = {*first, *rest[: A - kept]}
                self.assertEqual(set(ids[row].tolist()), expected)
                own = softmax(logits[row][ids[row]])  # of the unmodified logits
                np.testing.assert_allclose(weights[row], own, rtol=1e-5)
                stays = np.isin(np.asarray(seen.ids)[row], ids[row])
                np.testing.assert_array_equal(ids[row][stays], np.asarray(seen.ids)[row][stays])

    def test_prompts_and_padding_are_routed_as_they_are(self):
        rng = np.random.default_rng(1)
        policy = make_policy(NAME, strength=1.0)
        state = policy.init(SPEC)
        resident = rng.random(E) < 0.5
        seen = observed(rng.normal(size=(N, E)), resident, is_prefill=True)
        decision, after = policy.decide(state, seen)
        np.testing.assert_array_equal(decision.ids, seen.ids)
        self.assertEqual(float(after.tokens[1]), N)
        alone = np.arange(N) == 0
        decision, after = policy.decide(
            state, dataclasses.replace(seen, active=jnp.asarray(alone), is_prefill=False)
        )
        self.assertEqual(float(after.tokens[1]), 1)
        np.testing.assert_array_equal(np.asarray(decision.tier)[1:], -1)

    def test_it_misses_less_than_the_router(self):
        rng = np.random.default_rng(2)
        resident = np.arange(E) < 6
        logits = rng.normal(size=(64, E))
        seen = observed(logits, resident)
        misses = []
        for strength in (0.0, 0.2, 1.0):
            policy = make_policy(NAME, strength=strength)
            decision, _ = policy.decide(policy.init(SPEC), seen)
            misses.append(int((~resident[np.asarray(decision.ids)]).sum()))
        self.assertGreater(misses[0], misses[1])
        self.assertGreater(misses[1], misses[2])

    @pytest.mark.slow
    def test_the_ledger_counts_what_the_cache_changed(self):
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        prompt = list(range(40, 52))
        plain = tiny_engine.load_tiny_engine(folder)
        how = {"max_new_tokens": 40, "ignore_eos": True}
        exact = plain.generate([prompt], **how)[0].tokens
        ledgers = {}
        for strength in (0.0, 1.0):
            policy = Tiering(
                policy=NAME, settings={"strength": strength}, slots=(3,)
            )  # fmt: skip
            engine = tiny_engine.load_tiny_engine(folder, policy=policy)
            tokens = engine.generate([prompt], **how)[0].tokens
            self.assertEqual(tokens == exact, strength == 0)
            ledgers[strength] = engine.ledger
        self.assertEqual(ledgers[0.0].shares["substituted"], 0)
        self.assertGreater(ledgers[1.0].shares["substituted"], 0.02)
        self.assertLess(ledgers[1.0].link_bytes, ledgers[0.0].link_bytes)

    @parameterized.parameters(True, False)
    def test_the_contract_of_policies(self, prefill):
        settings = ({"strength": 0.3}, {"strength": 0.0}, {"strength": 1.0, "kept": 2})
        case = policies_cases.Case(NAME, settings, policies_cases.ONE)
        trace = policies_cases.random_trace(case.spec, 6, 2, prefill=prefill, seed=1)
        for check in (
            policies_contract.check_form, policies_contract.check_values,
            policies_contract.check_forms_agree, policies_contract.check_padding,
            policies_contract.check_nothing_active,
        ):  # fmt: skip
            check(case, trace)

    def test_one_tier(self):
        spec = dataclasses.replace(
            SPEC, tiers=("int4", "int2"), expert_bytes=(8, 4), slots=(6, E)
        )  # fmt: skip
        with self.assertRaisesRegex(MoejaxError, "cache_aware serves one tier"):
            make_policy(NAME).init(spec)


if __name__ == "__main__":
    absltest.main()
