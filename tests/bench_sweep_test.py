"""The benchmark of sweeps on tiny numbers: rows, limits, and the trace that it makes up."""

import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from absl.testing import absltest

from moejax.files.result_rows import read_rows
from scripts.studies.speed.sweep_grids import POLICIES, drifting_trace, grid_of
from tests.script_runs import run_module

# In processes of their own: flags of several scripts have one name.
TINY = ["--device=cpu", "--settings=5", "--tokens=40", "--layers=3", "--experts=16", "--width=2"]
POLICY_NAMES = ["lru", "dynaexq", "dymoe", "dymoe_ahead", "buddymoe", "compose"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module("scripts.studies.speed.bench_sweep", *TINY, *arguments)


class BenchSweepTest(absltest.TestCase):
    @pytest.mark.slow
    def test_a_row_of_each_policy(self):
        path = Path(self.enter_context(tempfile.TemporaryDirectory())) / "rows.jsonl"
        policies = ",".join(POLICY_NAMES)
        done = run(f"--policy={policies}", f"--output={path}", "--note=of a test")
        self.assertEqual(done.returncode, 0, done.stderr)
        found = read_rows(path)
        self.assertEqual([row.what.split(", ")[1] for row in found], POLICY_NAMES)
        for row in found:
            self.assertGreater(row.figure, 0)
            self.assertIn("compile_s", row.baseline)
            self.assertAlmostEqual(row.baseline["settings_x_tokens_a_second"] * row.figure, 200)
            self.assertEqual(row.baseline["note"], "of a test")

    @pytest.mark.slow
    def test_a_limit(self):
        for policy, said in (("lru", "lru: .* the limit is 1e-06"), ("lur", "is none of lru")):
            done = run(f"--policy={policy}", "--limit=1e-6", "--nowarm")
            self.assertNotEqual(done.returncode, 0)
            self.assertRegex(done.stderr, said)

    def test_settings_differ(self):
        for policy in POLICIES:
            grid = grid_of(policy, 250, 128, None)
            self.assertLen({str(setting) for setting in grid}, 250)

    def test_the_trace_drifts(self):
        trace = drifting_trace(
            num_steps=800, num_layers=2, num_experts=32, width=4, foreseen=4, seed=1
        )
        ids = trace.ids[:, 1]
        np.testing.assert_array_equal(np.argsort(-trace.probabilities[5, 1])[0], ids[5, 0])

        def shared(distance: int) -> float:
            pairs = zip(ids[:-distance], ids[distance:], strict=True)
            return float(np.mean([len(np.intersect1d(a, b)) for a, b in pairs])) / 4

        self.assertGreater(shared(1), shared(400) + 0.05)
        right = [np.isin(g, i).mean() for g, i in zip(trace.predicted_ids[:, 0], ids, strict=True)]
        self.assertGreater(np.mean(right), 0.5)


if __name__ == "__main__":
    absltest.main()
