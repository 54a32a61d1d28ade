"""The benchmark of bulk transfers runs on a CPU, and its requests move experts."""

import tempfile
from pathlib import Path

import pytest
from absl.testing import absltest

from moejax.files.result_rows import read_rows
from tests.script_runs import run_module


class ScriptTest(absltest.TestCase):
    @pytest.mark.slow
    def test_it_runs_on_a_cpu(self):
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "rows.jsonl"
            done = run_module(
                "scripts.bench_transfers_gpu", "--model=tiny", "--device=cpu", "--slots=4",
                "--steps=32", "--rate=1", "--per_call=4", f"--out={out}",
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            rows = read_rows(out)
        self.assertLen(rows, 4)
        none, asked = (row for row in rows if "99th percentile" in row.what)
        self.assertEqual(none.baseline["moved_per_s"], 0)
        self.assertGreater(asked.baseline["landed_per_s"], 0)
        self.assertGreater(asked.figure, 0)


if __name__ == "__main__":
    absltest.main()
