"""Calls of several decode steps: those that run whole, and what their time counts as."""

import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from absl.testing import absltest

from moejax import Engine
from moejax.inference import steps
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner
from tests.cached_runners import QWEN, cached_runner
from tests.tiny_engine import VOCAB_SIZE, answers, load_tiny_engine

CONTEXT = 256
ENGINE: Engine


def setUpModule():
    """One engine for the file: most of the time is compiling."""
    global ENGINE
    with tempfile.TemporaryDirectory() as directory:
        ENGINE = load_tiny_engine(Path(directory), tokenizer=False)


def random_tokens(length: int) -> list[int]:
    """Tokens of a random prompt."""
    return np.random.default_rng(length).integers(0, VOCAB_SIZE, length).tolist()


class WholeCallsTest(absltest.TestCase):
    @pytest.mark.slow
    def test_steps_that_were_not_asked_for_change_nothing(self):
        prompts = [random_tokens(20), random_tokens(9)]
        settings = GenerationSettings(temperature=0.8, top_k=50, repetition_penalty=1.2, seed=3)
        found = []
        for whole in (False, True):
            serving = Runner(ENGINE.config, ENGINE.weights, ENGINE.device, whole_calls=whole)
            session = serving.prefill(prompts, CONTEXT, settings.by_prompt(2), ())
            emitted = [np.asarray(serving.decode(session, n, 8)) for n in (3, 8, 1, 5)]
            state = session.state
            keys = jax.random.key_data(state.keys)
            found.append((emitted, state.tokens, state.positions, state.done, keys, state.seen))
        jax.tree.map(np.testing.assert_array_equal, *found)
        counts = [(np.asarray(part) >= 0).sum(axis=1).tolist() for part in found[1][0]]
        self.assertEqual(counts, [[n, n] for n in (3, 8, 1, 5)])

    @pytest.mark.slow
    def test_rows_that_rest_are_no_steps_of_the_ledger(self):
        runner, memory = cached_runner(None, (16,), (4,))
        runner._whole_calls = True
        prompts = [random_tokens(7), random_tokens(5)]
        session = runner.prefill(prompts, 64, [GenerationSettings()] * 2, ())
        first = memory.read_counters().total("steps")
        self.assertEqual(first, QWEN.num_layers)
        runner.decode(session, 3, 8)  # five steps more pad the call
        self.assertEqual(memory.read_counters().total("steps") - first, 3 * QWEN.num_layers)
        state = session.state._replace(done=np.asarray([True, False]))
        session.state = jax.device_put(state, runner.device)
        runner.decode(session, 2, 8)
        self.assertEqual(memory.read_counters().total("steps") - first, 5 * QWEN.num_layers)
        state = session.state._replace(done=np.ones(2, bool))
        session.state = jax.device_put(state, runner.device)
        runner.decode(session, 8, 8)
        self.assertEqual(memory.read_counters().total("steps") - first, 5 * QWEN.num_layers)

    @pytest.mark.slow
    def test_an_answer_of_which_much_would_be_waste_is_not_run_whole(self):
        serving = Runner(ENGINE.config, ENGINE.weights, ENGINE.device, whole_calls=True)
        for num_new, expected in ((2, False), (4, False), (17, True), (20, True)):
            serving.programs._programs.clear()
            [answer] = answers(serving, [random_tokens(12)], 64, num_new, per_call=4)
            self.assertLen(answer, num_new)
            (key,) = (key for key in serving.programs._programs if key[0] is steps.decode)
            self.assertEqual(key[1][-1], expected, num_new)
