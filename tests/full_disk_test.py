"""A disk that is full: the error names the file, and nothing is left beside what was there."""

import contextlib
import io
import json
import pathlib
from collections.abc import Iterator
from unittest import mock

import pytest
from absl.testing import absltest

from moejax import generate
from moejax.errors import MoejaxError
from moejax.evaluation import perplexity_run
from moejax.evaluation.answers import AnswerFile
from moejax.evaluation.perplexity import WindowScore
from moejax.files import whole as files
from tests import commands
from tests.folder_case import FolderTestCase

FULL = pathlib.Path("/dev/full")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Files are made, but what is written to them finds no room."""
    own = pathlib.Path.open

    def opened(path: pathlib.Path, mode: str = "r", *arguments, **how):
        if "w" not in mode and "a" not in mode:
            return own(path, mode, *arguments, **how)
        own(path, mode, *arguments, **how).close()
        return own(FULL, mode, *arguments, **how)

    with mock.patch.object(pathlib.Path, "open", opened):
        yield


@absltest.skipUnless(FULL.exists(), "this system has no /dev/full")
class FullDiskTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.path = self.directory / "x.out"

    def assert_left(self, *names: str) -> None:
        self.assertEqual(sorted(path.name for path in self.directory.iterdir()), sorted(names))

    @contextlib.contextmanager
    def refused(self, *more: str) -> Iterator[None]:
        said = f"{self.path}: No space left on device; make room"
        with self.assert_one_line(said, *more), full_disk():
            yield

    def test_results_replace_what_was_there_or_nothing(self):
        with self.refused("run the same command again to resume"):
            perplexity_run._write_record(self.path, {"a": 1})
        self.assert_left()
        perplexity_run._write_record(self.path, {"a": 1})
        with self.refused():
            perplexity_run._write_record(self.path, {"a": 2})
        self.assert_left("x.out")
        self.assertEqual(json.loads(self.path.read_text()), {"a": 1})

    def test_what_was_appended_in_part_is_taken_back(self):
        files.append(self.path, "before\n")

        own = pathlib.Path.open

        class Short(io.FileIO):
            """Takes three bytes, then no more."""

            def write(self, content) -> int:
                if self.tell() > 7:
                    raise OSError(28, "No space left on device")
                return super().write(content[:3])

        def opened(path: pathlib.Path, mode: str = "r", **how):
            return Short(path, "ab") if "a" in mode else own(path, mode, **how)

        with (
            mock.patch.object(pathlib.Path, "open", opened),
            self.assertRaisesRegex(MoejaxError, "No space left"),
        ):
            files.append(self.path, "after\n")
        self.assertEqual(self.path.read_text(), "before\n")

    def test_answers_stay_and_are_gone_on_from(self):
        answers = AnswerFile(self.path, {"task": "x"})
        score = WindowScore(0.5, 3)
        with self.refused("run the same command again to resume"):
            answers.add({0: score})
        self.assert_left()
        answers.add({0: score})
        with self.refused("run the same command again to resume"):
            answers.add({1: score})
        self.assert_left("x.out")
        self.assertEqual(AnswerFile(self.path, {"task": "x"}).known, {0: score})

    @pytest.mark.slow
    def test_the_command(self):
        arguments = ["--prompt=Hi", "--max_new_tokens=2", f"--record_trace={self.path}"]
        with full_disk():
            status, _, err = commands.run(generate.COMMAND, *arguments)
        self.assertEqual(status, 1)
        said = f"error: {self.path}: No space left on device; make room, or name a place that has"
        self.assertIn(said, err.splitlines()[-1])
        self.assert_left()
