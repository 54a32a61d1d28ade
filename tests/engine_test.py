"""Answers of an engine: batches, ends, stop strings, streams, and refusals."""

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized

from moejax import Engine, MoejaxError
from moejax import engine as engine_module
from moejax.inference.chunking import PlannedSizes
from moejax.models.config import RopeScaling
from tests.tiny_engine import VOCAB_SIZE, load_tiny_engine

CONTEXT = 256
ENGINE: Engine
SAMPLED = {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.01}


def setUpModule():
    """One engine for the file: most of the time is compiling."""
    global ENGINE
    with tempfile.TemporaryDirectory() as directory:
        ENGINE = load_tiny_engine(Path(directory))


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids."""
    return np.random.default_rng([length, seed]).integers(0, VOCAB_SIZE, length).tolist()


def spell(tokens: list[int]) -> str:
    """The text of tokens, each by itself: this tokenizer only joins."""
    return "".join(ENGINE.tokenizer.decode([token]) for token in tokens)


def sibling(**how: Any) -> Engine:
    """An engine of the same weights."""
    how = {"tokenizer": ENGINE.tokenizer, **how}
    return Engine(ENGINE.config, ENGINE.weights, device=ENGINE.device, **how)


def answers(prompts: Any, engine: Engine | None = None, **settings: Any) -> list[list[int]]:
    return [answer.tokens for answer in (engine or ENGINE).generate(prompts, **settings)]


class BatchTest(parameterized.TestCase):
    PROMPTS = tuple(random_prompt(length) for length in (20, 40))  # in buckets of 32 and of 64

    def test_greedy_tokens_are_those_of_each_prompt_alone(self):
        together = answers(list(self.PROMPTS), max_new_tokens=20)
        for prompt, tokens in zip(self.PROMPTS, together, strict=True):
            self.assertEqual(answers(prompt, max_new_tokens=20), [tokens])
            self.assertLen(tokens, 20)

    @pytest.mark.slow
    def test_at_the_edge_of_the_context_a_long_prompt_does_not_cut_a_short_one(self):
        long, short = random_prompt(250), random_prompt(20)
        first, second = ENGINE.generate([long, short], max_new_tokens=40)
        # The last token of an answer is chosen from a full cache and never written to it.
        self.assertLen(first.tokens, CONTEXT - 250 + 1)
        self.assertLen(second.tokens, 40)
        self.assertEqual([first.finish_reason, second.finish_reason], ["length", "length"])
        self.assertEqual(answers(long, max_new_tokens=40), [first.tokens])
        self.assertEqual(answers(short, max_new_tokens=40), [second.tokens])
        logits = ENGINE.logits([long + first.tokens[:-1]])[0]
        np.testing.assert_array_equal(logits[249:].argmax(-1), first.tokens)

    def test_greedy_tokens_are_the_best_of_the_logits(self):
        prompt = self.PROMPTS[0]
        [tokens] = answers(prompt, max_new_tokens=20)
        logits = ENGINE.logits([prompt + tokens[:-1]])[0]
        np.testing.assert_array_equal(logits[len(prompt) - 1 :].argmax(-1), tokens)

    @pytest.mark.slow
    def test_a_repetition_penalty_weighs_the_prompt_and_the_answer(self):
        prompt = self.PROMPTS[0]
        # Sampling from one token is greedy, by a program that other tests have compiled.
        one = {"temperature": 1.0, "top_k": 1}
        [tokens] = answers(prompt, max_new_tokens=20, repetition_penalty=1.7, **one)
        logits = ENGINE.logits([prompt + tokens[:-1]])[0, len(prompt) - 1 :].astype(np.float64)
        for step, token in enumerate(tokens):
            row = logits[step]
            for seen in set(prompt + tokens[:step]):
                row[seen] = row[seen] / 1.7 if row[seen] > 0 else row[seen] * 1.7
            self.assertEqual(row.argmax(), token)
        self.assertNotEqual([tokens], answers(prompt, max_new_tokens=20))


class ChunkTest(parameterized.TestCase):
    def test_a_resident_model_reads_prompts_by_the_longest_planned_chunk(self):
        """Without limits too; rows of a running batch keep to the usual one, and wait less."""
        with (
            mock.patch.object(engine_module, "planned_chunks", lambda *_: (1024, 2048)),
            mock.patch.object(engine_module, "ContinuousBatch") as running,
            Engine.from_pretrained("demo", progress=False) as loaded,
        ):
            self.assertEqual(loaded._runner.planned, PlannedSizes(chunk=2048))
            self.assertIsNone(loaded.budget)
            loaded.context = 4096
            loaded.continuous_batch(2)
        self.assertLessEqual(max(running.call_args.kwargs["sizes"].chunks), 1024)


class PromptTest(parameterized.TestCase):
    def test_forms_of_a_prompt(self):
        ids = random_prompt(20)
        text = spell(ids)
        ids = ENGINE.tokenizer.encode(text)
        [expected] = answers(ids, max_new_tokens=4)
        for prompts in (text, [text], [ids], np.asarray(ids), np.asarray([ids]), tuple(ids)):
            self.assertEqual(answers(prompts, max_new_tokens=4), [expected])
        self.assertEqual(answers([text, ids], max_new_tokens=4), [expected, expected])
        self.assertEqual(ENGINE.generate([]), [])

    def test_what_comes_back(self):
        [answer] = ENGINE.generate(random_prompt(20), max_new_tokens=4)
        self.assertEqual(answer.num_prompt_tokens, 20)
        self.assertEqual(answer.text, spell(answer.tokens))
        self.assertEqual(answer.finish_reason, "length")
        self.assertTrue(all(type(token) is int for token in answer.tokens))
        self.assertEqual(answer.timing.num_decoded, 3)
        self.assertGreater(answer.timing.ttft_s, 0)
        self.assertGreater(answer.timing.tpot_s, 0)

    @parameterized.parameters(
        ("", "an empty prompt"),
        ([[]], "an empty prompt"),
        ([[1], []], "an empty prompt"),
        ([[1, -1]], r"token id -1 is outside the vocabulary of 160"),
        ([160], r"token id 160 is outside"),
        ([[2**40]], r"token id 1099511627776 is outside"),
        ([[1.5]], "text or a list of token ids .*float"),
        ([1.5, 2], "text or a list of token ids"),
        ([[1], 2], "text or a list of token ids"),
        ([["a"]], "text or a list of token ids .*str"),
        (7, "text or a list of token ids .*int"),
        (None, "text or a list of token ids"),
    )
    def test_a_bad_prompt_is_named(self, prompt, message):
        with self.assertRaisesRegex(MoejaxError, message) as caught:
            ENGINE.generate(prompt)
        self.assertNotIn("\n", str(caught.exception))

    def test_a_prompt_that_fills_the_context(self):
        with self.assertRaisesRegex(MoejaxError, "256 tokens .* context of 256: shorten it$"):
            ENGINE.generate([[1], random_prompt(CONTEXT)])
        with self.assertRaisesRegex(MoejaxError, "context of 256"):
            ENGINE.stream(random_prompt(CONTEXT))
        with (
            mock.patch.object(ENGINE, "context", 20),
            self.assertRaisesRegex(MoejaxError, r"20 tokens .* context of 20: .* raise .*256"),
        ):
            ENGINE.generate(random_prompt(20))

    @parameterized.parameters((0, 1023), (64, 63))
    def test_the_longest_prompt_of_scaled_rope_is_the_longest_that_is_taken(self, context, longest):
        scaling = RopeScaling(kind="yarn", factor=4.0, original_positions=CONTEXT)
        config = dataclasses.replace(ENGINE.config, rope_scaling=scaling)
        engine = Engine(config, ENGINE.weights, device=ENGINE.device, context=context)
        self.assertEqual(engine.longest_prompt, longest)
        engine.check_prompt([0] * longest)
        with self.assertRaisesRegex(MoejaxError, "leaves no room"):
            engine.check_prompt([0] * (longest + 1))

    @parameterized.parameters(-1, 257)
    def test_a_context_that_the_model_does_not_take(self, context):
        with self.assertRaisesRegex(MoejaxError, rf"context={context} must be from 0 .* 256"):
            sibling(context=context)


class LogitsTest(parameterized.TestCase):
    def test_rows_are_independent_of_each_other(self):
        rows = np.asarray([random_prompt(20), random_prompt(20, seed=1)])
        together = ENGINE.logits(rows)
        self.assertEqual((together.shape, together.dtype), ((2, 20, VOCAB_SIZE), np.float32))
        alone = np.concatenate([ENGINE.logits(rows[i : i + 1]) for i in range(2)])
        np.testing.assert_allclose(together, alone, atol=1e-5 * np.abs(alone).max())

    @parameterized.parameters(
        ([1, 2], r"token ids \[B, T\], not shape \(2,\)"),
        ([], r"\[B, T\], not shape \(0,\)"),
        ([[]], r"\[B, T\], not shape \(1, 0\)"),
        ([[1], [1, 2]], "rows of one length"),
        ([[1.5]], "takes token ids, not float64"),
        ([["a"]], "takes token ids, not"),
        ([[160]], "token id 160 is outside"),
        ([[-1]], "token id -1 is outside"),
        ([[2**40]], "token id 1099511627776 is outside"),
        ([[0] * 257], "257 tokens do not fit the model's context of 256"),
    )
    def test_bad_token_ids_are_named(self, token_ids, message):
        with self.assertRaisesRegex(MoejaxError, message):
            ENGINE.logits(token_ids)


class EndTest(parameterized.TestCase):
    PROMPTS = BatchTest.PROMPTS

    @pytest.mark.slow
    def test_any_of_several_eos_ends_a_row_and_only_that_row(self):
        free = answers(list(self.PROMPTS), max_new_tokens=40)
        # One eos from each answer, late enough that a call of 16 steps ends in between.
        eos = (free[0][4], free[1][21])
        ends = [next(i for i, t in enumerate(row) if t in eos) + 1 for row in free]
        self.assertNotEqual(ends[0], ends[1])
        engine = sibling(eos_ids=eos)
        found = engine.generate(list(self.PROMPTS), max_new_tokens=40)
        for answer, row, end in zip(found, free, ends, strict=True):
            self.assertEqual(answer.tokens, row[:end])
            self.assertEqual(answer.finish_reason, "eos")
            self.assertEqual(answer.text, spell(row[: end - 1]))  # eos is no text
        chunks = list(engine.stream(self.PROMPTS[1], max_new_tokens=40))
        self.assertEqual([chunk.token for chunk in chunks], found[1].tokens)
        self.assertEqual(chunks[-1].finish_reason, "eos")

        ignoring = engine.generate(list(self.PROMPTS), max_new_tokens=40, ignore_eos=True)
        self.assertEqual([answer.tokens for answer in ignoring], free)
        self.assertEqual([answer.finish_reason for answer in ignoring], ["length", "length"])
        self.assertEqual(ignoring[0].text, spell(free[0]))

    def test_eos_as_the_first_and_as_the_last_token(self):
        [free] = answers(self.PROMPTS[0], max_new_tokens=8)
        first = sibling(eos_ids=(free[0],)).generate(self.PROMPTS[0], max_new_tokens=8)[0]
        self.assertEqual((first.tokens, first.finish_reason, first.text), (free[:1], "eos", ""))
        self.assertTrue(math.isnan(first.timing.tpot_s))

    def test_one_new_token(self):
        [free] = answers(self.PROMPTS[0], max_new_tokens=8)
        answer = ENGINE.generate(self.PROMPTS[0], max_new_tokens=1)[0]
        self.assertEqual((answer.tokens, answer.finish_reason), (free[:1], "length"))
        [chunk] = ENGINE.stream(self.PROMPTS[0], max_new_tokens=1)
        self.assertEqual((chunk.token, chunk.text), (free[0], spell(free[:1])))

    @parameterized.parameters(1, 2, 15, 16, 17, 18, 33)
    def test_any_number_of_tokens(self, max_new_tokens):
        [free] = answers(self.PROMPTS[0], max_new_tokens=40)
        self.assertEqual(
            answers(self.PROMPTS[0], max_new_tokens=max_new_tokens), [free[:max_new_tokens]]
        )

    def test_eos_ids_are_read_from_the_checkpoint(self):
        with tempfile.TemporaryDirectory() as parent:
            engine = load_tiny_engine(Path(parent), eos_ids=(5, 9))
        self.assertEqual(engine.eos_ids, (5, 9))


class StopTest(parameterized.TestCase):
    PROMPT = BatchTest.PROMPTS[0]

    def _free(self) -> tuple[list[int], str]:
        [tokens] = answers(self.PROMPT, max_new_tokens=40)
        return tokens, spell(tokens)

    def _check(self, stop: Any, tokens: list[int], text: str) -> None:
        """Expects the free answer cut where a stop string is first whole."""
        stops = (stop,) if isinstance(stop, str) else stop
        count = next(
            n for n in range(1, len(tokens) + 1) if any(s in spell(tokens[:n]) for s in stops)
        )
        so_far = spell(tokens[:count])
        expected = so_far[: min(so_far.find(s) for s in stops if s in so_far)]
        [answer] = ENGINE.generate(self.PROMPT, max_new_tokens=40, stop=stop)
        self.assertEqual(answer.finish_reason, "stop")
        self.assertEqual(answer.text, expected)
        self.assertEqual(answer.tokens, tokens[:count])
        chunks = list(ENGINE.stream(self.PROMPT, max_new_tokens=40, stop=stop))
        self.assertEqual("".join(chunk.text for chunk in chunks), expected)
        self.assertEqual([chunk.token for chunk in chunks], answer.tokens)
        self.assertEqual([chunk.finish_reason for chunk in chunks][-1], "stop")
        self.assertFalse(any(chunk.finish_reason for chunk in chunks[:-1]))

    @parameterized.parameters((10, 12), (5, 9), (0, 2), (36, 40), (20, 21))
    def test_across_token_borders(self, first, last):
        tokens, text = self._free()
        piece = spell(tokens[first:last])
        if last - first > 1:  # from inside one token to inside another where they have two letters
            piece = piece[len(spell(tokens[first : first + 1])) - 1 :]
        self._check(piece, tokens, text)


class StreamTest(parameterized.TestCase):
    @parameterized.parameters(({},), (SAMPLED,))
    def test_equals_generate(self, how):
        how = {"max_new_tokens": 20, "seed": 3, **how}
        prompt = random_prompt(20)
        [answer] = ENGINE.generate(prompt, **how)
        chunks = list(ENGINE.stream(prompt, **how))
        self.assertEqual([chunk.token for chunk in chunks], answer.tokens)
        self.assertEqual("".join(chunk.text for chunk in chunks), answer.text)
        self.assertEqual([chunk.finish_reason for chunk in chunks], [None] * 19 + ["length"])
        self.assertEqual(chunks[-1].timing.num_decoded, 19)

    def test_may_be_left_early(self):
        stream = ENGINE.stream(random_prompt(20), max_new_tokens=20)
        first = next(stream)
        stream.close()
        self.assertEqual([first.token], ENGINE.generate(random_prompt(20))[0].tokens[:1])

    def test_bad_input_raises_at_the_call(self):
        with self.assertRaisesRegex(MoejaxError, "temperature=-1"):
            ENGINE.stream([1], temperature=-1)
        with self.assertRaisesRegex(MoejaxError, "did you mean temperature"):
            ENGINE.stream([1], temprature=1)


class SeedTest(parameterized.TestCase):
    PROMPT = BatchTest.PROMPTS[0]

    @parameterized.parameters(
        ({},), ({"top_k": 5},), ({"top_p": 0.7},), ({"min_p": 0.1},), ({"repetition_penalty": 1.5},)
    )
    def test_the_same_seed_gives_the_same_tokens_and_another_others(self, how):
        how = {"temperature": 1.5, "max_new_tokens": 20, **how}
        first, again, other = (answers(self.PROMPT, seed=seed, **how) for seed in (1, 1, 2))
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)

    @parameterized.parameters(({"top_k": 1},), ({"top_p": 1e-6},), ({"min_p": 1.0},))
    def test_a_filter_that_leaves_one_token_is_greedy(self, how):
        greedy = answers(self.PROMPT, max_new_tokens=20)
        self.assertEqual(answers(self.PROMPT, max_new_tokens=20, temperature=2.0, **how), greedy)
