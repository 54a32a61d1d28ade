"""Text from files in errors and log lines: no escape sequence reaches a terminal."""

import io
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from absl.testing import parameterized
from safetensors.numpy import save_file

from moejax import cli
from moejax.demo import DEMO_DIRECTORY
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

    @pytest.mark.slow
    def test_a_main(self):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "config.json").symlink_to(DEMO_DIRECTORY / "config.json")
            tensors = tensors_like_the_demo()
            save_file({**tensors, NAME: np.zeros(3, np.float32)}, directory / "model.safetensors")
            command = (
                "import moejax.generate as g; from moejax import cli; from absl import logging; "
                f"load = g.load_engine; g.load_engine = lambda *args: (logging.warning('of %s', "
                f"{NAME!r}), load(*args)); cli.run(g.COMMAND)"
            )
            done = subprocess.run(
                [sys.executable, "-c", command, "--prompt=a", f"--config.checkpoint={name}"],
                capture_output=True, text=True, check=False,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )  # fmt: skip
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"of {SHOWN}\n", done.stderr)
        self.assertIn(f"unexpected tensors (1): {SHOWN} [3]", done.stderr)
        self.assertNotRegex(done.stderr, "[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f]")


def tensors_like_the_demo():
    """Returns the tensors of a file for which numpy has a type."""
    header = json.loads(_header(DEMO_DIRECTORY / "model.safetensors"))
    del header["__metadata__"]
    return {name: np.zeros(entry["shape"], np.float16) for name, entry in header.items()}


def _header(path):
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))
