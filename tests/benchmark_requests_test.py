"""Prompts of a benchmark: every form of file, what is wrong with one, how many tokens there are."""

import json
import lzma
from typing import Any

import numpy as np
from absl.testing import absltest, parameterized

from moejax.benchmarking import requests
from moejax.benchmarking.requests import _RawPrompt, read_prompt_file
from moejax.errors import MoejaxError
from tests.folder_case import FolderTestCase

SHAREGPT = [
    {"id": "a", "conversations": [
        {"from": "human", "value": "one"}, {"from": "gpt", "value": "two"},
        {"from": "human", "value": "three"}]},
    {"id": "b", "conversations": [
        {"from": "gpt", "value": "two"}, {"from": "human", "value": "three"}]},
    {"id": "c", "conversations": [{"from": "gpt", "value": "only"}]},
    {"id": "d", "conversations": []},
    {"id": "e", "conversations": [{"from": "user", "value": "four"}]},
]  # fmt: skip


class Letters:
    """A tokenizer of letters, and one chat template or none."""

    def __init__(self, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, messages: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def spelt(ids: list[int]) -> str:
    return "".join(chr(i) if i else "^" for i in ids)


class FileTest(FolderTestCase):
    def read(self, name: str, text: str, split: str = "lines") -> requests.PromptFile:
        path = self.directory / name
        content = text.encode()
        path.write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
        return read_prompt_file(path, split)

    def test_a_line_or_a_paragraph_is_a_prompt(self):
        text = "one\ntwo\n\n\nthree\r\n"
        lines = self.read("x.txt", text)
        self.assertEqual([p.text for p in lines.prompts], ["one", "two", "three"])
        paragraphs = self.read("x.txt.xz", text, "paragraphs")
        self.assertEqual([p.text for p in paragraphs.prompts], ["one\ntwo", "three"])

    def test_json_lines(self):
        rows = [{"prompt": "a"}, {"text": "b"}, {"messages": [{"role": "user", "content": "c"}]}]
        found = self.read("x.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n").prompts
        self.assertEqual(found[:2], [_RawPrompt("a"), _RawPrompt("b")])
        self.assertEqual(found[2].messages, ({"role": "user", "content": "c"},))

    def test_sharegpt_asks_with_the_first_human_turn(self):
        found = self.read("x.json", json.dumps(SHAREGPT))
        self.assertEqual([p.messages[0]["content"] for p in found.prompts],
                         ["one", "three", "four"])  # fmt: skip
        self.assertEqual(found.num_skipped, 2)

    @parameterized.parameters(
        ("x.json", '{"a": 1}', "no list"),
        ("x.json", "[1]", "entry 0 is no JSON object"),
        ("x.json", '[{"id": "q7", "conversations": [{"from": "human"}]}]',
         r'entry 0 \(id q7\): turn 0 needs "from" and "value"'),
        ("x.json", '[{"id": "q", "conversations": []}]', "holds no prompt"),
        ("x.json", '[{"id": "q", "conversations": "a"}]', r"\(id q\): conversations must be"),
        ("x.json", '[{"id": "q"}]', r"entry 0 \(id q\) has no prompt, text, messages or conv"),
        ("x.json", "[", "is not JSON"),
        ("x.json", "[" * 100_000, "is not JSON"),
        ("x.jsonl", '{"prompt": "\\ud800 hi"}', "line 1 is not UTF-8"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt"}', "line 2 is not JSON"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": 3}', "line 2: prompt must be a text"),
        ("x.jsonl", '{"messages": [{"role": "user"}]}', "message 0 needs a role and a content"),
        ("x.txt", " \n\n", "holds no prompt"),
    )  # fmt: skip
    def test_what_is_wrong_is_named(self, name, text, said):
        with self.assertRaisesRegex(MoejaxError, said):
            self.read(name, text)

    def test_no_file(self):
        with self.assertRaisesRegex(MoejaxError, "there is no prompt file"):
            read_prompt_file(self.directory / "none.json", "lines")

    def test_messages_go_through_the_template(self):
        file = self.read("x.json", json.dumps(SHAREGPT))
        by_template = requests.of_file(file, Letters("t"), num_prompts=2, longest=99)
        self.assertEqual([*map(spelt, by_template.prompts)], ["<user>one", "<user>three"])
        self.assertIn("through the chat template", by_template.about)
        self.assertIn("2 entries without a human turn", by_template.about)
        plain = requests.of_file(file, Letters(), num_prompts=0, longest=99)
        self.assertEqual([*map(spelt, plain.prompts)], ["^one", "^three", "^four"])

    def test_long_prompts_are_cut_and_counted(self):
        file = self.read("x.txt", "12345\n123\n1234")
        found = requests.of_file(file, Letters(), num_prompts=0, longest=4)
        self.assertEqual([*map(spelt, found.prompts)], ["^123", "^123", "^123"])
        self.assertEqual(found.num_cut, 2)
        self.assertEqual([*map(len, found.batches(2))], [2, 1])
        with self.assertRaisesRegex(MoejaxError, "num_prompts=4, but x.txt holds 3"):
            requests.of_file(file, Letters(), num_prompts=4, longest=4)


class LengthTest(absltest.TestCase):
    def test_a_text_gives_prompts_of_a_length_from_different_places(self):
        found = requests.of_text("abcdef", Letters(), num_prompts=3, length=8, name="it")
        self.assertEqual([*map(spelt, found.prompts)], ["abcdefab", "cdefabcd", "efabcdef"])

    def test_random_tokens(self):
        found = requests.at_random(7, num_prompts=5, length=50, seed=1)
        array = np.asarray(found.prompts)
        self.assertEqual(array.shape, (5, 50))
        self.assertEqual((array.min(), array.max()), (0, 6))
