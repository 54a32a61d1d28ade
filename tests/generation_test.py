"""Settings, and the building of an answer's text: stop strings, half characters, ends."""

import math
import tempfile
from pathlib import Path

import numpy as np
import tokenizers
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from moejax.errors import MoejaxError
from moejax.inference.generation import AnswerBuilder, GenerationSettings, Timing
from moejax.text.tokenizer import Tokenizer

EOS = 999


class SettingsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"temperature": -1}, "temperature=-1 must be 0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"temperature": None}, "temperature=None must be a number"),
        ({"top_k": -1}, "top_k=-1 must be 0"),
        ({"top_k": 2.5}, "top_k=2.5 must be an integer"),
        ({"top_k": 2**31}, "top_k=2147483648 must be"),
        ({"top_p": 0}, "top_p=0 must be above 0"),
        ({"top_p": 1.01}, "top_p=1.01 must be"),
        ({"top_p": math.nan}, "top_p=nan must be"),
        ({"min_p": -0.1}, "min_p=-0.1 must be from 0"),
        ({"min_p": 1.1}, "min_p=1.1 must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be a positive"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf must be"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5 must be an integer"),
        ({"seed": -1}, "seed=-1 must be an integer from 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296 must be"),
        ({"seed": 0.5}, "seed=0.5 must be"),
        ({"seed": [1, -2]}, r"seed=\[1, -2\] must be"),
        ({"seed": "a"}, "seed='a' must be"),
        ({"stop": ""}, "stop=.* must be strings that are not empty"),
        ({"stop": ["a", ""]}, "stop=.* not empty"),
        ({"stop": 5}, "stop=.* must be strings"),
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


class HalfCharacterTest(parameterized.TestCase):
    """With a byte-level tokenizer of 256 tokens, in which most characters are several."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        encoder = tokenizers.Tokenizer(models.BPE())
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoder.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=256, initial_alphabet=alphabet, show_progress=False
        )
        encoder.train_from_iterator([], trainer)
        with tempfile.TemporaryDirectory() as directory:
            encoder.save(str(Path(directory) / "tokenizer.json"))
            cls._tokenizer = Tokenizer.from_directory(Path(directory))

    def _push(self, text: str, count: int | None = None, **how) -> tuple[AnswerBuilder, list[str]]:
        ids = self._tokenizer.encode(text)[:count]
        how = {"stop": (), "eos_ids": (), "max_tokens": len(ids), **how}
        builder = AnswerBuilder(self._tokenizer, **how)
        return builder, [builder.push(token) for token in ids]

    def test_no_half_character_is_shown(self):
        text = "né 日🎉!"
        builder, shown = self._push(text)
        self.assertLen(shown, len(text.encode()))
        self.assertEqual(shown, ["n", "", "é", " ", "", "", "日", "", "", "", "🎉", "!"])
        self.assertEqual(builder.text, text)

    def test_an_answer_that_ends_within_a_character(self):
        builder, shown = self._push("a🎉", count=3)
        self.assertEqual(shown[:2], ["a", ""])
        self.assertEqual(builder.text[:1], "a")
        self.assertEqual(set(builder.text[1:]), {"\N{REPLACEMENT CHARACTER}"})

    def test_a_stop_string_of_many_bytes(self):
        ids = self._tokenizer.encode("a日本b")
        builder = AnswerBuilder(self._tokenizer, stop=("日本",), eos_ids=(), max_tokens=100)
        for token in ids:
            builder.push(token)
            if builder.finish_reason:
                break
        self.assertEqual((builder.text, builder.finish_reason), ("a", "stop"))
        self.assertLen(builder.tokens, 1 + 6)
