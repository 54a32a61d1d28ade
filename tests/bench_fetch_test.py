"""The fetch benchmark runs on a CPU; what it measures is for a GPU."""

import tempfile
from pathlib import Path

import pytest
from absl.testing import absltest

from moejax.files.result_rows import read_rows
from tests.script_runs import run_module


class SmokeTest(absltest.TestCase):
    @pytest.mark.slow
    def test_every_part_writes_rows(self):
        output = Path(self.enter_context(tempfile.TemporaryDirectory())) / "rows.jsonl"
        done = run_module("scripts.bench_fetch", "--smoke", f"--output={output}")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = read_rows(output)
        for what in ("device_put of 4", "fetch of 8 x 0.03 MB", "slice by XLA of 1"):
            self.assertTrue(any(row.what.startswith(what) for row in rows), what)
        self.assertTrue(all(row.figure > 0 and row.unit == "us" for row in rows))


if __name__ == "__main__":
    absltest.main()
