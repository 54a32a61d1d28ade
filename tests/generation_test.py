"""Settings, those of a checkpoint too, and an answer's text: stop strings, half characters."""

import json
import math
from typing import Any

import numpy as np
import pytest
import transformers
from absl import logging
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import Engine
from moejax.checkpoints.orbax_directory import save_orbax
from moejax.errors import MoejaxError
from moejax.inference.generation import (
    AnswerBuilder,
    GenerationSettings,
    Timing,
    describe_defaults,
    read_generation_defaults,
)
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import TinyCheckpoint, write_random_checkpoint

EOS = 999


class SettingsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"temperature": -1}, "temperature=-1 must be 0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"top_k": -1}, "top_k=-1 must be 0"),
        ({"top_k": 2.5}, "top_k=2.5 must be an integer"),
        ({"top_k": 2**31}, "top_k=2147483648 must be"),
        ({"top_p": 0}, "top_p=0 must be above 0"),
        ({"min_p": -0.1}, "min_p=-0.1 must be from 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be a positive"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5 must be an integer"),
        ({"seed": -1}, "seed=-1 must be an integer from 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296 must be"),
        ({"seed": [1, -2]}, r"seed=\[1, -2\] must be"),
        ({"stop": ""}, "stop=.* must be strings that are not empty"),
        ({"stop": ["a", ""]}, "stop=.* not empty"),
        ({"stop": [5]}, "stop=.* must be strings"),
        ({"temprature": 1}, "unknown generation setting temprature; did you mean temperature[?]"),
        ({"beams": 1}, "unknown generation setting beams; there are max_new_tokens, temperature, "),
    )
    def test_a_bad_setting_is_named(self, fields, message):
        with self.assertRaisesRegex(MoejaxError, message) as caught:
            GenerationSettings.of(**fields)
        self.assertNotIn("\n", str(caught.exception))

    def test_every_edge_is_allowed(self):
        GenerationSettings.of(
            max_new_tokens=np.int64(1),
            temperature=np.float32(0.5),
            top_k=2**31 - 1,
            top_p=1,
            min_p=1,
            repetition_penalty=1e-3,
            seed=2**32 - 1,
            stop=["a", "bc"],
        )

    def test_one_stop_string_need_not_be_listed(self):
        self.assertEqual(GenerationSettings.of(stop="ab").stop, ("ab",))

    def test_seeds(self):
        self.assertEqual(GenerationSettings.of(seed=np.uint32(3)).seeds(3), [3, 4, 5])
        self.assertEqual(GenerationSettings.of(seed=2**32 - 1).seeds(2), [2**32 - 1, 0])
        self.assertEqual(GenerationSettings.of(seed=(5, 5)).seeds(2), [5, 5])
        with self.assertRaisesRegex(MoejaxError, "2 seeds for 3 prompts"):
            GenerationSettings.of(seed=(5, 5)).seeds(3)

    def test_time_a_token(self):
        self.assertEqual(Timing(1.0, 6.0, 3, 0.0).tpot_s, 2.0)
        self.assertTrue(math.isnan(Timing(1.0, 0.0, 0, 0.0).tpot_s))


class PieceTokenizer:
    """Token i spells the i-th piece; nothing is left at the end."""

    thoughts = ""

    def __init__(self, pieces: list[str]):
        self._pieces = pieces

    def stream(self, chat_prompt=None) -> "PieceTokenizer":
        return self

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


def build(pieces: list[str], stop: tuple[str, ...] = (), max_tokens: int = 100):
    """Pushes every piece until the answer ends; the builder and what each push showed."""
    builder = AnswerBuilder(
        PieceTokenizer(pieces), stop=stop, eos_ids=(EOS,), max_tokens=max_tokens
    )
    shown = []
    for token in range(len(pieces)):
        shown.append(builder.push(token))
        if builder.finish_reason:
            break
    return builder, shown


