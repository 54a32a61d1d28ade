"""The model with the kernel of softmax and top-k: when it serves, what it gives, its launches."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax import nnx

from moejax import Engine
from moejax.inference.runner import Runner
from moejax.models import moe
from moejax.models.experts import ResidentExperts, routing_record
from moejax.models.kernel_choice import phase_warnings
from moejax.models.layer_index import layer_indices
from moejax.models.routing import Routing
from moejax.models.shapes import MIXTRAL_8X7B, QWEN3_30B_A3B
from moejax.models.transformer import Transformer, forward
from moejax.weights import choices
from moejax.weights import linear as ops
from pallas_kernels import op
from pallas_kernels import router_topk as package
from pallas_kernels.target import SIMULATED, Target
from tests import gpu_targets, tiny_engine
from tests.host_test_case import HostTestCase

CONFIG = dataclasses.replace(
    QWEN3_30B_A3B, vocab_size=32, model_dim=32, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=16, num_experts=6, experts_per_token=2, expert_dim=16, moe_layers=(0, 1, 2),
)  # fmt: skip
AMPERE = ops.Kernels(Target("gpu", (8, 6)))


def small_model(config: Any, kernels: ops.Kernels) -> Transformer:
    return Transformer(config, rngs=nnx.Rngs(0), kernels=kernels)


@contextlib.contextmanager
def interpreted() -> Iterator[mock.Mock]:
    """The kernel runs on the CPU; yields what counts its traces."""
    call = mock.Mock(side_effect=functools.partial(package.top_k, interpret=True))
    moe.routing_by_kernel.clear_cache()
    with mock.patch.object(moe.router_topk, "top_k", call):
        yield call
    moe.routing_by_kernel.clear_cache()


class WiringTest(HostTestCase):
    """The model runs the kernel that it chose."""

    @parameterized.product(config=(QWEN3_30B_A3B, MIXTRAL_8X7B), num_tokens=(1, 32, 2048))
    def test_what_serves(self, config, num_tokens):
        choose = functools.partial(moe.choose_routing, num_tokens, config)
        self.assertEqual(choose(AMPERE), ("triton", {}))
        self.assertEqual(choose(ops.Kernels(Target("gpu", (9, 0)), "mosaic")), ("triton", {}))
        self.assertEqual(choose(dataclasses.replace(AMPERE, implementation="reference")).describe(),
                         "xla")  # fmt: skip
        for kernels in (ops.NO_KERNELS, ops.Kernels(Target("cpu", None))):
            found = choose(kernels)
            self.assertEqual(found.implementation, "xla")
            self.assertNotEmpty(found.refusals["triton"])

    def test_what_the_kernel_refuses_xla_serves(self):
        wide = dataclasses.replace(CONFIG, num_experts=1025)
        found = moe.choose_routing(1, wide, AMPERE)
        self.assertEqual(found, ("xla", {"triton": "1025 experts, more than 1024"}))

    @parameterized.parameters(True, False)
    @pytest.mark.slow
    def test_the_model_routes_as_it_did(self, normalised):
        config = dataclasses.replace(CONFIG, norm_topk_prob=normalised)
        tokens = jnp.asarray(np.random.default_rng(1).integers(0, 32, (2, 9)), jnp.int32)
        with interpreted() as call:
            found = forward(small_model(config, ops.Kernels(SIMULATED)), tokens)
        self.assertEqual(call.call_count, 1)  # all layers share a trace
        expected = forward(small_model(config, ops.NO_KERNELS), tokens)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
        np.testing.assert_array_equal(found[1].ids, expected[1].ids)
        self.assertIsInstance(found[1], Routing)
        sums = np.sum(found[1].weights, axis=-1)
        self.assertEqual(np.allclose(sums, 1), normalised)

    def test_ids_that_the_kernel_counts_from_a_slot_are_those_of_experts(self):
        logits = jax.random.normal(jax.random.key(2), (5, 6))
        how = {"num_chosen": 2, "normalise": True}
        with interpreted() as call:
            plain = moe.routing_by_kernel(logits, **how)
            counted = moe.routing_by_kernel(logits, jnp.int32(12), **how)
        for one, other in zip(plain, counted, strict=True):
            np.testing.assert_array_equal(one, other)
        self.assertIsNone(call.call_args_list[0].kwargs["first"])
        self.assertIsNotNone(call.call_args_list[1].kwargs["first"])

    def test_layers_share_a_kernel_and_nothing_else_routes(self):
        tokens, gpu = jnp.zeros((2, 1), jnp.int32), gpu_targets.GPUS["A10"]

        def text_of(kernels: ops.Kernels) -> str:
            model = small_model(CONFIG, kernels)
            moe.routing_by_kernel.clear_cache()
            step = jax.jit(lambda tokens: forward(model, tokens))
            with (
                gpu_targets.described(gpu),
                mock.patch.object(op, "current_target", lambda: gpu.target),
            ):
                return step.trace(tokens).lower(lowering_platforms=("cuda",)).as_text()

        text, plain = text_of(ops.Kernels(gpu.target)), text_of(ops.NO_KERNELS)
        moe.routing_by_kernel.clear_cache()
        self.assertEqual(text.count("__gpu$xla.gpu.triton"), 1)
        self.assertEqual(len(re.findall(r"call @routing_by_kernel\w*\(", text)), 3)
        self.assertNotIn("top_k", text.replace("router_topk", ""))
        self.assertIn("top_k", plain)  # it is seen where it is done

    @pytest.mark.slow
    def test_experts_that_move_are_routed_alike(self):
        x = jax.random.normal(jax.random.key(0), (2, 3, CONFIG.model_dim))
        mask, seen = jnp.ones((2, 3), bool), []

        class Seeing(ResidentExperts):
            def __call__(self, carry: Any, layer: Any, x: jax.Array, *inputs: Any) -> Any:
                routing, _, next_routing, _ = inputs
                seen.append((routing, next_routing()))
                return jnp.zeros_like(x), None, None

        with interpreted() as call:
            model = small_model(CONFIG, ops.Kernels(SIMULATED))
            index = layer_indices(CONFIG)[1]
            experts = ResidentExperts(model.moe, "dense", routing_record)
            *_, resident = model.mlp_block(x, index, mask, experts, None)
            model.mlp_block(x, index, mask, Seeing(None, "dense"), None)
            next_moe = model.moe.route(model._mlp_normed(x, 2), 2)
        self.assertEqual(call.call_count, 1)
        for found, expected in zip(seen[0], (resident, next_moe), strict=True):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)

    def test_it_is_on_record(self):
        cpu = jax.devices("cpu")[0]
        weights = {
            name: jnp.asarray(of)
            for name, of in tiny_engine.random_weights(tiny_engine.CONFIG).items()
        }
        engine = Engine(tiny_engine.CONFIG, weights, device=cpu)
        for phase in ("prefill", "decode"):
            said = engine.kernels[f"{phase} routing"]
            self.assertRegex(said, r"^xla, float32 \(triton: it runs on GPUs")
        expected = choices.KernelChoice("triton", "float32", False, {})
        with gpu_targets.pretended(AMPERE.target):
            on_gpu = Runner(tiny_engine.CONFIG, weights, cpu, kernels=AMPERE)
            for num_tokens in (1, 256):
                self.assertEqual(on_gpu.kernel_choices(num_tokens, 1)["routing"], expected)
        with choices.recorded_choices() as found:
            moe.choose_routing(1, dataclasses.replace(tiny_engine.CONFIG, num_experts=1025), AMPERE)
        refused = phase_warnings("decode", found, "triton")
        self.assertLen([line for line in refused if "routing run without their kernel" in line], 1)

    def test_layers_without_experts_have_none(self):
        dense = dataclasses.replace(tiny_engine.CONFIG, moe_layers=())
        weights = {name: jnp.asarray(of) for name, of in tiny_engine.random_weights(dense).items()}
        runner = Runner(dense, weights, jax.devices("cpu")[0])
        self.assertNotIn("routing", runner.kernel_choices(1, 1))


if __name__ == "__main__":
    absltest.main()
