"""Text from files in errors and log lines: no escape sequence reaches a terminal."""

import io
import logging

from absl.testing import parameterized

from moejax import cli
from moejax.errors import MoejaxError, printable

NAME = "model.\x1b[31mred\x1b]0;title\x07\x9b2J\u202e\r\x00é"
SHOWN = r"model.\x1b[31mred\x1b]0;title\x07\x9b2J\u202e\r\x00é"


class PrintableTest(parameterized.TestCase):
    def test_control_characters(self):
        self.assertEqual(printable(NAME), SHOWN)
        self.assertEqual(str(MoejaxError(f"no {NAME}")), f"no {SHOWN}")
        for plain in ("今天\tnaïve\n", "👩‍👩‍👧 \\x1b", "x" * 4000):
            self.assertEqual(printable(plain), plain)

    def test_length(self):
        text = printable("a" * 50_000 + "b" * 50_000)
        self.assertLess(len(text), 4100)
        self.assertRegex(text, r"^a+ \.\.\. \(100,000 characters\) \.\.\. b+$")

    def test_log_lines(self):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.addFilter(cli._escape)
        logger = logging.getLogger("printable_test")
        logger.addHandler(handler)
        logger.warning("left out %s\n%d", NAME, 3)
        self.assertEqual(stream.getvalue(), f"left out {SHOWN}\\n3\n")
