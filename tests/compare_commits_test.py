"""Trees that are timed turn by turn, and rows that are brought to where documents look."""

import contextlib
import io
import tempfile
from pathlib import Path

import pytest
from absl import flags
from absl.testing import absltest, flagsaver

from moejax.files.result_rows import ResultRow, append_rows, read_rows
from scripts import compare_commits, merge_rows
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


def setUpModule():
    flags.FLAGS.mark_as_parsed()


class MergeTest(absltest.TestCase):
    def row(self, what, figure, command="python -m scripts.x --cache=p --output=tmp/x.jsonl --m=1"):
        return ResultRow(what=what, figure=figure, unit="ms", baseline={}, device="a GPU",
                         versions={}, date="2026-11-22", command=command)  # fmt: skip

    def test_newer_rows_replace_older_and_say_what_to_type(self):
        with tempfile.TemporaryDirectory() as name:
            source, into = Path(name) / "rows", Path(name) / "results"
            into.mkdir()
            append_rows(into / "x_gpu.jsonl", [self.row("a", 1), self.row("b", 2)])
            append_rows(source / "x.jsonl", [
                self.row("b", 3), self.row("b", 4), self.row("compile b", 5),
                self.row("c", 6, "python -m moejax.benchmark --config.output=t/b.json,t/x.jsonl "
                                 "--config.compilation_cache=p"),
            ])  # fmt: skip
            with (
                flagsaver.flagsaver(into=str(into), suffix="_gpu"),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                merge_rows.main(["merge_rows", str(source)])
            rows = read_rows(into / "x_gpu.jsonl")
            path = into / "x_gpu.jsonl"
        self.assertEqual([(row.what, row.figure) for row in rows], [("a", 1), ("b", 4), ("c", 6)])
        self.assertEqual(rows[1].command, f"python -m scripts.x --output={path} --m=1")
        self.assertEqual(rows[2].command, f"python -m moejax.benchmark --config.output={path}")

    def test_a_folder_without_rows_is_an_error(self):
        with (
            tempfile.TemporaryDirectory() as name,
            self.assertRaisesRegex(SystemExit, "give a fol"),
        ):
            merge_rows.main(["merge_rows", name])
