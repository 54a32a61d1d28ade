"""Laws that hold for every kind of model: residency is invisible, chunks and decode are a prompt.

A kind costs few programs by default; the others are slow tests.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.inference import runner
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner
from moejax.models.config import ModelConfig, RouterRule
from moejax.weights.qtensor import Weight
from tests import model_kinds, pooled_test, slow
from tests.transformers_parity_test import RELATIVE_ERROR, relative_errors

# A sparse layer beside another; where the family has them, a dense one before both.
SMALL: dict[str, Any] = {"model_dim": 32, "num_experts": 8, "expert_dim": 16, "mlp_dim": 40}
WIDTHS: dict[str, dict[str, Any]] = {
    "shared": {"head_dim": 8, "shared_dim": 32},
    "latent": {
        "shared_dim": 32, "router": RouterRule(num_groups=4, top_groups=2, scale=1.5),
    },
    "sigmoid": {"shared_dim": 32},
    "delta": {
        "head_dim": 8, "shared_dim": 16, "num_layers": 2, "moe_layers": (0, 1),
        "delta_net": dataclasses.replace(model_kinds.DELTA["delta_net"], layers=(0,)),
    },
}  # fmt: skip
KINDS = tuple(model_kinds.KINDS)
LENGTHS, NUM_NEW, CACHE, CHUNK = (16, 9), 8, 32, 8
PROMPTS = [np.random.default_rng(n).integers(0, 160, n).tolist() for n in LENGTHS]
SETTINGS = GenerationSettings.of(max_new_tokens=NUM_NEW)


def config_of(kind: str) -> ModelConfig:
    return model_kinds.config_of(kind, **SMALL, **WIDTHS[kind])


@functools.cache
def weights_of(kind: str, bits: int = 16) -> dict[str, Weight]:
    return pooled_test.random_weights(config_of(kind), bits)


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers to two prompts: tokens [B, n], log-probabilities [B, n, V], and the cache."""

    tokens: np.ndarray
    logprobs: np.ndarray
    cache: list[np.ndarray]


def answers_of(of: Runner) -> Answers:
    session = of.prefill(PROMPTS, CACHE, SETTINGS, (), of.config.vocab_size)
    parts = [session.emitted]
    of.decode(session, NUM_NEW - 1, NUM_NEW - 1)
    parts.append(session.emitted)
    falling = np.concatenate([part.logprobs.top for part in parts], axis=1)
    ids = np.concatenate([part.logprobs.top_ids for part in parts], axis=1)
    logprobs = np.empty_like(falling)
    np.put_along_axis(logprobs, ids, falling, axis=-1)
    tokens = np.concatenate([part.tokens for part in parts], axis=1)
    return Answers(tokens, logprobs, [np.asarray(a) for a in jax.tree.leaves(session.state.cache)])


@functools.cache
def resident(kind: str, bits: int = 16) -> Runner:
    return Runner(config_of(kind), weights_of(kind, bits), pooled_test.CPU)


@functools.cache
def resident_answers(kind: str, bits: int = 16) -> Answers:
    return answers_of(resident(kind, bits))


@functools.cache
def whole_texts(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and answers, padded, and their logits as prompts at once."""
    longest = max(LENGTHS) + NUM_NEW
    rows = zip(PROMPTS, resident_answers(kind).tokens.tolist(), strict=True)
    tokens = np.stack([np.pad(p + a, (0, longest - len(p + a))) for p, a in rows])
    return tokens.astype(np.int32), resident(kind).logits(tokens.astype(np.int32))


AHEAD = "25 % and prefetch", 16


class ResidencyTest(parameterized.TestCase):
    """Where the experts are is not seen: no bit of tokens, probabilities and caches differs."""

    @slow.where(
        lambda kind, policy, bits: (kind, policy, bits) != ("delta", "25 % and prefetch", 16)
    )
    @parameterized.product(
        kind=KINDS, policy=("25 % and prefetch", "25 %", "50 %", "no cache"), bits=(16, 3)
    )
    def test_answers_are_those_of_a_resident_model(self, kind, policy, bits):
        weights, how = weights_of(kind, bits), pooled_test.POLICIES[policy]
        pooled = pooled_test.pooled_runner(config_of(kind), weights, how)
        found, expected = answers_of(pooled), resident_answers(kind, bits)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.logprobs, expected.logprobs)
        for a, b in zip(found.cache, expected.cache, strict=True):
            np.testing.assert_array_equal(a, b)
        events = pooled.memory.read_counters().as_dict()["totals"]
        self.assertEqual(events["unserved"], 0)
        self.assertGreater(events["streamed"], 0)
        self.assertEqual(events["prefetched"] > 0, "prefetch" in policy)

    @parameterized.parameters(*KINDS)
    @pytest.mark.slow
    def test_logits_of_chunks_are_those_of_a_resident_model(self, kind):
        how = pooled_test.POLICIES["25 % and prefetch"]
        pooled = pooled_test.pooled_runner(config_of(kind), weights_of(kind), how)
        tokens, _ = whole_texts(kind)
        with mock.patch.object(runner, "longest_chunk", lambda *_: CHUNK):
            np.testing.assert_array_equal(pooled.logits(tokens), resident(kind).logits(tokens))


class ChunksTest(parameterized.TestCase):
    """A text by chunks, and token by token, has the logits of the text at once."""

    @slow.where(lambda kind, chunk: (kind, chunk) != ("shared", CHUNK))
    @parameterized.product(kind=KINDS, chunk=(CHUNK, 1))
    def test_chunks(self, kind, chunk):
        tokens, expected = whole_texts(kind)
        with mock.patch.object(runner, "longest_chunk", lambda *_: chunk):
            found = resident(kind).logits(tokens)
        self.assertLess(relative_errors(found, expected).max(), RELATIVE_ERROR)

    @parameterized.parameters(*KINDS)
    @pytest.mark.slow
    def test_decode(self, kind):
        _, logits = whole_texts(kind)
        expected = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
        found = resident_answers(kind)
        for row, length in enumerate(LENGTHS):
            of_row = expected[row, length - 1 : length - 1 + NUM_NEW]
            self.assertLess(relative_errors(found.logprobs[row], of_row).max(), RELATIVE_ERROR)
            np.testing.assert_array_equal(found.tokens[row], of_row.argmax(-1))


if __name__ == "__main__":
    absltest.main()
