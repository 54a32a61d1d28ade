"""A checkpoint's generation_config.json: what of it is used, and what a caller's own wins over."""

import json
from typing import Any

import pytest
import transformers
from absl import logging
from absl.testing import parameterized

from moejax import Engine
from moejax.checkpoints.orbax_directory import save_orbax
from moejax.errors import MoejaxError
from moejax.inference.generation import describe_defaults, read_generation_defaults
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import TinyCheckpoint, write_random_checkpoint

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
        ({"temperature": None, "top_k": 5}, "by generation_config.json: temperature 0.6, top_p 0."),
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
