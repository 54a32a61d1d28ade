"""The closing line, rows of results, and bits a weight as each command says them."""

import json
import os
import pathlib
import tempfile
from typing import Any
from unittest import mock

import jax
import psutil
import pytest
from absl.testing import absltest

from moejax import cli, evaluate, plan
from moejax.experts.bits import BitsPerWeight
from moejax.experts.budget import Limits
from moejax.experts.tiering import Tiering
from moejax.files import result_rows as results
from moejax.inference import report
from moejax.inference.generation import Timing
from tests import commands, tiny_engine
from tests.folder_case import FolderTestCase


class ReportTest(absltest.TestCase):
    def test_closing_line(self):
        timing = Timing(ttft_s=0.5, decode_s=1.5, num_decoded=3, compile_s=2.0)
        line = report.closing_line(
            timing, prompt_tokens=7, new_tokens=4, device_peak_bytes=3 * 2**20
        )
        self.assertIn("TTFT 500.0 ms, TPOT 500.00 ms, 2.0 tokens/s", line)
        self.assertIn("device 3 MiB", line)
        timing = Timing(ttft_s=0.5, decode_s=0.0, num_decoded=0, compile_s=0.0)  # of one token
        line = report.closing_line(timing, prompt_tokens=7, new_tokens=1, device_peak_bytes=None)
        self.assertIn("TPOT n/a, 2.0 tokens/s, peak memory: device n/a, host ", line)

    def test_host_peak_is_in_bytes(self):
        resident = psutil.Process(os.getpid()).memory_info().rss
        # Linux counts pages in batches, a core at a time: the peak may lag a little.
        self.assertBetween(report.host_peak_bytes(), 0.9 * resident, 100 * resident)

    def test_device_peak(self):
        self.assertIsNone(report.device_peak_bytes(mock.Mock(memory_stats=lambda: None)))
        gpu = mock.Mock(memory_stats=lambda: {"bytes_in_use": 1, "peak_bytes_in_use": 5})
        self.assertEqual(report.device_peak_bytes(gpu), 5)


class ResultsTest(absltest.TestCase):
    def test_rows_are_appended_and_read_back(self):
        row = results.ResultRow(
            what="TPOT",
            figure=1.5,
            unit="ms",
            baseline={"transformers": 7.5},
            device=results.describe_device(jax.devices("cpu")[0]),
            versions=results.package_versions("jax"),
            date=results.today(),
            command=results.command_line(["scripts/x.py", "--name=a b"]),
        )
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "made" / "x.jsonl"
            results.append_rows(path, [row])
            results.append_rows(path, [row])
            self.assertEqual(results.read_rows(path), [row, row])
        self.assertEqual(row.versions["jax"], jax.__version__)
        self.assertRegex(row.date, r"^\d{4}-\d\d-\d\d$")
        self.assertRegex(row.device, r", \d+ cores$")

    def test_command_holds_no_path_of_this_machine(self):
        script = pathlib.Path.cwd() / "scripts" / "x.py"
        self.assertEqual(
            results.command_line([str(script), "--name=a b"]), "python scripts/x.py '--name=a b'"
        )


CONFIG = tiny_engine.CONFIG
POLICY = {"policy": "dymoe", "slots": (2, 8), "tiers": ("int4", "int2"), "quantizer": "rtn",
          "group_size": 16}  # fmt: skip
FLAGS = {"policy.name": "dymoe", "policy.slots": "('2','8')", "policy.tiers": "('int4','int2')",
         "policy.quantizer": "rtn", "policy.group_size": 16}  # fmt: skip
# A scale and a zero, float16 each, for a group of 16; in `down`, a third of the weights, rows of 16
# numbers are padded to 32.
INT4, INT2 = ((2 * (bits + 2) + 2 * bits + 2) / 3 for bits in (4, 2))
EXPERTS = 2 * 8 * 3 * CONFIG.expert_dim * CONFIG.model_dim


class BitsTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = cls.class_folder()
        cls.checkpoint = cls.folder / "model"
        plain = tiny_engine.load_tiny_engine(cls.checkpoint)
        cls.parameters = sum(leaf.size for leaf in plain.weights.values())
        rest = cls.parameters - EXPERTS
        cls.overall = ((INT4 + INT2) * EXPERTS + 32 * rest) / cls.parameters
        cls.text = cls.folder / "text.txt"
        cls.text.write_text("the quick brown fox jumps over the lazy dog. ")

    def run_main(self, command: cli.Command, *arguments: str, **fields: Any) -> tuple[str, str]:
        fields = {"checkpoint": self.checkpoint, **FLAGS, **fields}
        return commands.succeed(command, *arguments, **fields)

    def assert_parts(self, found: dict[str, float]) -> None:
        self.assertEqual(list(found), ["int4", "int2", "rest"])
        for bits, expected in zip(found.values(), (INT4, INT2, 32), strict=True):
            self.assertAlmostEqual(bits, expected)

    @property
    def said(self) -> str:
        """Text for people."""
        return (
            f"{self.overall:.2f} bits a weight (experts: int4 {INT4:.2f} and int2 {INT2:.2f} "
            "together; the rest 32.00)"
        )

    @pytest.mark.slow
    def test_engines(self):
        plain = tiny_engine.load_tiny_engine(self.checkpoint)
        moving = tiny_engine.load_tiny_engine(self.checkpoint, limits=Limits(slots=3))
        tiered = tiny_engine.load_tiny_engine(self.checkpoint, policy=Tiering(**POLICY))
        for engine in (plain, moving, tiered):
            self.assertEqual(engine.num_weights, self.parameters)
        self.assertEqual((plain.bits_per_weight, plain.bits.parts), (32, {}))
        self.assertEqual(moving.bits_per_weight, 32)
        self.assertEqual(moving.bits.parts, {"stored": 32, "rest": 32})
        self.assertAlmostEqual(tiered.bits_per_weight, self.overall)
        self.assert_parts(tiered.bits.parts)
        self.assertIn(self.said, tiered.weights_summary)
        self.assertIn("moe.gate_up in int4: INT4 in groups of 16", tiered.weights_summary)
        self.assertNotIn("none packed", tiered.weights_summary)

    def test_plan(self):
        out, _ = self.run_main(plan.COMMAND, platform="cpu")
        self.assertIn(f"weights: {self.said}", out)

    @pytest.mark.slow
    def test_evaluate(self):
        output = self.folder / "x.json"
        out, _ = self.run_main(
            evaluate.COMMAND, text=self.text, window=32, fidelity_share=0, output=output
        )
        self.assertNotIn("KL of the exact model", out)
        weights = json.loads(output.read_text())["weights"]
        self.assertEqual(weights["parameters"], self.parameters)
        self.assertAlmostEqual(weights["bits_per_weight"], self.overall)
        self.assert_parts(weights["bits_per_weight_by_part"])
        self.assertEqual(weights["stored_bits_per_weight"], 32)
        self.assertEqual(8 * weights["bytes"], round(self.overall * self.parameters))
        self.assertIn(f"{self.overall:.3f} bits a weight (experts: int4 {INT4:.3f} and int2", out)
        self.assertIn("32.000 in the files", out)

    def test_sums(self):
        bits = BitsPerWeight(100, 60, 80, {"a": 60, "b": 30})
        self.assertEqual(bits.nbytes, 170)
        self.assertEqual(bits.parts, {"a": 8, "b": 4, "rest": 16})
        self.assertEqual(bits.overall, 13.6)
