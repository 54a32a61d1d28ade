"""Two trees are timed turn by turn: fake ones, whose benchmark writes a row."""

import tempfile
from pathlib import Path

import pytest
from absl.testing import absltest

from scripts import compare_commits
from tests.script_runs import run_module

BENCH = """
import json, pathlib, sys
name = "--config.output="
out = next(word for word in sys.argv if word.startswith(name)).removeprefix(name)
row = {row!r}
pathlib.Path(out).write_text(json.dumps(row) + "\\n")
"""


class CompareTest(absltest.TestCase):
    def tree(self, name: str, figure: float) -> Path:
        folder = Path(self.enter_context(tempfile.TemporaryDirectory())) / name
        (folder / "moejax").mkdir(parents=True)
        (folder / "moejax" / "__init__.py").touch()
        row = {
            "what": "TPOT", "figure": figure, "unit": "ms", "baseline": {}, "device": "none",
            "date": "2026-11-24", "command": "bench", "versions": {},
        }  # fmt: skip
        text = BENCH.replace("{row!r}", repr(row))
        (folder / "moejax" / "benchmark.py").write_text(text)
        return folder

    @pytest.mark.slow
    def test_a_slower_tree_is_told(self):
        old, new = self.tree("old", 2.0), self.tree("new", 2.5)
        how = ("--job=dymoe", "--turns=1", "--most_percent=2")
        done = run_module("scripts.compare_commits", f"--old={old}", f"--new={new}", *how)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("dymoe, turn 1, new: TPOT: 2.5\n", done.stdout)
        self.assertIn("| dymoe | TPOT | 2 | 2.5 | +25.0 % |", done.stdout)
        self.assertIn("dymoe, TPOT: +25.0 %", done.stderr)

    def test_medians_of_what_both_have(self):
        old = [{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 5.0}, {"a": 2.0}]
        found = compare_commits.compared(old, [{"a": 4.0, "b": 1.0, "c": 1.0}])
        self.assertEqual(found, {"a": (2.0, 4.0)})
