"""Quantizing whole directories: what is written and refused; runs that are killed go on."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from safetensors.numpy import load_file, save_file

from moejax.checkpoints import open_checkpoint
from moejax.checkpoints.verify import verify_checkpoint
from moejax.errors import MoejaxError
from moejax.quantization.pipeline import disk_space as space
from moejax.quantization.pipeline import run as pipeline
from moejax.quantization.pipeline.report import report_lines
from moejax.quantization.pipeline.run import quantize_checkpoint
from pallas_kernels import layout
from tests import slow
from tests.quantize_case import Killed, QuantizeTestCase, all_tensors, digests, stopped_after
from tests.random_checkpoints import write_random_checkpoint


class WrittenTest(QuantizeTestCase):
    def test_rtn_against_numpy(self):
        outcome = quantize_checkpoint(self.job("head: method=rtn bits=8 group=0"))
        source, found = all_tensors(self.source), all_tensors(outcome.output)
        manifest = json.loads((outcome.output / "quantization.json").read_text())
        for name, entry in manifest["tensors"].items():
            weights = source[name].astype(np.float64)
            bits, size = entry["bits"], entry["group_size"]
            self.assertEqual((bits, size), (8, 64) if "lm_head" in name else (3, 32))
            groups = weights.reshape(len(weights), -1, size)
            low, high = groups.min(-1), groups.max(-1)
            scales = ((high - low) / (2**bits - 1)).astype(np.float16)
            prefix = name.removesuffix(".weight")
            # float32 arithmetic may round the other way where float16 values meet.
            np.testing.assert_allclose(found[f"{prefix}.scales"], scales, rtol=1e-3)
            codes = layout.unpack(found[f"{prefix}.words"], bits, weights.shape[1])
            zeros = found[f"{prefix}.zeros"].astype(np.float64)
            values = codes.reshape(groups.shape) - zeros[..., None]
            values *= found[f"{prefix}.scales"].astype(np.float64)[..., None]
            # Half a step, and what float16 takes of zeros and scales.
            step = (0.5 + 2.0 ** (bits - 10)) * ((high - low) / (2**bits - 1))[..., None]
            self.assertTrue((abs(values - groups) <= step).all(), name)
            error = np.linalg.norm(values - groups) / np.linalg.norm(groups)
            np.testing.assert_allclose(entry["relative_error"], error, rtol=1e-4)
            stored = sum(t.nbytes for n, t in found.items() if n.startswith(prefix + "."))
            self.assertEqual(entry["bytes"], stored)
        for name, entry in manifest["plain"].items():
            np.testing.assert_array_equal(found[name], source[name])
            self.assertEqual(entry["bytes"], source[name].nbytes)
        kinds = {entry["class"] for entry in manifest["tensors"].values()}
        self.assertEqual(kinds, {"attention", "experts", "mlp", "head"})
        self.assertEqual(manifest["tensors"].keys() | manifest["plain"].keys(), source.keys())

    @pytest.mark.slow
    def test_an_edited_config_loads_and_verify_names_it(self):
        output = quantize_checkpoint(self.job()).output
        self.assertRegex(verify_checkpoint(str(output)), "^verified")
        path = output / "config.json"
        before = path.read_text()
        path.write_text(json.dumps({**json.loads(before), "rms_norm_eps": 1e-3}))
        checkpoint = open_checkpoint(str(output))
        self.assertEqual(checkpoint.config.norm_eps, 1e-3)
        checkpoint.load(dtype="float32", device=jax.devices("cpu")[0], progress=False)
        with self.assertRaisesRegex(MoejaxError, f"{path} "):
            verify_checkpoint(str(output))
        path.write_text(before.replace("1", "2", 1))  # as many bytes
        with self.assertRaisesRegex(MoejaxError, f"{path} is not what was written"):
            verify_checkpoint(str(output))
        manifest = json.loads((output / "quantization.json").read_text())
        del manifest["files"]["config.json"]  # packages of before have it not
        (output / "quantization.json").write_text(json.dumps(manifest))
        self.assertRegex(verify_checkpoint(str(output)), "^verified")

    @pytest.mark.slow
    def test_no_plots_without_matplotlib(self):
        self.drawing.stop()
        with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
            outcome = quantize_checkpoint(self.job())
        self.assertRegex(outcome.remarks[0], "no plots: matplotlib is not installed")
        self.assertFalse([line for line in report_lines(outcome) if line.startswith("plots")])
        self.assertTrue((outcome.output / "config.json").exists())

    @pytest.mark.slow
    def test_small_stacks_and_parts_of_rows_change_nothing(self):
        expected = all_tensors(quantize_checkpoint(self.job()).output)
        with (
            mock.patch("moejax.quantization.pipeline.batches.BATCH_BYTES", 3 * 4 * 32 * 64),
            mock.patch("moejax.quantization.pipeline.batches.MATRIX_BYTES", 4 * 20 * 64),
        ):
            job = self.job("head: method=none", output=self.directory / "small")
            found = all_tensors(quantize_checkpoint(job).output)
        self.assertEqual(found.keys(), expected.keys())
        for name, tensor in found.items():
            np.testing.assert_array_equal(tensor, expected[name], name)

    @pytest.mark.slow
    def test_fused_source_gives_the_same_files(self):
        fused = self.copy_of_source()
        tensors = all_tensors(fused)
        for layer in (0, 2):
            prefix = f"model.layers.{layer}.mlp.experts"
            take = lambda e, p, prefix=prefix: tensors.pop(f"{prefix}.{e}.{p}_proj.weight")  # noqa: E731
            both = [np.concatenate([take(e, "gate"), take(e, "up")]) for e in range(4)]
            tensors[f"{prefix}.gate_up_proj"] = np.stack(both)
            tensors[f"{prefix}.down_proj"] = np.stack([take(e, "down") for e in range(4)])
        save_file(tensors, fused / "model.safetensors")
        expected = digests(quantize_checkpoint(self.job()).output)
        found = digests(
            quantize_checkpoint(self.job(source=fused, output=self.directory / "fused")).output
        )
        for files in (expected, found):
            del files["quantization.json"]  # which names the source
        self.assertEqual(found, expected)


class RefusedTest(QuantizeTestCase):
    def refused_output(self, job, *messages):
        before = digests(job.output)
        with self.assert_one_line(*messages):
            quantize_checkpoint(job)
        self.assertEqual(digests(job.output), before)

    @pytest.mark.slow
    def test_output_of_other_settings_or_another_model(self):
        job = self.job()
        quantize_checkpoint(job)
        self.refused_output(self.job(bits=4), "holds a model with bits=3, not 4", "a new directory")
        self.refused_output(self.job("experts: bits=4"), "rules=[], not ['experts: bits=4']")
        other = write_random_checkpoint(self.directory / "other", seed=1)
        self.refused_output(self.job(source=other), "of another source checkpoint")
        (job.output / "model-00002-of-00004.safetensors").write_bytes(b"")
        said = (
            "model-00002-of-00004.safetensors was removed or changed after it was made; give a new"
        )
        self.refused_output(job, said)

    def test_unfinished_output_of_other_settings(self):
        with self.assertRaises(Killed), stopped_after(9, Killed()):
            quantize_checkpoint(self.job())
        self.refused_output(self.job(bits=4), "holds an unfinished run with bits=3, not 4")

    def test_output_that_holds_something_else(self):
        output = self.directory / "out"
        output.mkdir()
        (output / "letter.txt").write_text("dear all")
        self.refused_output(self.job(), "holds other files (letter.txt)")
        self.refused_output(self.job(output=self.source), "is the source itself; give another")
        (output / "config.json").write_text("{}")
        self.refused_output(self.job(), "holds another model; give a new directory")
        file = self.directory / "file"
        file.write_text("")
        self.refused_output(self.job(output=file), "is a file; give a directory")

    def test_two_processes(self):
        job = self.job()
        with mock.patch.object(
            pipeline, "quantize_shard", side_effect=lambda *_, **__: quantize_checkpoint(job)
        ):
            self.assert_refused(job, "another process is writing")

    @parameterized.parameters(np.nan, np.inf, -np.inf)
    def test_not_finite(self, value):
        for name, shape in (
            ("model.layers.2.mlp.experts.3.up_proj.weight", (32, 64)),
            ("model.layers.1.input_layernorm.weight", (64,)),
        ):
            damaged = pathlib.Path(shutil.copytree(self.source, self.directory / name))
            file = damaged / "model.safetensors"
            tensors = load_file(file)
            place = tuple(size - 2 for size in shape)
            tensors[name][place] = value
            save_file(tensors, file)
            at = ", ".join(map(str, place))
            job = self.job(source=damaged, output=self.directory / f"{name}.out")
            self.assert_refused(job, f"{name} holds {value} at [{at}]")

    def test_truncated_or_mislabelled(self):
        damaged = self.copy_of_source()
        file = damaged / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        self.assert_refused(self.job(source=damaged), "is truncated")
        shutil.copy(self.source / "model.safetensors", file)
        os.mkfifo(damaged / "merges.txt")
        self.assert_refused(self.job(source=damaged), "merges.txt is a FIFO, expected a regular")
        (damaged / "merges.txt").unlink()
        config = json.loads((damaged / "config.json").read_text())
        (damaged / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 48}))
        self.assert_refused(self.job(source=damaged), "does not fit its config.json")
        file.rename(damaged / "pytorch_model.bin")
        self.assert_refused(self.job(source=damaged), "no model.safetensors")

    def test_quantized_already(self):
        output = quantize_checkpoint(self.job()).output
        job = self.job(source=output, output=self.directory / "twice")
        self.assert_refused(job, "is quantized already (quant_method 'moejax')")

    @parameterized.parameters(0, 5, 12, 20)
    def test_full_disk(self, count):
        job, expected = self.job(), self.undisturbed()[0]
        full = OSError(errno.ENOSPC, "No space left on device")
        with stopped_after(count, full):
            self.assert_refused(
                job, "No space left on device; make room and start the same command again"
            )
        self.assertEmpty(list(job.output.rglob("*.partial")))
        quantize_checkpoint(job)
        self.assertEqual(digests(job.output), expected)

    def test_no_room_from_the_start(self):
        usage = shutil.disk_usage(self.directory)._replace(free=1000)
        with mock.patch.object(shutil, "disk_usage", return_value=usage):
            self.assert_refused(self.job(), "the result takes up to", "make room")

    @slow.where(lambda changes: changes)
    @parameterized.parameters(
        ({},),
        ({"method": "milo", "factor_bits": 3, "rank": "Dense-25%"},),
        ({"method": "milo", "factor_bits": 16, "rank": "Uniform-4"},),
        ({"method": "gptq", "bits": 4, "act_order": True, "group_size": 8},),
        ({"bits": 4, "zero_kind": "integer", "target": "gptq"},),
        ({"bits": 4, "zero_kind": "symmetric", "target": "compressed-tensors"},),
    )
    def test_the_room_that_is_asked_for_is_enough(self, changes):
        self.drawing.stop()
        job, taken, asked = self.job(**changes), 0, []
        written = pipeline.write_whole

        def measured(path, content, mend):
            nonlocal taken
            taken = max(taken, sum(p.stat().st_size for p in job.output.rglob("*") if p.is_file()))
            return written(path, content, mend)

        def noted(output, source, shards, tasks):
            asked.append(space._most_bytes(source, shards, tasks))

        with (
            mock.patch.object(pipeline, "check_space", noted),
            mock.patch.object(pipeline, "write_whole", measured),  # config.json, the last
        ):
            quantize_checkpoint(job)
        taken += (job.output / "config.json").stat().st_size
        self.assertLess(taken, asked[0])
        tensors = sum(t.nbytes for t in all_tensors(job.output).values())
        names = list(all_tensors(self.source))
        self.assertLess(asked[0], 1.5 * tensors + 4096 * len(names) + 2 * 2**20)

    def test_scales_beyond_float16(self):
        damaged = self.copy_of_source()
        tensors = all_tensors(damaged)
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name][5, 3] = ml_dtypes.bfloat16(1e6)
        save_file(tensors, damaged / "model.safetensors")
        self.assert_refused(self.job(source=damaged), "does not fit float16", "scale_dtype=float32")
        job = self.job("mlp: scale=float32", source=damaged, output=self.directory / "wide")
        quantize_checkpoint(job)


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
