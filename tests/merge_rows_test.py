"""Rows that are brought to where documents look."""

import contextlib
import io
import tempfile
from pathlib import Path

from absl import flags
from absl.testing import absltest, flagsaver

from moejax.files.result_rows import ResultRow, append_rows, read_rows
from scripts import merge_rows


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
