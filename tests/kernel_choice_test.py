"""Recorded kernel choices of each product, and those that a benchmark refuses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.benchmarking.expected_kernels import _allowed, _wrong_kernels, refuse_dequantized
from moejax.errors import MoejaxError
from moejax.inference import kernel_warnings
from moejax.inference.runner import Runner
from moejax.models import moe
from moejax.models.config import LatentConfig
from moejax.models.expert_products import choose_grouped
from moejax.models.shapes import SHAPES
from moejax.weights import linear as ops
from moejax.weights.linear import ChoiceRecord, KernelChoice, recorded_choices
from moejax.weights.qtensor import QTensor
from pallas_kernels.target import Target
from tests import gpu_targets, tiny_engine
from tests.packed_weights import Spec, draw

EXPANDING_LEAF = "attention.kv_b"
HOPPER, AMPERE = Target("gpu", (9, 0)), Target("gpu", (8, 0))
# Heads whose `kv_b` [H (n + v), R] kernels take.
LATENT = dataclasses.replace(
    SHAPES["DeepSeek-V2-Lite"], vocab_size=64, model_dim=32, num_layers=2, num_heads=8,
    num_kv_heads=8, head_dim=70, num_experts=4, experts_per_token=2, expert_dim=16, moe_layers=(1,),
    shared_dim=16, mlp_dim=16,
    latent=LatentConfig(kv_rank=256, query_rank=None, nope_dim=64, rope_dim=6, value_dim=64),
)  # fmt: skip


class LatentTest(absltest.TestCase):
    """The matrix that expands latents: a product in prompts, taken apart at decode."""

    def packed(self) -> QTensor:
        shape = (LATENT.num_layers, 8 * 128, 256)
        weight, _ = draw(np.random.default_rng(0), shape, Spec(bits=4, group_size=64))
        assert isinstance(weight, QTensor)
        return weight

    def of(self, weight: ops.Weight, target: Target, num_tokens: int) -> KernelChoice:
        plain = tiny_engine.random_weights(LATENT)
        weights = {name: jnp.asarray(a, "bfloat16") for name, a in plain.items()}
        weights[EXPANDING_LEAF] = weight
        with gpu_targets.pretended(target):
            runner = Runner(LATENT, weights, jax.devices("cpu")[0], kernels=ops.Kernels(target))
            return runner.kernel_choices(num_tokens, 2)[EXPANDING_LEAF]

    @pytest.mark.slow
    def test_packed_it_is_dequantized_at_decode(self):
        weight = self.packed()
        for target, kernel in ((HOPPER, "mosaic"), (AMPERE, "triton")):
            self.assertIn(self.of(weight, target, 64).implementation, ("mosaic", "triton"))
            decode = self.of(weight, target, 2)
            self.assertEqual(decode.implementation, ops.DEQUANTIZED)
            self.assertRegex(decode.describe(), "^dequantized, int4g64 .*take its rows apart")
            (line,) = kernel_warnings.phase_warnings(
                "decode", {"kv_b": decode}, kernel_warnings.expected_kernel(target)
            )
            self.assertIn(f"do not run on the {kernel} kernel: kv_b: dequantized", line)

    def test_plain_it_is_plain_at_decode(self):
        weight = jnp.zeros((LATENT.num_layers, 8 * 128, 256), jnp.bfloat16)
        self.assertEqual(self.of(weight, AMPERE, 16).implementation, "triton")
        decode = self.of(weight, AMPERE, 2)
        self.assertEqual(decode, KernelChoice(ops.PLAIN, "bfloat16", False, {}))


class ExpectedTest(parameterized.TestCase):
    """`moejax.benchmarking.expected_kernels`."""

    @parameterized.parameters(
        (HOPPER, ("mosaic", "triton")), (AMPERE, ("mosaic", "triton")),
        (Target("gpu", (7, 5)), ()), (Target("gpu", None), ()), (Target("cpu", None), ()),
        (None, ()),
    )  # fmt: skip
    def test_what_is_allowed(self, target, expected):
        self.assertEqual(_allowed(ops.Kernels(target)), expected)
        forced = ops.Kernels(target, implementation="reference")
        self.assertEqual(_allowed(forced), ("reference",))

    def test_what_is_wrong(self):
        found = {
            "a": KernelChoice("triton", "int4g64 float", True, {"mosaic": "K is 1408"}),
            "b": KernelChoice(ops.DEQUANTIZED, "int4g64 float, block", True, {"triton": "no"}),
            "c": KernelChoice(ops.PLAIN, "bfloat16", False, {"mosaic": "no"}),
            "d": KernelChoice("mosaic", "int2g64 float", True, {}),
        }
        self.assertEqual([line[0] for line in _wrong_kernels(found, ("mosaic",))], ["a", "b"])
        (line,) = _wrong_kernels(found, ("mosaic", "triton"))
        self.assertEqual(line, "b: dequantized, int4g64 float, block (triton: no)")

    def runner(self, weight: ops.Weight, target: Target | None, dtype: str) -> Runner:
        """A model with one packed matrix, as if on a device."""
        plain = tiny_engine.random_weights(LATENT)
        weights = {name: jnp.asarray(a, dtype) for name, a in plain.items()}
        device = jax.devices("cpu")[0]
        weights["attention.o_proj"] = weight
        return Runner(LATENT, weights, device, kernels=ops.Kernels(target))

    @pytest.mark.slow
    def test_a_benchmark_refuses_what_runs_on_no_kernel(self):
        rng = np.random.default_rng(1)
        shape = (LATENT.num_layers, 32, 512)
        fit, _ = draw(rng, shape, Spec(bits=4, group_size=64))
        unfit, _ = draw(rng, shape, Spec(bits=4, group_size=64, permuted=True))
        sizes = {"prompt": 20, "context": 64}
        for weight, target, dtype in (
            (fit, HOPPER, "bfloat16"), (fit, AMPERE, "bfloat16"), (unfit, HOPPER, "bfloat16"),
            (fit, Target("cpu", None), "float32"), (fit, Target("gpu", (7, 5)), "bfloat16"),
        ):  # fmt: skip
            with gpu_targets.pretended(target):
                refuse_dequantized(self.runner(weight, target, dtype), 2, **sizes)
        said = r"^prefill of packed weights would run on no kernel: attention.o_proj: dequantized, "
        with gpu_targets.pretended(AMPERE):
            wide = self.runner(fit, AMPERE, "float32")  # no kernel takes float32 activations
            with self.assertRaisesRegex(MoejaxError, said + r".*triton: x is float32"):
                refuse_dequantized(wide, 2, **sizes)
            with self.assertRaisesRegex(MoejaxError, "^decode of packed"):
                refuse_dequantized(wide, 2, prompt=0, context=64)


class TiersTest(absltest.TestCase):
    """Experts in several precisions: each is on record, by what serves them together."""

    def test_each_tier_is_recorded(self):
        rng, bf16 = np.random.default_rng(2), jnp.dtype("bfloat16")

        def experts(spec: Spec) -> list[ops.Weight]:
            shapes = ((1, 4, 512, 256), (1, 4, 256, 256))
            return [draw(rng, shape, spec)[0] for shape in shapes]

        config = dataclasses.replace(LATENT, model_dim=256, expert_dim=256)
        high, low = (experts(Spec(bits=bits, group_size=64)) for bits in (8, 2))
        odd = experts(Spec(bits=2, group_size=64, permuted=True))

        def of(second: list[ops.Weight], impl: tuple[Any, ...]) -> ChoiceRecord:
            with recorded_choices() as found:
                for tier, (form, stacks) in enumerate(zip(impl, (high, second), strict=True)):
                    chosen = choose_grouped(2, config, bf16, [stacks], ops.Kernels(AMPERE))
                    moe.record_experts(tier, form, stacks, chosen)
            return found

        found = of(low, ("grouped_kernel", "grouped_kernel"))
        self.assertEqual({n: f.implementation for n, f in found.items() if f.packed},
                         {"experts": "triton", "experts, tier 2": "triton"})  # fmt: skip
        self.assertStartsWith(found["experts, tier 2"].form, "int2")
        apart = of(odd, ("grouped_kernel", "block_in_cache"))
        self.assertEqual(apart["experts"].implementation, "triton")
        self.assertEqual(apart["experts, tier 2"].implementation, ops.DEQUANTIZED)
        self.assertStartsWith(apart["experts, tier 2"].describe(), "dequantized, ")

    @pytest.mark.slow
    def test_a_program_from_a_cache_adds_nothing(self):
        weights = {name: jnp.asarray(a) for name, a in tiny_engine.random_weights(LATENT).items()}
        runner = Runner(LATENT, weights, jax.devices("cpu")[0])
        tokens = np.ones((1, 16), np.int32)
        runner.logits(tokens)
        self.assertEqual(runner.products["prefill"]["experts"].implementation, "row")
        runner.products.clear()
        runner.logits(tokens)
        self.assertEmpty(runner.products)
        self.assertEqual(runner.kernel_choices(16, 1)["experts"].implementation, "row")
