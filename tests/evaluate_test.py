"""The evaluate command on a tiny checkpoint: its line, its JSON, its texts, what it refuses."""

import dataclasses
import gzip
import json
import lzma
import math
import pathlib
import re
import sys
import types
from typing import Any
from unittest import mock

import jax
import pytest
from absl.testing import parameterized

from moejax import cli, evaluate
from moejax.checkpoints.open import open_checkpoint
from moejax.checkpoints.orbax_directory import save_orbax
from moejax.config.commands import EvaluateConfig, MemoryConfig
from moejax.engine import Engine
from moejax.evaluation import perplexity_run
from moejax.evaluation.perplexity import log_likelihood
from moejax.text.corpus import joined_rows, load_text
from moejax.text.windows import Windowing
from tests import commands, tiny_engine
from tests.folder_case import FolderTestCase

TEXT = "the quick brown fox jumps over the lazy dog. " * 4
ROWS = ["", " = Title = \n", "", " one row \n", " another \n", ""]
RAW = "".join(row or " \n" for row in ROWS)
JOINED = "\n\n".join(ROWS)


class EvaluateTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = cls.class_folder()
        cls.checkpoint = cls.folder / "tiny"
        cls.engine: Engine = tiny_engine.load_tiny_engine(cls.checkpoint)
        cls.text = cls.folder / "text.txt"
        cls.text.write_text(TEXT)

    def run_main(self, **fields: Any) -> tuple[int, str, str]:
        fields = {"checkpoint": self.checkpoint, "text": self.text, "window": 32, **fields}
        return commands.run(evaluate.COMMAND, **fields)

    def test_line_and_json_are_the_engines_figure(self):
        output = self.folder / "x.json"
        status, out, err = self.run_main(stride=8, output=output)
        self.assertEqual(status, 0, err)
        ids = self.engine.tokenizer.encode(TEXT)
        expected = log_likelihood(ids, Windowing(32, 8), self.engine.score, batch_size=8)
        record = json.loads(output.read_text())
        self.assertAlmostEqual(record["perplexity"] / expected.perplexity, 1)
        bits = expected.nats / math.log(2) / len(TEXT)
        self.assertAlmostEqual(record["bits_per_byte"], bits)
        self.assertEqual(record["tokens"], len(ids))
        self.assertEqual(record["tokens_scored"], len(ids) - 1)
        self.assertEqual(record["bytes"], len(TEXT))
        protocol = record["protocol"]
        self.assertEqual((protocol["window"], protocol["stride"]), (32, 8))
        self.assertIsNone(protocol["bos"])
        self.assertEqual(record["weights"]["bits_per_weight"], 32)
        self.assertEqual(record["weights"]["stored_bits_per_weight"], 32)
        self.assertEqual(record["weights"]["parameters"], self.engine.num_weights)
        self.assertEqual(record["dtype"], "float32")
        self.assertContainsSubset(
            {"nats", "memory", "seconds", "versions", "device", "date", "command", "text"}, record
        )
        self.assertEqual(out.count("\n"), 1)
        error = record["perplexity_stderr"]
        self.assertAlmostEqual(error, expected.perplexity_stderr)
        self.assertAlmostEqual(record["nats_per_token"]["stderr"], error / record["perplexity"])
        self.assertIn("over windows", protocol["standard_error"])
        self.assertEqual((protocol["batch_size"], protocol["seed"]), (8, 0))
        self.assertEqual(record["limits"], dataclasses.asdict(MemoryConfig()))
        self.assertEqual(record["resumed_windows"], 0)
        figure = f"{record['perplexity']:.4f} ± {error:.4f}"
        said = f"perplexity {figure}, {bits:.4f} bits a byte; {len(ids) - 1} of"
        self.assertIn(said, out)
        self.assertIn("window 32, stride 8, bos none", out)
        self.assertIn("scoring", err)

    def test_an_orbax_directory(self):
        opened, place = open_checkpoint(str(self.checkpoint)), self.folder / "orbax"
        weights = opened.load(dtype="float32", device=jax.devices("cpu")[0], progress=False)
        save_orbax(place, opened.config, weights, tokenizer_from=self.checkpoint)
        status, out, err = self.run_main(checkpoint=place)
        self.assertEqual(status, 0, err)
        [figure] = re.findall(r"perplexity [\d.]+", out)
        self.assertIn(figure, self.run_main()[1])

    def _cut(self, after: int, **fields: Any) -> tuple[int, str, str]:
        """A run that is interrupted after so many batches."""
        score, calls = Engine.score, []

        def interrupted(engine: Engine, *arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) > after:
                raise KeyboardInterrupt
            return score(engine, *arguments)

        with mock.patch.object(Engine, "score", interrupted):
            return self.run_main(**fields)

    def test_interrupted_and_resumed(self):
        how = {"window": 16, "stride": 8, "batch_size": 2}
        self.assertEqual(self.run_main(output=self.folder / "whole.json", **how)[0], 0)
        whole = json.loads((self.folder / "whole.json").read_text())
        self.assertGreater(whole["protocol"]["windows"], 6)
        output = self.folder / "cut.json"
        for place in (output, self.folder / "whole.json"):  # what is there, if any, has ended
            self.assertEndsWith(self._cut(0, output=place, **how)[2], "error: interrupted\n")
        status, _, err = self._cut(2, output=output, **how)
        self.assertEqual(status, 130)
        self.assertEndsWith(err, "error: interrupted; run the same command again to resume\n")
        self.assertFalse(output.exists())
        for field, value, said in (
            ("window", 17, "protocol differ"), ("stride", 4, "protocol differ"),
            ("max_tokens", 30, "text, tokens differ"), ("memory.slots", 4, "memory differ"),
            ("dtype", "bfloat16", "dtype differ"), ("add_special_tokens", False, "protocol differ"),
        ):  # fmt: skip
            status, _, err = self.run_main(output=output, **{**how, field: value})
            self.assertEqual(status, 1)
            self.assertIn(f"cut.answers.jsonl holds answers of another run ({said})", err)
        with mock.patch.object(Engine, "score", autospec=True, side_effect=Engine.score) as score:
            status, _, err = self.run_main(output=output, **how)
        self.assertEqual(status, 0, err)
        num_windows = whole["protocol"]["windows"]
        place = self.folder / "cut.answers.jsonl"
        self.assertIn(f"\n4 of {num_windows} windows are taken over from {place}\n", f"\n{err}")
        self.assertEqual(score.call_count, math.ceil((num_windows - 4) / 2))
        resumed = json.loads(output.read_text())
        self.assertEqual(resumed["resumed_windows"], 4)
        for name in ("perplexity", "perplexity_stderr", "nats", "tokens_scored", "protocol"):
            self.assertEqual(resumed[name], whole[name])  # to the bit

    def test_a_result_that_cannot_be_written_costs_no_window(self):
        output = self.folder / "full.json"
        with mock.patch.object(
            perplexity_run, "_write_record", side_effect=OSError("no space left")
        ):
            self.assertIn("no space left", self.run_main(output=output)[2])
        with mock.patch.object(Engine, "score") as score:
            status, out, err = self.run_main(output=output)
        self.assertEqual((status, score.called), (0, False), err)
        self.assertIn("experts by none (nothing was left to run)", out)

    @pytest.mark.slow
    def test_under_a_policy_and_with_a_trace_it_begins_anew(self):
        policy = {"policy.name": "on_demand", "policy.tiers": "('int4',)", "policy.slots": "('3',)",
                  "policy.quantizer": "rtn", "policy.group_size": 16,
                  "fidelity_share": 0}  # fmt: skip
        trace = {"record_trace": self.folder / "x.trace"}
        for name, fields in (("policy", policy), ("trace", trace)):
            how = {"output": self.folder / f"{name}.json", "batch_size": 2, **fields}
            self.assertEqual(self._cut(1, **how)[0], 130)
            with self.assertLogs() as said:
                status, _, err = self.run_main(**how)
            self.assertEqual(status, 0, err)
            [line] = [line for line in said.output if "answers of an interrupted run" in line]
            cut = {"policy": 1, "trace": 2}[name]  # a policy reads one window at a time
            self.assertRegex(line, f"{cut} answers .* are not taken over: a {name}.* begins anew")
            self.assertEqual(json.loads(how["output"].read_text())["resumed_windows"], 0)

    def test_texts(self):
        for name, content in (
            ("a.txt", TEXT.encode()),
            ("a.md", TEXT.encode()),
            ("a.txt.xz", lzma.compress(TEXT.encode())),
            ("a.gz", gzip.compress(TEXT.encode())),
        ):
            (self.folder / name).write_bytes(content)
            text = load_text(str(self.folder / name), "none")
            self.assertEqual((text.content, text.source), (TEXT, name))
            self.assertEqual(text.sha256, load_text(str(self.text), "none").sha256)
        raw = self.folder / "raw.txt"
        raw.write_text(RAW)
        self.assertEqual(load_text(str(raw), "none").content, RAW)
        self.assertEqual(load_text(str(raw), "wikitext").content, JOINED)
        self.assertEqual(joined_rows("a\nb"), "a\n\n\nb\n")

    @parameterized.parameters(
        ({"text": "none.txt"}, "there is no text file none.txt"),
        ({"text": "~nobody-here/x"}, "there is no such place as ~nobody-here/x"),
        ({"output": "~nobody-here/x"}, "there is no such place as ~nobody-here/x"),
        ({"text": "."}, "cannot read .: Is a directory"),
        ({"window": 257}, "window=257 is beyond the model's context of 256; set "),
        ({"window": 8193}, "window=8193 is beyond the model's context of 256; set "),
        ({"stride": 33}, "stride=33 must be from 1 to 32, the window"),
        ({"window": -1}, "window=-1 must be 0 or more"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"task": "mmlu"}, "task is now written python -m moejax.lm_eval --model moejax "),
        ({"data": "x"}, "data is now written python -m moejax.lm_eval --model moejax "),
        ({"preset": "1"}, "preset='1' must be one of 2048/2048, 2048/512"),
        ({"join": "x"}, "join='x' must be one of none, wikitext"),
        ({"output": "no/such/x.json"}, "output no/such/x.json lies in no/such, which is not"),
        ({"output": "/dev/null"}, "output /dev/null is no regular file"),
        ({"checkpoint": "no/where"}, "no/where"),
        ({"record_trace": __file__}, "is there and is no trace; name another file"),
        ({"record_foreseen": 4}, "record_foreseen=4 has no effect without record_trace"),
        ({"fidelity_share": 0.5}, "fidelity_share=0.5 has no effect without policy.name: give "),
    )
    def test_what_is_refused(self, fields, said):
        if fields.get("text") == "." or "output" in fields or "text" in fields:
            fields = {key: str(value) for key, value in fields.items()}
        self._refused(said, **fields)

    def test_a_result_replaces_no_text(self):
        text = self.folder / "mine.txt"
        text.write_text(TEXT)
        self._refused("is there and holds no earlier result", text=text, output=text)
        self.assertEqual(text.read_text(), TEXT)
        text.write_text(" \n")  # neither begins as a result
        self._refused("is there and holds no earlier result", output=text)

    def _refused(self, said: str, **fields: Any) -> None:
        status, out, err = self.run_main(**fields)
        self.assertEqual((status, out), (2 if "is now written" in said else 1, ""))
        error = err.splitlines()[-1]
        self.assertRegex(error, "^error: ")
        self.assertIn(said, error)
        self.assertEqual(err.count("error:"), 1)

    @parameterized.parameters(
        ("short.txt", b"a", "the text has 1 tokens"),
        ("blank.txt", b" \n", "holds no text"),
        ("latin.txt", "café".encode("latin-1"), "is not UTF-8 (byte 3 is 0xe9)"),
        ("cut.xz", lzma.compress(b"abc" * 99)[:-9], "is no whole .xz file"),
        ("cut.gz", gzip.compress(b"abc" * 99)[:-9], "is no whole .gz file"),
        ("false.xz", b"plain", "is no whole .xz file"),
    )
    def test_a_text_that_cannot_be_scored(self, name, content, said):
        (self.folder / name).write_bytes(content)
        self._refused(said, text=self.folder / name)

    def test_a_checkpoint_without_a_tokenizer(self):
        tiny_engine.load_tiny_engine(self.folder / "mute", tokenizer=False)
        self._refused("has no tokenizer.json", checkpoint=self.folder / "mute")

    def test_the_named_configs(self):
        for path in sorted(pathlib.Path("configs").glob("evaluate_*.py")):
            config, _ = cli.parse(evaluate.COMMAND, ["evaluate", f"--config={path}"])
            self.assertIsInstance(config, EvaluateConfig)
            window = re.search(r"_(\d+)_(\d+)$", path.stem)
            assert window
            self.assertEqual(config.windowing(), Windowing(*map(int, window.groups())))

    def test_wikitext2_from_the_hub(self):
        asked = []

        def load_dataset(*args: str, split: str) -> dict[str, list[str]]:
            asked.append((*args, split))
            return {"text": ROWS}

        fake = types.SimpleNamespace(load_dataset=load_dataset)
        with mock.patch.dict(sys.modules, {"datasets": fake}):
            self.assertEqual(load_text("wikitext2", "none").content, JOINED)
        self.assertEqual(asked, [("Salesforce/wikitext", "wikitext-2-raw-v1", "test")])
        fake.load_dataset = mock.Mock(side_effect=ConnectionError("offline\nand more"))
        with mock.patch.dict(sys.modules, {"datasets": fake}):
            _, _, err = self.run_main(text="wikitext2")
        self.assertRegex(err, r"^error: wikitext2 is not in the cache .*\(offline\); give a file")
        with mock.patch.dict(sys.modules, {"datasets": None}):
            _, _, err = self.run_main(text="wikitext2")
        self.assertRegex(err, r"^error: wikitext2 needs the package datasets \(pip install ")
