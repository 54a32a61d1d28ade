"""Bit planes: codes of several widths chosen jointly, written once and read at each width."""

import contextlib
import dataclasses
import functools
import json
import shutil
from typing import ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax import plan
from moejax.checkpoints import open_checkpoint
from moejax.checkpoints.experts import ExpertReader, open_experts
from moejax.checkpoints.verify import verify_checkpoint
from moejax.engine import Engine
from moejax.errors import MoejaxError
from moejax.experts import load
from moejax.experts.budget import Limits
from moejax.experts.tiering import StoredTier, Tiering, open_tier
from moejax.models.config import ModelConfig
from moejax.models.shapes import SHAPES
from moejax.quantization.gptq import GptqSettings, gptq
from moejax.quantization.grid import PLANE_WEIGHTS, Grid, dequantize
from moejax.quantization.hqq import hqq, kernel_refusal
from moejax.quantization.least_squares import least_squares
from moejax.quantization.milo import MiloSettings, milo, width_ranks
from moejax.quantization.pipeline.recipe import parse_planes
from moejax.quantization.pipeline.report import report_lines
from moejax.quantization.pipeline.run import quantize_checkpoint
from moejax.quantization.rtn import rtn
from moejax.weights.linear import DEQUANTIZED, Kernels, _choose_product, linear, take_rows
from moejax.weights.qtensor import from_codes
from pallas_kernels import layout
from pallas_kernels.target import SIMULATED
from scripts.studies.dymoe.controls import AsAsked
from tests import commands, slow
from tests.numpy_model import relative_error
from tests.packed_weights import num_bytes, values_of
from tests.quantize_case import QuantizeTestCase, all_tensors
from tests.random_checkpoints import TINY

TEXT = "".join(chr(32 + i * i % 95) for i in range(300))
CPU = jax.devices("cpu")[0]


def grid_of(*planes: int, weight: float = 0.9, group_size: int = 64) -> Grid:
    return Grid(
        bits=planes[-1], group_size=group_size, zero_kind="float", planes=planes,
        plane_weight=weight,
    )  # fmt: skip


DEQUANTIZE = jax.jit(lambda tensor: tensor.dequantize())


def step(bits: int) -> float:
    """Step of a width in steps of the base, by the table of the layout's docstring."""
    return {2: 1.0, 3: 1.05 / 2, 4: 1.1 / 4, 8: 1.05 / 64}[bits]


def prefix_values(codes, scales, zeros, stored_bits, bits, group_size):
    """float64[..., N, K] of a prefix from codes and the base's scales and zeros: the definition."""
    group = np.arange(codes.shape[-1]) // group_size
    a = scales.astype(np.float64)[..., group]
    center = a * (1.5 - zeros.astype(np.float64)[..., group])
    prefix = (codes >> (stored_bits - bits)).astype(np.float64)
    return a * step(bits) * (prefix - (2**bits - 1) / 2) + center


def matrix(rows=16, inputs=256, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(rows, inputs)).astype(np.float32))


