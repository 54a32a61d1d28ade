"""All that is measured on a GPU: which jobs run, what becomes of them, and where rows go."""

import contextlib
import io
import json
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from absl import flags
from absl.testing import absltest, flagsaver

from moejax.files.result_rows import ResultRow, append_rows, read_rows
from scripts import bench_gpu, merge_rows
from scripts.gpu_jobs import PARTS, Job, jobs

SAYS = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('{}'))"


def setUpModule():
    flags.FLAGS.mark_as_parsed()


def job(name, program, *, seconds=1.0, memory=0.0, part="models"):
    return Job(part, name, seconds, ("-c", program), memory)


class JobsTest(absltest.TestCase):
    def test_every_job_has_its_name_its_rows_and_a_time_that_a_call_has(self):
        found = jobs()
        self.assertLen({one.name for one in found}, len(found))
        self.assertEqual({one.part for one in found}, set(PARTS))
        for one in found:
            self.assertBetween(one.seconds, 10, 400, one.name)
            words = " ".join(one.arguments("ROWS", "PROGRAMS"))
            self.assertEqual("ROWS/" in words, one.part != "tests", words)
            self.assertNotIn("{", words)


class RunTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.create_tempdir().full_path)

    def run_jobs(self, *found, cards="0", seconds=0.0, each=600.0):
        said = io.StringIO()
        with (
            mock.patch.object(bench_gpu, "jobs", return_value=list(found)),
            mock.patch.object(bench_gpu, "total_mib", return_value=100 * 1024.0),
            flagsaver.flagsaver(cards=cards.split(","), seconds=seconds, seconds_each=each),
            contextlib.redirect_stdout(said),
        ):
            try:
                bench_gpu.main(["bench_gpu", str(self.folder)])
            except SystemExit as error:
                return said.getvalue(), str(error)
        return said.getvalue(), ""

    def logs(self):
        return {path.stem: path.read_text() for path in (self.folder / "logs").glob("*.txt")}

    def test_what_is_finished_is_not_run_again_and_what_failed_is(self):
        flag = self.folder / "mended"
        fails = f"import os, sys; sys.exit(0 if os.path.exists({str(flag)!r}) else 3)"
        found = (
            job("capped", SAYS.format("XLA_CLIENT_MEM_FRACTION"), memory=25),
            job("a share", SAYS.format("XLA_CLIENT_MEM_FRACTION"), memory=0.03),
            job("fails", fails),
            job("free", SAYS.format("XLA_CLIENT_MEM_FRACTION")),
        )
        said, error = self.run_jobs(*found)
        self.assertIn("not finished: fails;", error)
        self.assertIn("fails | failed with 3 after", said)
        logs = {"capped": "0 0.2500\n", "a_share": "0 0.0300\n", "fails": "", "free": "0 None\n"}
        self.assertEqual(self.logs(), logs)
        finished = json.loads((self.folder / "finished.json").read_text())
        self.assertEqual(set(finished), {"capped", "a share", "free"})
        flag.touch()
        said, error = self.run_jobs(*found)
        self.assertEqual(error, "")
        self.assertEqual(said.count("begins"), 1)

    @pytest.mark.slow
    def test_cards_work_side_by_side_on_one_job_each(self):
        waits = SAYS.format("X") + "; import time; time.sleep(1)"
        found = [job(f"job {i}", waits, seconds=10 + i) for i in range(4)]
        said, error = self.run_jobs(*found, cards="0,3")
        self.assertEqual(error, "")
        first, second = said.splitlines()[:2]  # both begin before either ends
        self.assertTrue(first.endswith("begins") and second.endswith("begins"), said)
        self.assertEqual(sorted(log[0] for log in self.logs().values()), ["0", "0", "3", "3"])
        self.assertLess(said.index("job 3 | begins"), said.index("job 0 | begins"))

    @pytest.mark.slow
    def test_no_job_begins_that_would_not_end_and_a_long_one_is_interrupted(self):
        slow = (
            "import time, sys\ntry:\n  print('began', flush=True)\n  time.sleep(60)\n"
            "except KeyboardInterrupt:\n  print('rows are kept')"
        )
        said, error = self.run_jobs(
            job("slow", slow), job("later", "pass", seconds=50), seconds=40, each=4.0
        )
        self.assertRegex(said, r"slow \| interrupted after [4-9] s")
        self.assertIn("later | left: no time for 50 s", said)
        self.assertIn("not finished: slow; later", error)
        self.assertEqual(self.logs(), {"slow": "began\nrows are kept\n"})

    def test_what_cannot_be(self):
        said, error = self.run_jobs(job("wide", "pass", memory=130))
        self.assertIn("wide needs 130 GiB, the card has 102400 MiB", said)
        self.assertIn("not finished: wide", error)
        with flagsaver.flagsaver(only=["nothing such"]):
            _, error = self.run_jobs(job("wide", "pass"))
        self.assertIn("no job of any part has ['nothing such'] in its name", error)
        with (
            mock.patch.object(bench_gpu.subprocess, "run", side_effect=FileNotFoundError),
            self.assertRaisesRegex(SystemExit, "nvidia-smi knows no GPU 7"),
        ):
            bench_gpu.total_mib("7")


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