class AnswerBuilderTest(parameterized.TestCase):
    @parameterized.parameters(
        # pieces, stop strings, what each push shows
        (["a", "b", "c"], (), ["a", "b", "c"]),
        (["a", "b", "c"], ("bc",), ["a", "", ""]),
        (["a", "b", "d", "e"], ("bc",), ["a", "", "bd", "e"]),
        (["ab", "ca", "bd"], ("abd",), ["", "abc", ""]),
        (["aab"], ("ab",), ["a"]),
        (["a", "a", "b"], ("aab", "ab"), ["", "", ""]),
        (["x", "aaaa", "b"], ("aab",), ["x", "aa", ""]),
        (["one two"], ("two", "one"), [""]),
        (["on", "e two"], ("e t", "one t"), ["", ""]),
        (["", "a", ""], ("a",), ["", ""]),
        (["日", "本", "語"], ("本語",), ["日", "", ""]),
    )
    def test_what_is_shown(self, pieces, stop, expected):
        builder, shown = build(pieces, stop)
        self.assertEqual(shown, expected)
        self.assertEqual(builder.text, "".join(expected))

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(
        pieces=st.lists(st.text("ab", max_size=4), min_size=1, max_size=8),
        stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple),
    )
    def test_text_ends_before_the_first_stop_string_and_shows_all_that_is_safe(self, pieces, stop):
        builder, shown = build(pieces, stop, max_tokens=len(pieces))
        for count in range(1, len(pieces) + 1):
            so_far = "".join(pieces[:count])
            hits = [so_far.find(s) for s in stop if s in so_far]
            if hits:
                expected, reason = so_far[: min(hits)], "stop"
                break
            # The least that must wait: the longest end that begins a stop string.
            if count < len(pieces):
                begins = [s[:n] for s in stop for n in range(1, len(s))]
                wait = max((len(b) for b in begins if so_far.endswith(b)), default=0)
                self.assertEqual("".join(shown[:count]), so_far[: len(so_far) - wait])
        else:
            expected, reason = so_far, "length"
        self.assertEqual((builder.text, builder.finish_reason), (expected, reason))
        self.assertEqual("".join(shown), builder.text)
        self.assertEqual(builder.tokens, list(range(count)))

    def test_eos_is_a_token_and_no_text(self):
        builder, _ = build(["ab", "c"], stop=("cd",))
        self.assertEqual(builder.text, "ab")
        self.assertEqual(builder.push(EOS), "c")
        self.assertEqual((builder.text, builder.finish_reason), ("abc", "eos"))
        self.assertEqual(builder.tokens, [0, 1, EOS])

    def test_of_two_ends_at_once(self):
        # A stop string that the last allowed token completes is a stop; eos there is eos.
        self.assertEqual(build(["a", "b"], ("ab",), max_tokens=2)[0].finish_reason, "stop")
        self.assertEqual(build(["a", "b"], ("bc",), max_tokens=2)[0].finish_reason, "length")
        last = AnswerBuilder(PieceTokenizer([]), stop=(), eos_ids=(EOS,), max_tokens=1)
        last.push(EOS)
        self.assertEqual(last.finish_reason, "eos")

    def test_without_a_tokenizer(self):
        builder = AnswerBuilder(None, stop=(), eos_ids=(), max_tokens=2)
        self.assertEqual([builder.push(7), builder.push(8)], ["", ""])
        self.assertEqual((builder.tokens, builder.finish_reason), ([7, 8], "length"))
        with self.assertRaisesRegex(MoejaxError, "stop strings need a tokenizer"):
            AnswerBuilder(None, stop=("a",), eos_ids=(), max_tokens=2)


QWEN3 = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
    "pad_token_id": 151643, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    "transformers_version": "4.51.0",
}  # fmt: skip
OF_QWEN3 = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


