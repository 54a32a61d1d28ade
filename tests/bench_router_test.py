"""The routing benchmark runs on a CPU; what it measures is for a GPU."""

import tempfile
from pathlib import Path

import pytest
from absl.testing import absltest

from moejax.files.result_rows import read_rows
from moejax.models.shapes import SHAPES
from tests.script_runs import run_module


class SmokeTest(absltest.TestCase):
    @pytest.mark.slow
    def test_every_shape_writes_rows(self):
        output = Path(self.enter_context(tempfile.TemporaryDirectory())) / "rows.jsonl"
        done = run_module(
            "scripts.studies.kernels.bench_router", "--smoke", "--repeats=2", f"--output={output}"
        )
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        rows = read_rows(output)
        for what in ("product and routing of Qwen3-30B-A3B, 3 tokens", "routing of Mixtral-8x7B"):
            self.assertTrue(any(row.what.startswith(what) for row in rows), what)
        self.assertLen(rows, 2 * len(SHAPES))
        self.assertTrue(all("xla" in row.baseline and row.unit == "us" for row in rows))
