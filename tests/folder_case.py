"""A base of tests: a folder for each, and errors that take one line."""

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from absl.testing import parameterized

from moejax.errors import MoejaxError


class FolderTestCase(parameterized.TestCase):
    """`directory` is empty when a test begins, and goes with it; `class_folder` with the class."""

    @functools.cached_property
    def directory(self) -> Path:
        return Path(self.enterContext(tempfile.TemporaryDirectory()))

    @classmethod
    def class_folder(cls) -> Path:
        """Makes a folder that all tests of the class share."""
        return Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    @contextlib.contextmanager
    def assert_one_line(self, *said: str) -> Iterator[None]:
        """The block raises a MoejaxError of one line, which holds all of these parts."""
        with self.assertRaises(MoejaxError) as caught:
            yield
        for part in said:
            self.assertIn(part, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))