def correlated_hessian(inputs: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    mixed = rng.normal(size=(inputs, inputs)) * np.exp(-0.02 * np.arange(inputs))[:, None]
    x = rng.normal(size=(2048, inputs)) @ (0.5 * mixed + np.eye(inputs))
    return (2 / len(x) * x.T @ x).astype(np.float32)


class JointCodesTest(parameterized.TestCase):
    @parameterized.product(
        planes=((2, 3), (2, 4), (2, 8), (4, 8), (2, 4, 8)), weight=(0.0, 0.5, 0.9, 1.0)
    )
    def test_codes_are_the_best_of_all(self, planes, weight):
        widest = planes[-1]
        rng = np.random.default_rng(0)
        u = rng.normal(size=400) * 2 ** (widest - 2)
        found = np.asarray(
            grid_of(*planes, weight=weight).round(jnp.asarray(u + (2**widest - 1) / 2, jnp.float32))
        ).astype(int)
        errors = np.zeros((2**widest, len(u)))
        for bits in planes:
            share = weight if bits == widest else (1 - weight) / (len(planes) - 1)
            prefix = np.arange(2**widest) >> (widest - bits)
            values = step(bits) / step(widest) * (prefix - (2**bits - 1) / 2)
            errors += share * (u[None] - values[:, None]) ** 2
        np.testing.assert_allclose(
            errors[found, np.arange(len(u))], errors.min(axis=0), rtol=1e-4, atol=1e-5
        )

    @parameterized.parameters(rtn, hqq, least_squares)
    def test_a_higher_weight_favours_the_widest_width(self, quantize):
        weights, errors = matrix(), []
        for weight in (0.5, 0.9, 1.0):
            grid = grid_of(2, 4, weight=weight)
            codes = quantize(weights, grid)
            both = (relative_error(weights, dequantize(codes, grid, w)) for w in grid.widths)
            errors.append([float(error) for error in both])
        (four, two) = zip(*errors, strict=True)
        self.assertEqual(sorted(four, reverse=True), list(four))
        self.assertEqual(sorted(two), list(two))

    def test_gptq_lowers_the_output_error_of_both_widths(self):
        weights, grid = matrix(), grid_of(2, 4)
        hessian = correlated_hessian(256)
        factor = np.linalg.cholesky(hessian.astype(np.float64))
        errors = []
        for codes in (
            gptq(weights, jnp.asarray(hessian), grid).codes,
            least_squares(weights, grid),
        ):
            missed = (np.asarray(weights - dequantize(codes, grid, w)) for w in grid.widths)
            errors.append([np.linalg.norm(part @ factor) for part in missed])
        self.assertLess(errors[0][0], errors[1][0])
        self.assertLess(errors[0][1], errors[1][1])

    @parameterized.parameters(({},), ({"block_size": 16},), ({"act_order": True},))
    @pytest.mark.slow
    def test_gptq_fits_every_group_to_its_own_members(self, how):
        """By H = I no error spreads, so that groups are those of least squares."""
        weights, grid = matrix(16, 96), grid_of(2, 4, group_size=40)
        found = gptq(weights, jnp.eye(96), grid, GptqSettings(**how)).codes
        for i, (first, end) in enumerate(((0, 40), (40, 80), (80, 96))):
            alone = least_squares(weights[:, first:end], grid_of(2, 4, group_size=end - first))
            np.testing.assert_allclose(found.scales[:, i], alone.scales[:, 0], rtol=1e-5)
            np.testing.assert_allclose(found.zeros[:, i], alone.zeros[:, 0], rtol=1e-5)

    def test_a_compensator_repairs_the_narrowest_width(self):
        rng = np.random.default_rng(2)
        low = rng.normal(size=(64, 4)) @ rng.normal(size=(4, 128))
        weights = jnp.asarray((low + rng.normal(size=(64, 128))).astype(np.float32))
        grid = grid_of(2, 4)
        found = milo(weights, grid, MiloSettings(max_rank=8, max_passes=6), 8)
        product = np.asarray(found.factors[-1].u) @ np.asarray(found.factors[-1].v)
        two = np.asarray(dequantize(found.codes, grid, grid.widths[-1]))
        four = np.asarray(dequantize(found.codes, grid))
        bare = dequantize(hqq(weights, grid), grid, grid.widths[-1])

        def error(values):
            return np.linalg.norm(np.asarray(weights) - values)

        self.assertLess(error(two + product), 0.9 * error(np.asarray(bare)))
        self.assertLess(error(four), error(four + product))

    @pytest.mark.slow
    def test_wider_widths_have_compensators_of_their_own(self):
        rng = np.random.default_rng(2)
        low = rng.normal(size=(64, 8)) @ rng.normal(size=(8, 128))
        weights = jnp.asarray((low + rng.normal(size=(64, 128))).astype(np.float32))
        grid = grid_of(2, 4)
        settings = MiloSettings(max_rank=8, max_passes=6, rank_divisor=2)
        found = milo(weights, grid, settings, 8)
        errors = []
        for width, rank, own in zip(grid.widths, (4, 8), found.factors, strict=True):
            u, v = (np.asarray(part, np.float64) for part in (own.u, own.v))
            self.assertEqual((u.shape, v.shape), ((64, rank), (rank, 128)))
            missed = np.asarray(weights) - np.asarray(dequantize(found.codes, grid, width))
            self.assertLess(np.linalg.norm(missed - u @ v), np.linalg.norm(missed))
            # No other factors of that rank leave less than the SVD's; one iteration comes near.
            rest = np.linalg.svd(missed, compute_uv=False)[rank:]
            self.assertLess(np.linalg.norm(missed - u @ v), 1.02 * np.linalg.norm(rest))
            errors.append(np.linalg.norm(missed - u @ v))
        base_alone = milo(weights, grid, dataclasses.replace(settings, rank_divisor=0), 8)
        missed = weights - dequantize(base_alone.codes, grid)
        self.assertLess(errors[0], np.linalg.norm(missed))
        self.assertEqual(base_alone.factors[0].u.shape, (64, 0))

    @parameterized.parameters(
        (8, 3, 2, [2, 4, 8]), (9, 2, 4, [2, 9]), (8, 2, 0, [0, 8]), (5, 1, 4, [5])
    )
    def test_ranks_of_widths(self, rank, num_widths, divisor, expected):
        self.assertEqual(width_ranks(rank, num_widths, divisor), expected)

    def test_the_kernel_serves_one_width(self):
        self.assertEqual(kernel_refusal(matrix(), grid_of(2, 4)), "it finds codes of one width")


class PlanesTensorTest(parameterized.TestCase):
    def tensor(self, planes=(2, 4), inputs=300, lead=(2,)):
        rng = np.random.default_rng(3)
        bits = planes[-1]
        codes = rng.integers(0, 2**bits, (*lead, 5, inputs)).astype(np.uint8)
        shape = (*lead, 5, -(-inputs // 64))
        scales = rng.uniform(0.5, 2, shape).astype(np.float32)
        zeros = rng.uniform(2 ** (bits - 1) - 1, 2 ** (bits - 1), shape).astype(np.float32)
        tensor = from_codes(
            codes, scales, zeros, bits=bits, group_size=64, zero_kind="float",
            scale_dtype=np.float32, by_planes=True,
        )  # fmt: skip
        return codes, scales, zeros, jax.tree.map(jnp.asarray, tensor)

    @parameterized.parameters((2, 3), (2, 4), (2, 8), (2, 4, 8))
    def test_every_prefix_is_the_definition(self, *planes):
        codes, scales, zeros, tensor = self.tensor(planes)
        widest = planes[-1]
        group = np.arange(300) // 64
        expected = (codes - zeros.astype(np.float64)[..., group]) * scales[..., group]
        np.testing.assert_allclose(DEQUANTIZE(tensor), expected, rtol=1e-4, atol=1e-3)
        base = np.asarray(tensor.scales), np.asarray(tensor.zeros)
        for bits in planes:
            prefix = tensor.prefix(bits)
            prefix.check()
            values = prefix_values(codes, *base, widest, bits, 64)
            np.testing.assert_allclose(DEQUANTIZE(prefix), values, rtol=1e-5, atol=2e-4)

    def test_two_bits_are_a_plain_int2(self):
        codes, _, _, tensor = self.tensor()
        two = tensor.prefix(2)
        self.assertEqual(two.refinements, ())
        np.testing.assert_array_equal(two.words, layout.pack(codes >> 2, 2))
        self.assertEqual(two.nbytes + tensor.refinements[0].nbytes, tensor.nbytes)

    def test_products_and_rows(self):
        _, _, _, tensor = self.tensor(lead=(2,), inputs=64)
        x = matrix(3, 64)
        values = np.asarray(DEQUANTIZE(tensor), np.float64)
        expected = np.asarray(x, np.float64) @ values[1].T
        run = jax.jit(linear, static_argnames="kernels")
        np.testing.assert_allclose(run(x, tensor, 1), expected, rtol=1e-4, atol=1e-3)
        for kernels in (Kernels(implementation="reference"), Kernels(SIMULATED)):
            choice = _choose_product(3, jnp.dtype(jnp.float16), tensor, kernels)
            self.assertNotEqual(choice.implementation, DEQUANTIZED)
        by_slots = run(x, tensor, 1, kernels=Kernels(implementation="reference"))
        np.testing.assert_allclose(by_slots, expected, rtol=1e-4, atol=1e-3)
        rows = jax.jit(lambda of, ids: take_rows(of[0], ids, jnp.float32))(
            tensor, jnp.asarray([4, 1])
        )
        np.testing.assert_allclose(rows, values[0, [4, 1]], rtol=1e-6)

    def test_what_is_no_prefix(self):
        tensor = self.tensor((2, 8))[-1]
        with self.assertRaisesRegex(ValueError, "bits 3 is no prefix of 8 bits"):
            tensor.prefix(3)
        with self.assertRaisesRegex(ValueError, "2 planes, expected 3 of 8 bits"):
            dataclasses.replace(tensor, refinements=tensor.refinements[:1]).check()
        with self.assertRaisesRegex(ValueError, "refinements go with float zeros"):
            dataclasses.replace(tensor, zeros=None).check()


class PlanesCheckpointTest(QuantizeTestCase):
    # All matrices are of one shape, for which a method is compiled once.
    fields: ClassVar[dict] = {"num_kv_heads": 4, "expert_dim": 64, "mlp_dim": 64}

    def planes_job(self, *rules, planes=(2, 4), **changes):
        changes = {"bits": planes[-1], "planes": planes, "plane_weight": 0.9, **changes}
        return self.job(*rules, **changes)

    def quantized(self, to_edit=False):
        """Output of the job without changes, made once, or a copy of it."""
        output = self.shared / "planes"
        if not output.exists():
            quantize_checkpoint(self.planes_job(output=output))
        return shutil.copytree(output, self.directory / "out") if to_edit else output

    def load(self, directory, read_bits=0):
        leaves = open_checkpoint(str(directory), read_bits).load(
            dtype="float32", device=CPU, progress=False
        )
        return leaves, {name: values_of(leaf) for name, leaf in leaves.items()}

    def assert_reads(self, output, planes):
        """Leaves and the manifest's errors are those of the files, by numpy in float64."""
        tensors, source = all_tensors(output), all_tensors(self.source)
        manifest = json.loads((output / "quantization.json").read_text())
        for bits in planes:
            leaves, plain = self.load(output, bits)
            by_name = {
                f"model.layers.{layer}.self_attn.o_proj": plain["attention.o_proj"][layer]
                for layer in range(3)
            }
            for prefix, values in by_name.items():
                entry = manifest["tensors"][f"{prefix}.weight"]
                parts = [tensors[f"{prefix}.words"]]
                count = len(layout.PREFIX_PLANES[planes[-1]])
                parts += [tensors[f"{prefix}.refinement_{i}"] for i in range(1, count)]
                codes = layout.unpack_planes(parts, planes[-1], values.shape[1])
                base = tensors[f"{prefix}.scales"], tensors[f"{prefix}.zeros"]
                expected = prefix_values(codes, *base, planes[-1], bits, entry["group_size"])
                end = "" if bits == planes[0] else f"_{bits}"
                if f"{prefix}.u{end}" in tensors:
                    u, v = (tensors[f"{prefix}.{n}{end}"].astype(np.float64) for n in "uv")
                    expected += u.T @ v
                    if bits != planes[0]:
                        self.assertLen(u, entry["refined_ranks"][str(bits)])
                np.testing.assert_allclose(values, expected, atol=1e-5)
                weights = source[f"{prefix}.weight"].astype(np.float64)
                error = np.linalg.norm(expected - weights) / np.linalg.norm(weights)
                said = entry["relative_error"]
                if bits != planes[-1]:
                    said = entry["narrow_errors"][str(bits)]
                np.testing.assert_allclose(said, error, rtol=2e-4)
            self.assertEqual(leaves["attention.o_proj"].bits, bits)

    @slow.where(lambda how: how["method"] != "rtn")
    @parameterized.parameters(
        ({"method": "rtn"},),
        ({"method": "hqq", "planes": (2, 3)},),
        ({"method": "least_squares", "planes": (2, 4, 8)},),
        ({"method": "gptq", "text": TEXT},),
        ({"method": "milo", "factor_bits": 16},),
        ({"method": "milo", "factor_bits": 16, "rank_divisor": 2},),
        ({"method": "milo", "factor_bits": 16, "rank_divisor": 2, "planes": (2, 4, 8)},),
    )
    def test_one_checkpoint_is_read_at_each_width(self, how):
        job = self.planes_job(**how)
        outcome = quantize_checkpoint(job)
        self.assert_reads(job.output, job.recipe.default.planes)
        for bits in job.recipe.default.planes[:-1]:
            self.assertIn(f"read_bits={bits} reads {bits} bits", "\n".join(report_lines(outcome)))
        ranks = {
            name.rpartition(".u")[2]: len(tensor)
            for name, tensor in all_tensors(job.output).items() if "o_proj.u" in name
        }  # fmt: skip
        wider = [f"_{bits}" for bits in job.recipe.default.planes[1:]]
        if how["method"] == "milo":
            self.assertEqual(
                ranks,
                {"": 8} | dict(zip(wider, (4, 2), strict=False))
                if "rank_divisor" in how
                else {"": 8},
            )
        else:
            self.assertEqual(ranks, {})
            bits = job.recipe.default.bits + 32 / 32  # scales and zeros of fp16, groups of 32
            self.assertAlmostEqual(outcome.totals["quantized_bits_per_weight"], bits)

    def test_two_bits_read_the_base_alone(self):
        output = self.quantized(to_edit=True)
        _, expected = self.load(output, 2)
        opened = open_checkpoint(str(output), 2)
        reader = open_experts(opened, dtype="float32", device=CPU)
        with reader:
            self.assertEqual(reader.row_nbytes, 3 * 64 * 64 * (2 + 1) // 8)
            for plan in reader._leaves:
                names = {name for part in plan.parts for name in part.matrix.names}
                self.assertEmpty([name for name in names if "refinement" in name])
        for path in output.glob("*.safetensors"):  # what nobody reads may hold anything
            tensors = all_tensors_at(path)
            raw = bytearray(path.read_bytes())
            for name, (first, last) in tensors.items():
                if "refinement" in name:
                    raw[first:last] = b"\xff" * (last - first)
            path.write_bytes(raw)
        _, found = self.load(output, 2)
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)
        with self.assert_one_line("SHA-256"):
            verify_checkpoint(str(output))

    def test_matrices_of_different_widths(self):
        rules = ("experts: planes=4,8", "mlp: planes=2,8")
        job = self.planes_job(*rules, plane_weight=None)
        quantize_checkpoint(job)
        with self.assert_one_line("read_bits=4 must be a width", "has none"):
            open_checkpoint(str(job.output), 4)
        tensors = json.loads((job.output / "quantization.json").read_text())["tensors"]
        weights = {tuple(e["planes"]): e["plane_weight"] for e in tensors.values() if "bits" in e}
        self.assertEqual(weights, {widths: PLANE_WEIGHTS[widths] for widths in weights})

    def test_bad_input_is_one_line(self):
        output = self.quantized()
        with self.assert_one_line("read_bits=3 must be a width", "has 2, 4"):
            open_checkpoint(str(output), 3)
        with self.assert_one_line("read_bits=2", "has none"):
            open_checkpoint(str(self.source), 2)
        plain = quantize_checkpoint(self.job(output=self.directory / "plain")).output
        with self.assert_one_line("read_bits=2", "has none"):
            open_checkpoint(str(plain), 2)
        for text in ("a,4", "\N{SUPERSCRIPT TWO},4"):
            with self.assert_one_line(f"planes={text} must be widths"):
                parse_planes(text)
        for how, said in (
            ({"method": "autoround"}, "chooses codes of one width"),
            ({"method": "milo+"}, "chooses codes of one width"),
            ({"zero_kind": "symmetric"}, "float zero points"),
            ({"target": "gptq"}, "has no bit planes"),
            ({"plane_weight": -0.1}, "plane_weight"),
            ({"rank_divisor": -1}, "rank_divisor=-1 must be 0 or positive"),
        ):
            job = self.planes_job(output=self.directory / "refused", **how)
            self.assert_refused(job, said)

    @parameterized.parameters(
        ({},), ({"method": "milo", "rank": "Uniform-8", "rank_divisor": 2, "passes": 1},)
    )
    @pytest.mark.slow
    def test_a_tier_refines_the_next_which_holds_all(self, how):
        job = self.planes_job(**how)
        quantize_checkpoint(job)
        found = {}
        for form in ("planes", "copies"):
            as_planes = mock.patch.object(load, "_by_planes", return_value=None)
            # Copies of high precision would serve whoever asks for low, planes do not.
            tiering = Tiering(policy=AsAsked(prefetch=0), tiers=("int4", "int2"), slots=(2, 4))
            with (
                as_planes if form == "copies" else contextlib.nullcontext(),
                Engine.from_pretrained(job.output, progress=False, policy=tiering) as engine,
            ):
                logits = engine.logits(np.arange(3, 20)[None])
                high, low = engine._runner.memory.tiers
                engine._runner.memory.read_counters()
                found[form] = logits, high, low, engine.budget
        (logits, high, low, budget), (expected, copy, copied_low, of_copies) = found.values()
        np.testing.assert_array_equal(logits, expected)
        for tier, of in ((high, copy), (low, copied_low)):
            self.assertEqual(num_bytes(tier.store.terms) > 0, bool(how))
            jax.tree.map(np.testing.assert_array_equal, tier.store.terms, of.store.terms)
        self.assertEqual([high.spec.refines, low.spec.refines, copy.spec.refines], [2, 0, 0])
        for event in ("needed", "hits", "misses"):
            self.assertEqual(high.ledger.total(event), copy.ledger.total(event))
        weights = 3 * 64 * 64
        self.assertEqual(high.ledger.expert_bytes, weights * 2 // 8)
        self.assertEqual(copy.ledger.expert_bytes, weights * (4 + 1) // 8)
        num_experts = high.spec.cache.num_layers * high.spec.cache.num_experts
        experts = budget.total_host - budget.host["embeddings"]
        self.assertEqual(experts, num_experts * weights * (4 + 1) // 8)
        copies = of_copies.total_host - of_copies.host["embeddings"]
        self.assertEqual(copies, num_experts * weights * (4 + 1 + 2 + 1) // 8)

    def test_planes_of_a_shape_are_planned_as_those_of_a_checkpoint(self):
        output = self.quantized()
        asked = (
            "--config.policy.name=dynaexq", "--config.policy.tiers=int4,int2",
            "--config.context=64", "--config.policy.slots=2,4",
        )  # fmt: skip
        found = []
        tiny = {"tiny": ModelConfig(**{**TINY, **self.fields})}
        for how in (
            (f"--config.checkpoint={output}",),
            ("--config.shape=tiny", "--config.planes=2,4", "--config.attention_bits=4",
             "--config.group_size=32"),
        ):  # fmt: skip
            with mock.patch.dict(SHAPES, tiny):
                status, out, err = commands.run(plan.COMMAND, *asked, *how)
            self.assertEqual(status, 0, err)
            found.append(out)
        self.assertEqual(found[1].partition("\n")[2], found[0])

    def test_experts_without_planes_are_no_prefixes(self):
        job = self.job("experts: method=rtn bits=4", planes=(2, 4), plane_weight=0.9, bits=4)
        quantize_checkpoint(job)
        checkpoint = open_checkpoint(str(job.output))
        self.assertEqual(checkpoint.planes, (2, 4))  # of attention
        tier, found = open_tier(StoredTier("int4", ""), checkpoint)
        self.assertEqual((tier.source, found.read_bits), ("", 0))
        with self.assertRaisesRegex(ValueError, "do not lie by bit planes"):
            open_experts(checkpoint, dtype="float32", device=CPU, last_plane=True)

    def of_slots(self, *slots):
        tiering = Tiering(policy="dymoe", tiers=("int4", "int2"), slots=slots)
        engine = Engine.from_pretrained(self.quantized(), progress=False, policy=tiering)
        self.addCleanup(engine.close)
        return engine

    def test_tiers_that_both_lack_experts_share_slots(self):
        engine = self.of_slots(2, 2)
        high, low = engine._runner.memory.tiers
        self.assertTrue(high.spec.shares_slots)
        self.assertEqual(low.spec.cache.slots, 4)
        check_bytes(self, engine.budget, "int4", high)
        check_bytes(self, engine.budget, "int2", low)

    def test_tiers_whose_experts_move_between_steps_have_copies(self):
        output = self.quantized()
        with self.assertLogs("absl", "WARNING") as logs:
            status, out, err = commands.run(
                plan.COMMAND, "--config.policy.name=dynaexq", "--config.policy.tiers=int4,int2",
                "--config.policy.slots=2,2", checkpoint=output,
            )  # fmt: skip
        self.assertEqual(status, 0, err)
        self.assertIn("experts move between steps", "\n".join(logs.output))
        self.assertNotIn("base planes", out)


def check_bytes(test, budget, name, tier):
    """Planned bytes of slots, tables and rows are those that are allocated."""
    parts = ("expert slots", "transient slots", "residency tables")
    planned = sum(budget.device.get(f"{part}, {name}", 0) for part in parts)
    pool = (tier.pool.banks, tier.pool.residency, tier.pool.counts, tier.pool.used)
    test.assertEqual(planned, num_bytes(pool) + num_bytes(tier.store.row_of), name)
    rows = num_bytes((tier.store.gate_up, tier.store.down))
    test.assertEqual(budget.host[f"experts, {name}"], rows)


def all_tensors_at(path):
    """First and last byte of each tensor in a safetensors file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    return {
        name: tuple(8 + size + place for place in entry["data_offsets"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


class PlanesOnDiskTest(QuantizeTestCase):
    fields: ClassVar[dict] = {
        "num_kv_heads": 4, "expert_dim": 64, "mlp_dim": 64, "num_experts": 32,
    }  # fmt: skip

    @pytest.mark.slow
    def test_planes_in_shared_slots_are_read_from_the_disk(self):
        job = self.job(bits=4, planes=(2, 4), plane_weight=0.9)
        quantize_checkpoint(job)
        plane, tokens = 3 * 64 * 64 * 2 // 8, [list(range(3, 20))]
        open_engine = functools.partial(Engine.from_pretrained, job.output, progress=False)
        tiering = Tiering(policy="dymoe", tiers=("int4", "int2"), slots=(4, 4))
        with open_engine(policy=tiering) as engine:
            expected = engine.generate(tokens, max_new_tokens=8)[0].tokens
        # Of 64 planes of each kind some 40, and blocks on their way.
        limits = Limits(host_gib=45 * (plane + plane * 3 // 2) / 2**30, transient=4)
        with open_engine(policy=tiering, limits=limits) as engine:
            memory, budget = engine._runner.memory, engine.budget
            self.assertTrue(all(0 < tier.host_rows < 64 for tier in budget.tiers))
            for _ in range(2):
                self.assertEqual(engine.generate(tokens, max_new_tokens=8)[0].tokens, expected)
            with (
                mock.patch.object(ExpertReader, "read", side_effect=MoejaxError("a bad sector")),
                self.assertRaisesRegex(MoejaxError, "a bad sector"),
            ):
                engine.generate([list(range(40, 90))], max_new_tokens=8)
            self.assertEqual(engine.generate(tokens, max_new_tokens=8)[0].tokens, expected)
            memory.read_counters()
            for name, tier in zip(("int4", "int2"), memory.tiers, strict=True):
                self.assertEqual(tier.spec.shares_slots, name == "int4")
                self.assertGreater(tier.ledger.disk["waits"], 0, name)
                self.assertGreater(tier.disk.cache.evictions, 0, name)
                check_bytes(self, budget, name, tier)