class FileTest(FolderTestCase):
    def read(self, fields: Any) -> dict[str, Any]:
        (self.directory / "generation_config.json").write_text(json.dumps(fields))
        return read_generation_defaults(self.directory)

    @parameterized.parameters(
        (QWEN3, OF_QWEN3),
        ({}, {}),
        ({"eos_token_id": 2, "pad_token_id": 0}, {}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        (
            {"do_sample": True, "top_k": 0, "min_p": 0.1},
            {"temperature": 1.0, "top_k": 0, "min_p": 0.1},
        ),
        ({"do_sample": None, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"max_new_tokens": 77, "max_length": 4096}, {"max_new_tokens": 77}),
        ({"stop_strings": ["###", "User:"]}, {"stop": ["###", "User:"]}),
    )
    def test_fields(self, fields, expected):
        with self.assertNoLogs(logging.get_absl_logger(), "WARNING"):
            self.assertEqual(self.read(fields), expected)

    def test_no_file(self):
        self.assertEqual(read_generation_defaults(self.directory), {})

    def test_defaults_are_those_of_transformers(self):
        theirs = transformers.GenerationConfig._get_default_generation_params()
        self.assertFalse(theirs["do_sample"])
        self.assertEqual(self.read({"do_sample": True})["top_k"], theirs["top_k"])
        self.assertEqual(self.read({"do_sample": True})["temperature"], theirs["temperature"])

    def test_what_is_not_supported_is_named_in_one_line(self):
        fields = {"num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 1.0, "max_length": 4096}
        with self.assertLogs(logging.get_absl_logger(), "WARNING") as logs:
            self.assertEqual(self.read(fields | {"top_p": 0.5, "do_sample": True})["top_p"], 0.5)
        [line] = logs.output
        said = "not supported, left out: num_beams=4, no_repeat_ngram_size=3, max_length=4096"
        self.assertTrue(line.endswith(f"generation_config.json: {said}"), line)

    @parameterized.parameters(
        ({"temperature": "warm", "do_sample": True}, "temperature='warm' must be a number"),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
        ({"do_sample": "yes"}, "do_sample is 'yes', expected true or false"),
        ({"top_k": 2.5}, "top_k=2.5 must be an integer"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be a positive number"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"stop_strings": [3]}, "stop=.* must be strings"),
        ([], "expected a JSON object"),
    )  # fmt: skip
    def test_broken(self, fields, message):
        with self.assertRaisesRegex(MoejaxError, f"generation_config.json.*{message}"):
            self.read(fields)

    @parameterized.parameters(
        ({}, "by generation_config.json: temperature 0.6, top_k 20, top_p 0.95"),
        (
            {"temperature": None, "top_k": 5},
            "by generation_config.json: temperature 0.6, top_p 0.95",
        ),
        ({"temperature": 0.0}, ""),
        (OF_QWEN3, ""),
    )
    def test_description(self, given, expected):
        self.assertEqual(describe_defaults(OF_QWEN3, given), expected)

    def test_description_of_greedy(self):
        defaults = {"temperature": 0.0, "top_k": 5, "repetition_penalty": 1.1}
        said = "by generation_config.json: temperature 0.0, repetition_penalty 1.1"
        self.assertEqual(describe_defaults(defaults, {}), said)


class EngineTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.directory = cls.class_folder() / "tiny"
        spec = TinyCheckpoint(family="qwen3_moe", fields={"num_hidden_layers": 1})
        write_random_checkpoint(spec, cls.directory, seed=3)
        cls.path = cls.directory / "generation_config.json"

    def load(self, fields: dict[str, Any], **how: Any) -> Engine:
        self.path.write_text(json.dumps(fields))
        return Engine.from_pretrained(
            self.directory, dtype="float32", platform="cpu", progress=False, **how
        )

    @pytest.mark.slow
    def test_sampling_of_the_file_and_what_wins_over_it(self):
        engine = self.load({"do_sample": True, "temperature": 3.0, "top_k": 30})
        prompt = [5, 6, 7]
        by_file = engine.generate(prompt, seed=4)[0].tokens
        given = {"temperature": 3.0, "top_k": 30}
        off = self.load({"do_sample": True, "temperature": 3.0}, generation_config=False)
        self.assertEqual(off.generate(prompt, seed=4, **given)[0].tokens, by_file)
        self.assertEqual([c.token for c in engine.stream(prompt, seed=4)], by_file)
        greedy = off.generate(prompt)[0].tokens
        self.assertNotEqual(by_file, greedy)
        self.assertEqual(engine.generate(prompt, temperature=0)[0].tokens, greedy)
        self.assertEqual(engine.generate(prompt, top_k=1, temperature=None)[0].tokens, greedy)

    def test_orbax_keeps_it(self):
        engine = self.load({"do_sample": True, "temperature": 3.0, "top_k": 30})
        saved = self.directory.parent / "orbax"
        save_orbax(saved, engine.config, engine.weights, tokenizer_from=self.directory)
        self.assertEqual(read_generation_defaults(saved), {"temperature": 3.0, "top_k": 30})
