"""Every method and file format through the whole pipeline, against numpy and the loaders."""

import dataclasses
import json
import shutil
from typing import ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.checkpoints import open_checkpoint
from moejax.quantization import hqq
from moejax.quantization.gptq import GptqSettings, gptq
from moejax.quantization.grid import Grid, dequantize
from moejax.quantization.pipeline import quantizers
from moejax.quantization.pipeline.calibration_pass import CalibrationRun
from moejax.quantization.pipeline.recipe import Scheme
from moejax.quantization.pipeline.run import quantize_checkpoint
from moejax.weights.qtensor import dense
from pallas_kernels import layout
from pallas_kernels.target import SIMULATED
from tests.quantize_case import Killed, QuantizeTestCase, all_tensors, digests, stopped_after
from tests.random_checkpoints import TINY, write_random_checkpoint, write_tokenizer

TEXT = "".join(chr(32 + i * i % 95) for i in range(300))


def manifest_of(output):
    return json.loads((output / "quantization.json").read_text())


def values_of(prefix: str, entry: dict, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """float64[N, K] of one matrix in the package's own format, compensator included."""
    num_rows, num_inputs = entry["shape"]
    group = np.arange(num_inputs) // entry["group_size"]
    codes = layout.unpack(tensors[f"{prefix}.words"], entry["bits"], num_inputs)
    zeros = tensors.get(f"{prefix}.zeros", np.array([[2.0 ** (entry["bits"] - 1)]]))
    scales = tensors[f"{prefix}.scales"].astype(np.float64)
    zeros = np.broadcast_to(zeros.astype(np.float64), scales.shape)
    values = (codes - zeros[:, group]) * scales[:, group]
    factors = []
    for name, length in (("u", num_rows), ("v", num_inputs)):
        if f"{prefix}.{name}" in tensors:
            factors.append(tensors[f"{prefix}.{name}"].astype(np.float64))
        elif f"{prefix}.{name}.words" in tensors:
            bits = entry["factor_bits"]
            part = layout.unpack(tensors[f"{prefix}.{name}.words"], bits, length)
            steps = tensors[f"{prefix}.{name}.scales"].astype(np.float64)
            factors.append((part - 2.0 ** (bits - 1)) * steps[:, np.arange(length) // 64])
    return values + factors[0].T @ factors[1] if factors else values


class MethodsTest(QuantizeTestCase):
    # All matrices are of one shape, for which a method is compiled once.
    fields: ClassVar[dict] = {"num_kv_heads": 4, "expert_dim": 64, "mlp_dim": 64}

    def checked(self, outcome):
        """The manifest, after every error in it was computed again from the files."""
        manifest = manifest_of(outcome.output)
        source, tensors = all_tensors(self.source), all_tensors(outcome.output)
        for name, entry in manifest["tensors"].items():
            weights = source[name].astype(np.float64)
            values = values_of(name.removesuffix(".weight"), entry, tensors)
            error = np.linalg.norm(values - weights) / np.linalg.norm(weights)
            np.testing.assert_allclose(entry["relative_error"], error, rtol=2e-4, err_msg=name)
        return manifest

    def mean_error(self, manifest):
        return np.mean([entry["relative_error"] for entry in manifest["tensors"].values()])

    @parameterized.parameters((8, "milo", "milo+"), (16, "milo"))
    @pytest.mark.slow
    def test_milo(self, factor_bits, *methods):
        """Less error than HQQ, ranks as the policy says, bytes as the ranks say."""
        policy = "Dense-8 + Kurtosis-6"
        plain = self.checked(quantize_checkpoint(self.job(method="hqq")))
        errors = {}
        for method in methods:
            job = self.job(
                method=method,
                rank=policy,
                factor_bits=factor_bits,
                zero_kind="float",  # for both, so that they take the same bytes
                output=self.directory / method,
            )
            manifest = self.checked(quantize_checkpoint(job))
            errors[method] = self.mean_error(manifest)
            ranks = {name: entry["rank"] for name, entry in manifest["tensors"].items()}
            self.assertEqual({r for n, r in ranks.items() if "self_attn" in n}, {8})
            experts = [rank for name, rank in ranks.items() if ".experts." in name]
            self.assertBetween(np.mean(experts), 4, 6)
            self.assertGreater(len(set(experts)), 1)
            self.assert_loads(job)
            found = all_tensors(job.output)
            for name, rank in ranks.items():
                u = f"{name.removesuffix('weight')}u{'' if factor_bits == 16 else '.words'}"
                self.assertEqual(len(found[u]) if rank else u in found, rank, name)
        self.assertLess(errors["milo"], self.mean_error(plain))
        self.assertLess(errors.get("milo+", 0), errors["milo"])

    @parameterized.parameters("milo", "milo+")
    @pytest.mark.slow
    def test_surging_factors_are_kept_in_int8(self, method):
        def surges(weights, solution, program):
            del solution, program
            # By a mark that stays when matrices are stacked: which one is larger.
            size = jnp.sum(jnp.abs(weights), axis=(-2, -1))
            return size >= jnp.max(size)

        # Another number of passes, so that programs traced without the mock are not met.
        with mock.patch.object(quantizers, "_has_surged", surges):
            job = self.job("mlp, experts: method=none", method=method, factor_bits=3, passes=4)
            manifest = self.checked(quantize_checkpoint(job))
        surged = [name for name, entry in manifest["tensors"].items() if entry.get("surged")]
        self.assertLen(surged, 3)  # one of each layer's attention
        self.assertEqual(manifest["totals"]["surged_matrices"], 3)
        for name, entry in manifest["tensors"].items():
            self.assertEqual(entry["factor_bits"], 8 if name in surged else 3)
        self.assert_loads(job)

    @pytest.mark.slow
    def test_gptq_is_given_the_inputs_of_the_layer(self):
        job = self.job("experts, mlp: method=rtn", method="gptq", text=TEXT)
        manifest = self.checked(quantize_checkpoint(job))
        self.assertEqual(manifest["totals"]["starved_matrices"], 0)
        source, found = all_tensors(self.source), all_tensors(job.output)
        # Layer 0 reads the embeddings of the text.
        ids = np.array([ord(c) - 32 for c in TEXT])
        starts = np.arange(4) * len(ids) // 4
        x = source["model.embed_tokens.weight"].astype(np.float64)[
            ids[starts[:, None] + np.arange(32)]
        ]
        x = x.reshape(-1, x.shape[-1])
        x /= np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        x *= source["model.layers.0.input_layernorm.weight"].astype(np.float64)
        hessian = jnp.asarray((2 / len(x) * x.T @ x).astype(np.float32))
        grid = Grid(bits=3, group_size=32, zero_kind="float")
        for matrix in "qkv":
            prefix = f"model.layers.0.self_attn.{matrix}_proj"
            weights = jnp.asarray(source[f"{prefix}.weight"].astype(np.float32))
            codes = np.asarray(gptq(weights, hessian, grid).codes.codes)
            stored = layout.unpack(found[f"{prefix}.words"], 3, weights.shape[1])
            self.assertGreater(np.mean(codes == stored), 0.995)  # rounding may move a tie
            plain = quantize_checkpoint(self.job(output=self.directory / "rtn")).output
            words = all_tensors(plain)[f"{prefix}.words"]
            self.assertLess(np.mean(layout.unpack(words, 3, weights.shape[1]) == stored), 0.95)

    def test_starved_experts_are_counted(self):
        seen = {}

        def calibrate(run, captured, entries):
            found = real(run, captured, entries)
            counts = np.asarray(found.num_tokens)
            seen.update(zip((entry.name for entry in entries), counts, strict=True))
            return found

        real = CalibrationRun.calibrate
        with mock.patch.object(CalibrationRun, "calibrate", calibrate):
            manifest = self.checked(quantize_checkpoint(self.job(method="gptq", text=TEXT)))
        enough = GptqSettings().min_tokens_per_input * 64
        starved = {name for name, entry in manifest["tensors"].items() if entry.get("starved")}
        self.assertEqual(starved, {name for name, count in seen.items() if count < enough})
        self.assertEqual(manifest["totals"]["starved_matrices"], len(starved))
        for layer in (0, 2):  # two experts a token
            prefix = f"model.layers.{layer}.mlp.experts"
            counts = [seen[f"{prefix}.{e}.down_proj.weight"] for e in range(4)]
            self.assertEqual(sum(counts), 2 * 128)

    @pytest.mark.slow
    def test_frequency_gives_ranks_by_the_router(self):
        # A router that prefers some experts by more than ranks are rounded to.
        source = write_random_checkpoint(self.directory / "source", seed=1, **self.fields)
        write_tokenizer(source, TINY["vocab_size"])
        job = self.job(method="milo", rank="Frequency-16", text=TEXT, source=source)
        quantize_checkpoint(job)
        manifest = manifest_of(job.output)
        ranks = [
            [
                manifest["tensors"][f"model.layers.2.mlp.experts.{e}.{p}.weight"]["rank"]
                for e in range(4)
            ]
            for p in ("gate_proj", "up_proj")
        ]
        self.assertEqual(ranks[0], ranks[1])
        self.assertGreater(max(ranks[0]), min(ranks[0]))

    def test_calibration_text_too_short(self):
        self.assert_refused(self.job(method="gptq", text="short"), "has 5 tokens, 4 x 32 = 128")
        bare = self.copy_of_source()
        (bare / "tokenizer.json").unlink()
        job = self.job(method="gptq", text=TEXT, source=bare)
        self.assert_refused(job, "calibration needs a tokenizer.json")

    # The formats.

    def assert_loads(self, job):
        """The checkpoint as the engine reads it has the errors that the manifest says."""
        manifest = manifest_of(job.output)
        cpu = jax.devices("cpu")[0]
        source = open_checkpoint(str(self.source))
        original = source.load(dtype="float32", device=cpu, progress=False)
        loaded = open_checkpoint(str(job.output)).load(
            dtype="float32", device=jax.devices("cpu")[0], progress=False
        )
        self.assertEqual(loaded.keys(), original.keys())
        lost = whole = said = 0.0
        for name, leaf in loaded.items():
            values = np.asarray(dense(leaf, jnp.float32), np.float64)
            weights = np.asarray(original[name], np.float64)
            lost += np.sum((values - weights) ** 2)
        source = all_tensors(self.source)
        for name, entry in manifest["tensors"].items():
            whole = np.sum(source[name].astype(np.float64) ** 2)
            said += whole * entry["relative_error"] ** 2
        np.testing.assert_allclose(lost, said, rtol=1e-3)

    @parameterized.parameters("integer", "symmetric")
    @pytest.mark.slow
    def test_formats_of_other_engines(self, zero_kind):
        loaded = []
        for target in ("gptq", "compressed-tensors", "moejax"):
            job = self.job(
                "head: bits=8 method=rtn",
                "*.experts.1.*: bits=3",
                bits=4,
                zero_kind=zero_kind,
                target=target,
                output=self.directory / target,
            )
            quantize_checkpoint(job)
            self.assert_loads(job)
            loaded.append(
                {n: e["relative_error"] for n, e in manifest_of(job.output)["tensors"].items()}
            )
        self.assertEqual(loaded[0], loaded[2])
        self.assertEqual(loaded[1], loaded[2])

    def test_what_the_gpu_kernel_refuses_is_said(self):
        served = self.job(method="milo", group_size=64).recipe.default
        served = dataclasses.replace(served, zero_kind="float")
        odd = dataclasses.replace(served, group_size=48)
        matrices = [((64, 96), odd), ((32, 96), odd), ((64, 128), served)]
        self.enter_context(mock.patch.object(hqq, "current_target", lambda: SIMULATED))
        [line] = quantizers.kernel_remarks(matrices)
        self.assertRegex(line, "^2 matrices were solved without the HQQ kernel.*group_size 48")
        self.assertEmpty(quantizers.kernel_remarks(matrices[2:]))

    @parameterized.parameters(
        ({"method": "gptq", "target": "gptq"},),
        ({"method": "milo", "rank": "Dense-8 + Frequency-16"},),
        ({"method": "autoround", "zero_kind": "symmetric"},),
    )
    @pytest.mark.slow
    def test_calibrated_run_that_was_killed(self, how):
        job = self.job(text=TEXT, output=self.directory / "undisturbed", **how)
        with mock.patch("os.fsync") as fsync:
            quantize_checkpoint(job)
        expected, count = digests(job.output), fsync.call_count
        job = self.job(text=TEXT, **how)
        for step in (count // 3, 2 * count // 3):
            shutil.rmtree(job.output, ignore_errors=True)
            with self.assertRaises(Killed), stopped_after(step, Killed()):
                quantize_checkpoint(job)
            self.assertGreater(quantize_checkpoint(job).shards_before, 0)
            self.assertEqual(digests(job.output), expected)


class SurgeTest(absltest.TestCase):
    @pytest.mark.slow
    def test_factors_of_a_wider_width_that_do_harm_are_kept_in_more_bits(self):
        scheme = Scheme(
            method="milo", bits=4, group_size=16, zero_kind="float", scale_dtype="float32",
            factor_bits=3, planes=(2, 4),
        )  # fmt: skip
        program = quantizers.Program(scheme=scheme, max_rank=4, passes=1)
        weights = jnp.asarray(np.random.default_rng(0).standard_normal((3, 32, 32)), jnp.float32)
        found = quantizers._solve(weights, jnp.full(3, 4, jnp.int32), program, 3)
        self.assertFalse(np.any(quantizers._has_surged(weights, found, program)))
        wide, narrow = found.lost
        harmed = found._replace(lost=(wide.at[1].set(1.01 * found.bare[0][1]), narrow))
        surged = quantizers._has_surged(weights, harmed, program)
        np.testing.assert_array_equal(surged, [False, True, False])
        # Without its factors a width loses what its codes alone lose.
        for width, bare in zip(program.grid.widths, found.bare, strict=True):
            left = weights - dequantize(found.codes, program.grid, width)
            np.testing.assert_allclose(bare, jnp.sum(left**2, axis=(1, 2)), rtol=1e-5)
