"""A killed run, started again, ends with the bytes of an undisturbed one."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from unittest import mock

import jax
import pytest

from moejax.errors import MoejaxError
from moejax.quantization.pipeline import run as pipeline
from moejax.quantization.pipeline.run import quantize_checkpoint
from tests.quantize_case import Killed, QuantizeTestCase, digests, stopped_after

ROOT = pathlib.Path(__file__).parents[1]


class ResumeTest(QuantizeTestCase):
    def test_killed_at_every_step(self):
        expected, count = self.undisturbed()
        self.assertGreater(count, 2 * len(expected))
        job = self.job()
        for step in range(count):
            shutil.rmtree(job.output, ignore_errors=True)
            with self.assertRaises(Killed), stopped_after(step, Killed()):
                quantize_checkpoint(job)
            # Nothing looks whole that is not; config.json is there before its place is synced.
            self.assertEqual((job.output / "config.json").exists(), step == count - 1)
            quantize_checkpoint(job)
            self.assertEqual(digests(job.output), expected, f"killed at step {step}")

    def test_killed_again_and_again(self):
        expected, _ = self.undisturbed()
        job, runs = self.job(), 0
        while not (job.output / "config.json").exists():
            runs += 1
            self.assertLess(runs, 50)
            with contextlib.suppress(Killed), stopped_after(9, Killed()):
                quantize_checkpoint(job)
        self.assertGreater(runs, 2)
        # Killed after config.json was there, before the notes went away: this sees that it is done.
        self.assertTrue(quantize_checkpoint(job).was_done)
        self.assertEqual(digests(job.output), expected)

    def test_what_is_done_is_not_done_again(self):
        _, count = self.undisturbed()
        job = self.job()
        with self.assertRaises(Killed), stopped_after(count // 2, Killed()):
            quantize_checkpoint(job)
        quantize_shard = pipeline.quantize_shard
        with mock.patch.object(pipeline, "quantize_shard", side_effect=quantize_shard) as done:
            outcome = quantize_checkpoint(job)
        self.assertGreater(outcome.shards_before, 0)
        num_shards = len(list(job.output.glob("*.safetensors")))
        self.assertEqual(done.call_count, num_shards - outcome.shards_before)

    @pytest.mark.slow
    def test_a_real_kill(self):
        self.drawing.stop()
        expected, count = self.undisturbed()
        job = self.job()
        program = f"""
import dataclasses, os, pathlib, signal, jax
jax.config.update("jax_numpy_dtype_promotion", "strict")
from moejax.quantization.pipeline.run import Job, quantize_checkpoint
from moejax.quantization.pipeline.recipe import Recipe, Scheme
calls, real = iter(range({count // 2})), os.fsync
def fsync(handle):
    real(handle)
    if next(calls, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = fsync
quantize_checkpoint(Job(
    source=pathlib.Path({str(job.source)!r}), output=pathlib.Path({str(job.output)!r}),
    recipe={job.recipe!r}, rank_policy={job.rank_policy!r}, passes={job.passes},
    calibration_text=None, calibration_samples=4, calibration_length=32,
    device=jax.devices("cpu")[0], progress=False,
))
"""
        cache = jax.config.jax_compilation_cache_dir or ""
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
        ended = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True
        )
        self.assertEqual(ended.returncode, -signal.SIGKILL, ended.stderr.decode())
        self.assertFalse((job.output / "config.json").exists())
        self.assertGreater(quantize_checkpoint(job).shards_before, 0)
        self.assertEqual(digests(job.output), expected)

    @pytest.mark.slow
    def test_damaged_shard_is_made_again(self):
        expected, count = self.undisturbed()
        job = self.job()
        with self.assertRaises(Killed), stopped_after(count // 2, Killed()):
            quantize_checkpoint(job)
        shard = job.output / "model-00001-of-00004.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        self.assertEqual(quantize_checkpoint(job).shards_before, 0)
        self.assertEqual(digests(job.output), expected)

    def test_finished_already(self):
        job = self.job()
        first = quantize_checkpoint(job)
        before = {path: path.stat().st_mtime_ns for path in job.output.rglob("*")}
        again = quantize_checkpoint(job)
        self.assertTrue(again.was_done)
        self.assertEqual(again.totals, first.totals)
        self.assertEqual({path: path.stat().st_mtime_ns for path in before}, before)
        shard = sorted(job.output.glob("*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        with self.assertRaisesRegex(MoejaxError, f"{shard.name} is not what was written"):
            quantize_checkpoint(job)
