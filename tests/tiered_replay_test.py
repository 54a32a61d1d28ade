"""Replayed routing under a policy: what is replayed runs, and the policy sees what goes with it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

from moejax.policies.make import make_policy
from moejax.policies.on_demand import OnDemand
from tests.pooled_test import PROMPTS, answers, pooled_runner, random_weights
from tests.tiered_case import CONFIG, tiered_runner

pytestmark = pytest.mark.slow

NUM_LAYERS, NUM_EXPERTS = len(CONFIG.moe_layers), CONFIG.num_experts
WIDTH, STEPS, TOKENS = CONFIG.experts_per_token, 5, 9


class Seen(NamedTuple):
    """Routing of each layer's last decode step of one token."""

    of: Any
    probabilities: jax.Array  # float32[M, 1, E]
    weights: jax.Array  # float32[M, 1, A]
    predicted: jax.Array  # float32[M, 1, E], of the next layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Looking(OnDemand):
    """Keeps what it saw."""

    def init(self, spec):
        def zeros(size):
            return jnp.zeros((spec.num_layers, 1, size), jnp.float32)

        sizes = (spec.num_experts, spec.width, spec.num_experts)
        return Seen(super().init(spec), *map(zeros, sizes))

    def decide(self, state, observation):
        decision, of = super().decide(state.of, observation)
        if observation.is_prefill:
            return decision, state._replace(of=of)
        new = {"probabilities": observation.probabilities, "weights": observation.weights}
        if observation.predicted is not None:
            new["predicted"] = observation.predicted
        place = observation.layer
        kept = {name: getattr(state, name).at[place].set(what) for name, what in new.items()}
        return decision, state._replace(of=of, **kept)

    def transfers(self, state, resident):
        requests, of = super().transfers(state.of, resident)
        return requests, state._replace(of=of)


def replays(with_predicted: bool) -> dict[str, jax.Array]:
    rng = np.random.default_rng(5)
    shape = (STEPS, NUM_LAYERS, 1, NUM_EXPERTS)
    names = ["replay", "replay_predicted"][: 1 + with_predicted]
    return {name: jnp.asarray(rng.standard_normal(shape, np.float32)) for name in names}


def replayed(runner: Any, tiers: Any, given: dict[str, jax.Array]) -> list[list[int]]:
    for memory in tiers:
        memory.store = dataclasses.replace(memory.store, **given)
    return answers(runner, PROMPTS[:1], TOKENS)


class ReplayTest(absltest.TestCase):
    def test_the_replayed_experts_run_and_are_counted_as_without_a_policy(self):
        given, slots, how = replays(False), 3, {"transient": 2, "prefetch": 0}
        plain = pooled_runner(CONFIG, random_weights(CONFIG), (slots, 2, 0))
        expected = replayed(plain, plain.memory.tiers, given)
        runner, memory = tiered_runner(make_policy("on_demand"), (16,), (slots,), **how)
        self.assertEqual(replayed(runner, memory.tiers, given), expected)
        self.assertEqual(memory.read_counters().layers, plain.memory.read_counters().layers)
        routed = answers(pooled_runner(CONFIG, random_weights(CONFIG), (slots, 2, 0)), PROMPTS[:1])
        self.assertNotEqual(expected[0], routed[0][:TOKENS])
        again, second = tiered_runner(make_policy("on_demand"), (16,), (slots,), **how)
        self.assertEqual(replayed(again, second.tiers, given), expected)
        self.assertEqual(second.read_counters().layers, memory.ledger.layers)

    def test_a_policy_sees_the_replayed_probabilities(self):
        given = replays(True)
        runner, memory = tiered_runner(Looking(prefetch=2), (4, 2), (3, 3), prefetch=2)
        replayed(runner, memory.tiers[:1], given)
        clock = int(memory.pool.tiers[0].residency.clock)
        step = ((clock - 1) // NUM_LAYERS - 1) % STEPS  # the last one
        seen = jax.device_get(memory.pool.state)
        probabilities, predicted = (
            np.asarray(jax.nn.softmax(given[name][step])) for name in ("replay", "replay_predicted")
        )
        np.testing.assert_allclose(seen.probabilities, probabilities, rtol=1e-6)
        np.testing.assert_allclose(seen.predicted[:-1], predicted[1:], rtol=1e-6)
        chosen = -np.sort(-probabilities, axis=-1)[..., :WIDTH]
        if CONFIG.norm_topk_prob:
            chosen = chosen / chosen.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(seen.weights, chosen, rtol=1e-6)


if __name__ == "__main__":
    absltest.main()
