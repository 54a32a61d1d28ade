"""Steps of pooled experts leave the pool where it is, as XLA compiles them for a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from absl.testing import absltest

from tests.gpu_targets import SKIP_CHECKS
from tests.pooled_programs import CASES, CHUNKS, CONFIGS
from tests.tiered_programs import MOST_BYTES

ROOT = Path(__file__).parents[1]


class CompilingTest(absltest.TestCase):
    """In a process of its own, by JAX's CUDA plugin, without a GPU."""

    def printed(self, module):
        if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
            self.skipTest("JAX's CUDA plugin is not installed")
        done = subprocess.run(
            [sys.executable, "-m", module], cwd=ROOT, env=os.environ | {SKIP_CHECKS: "1"},
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr[-4000:])
        return done.stdout

    def test_no_slots_of_tiers_are_copied(self):
        lines = [line.split() for line in self.printed("tests.tiered_programs").splitlines()]
        found = {line[0]: int(line[1]) for line in lines if line[:1] in (["routed"], ["replayed"])}
        self.assertLen(found, 2)
        for label, temporary in found.items():
            self.assertLess(temporary, MOST_BYTES, label)

    def test_no_bank_is_copied(self):
        printed = self.printed("tests.pooled_programs")
        lines = [line.split() for line in printed.splitlines() if "_slots_" in line]
        self.assertLen(lines, (len(CASES) + 1 + len(CHUNKS)) * len(CONFIGS), printed[-4000:])
        for label, temporary, bound, aliased, donated in lines:
            with self.subTest(label):
                self.assertGreaterEqual(int(aliased), int(donated))
                self.assertLess(int(temporary), int(bound))


if __name__ == "__main__":
    absltest.main()
