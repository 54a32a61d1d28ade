"""What is recorded as serving each product, and what of it a benchmark refuses."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from moejax import ops, served
from moejax.generation import GenerationSettings
from moejax.models.parts import LatentAttention
from moejax.models.shapes import DEEPSEEK_V2_LITE
from moejax.qtensor import QTensor
from moejax.runner import Runner
from pallas_kernels.target import Target
from tests import tiny_engine
from tests.packed_weights import Spec, draw

HOPPER, AMPERE = Target("gpu", (9, 0)), Target("gpu", (8, 0))
# Heads whose `kv_b` [H (n + v), R] kernels take.
LATENT = dataclasses.replace(
    DEEPSEEK_V2_LITE, vocab_size=64, model_dim=32, num_layers=2, num_heads=8, num_kv_heads=8,
    head_dim=70, num_experts=4, experts_per_token=2, expert_dim=16, moe_layers=(1,),
    shared_dim=16, mlp_dim=16,
    latent=LatentAttention(kv_rank=256, query_rank=None, nope_dim=64, rope_dim=6, value_dim=64),
)  # fmt: skip


class LatentTest(absltest.TestCase):
    """The matrix that expands latents: a product in prompts, taken apart at decode."""

    def packed(self) -> QTensor:
        shape = (LATENT.num_layers, 8 * 128, 256)
        weight, _ = draw(np.random.default_rng(0), shape, Spec(bits=4, group_size=64))
        assert isinstance(weight, QTensor)
        return weight

    def of(self, weight: ops.Weight, target: Target, num_tokens: int) -> served.Served:
        return served.served_products(
            LATENT, {served.EXPANDING_LEAF: weight}, jnp.dtype("bfloat16"), ops.Kernels(target),
            num_tokens=num_tokens, num_sequences=2, experts_via="dense",
        )[served.EXPANDING_LEAF]  # fmt: skip

    def test_packed_it_is_dequantized_at_decode(self):
        weight = self.packed()
        for target, kernel in ((HOPPER, "mosaic"), (AMPERE, "triton")):
            self.assertIn(self.of(weight, target, 64).implementation, ("mosaic", "triton"))
            decode = self.of(weight, target, 2)
            self.assertEqual(decode.implementation, ops.DEQUANTIZED)
            self.assertRegex(decode.describe(), "^dequantized, int4g64 .*take its rows apart")
            (line,) = served.remarks({"kv_b": decode}, served.expected_kernel(target))
            self.assertIn(f"do not run on the {kernel} kernel: kv_b: dequantized", line)

    def test_plain_it_is_plain_at_decode(self):
        weight = jnp.zeros((LATENT.num_layers, 8 * 128, 256), jnp.bfloat16)
        self.assertEqual(self.of(weight, AMPERE, 16).implementation, "triton")
        decode = self.of(weight, AMPERE, 2)
        self.assertEqual(decode, served.Served(ops.PLAIN, "bfloat16", False, {}))

    def test_that_is_what_runs(self):
        """The kernel's product is traced in prompts alone, `ops.matrix` at decode alone."""
        weights = {name: jnp.asarray(a) for name, a in tiny_engine.random_weights(LATENT).items()}
        weights[served.EXPANDING_LEAF] = self.packed()
        by_kernels = ops.Kernels(implementation="reference")
        runner = Runner(LATENT, weights, jax.devices("cpu")[0], kernels=by_kernels)
        expanded, taken, phase = set(), set(), "prefill"
        product, matrix = ops._by_kernel, ops.matrix

        def is_it(weight: ops.Weight) -> bool:
            return isinstance(weight, QTensor) and weight.shape[-2:] == (8 * 128, 256)

        def by_kernel(x, weight, *rest):
            done = product(x, weight, *rest)
            if is_it(weight) and done is not None:
                expanded.add(phase)
            return done

        def dequantized(weight, *rest):
            if is_it(weight):
                taken.add(phase)
            return matrix(weight, *rest)

        with (
            mock.patch.object(ops, "_by_kernel", by_kernel),
            mock.patch.object(ops, "matrix", dequantized),
        ):
            settings = GenerationSettings.of(max_new_tokens=4)
            session = runner.prefill([[1, 2, 3]], 64, settings, ())
            phase = "decode"
            jax.block_until_ready(runner.decode(session, 2, 2))
        self.assertEqual((expanded, taken), ({"prefill"}, {"decode"}))
        said = runner.products.items()
        found = {of: products[served.EXPANDING_LEAF].implementation for of, products in said}
        self.assertEqual(found, {"prefill": "reference", "decode": ops.DEQUANTIZED})


if __name__ == "__main__":
    absltest.main()
