"""The attention benchmark runs on a CPU; what it measures is for a GPU."""

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
        command = [
            "scripts.studies.kernels.bench_attention",
            "--smoke",
            "--repeats=2",
            "--tiles=16x2w4p2",
        ]
        done = run_module(*command, f"--output={output}")
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        rows = read_rows(output)
        for what in (
            "Qwen3-30B-A3B, batch 2, 40 slots, bf",
            "Mixtral-8x7B, batch 2, 40 slots, s16",
        ):
            self.assertTrue(any(what in row.what for row in rows), what)
        self.assertLen(rows, 2 * sum(config.latent is None for config in SHAPES.values()))
        self.assertTrue(all("xla_gb_per_s" in row.baseline and row.unit == "us" for row in rows))
