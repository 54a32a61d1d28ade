"""The benchmark of sweeps on tiny numbers: rows, limits, and the trace that it makes up."""

import tempfile
from pathlib import Path

import numpy as np
from absl import flags
from absl.testing import absltest, flagsaver

from moejax.results import read_rows
from scripts import bench_sweep
from scripts.synthetic_traces import drifting_trace

if not flags.FLAGS.is_parsed():
    flags.FLAGS(["test"])
TINY = {
    "device": "cpu", "settings": 5, "tokens": 40, "layers": 3, "experts": 16, "width": 2,
    "policy": ["lru", "dynaexq", "dymoe", "dymoe_ahead"],
}  # fmt: skip


class BenchSweepTest(absltest.TestCase):
    def test_a_row_of_each_policy(self):
        rows = Path(self.enter_context(tempfile.TemporaryDirectory())) / "rows.jsonl"
        with flagsaver.flagsaver(**TINY, output=str(rows), note="of a test"):
            bench_sweep.main([])
        found = read_rows(rows)
        self.assertEqual([row.what.split(", ")[1] for row in found], TINY["policy"])
        for row in found:
            self.assertGreater(row.figure, 0)
            self.assertIn("compile_s", row.baseline)
            self.assertAlmostEqual(row.baseline["settings_x_tokens_a_second"] * row.figure, 200)
            self.assertEqual(row.baseline["note"], "of a test")

    def test_a_limit(self):
        for policy, said in (("lru", "lru: .* the limit is 1e-06"), ("lur", "is none of lru")):
            flags_of = TINY | {"policy": [policy], "limit": 1e-6}
            with (
                flagsaver.flagsaver(**flags_of),
                self.assertRaisesRegex(SystemExit, said),
            ):
                bench_sweep.main([])

    def test_settings_differ(self):
        for policy in bench_sweep.POLICIES:
            grid = bench_sweep.grid_of(policy, 250, 128)
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
