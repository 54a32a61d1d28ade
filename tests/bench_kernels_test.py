"""The kernel benchmark: its chains, its data, what it calls a fault; its mains on tiny shapes."""

import json
import subprocess
import tempfile
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.files.result_rows import read_rows
from pallas_kernels.packed import dequantize
from pallas_kernels.target import Choice, Target
from scripts.studies.kernels import data, timing
from scripts.studies.kernels import running as run
from scripts.studies.measuring import Report
from tests import slow
from tests.script_runs import run_module

HOPPER, AMPERE = Target("gpu", (9, 0)), Target("gpu", (8, 0))


def bench(target: Target = HOPPER, **settings) -> run.Bench:
    defaults = {"deadline": time.monotonic() + 1000, "implementations": run.IMPLEMENTATIONS}
    return run.Bench(
        report=Report(jax.devices()[0], "", ""), target=target, **(defaults | settings)
    )


def times(microseconds: float) -> timing.Timing:
    return timing.Timing(microseconds, 0.1, None, None)


def folder(test: absltest.TestCase) -> Path:
    """Removed with the test."""
    return Path(test.enter_context(tempfile.TemporaryDirectory()))


class TimingTest(parameterized.TestCase):
    def test_chain_rotates_past_the_l2(self):
        for slot_bytes, seconds in ((27e6, 15e-6), (1.7e6, 4e-6), (117e6, 30e-6), (27e6, 700e-6)):
            chain = timing.chain_for(int(slot_bytes), seconds)
            self.assertEqual(chain.num_calls % chain.num_slots, 0)
            self.assertGreaterEqual(chain.num_slots * slot_bytes, 150e6)
            self.assertBetween(chain.num_calls * chain.num_rounds * seconds, 1e-3, 2e-2)
            self.assertLessEqual(chain.num_calls, timing.MAX_CALLS)

    def test_difference_leaves_out_what_comes_once(self):
        clock, noise = [0.0], iter([0.0, 5.0, *[0.0] * 20])

        def run(count: int) -> None:
            clock[0] += 20 + 10 * count + next(noise)

        with mock.patch.object(timing.time, "perf_counter", lambda: clock[0]):
            [(took, spread)] = timing.differences([run], 5)
        self.assertAlmostEqual(took, 10)
        self.assertLess(spread, 1)


class DataTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.parameters(
        *((bits, data.random_stack) for bits in (2, 3, 4, 8, 16)), (4, data.random_planes)
    )
    def test_sample_is_the_product(self, bits, make):
        weights = make(jnp.uint32(5), slots=2, rows=500, inputs=128, bits=bits)
        weights.check()
        x = data.random_rows(1, (40, 128))
        sample = data.dense_sample(x, weights, 1)
        self.assertEqual(sample.values.shape, (32, 384))
        self.assertIn(499, sample.columns)
        dense = np.asarray(dequantize(weights, jnp.int32(1)), np.float64)
        whole = np.asarray(x).astype(np.float64) @ dense.T
        expected = whole[np.ix_(sample.rows, sample.columns)]
        rounded = 1e-6 if weights.refinements else 0  # scales of planes are no short numbers
        np.testing.assert_allclose(sample.values, expected, rtol=1e-7, atol=rounded)
        self.assertBetween(whole.std(), 0.3, 3)
        self.assertLess(sample.error(whole.astype(np.float32)), 1e-6)
        self.assertGreater(sample.error(np.roll(whole, 1, axis=1)), 0.5)
        whole[3, 7] = np.nan
        self.assertEqual(sample.error(whole), np.inf)


class FaultsTest(parameterized.TestCase):
    @parameterized.parameters(
        (HOPPER, 3, "mosaic", True),
        (HOPPER, 3, "triton", False),
        (HOPPER, 3, "reference", False),
        (HOPPER, 16, "triton", True),
        (AMPERE, 3, "triton", True),
        (AMPERE, 3, "reference", False),
        (Target("cpu", None), 3, "reference", True),
    )
    def test_unexpected_kernel(self, target, bits, found, is_right):
        recorder = bench(target)
        recorder.check_choice("case", Choice(found, {"mosaic": "too wide"}), bits)
        self.assertEqual(not recorder.problems, is_right)
        if not is_right:
            self.assertIn("too wide", recorder.problems[0])

    def test_wrong_values_and_impossible_times_get_no_figure(self):
        recorder = bench(bandwidth=1e15, rate=1e15)
        recorder.record("fast", times(1), [0.001, 0.004], 3e-3, 1e6, 1e6)
        recorder.record("none", times(1), [np.nan], 3e-3, 1e6, 1e6)
        recorder.record("right", times(2), [0.001, 0.002], 3e-3, 1e6, 1e6)
        recorder.bandwidth = 1e12
        recorder.record("dropped", times(0.5), [0.001], 3e-3, 1e6, 1e6)
        self.assertLen(recorder.problems, 3)
        self.assertIn("faster than its bounds", recorder.problems[2])
        self.assertEqual(recorder.figures, {"right": 2})

    def test_bounds(self):
        recorder = bench(bandwidth=4e12, rate=8e14)
        out = folder(self) / "rows.jsonl"
        recorder.report.output = str(out)
        recorder.record("case", times(10), [0.0], 3e-3, 20e6, 4e9)
        row = json.loads(out.read_text(encoding="utf-8"))
        self.assertAlmostEqual(row["baseline"]["bandwidth_bound_us"], 5)
        self.assertAlmostEqual(row["baseline"]["percent_of_bandwidth"], 50)
        self.assertAlmostEqual(row["baseline"]["compute_bound_us"], 5)

    def test_failures(self):
        recorder = bench(longest=0.0)

        def broken():
            raise RuntimeError("launch failed")

        recorder.attempt("peer", broken, ours=False)
        self.assertEmpty(recorder.problems)
        recorder.attempt("kernel", broken, ours=True)
        self.assertLen(recorder.problems, 1)


def script(name: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a main in a process of its own: flags of several scripts have the same names."""
    return run_module(f"scripts.studies.kernels.{name}", *arguments)


class MainsTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_smoke(self):
        out = folder(self)
        rows_path = out / "rows.jsonl"
        done = script(
            "bench_kernels", "--smoke", "--bits=3", "--m=1", f"--out={rows_path}",
            "--only=dense,grouped,compensator,planes",
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        names = {row.what for row in read_rows(rows_path)}
        self.assertIn("ceiling | read bandwidth of a plain sum", names)
        for section in ("dense", "grouped", "compensator", "planes"):
            self.assertTrue(any(name.startswith(section) for name in names), names)

    @pytest.mark.slow
    def test_tune_tiles(self):
        out = folder(self) / "tiles.jsonl"
        done = script(
            "tune_tiles", "--smoke", "--implementation=reference", "--shape=256x96", "--m=1",
            "--tiles=pallas_kernels.mosaic_decode.tiles:StreamTiles",
            "--grid=row_tiles=1,2;warps_n=1", "--base=warps_k=4", f"--out={out}",
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("2 configurations", done.stdout)
        self.assertIn("heuristic", done.stdout)
