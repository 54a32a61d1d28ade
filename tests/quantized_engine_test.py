"""An engine with packed weights answers as one with the same weights plain."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax import Engine
from moejax.inference import chunking as chunks
from moejax.inference import kernel_warnings, runner, steps
from moejax.models import moe
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.transformer import merge_weights, model_definition
from moejax.weights import linear as ops
from moejax.weights.linear import KernelChoice
from moejax.weights.qtensor import QTensor
from pallas_kernels.target import Target
from tests import gpu_targets, tiny_engine
from tests.numpy_model import relative_errors
from tests.packed_weights import SPECS, draw
from tests.runner_test import counted_compilations, recorded_programs

QWEN3 = dataclasses.replace(tiny_engine.CONFIG, moe_layers=(1,))
MIXTRAL = dataclasses.replace(
    tiny_engine.CONFIG, family="mixtral", qk_norm=False, tied_embeddings=True, num_experts=4
)
MIXES: dict[str, tuple[ModelConfig, dict[str, str]]] = {
    "qwen3": (
        QWEN3,
        {
            "embed": "int2_int8_ranks",
            "attention.qkv_proj": "int3_ranks",
            "attention.o_proj": "int4_permuted",
            "mlp.gate_up": "int4_symmetric",
            "mlp.down": "int4_int4_ranks",
            "moe.router": "int8_integer",
            "moe.gate_up": "int2_int8_ranks",
            "moe.down": "int3_permuted",
            "head": "fp8",
        },
    ),
    "mixtral": (
        MIXTRAL,
        {
            "embed": "int3",
            "attention.qkv_proj": "fp8",
            "attention.o_proj": "int2",
            "moe.gate_up": "int3_ranks",
            "moe.down": "int4_int4_ranks",
        },
    ),
}
ENGINES: dict[str, tuple[Engine, Engine]] = {}


def engines(name: str) -> tuple[Engine, Engine]:
    """The packed engine of a mix, and the plain one; kept, since compiling is most of the time."""
    if name not in ENGINES:
        config, mix = MIXES[name]
        rng = np.random.default_rng(3)
        cpu = jax.devices("cpu")[0]
        packed: dict[str, Any] = {}
        plain: dict[str, Any] = {}
        for leaf, shape in weight_shapes(config).items():
            if leaf in mix:
                packed[leaf], values = draw(rng, shape, SPECS[mix[leaf]])
            else:
                values = leaf.endswith("norm") + 0.3 * rng.standard_normal(shape)
            plain[leaf] = jnp.asarray(values, jnp.float32)
        packed = {**plain, **packed}
        ENGINES[name] = Engine(config, packed, device=cpu), Engine(config, plain, device=cpu)
    return ENGINES[name]


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, tiny_engine.VOCAB_SIZE, length).tolist()


class QuantizedEngineTest(parameterized.TestCase):
    @parameterized.parameters(sorted(MIXES))
    @pytest.mark.slow
    def test_logits_are_those_of_the_plain_weights(self, name):
        packed, plain = engines(name)
        tokens = np.asarray([prompt(32), prompt(32)[::-1]])
        expected = plain.logits(tokens)
        self.assertLess(relative_errors(packed.logits(tokens), expected).max(), 1e-5)
        if name == "qwen3":  # the second half sees the first in the cache
            with mock.patch.object(chunks, "MAX_PREFILL_LENGTH", 16):
                self.assertLess(relative_errors(packed.logits(tokens), expected).max(), 1e-5)

    def test_what_serves_is_on_record(self):
        ENGINES.pop("mixtral", None)  # one that has run a prompt has no record of decode
        packed, plain = engines("mixtral")
        self.assertEqual(plain.kernels["decode attention.o_proj"], "plain, float32")
        self.assertRegex(
            packed.kernels["decode attention.o_proj"],
            r"^dequantized, int2g8 float \(mosaic: x is float32.*; triton: x is float32.*\)$",
        )
        self.assertRegex(packed.kernels["prefill experts"], "^dequantized, .*, block_in_cache")
        self.assertRegex(
            plain.kernels["decode attention"], r"^xla, float32 \(triton: q is float32.*runs on GPUs"
        )
        self.assertEqual(plain.kernels["prefill attention"], "xla, float32")
        self.assertEqual(packed._runner._kernel_warnings(), [])  # a CPU has none

    @pytest.mark.slow
    def test_a_gpu_without_the_expected_kernel_is_remarked_on(self):
        packed, _ = engines("mixtral")
        on_gpu = ops.Kernels(target=Target("gpu", (9, 0)))
        with gpu_targets.pretended(Target("gpu", (9, 0))):
            serving = runner.Runner(packed.config, packed.weights, packed.device, kernels=on_gpu)
            found = serving.kernel_choices(1, 1)
        with self.assertLogs("absl", "WARNING") as logs:
            serving._record_choices("decode", found)
            serving._record_choices("decode", found)
        self.assertLen(logs.output, len(serving._kernel_warnings()))
        told = "\n".join(logs.output)
        self.assertIn("decode: packed weights do not run on the mosaic kernel: ", told)
        self.assertIn("experts: dequantized, int3g8 float", told)
        self.assertIn("x is float32", told)
        for name in ("attention.qkv_proj", "attention.o_proj", "embed", "experts"):
            self.assertIn(name, told)

    def test_the_expected_kernel_is_not_remarked_on(self):
        found = {"a": KernelChoice("triton", "int4g64 float", True, {"mosaic": "no"})}
        found["b"] = KernelChoice(ops.PLAIN, "bfloat16", False, {})
        self.assertEqual(kernel_warnings.phase_warnings("prefill", found, "triton"), [])
        self.assertEqual(kernel_warnings.phase_warnings("prefill", found, None), [])
        (line,) = kernel_warnings.phase_warnings("prefill", found, "mosaic")
        self.assertEndsWith(line, "mosaic kernel: a: triton, int4g64 float (mosaic: no)")
        # Mosaic takes MXFP4 of few tokens alone: prompts on Hopper run as well as they can.
        found = {"experts": KernelChoice("triton", "mxfp4", True, {"mosaic": "no"})}
        self.assertEqual(kernel_warnings.phase_warnings("prefill", found, "mosaic"), [])
        self.assertLen(kernel_warnings.phase_warnings("decode", found, "mosaic"), 1)
        found = {"experts": KernelChoice(ops.DEQUANTIZED, "mxfp4", True, {"triton": "no"})}
        self.assertLen(kernel_warnings.phase_warnings("decode", found, "mosaic"), 1)
        for target, expected in (
            (Target("cpu", None), None),
            (Target("gpu", (8, 0)), "triton"),
            (Target("gpu", (9, 0)), "mosaic"),
            (Target("gpu", (12, 0)), "triton"),
        ):
            self.assertEqual(kernel_warnings.expected_kernel(target), expected)

    @pytest.mark.slow
    def test_nothing_is_traced_after_the_warm_up(self):
        packed, _ = engines("mixtral")
        packed.generate([prompt(20), prompt(9)], max_new_tokens=20)
        traces = packed.num_traces
        with counted_compilations() as events:
            packed.generate([prompt(31), prompt(17)], max_new_tokens=18)
        self.assertEqual(events, [])
        self.assertEqual(packed.num_traces, traces)

    @pytest.mark.slow
    def test_the_state_is_donated_and_no_stack_is_dequantized(self):
        config = dataclasses.replace(QWEN3, num_layers=3, num_experts=32, moe_layers=(0, 1, 2))
        config = dataclasses.replace(config, model_dim=64, expert_dim=64, num_heads=16, head_dim=32)
        rng, shapes = np.random.default_rng(4), weight_shapes(config)
        weights: dict[str, Any] = {
            leaf: draw(rng, shape, SPECS["int2"])[0]
            if leaf.endswith(("proj", "gate_up", "down"))
            else jnp.ones(shape)
            for leaf, shape in shapes.items()
        }
        serving = runner.Runner(config, weights, jax.devices("cpu")[0])
        step_bytes = {**moe.STEP_BYTES, "block_in_cache": 2**16}
        with (
            mock.patch.object(moe, "STEP_BYTES", step_bytes),
            recorded_programs(serving) as programs,
        ):
            settings = [runner.GenerationSettings.of()]
            session = serving.prefill([prompt(20)], 64, settings, ())
            serving.decode(session, 4, 16)
        cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(session.state.cache))
        layer_bytes = 4 * sum(int(np.prod(shapes[x][1:])) for x in runner.EXPERT_LEAVES)
        for function in (steps.prefill_chunk, steps.decode):
            memory = programs[function].memory_analysis()
            self.assertGreaterEqual(memory.alias_size_in_bytes, cache_bytes)
            # The experts of one layer, let alone the stack, would be more than everything there is.
            self.assertLess(memory.temp_size_in_bytes, 0.8 * layer_bytes, str(function))

    def test_modules_carry_packed_leaves(self):
        config, _ = MIXES["mixtral"]
        packed, _ = engines("mixtral")
        model = merge_weights(model_definition(config), packed.weights)
        found = model.moe.gate_up[...]
        self.assertIsInstance(found, QTensor)
        self.assertIs(found.words, packed.weights["moe.gate_up"].words)
