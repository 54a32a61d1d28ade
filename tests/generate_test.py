"""The generate command with real checkpoints: tiny random ones, and the demo that ships."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import jax
import pytest
from absl.testing import absltest

from moejax import generate
from moejax.demo import DEMO_DIRECTORY
from moejax.engine import Engine
from tests import commands
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import write_checkpoint
from tests.random_checkpoints import write_tokenizer

ROOT = pathlib.Path(__file__).parents[1]
VOCAB_SIZE = 160  # of the tiny checkpoints


def run_in_process(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command, run here."""
    return commands.run(generate.COMMAND, *arguments)


def run_process(
    *arguments: str, cwd: str, pythonpath: pathlib.Path = ROOT
) -> "subprocess.CompletedProcess[str]":
    """The command as a user starts it, from a directory that is not the repository."""
    command = [sys.executable, "-m", "moejax.generate", *arguments]
    env = {
        **os.environ,
        "PYTHONPATH": str(pythonpath),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "",
    }
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


class TinyCheckpointTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = cls.class_folder()
        cls.checkpoint = write_checkpoint("qwen3", cls.folder)
        write_tokenizer(cls.checkpoint, VOCAB_SIZE)

    def test_stream_is_the_engines_answer(self):
        status, out, err = run_in_process(
            f"--config.checkpoint={self.checkpoint}",
            "--prompt=Hello, world",
            "--config.max_new_tokens=20",
        )
        self.assertEqual(status, 0, err)
        engine = Engine.from_pretrained(self.checkpoint, progress=False)
        [expected] = engine.generate("Hello, world", max_new_tokens=20)
        self.assertEqual(out, f"{expected.text}\n")
        self.assertRegex(err.splitlines()[-1], r"^prompt tokens 12, new tokens 20, TTFT [\d.]+ ms")
        self.assertRegex(err, rf"loaded {re.escape(str(self.checkpoint))} on \S+ in [\d.]+ s\n")

    def test_no_gpu_where_one_is_asked_for(self):
        if jax.default_backend() != "cpu":
            self.skipTest("there is an accelerator")
        self.assert_fails(
            "JAX sees only cpu; on an NVIDIA machine pip install '.[cuda13]' (or '.[cuda12]') in",
            f"--config.checkpoint={self.checkpoint}",
            "--config.platform=gpu",
            "--prompt=a",
        )

    def assert_fails(self, said: str, *arguments: str) -> None:
        """The command fails, and its last line on stderr says so."""
        status, out, err = run_in_process(*arguments)
        self.assertEqual((status, out), (1, ""), err)
        self.assertNotIn("Traceback", err)
        last = err.splitlines()[-1]
        self.assertStartsWith(last, "error: ")
        self.assertEqual(err.count("error: "), 1, err)
        self.assertIn(said, last)

    @pytest.mark.slow
    def test_process(self):
        done = run_process(
            f"--config.checkpoint={self.checkpoint}",
            "--prompt=Hello, world",
            "--config.max_new_tokens=4",
            cwd=str(self.folder),
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLen(done.stdout, len("1234\n"))
        self.assertIn(f"compilation cache: {jax.config.jax_compilation_cache_dir}\n", done.stderr)


class DemoTest(absltest.TestCase):
    """The model in the package: small, there, and served by the wheel alone."""

    def test_demo_answers(self):
        status, out, err = run_in_process("--prompt=The history of", "--config.max_new_tokens=24")
        self.assertEqual(status, 0, err)
        self.assertGreater(len(out.split()), 5)

    def test_demo_is_under_30_mb(self):
        sizes = [path.stat().st_size for path in DEMO_DIRECTORY.rglob("*") if path.is_file()]
        self.assertLess(sum(sizes), 30e6)

    @pytest.mark.slow
    def test_wheel_answers_away_from_the_repository(self):
        folder = self.enter_context(tempfile.TemporaryDirectory())
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        [wheel] = pathlib.Path(folder).glob("*.whl")
        site = pathlib.Path(folder) / "site"
        shutil.unpack_archive(wheel, site, format="zip")
        done = run_process("--prompt=Once", cwd=folder, pythonpath=site)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotEmpty(done.stdout.strip())
        self.assertFalse((site / "tests").exists())
