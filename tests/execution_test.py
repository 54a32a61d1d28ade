"""Programs in a subprocess with limits: what passes, and what does not get far."""

import time
from pathlib import Path

from absl.testing import absltest, parameterized

from moejax.evaluation.execution import FILE_BYTES, Verdict, run_program


class ExecutionTest(parameterized.TestCase):
    def test_a_program_that_ends(self):
        found = run_program("import math, collections, re\nassert math.sqrt(4) == 2\n")
        self.assertEqual((found.verdict, found.said), (Verdict.PASSED, ""))

    @parameterized.parameters(
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit"),  # an early end is no success
        ("import sys; sys.exit(7)", "SystemExit: 7"),
        ("import os; os._exit(7)", "TypeError"),
        ("import socket", "ModuleNotFoundError"),
        ("import subprocess", "ModuleNotFoundError"),
        ("import os; os.system('true')", "TypeError"),
        ("import os; os.remove('program.py')", "TypeError"),
        ("x = bytearray(2 ** 32)", "MemoryError"),
        ("assert input() == ''", "EOFError"),
        (f"f = open('big', 'wb', 0)\nf.write(bytes({FILE_BYTES}))\nf.write(b'x')", "too large"),
    )
    def test_what_fails(self, source, said):
        found = run_program(source)
        self.assertIs(found.verdict, Verdict.FAILED)
        self.assertIn(said, found.said)

    def test_time(self):
        started = time.monotonic()
        found = run_program("while True: pass", seconds=0.7)
        self.assertIs(found.verdict, Verdict.TIMED_OUT)
        self.assertLess(time.monotonic() - started, 5)

    def test_it_leaves_nothing(self):
        before = set(Path.cwd().iterdir())
        run_program("open('left', 'w').write('x')")
        self.assertEqual(set(Path.cwd().iterdir()), before)


if __name__ == "__main__":
    absltest.main()
