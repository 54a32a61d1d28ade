"""The closing line, and rows of results."""

import math
import os
import pathlib
import tempfile
from unittest import mock

import jax
import psutil
from absl.testing import absltest

from moejax.files import result_rows as results
from moejax.inference import report
from moejax.inference.generation import Timing


class ReportTest(absltest.TestCase):
    def test_closing_line(self):
        timing = Timing(ttft_s=0.5, decode_s=1.5, num_decoded=3, compile_s=2.0)
        line = report.closing_line(
            timing, prompt_tokens=7, new_tokens=4, device_peak_bytes=3 * 2**20
        )
        self.assertIn("TTFT 500.0 ms, TPOT 500.00 ms, 2.0 tokens/s", line)
        self.assertIn("device 3 MiB", line)

    def test_one_token_has_no_tpot(self):
        timing = Timing(ttft_s=0.5, decode_s=0.0, num_decoded=0, compile_s=0.0)
        self.assertTrue(math.isnan(timing.tpot_s))
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
