"""The packed products lowered for every GPU without one, and compiled where JAX's plugin is."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest
from absl.testing import parameterized

from pallas_kernels import launch
from tests import gpu_programs, slow
from tests.gpu_programs import PROGRAMS
from tests.gpu_targets import GPUS, SKIP_CHECKS, Program

ROOT = Path(__file__).parents[1]
# Cases that every GPU lowers; the H100 lowers all.
EVERYWHERE = (
    "dense_decode_int3_rank_32", "dense_prefill_int3", "layer_decode", "layer_prefill",
    "attention_qwen", "attention_mixtral_32", "chunk_qwen", "router_qwen", "router_mixtral",
    "norm_qwen", "norm_mixtral_64", "sum_of_2", "writing_qwen", "writing_mixtral_64",
    "plan_qwen", "plan_tiers_qwen", "buddies_qwen",
)  # fmt: skip
MLIR_TYPES = {"uint32": "ui32", "bfloat16": "bf16", "float16": "f16", "float32": "f32"}


# One kernel's: its program's maker, launches, its name, and operands that outputs are written to.
LAUNCHED: dict[str, Any] = {
    "decode_attention": [
        (partial(gpu_programs.attention, batch, num_kv), launches, f"{32 // num_kv}x128_", ())
        for batch, num_kv, launches in (
            (1, 4, 2), (16, 4, 2), (32, 4, 1), (1, 8, 2), (32, 8, 1)
        )
    ],
    "chunk_attention": [
        (partial(gpu_programs.chunk_attention, batch, num_kv), 1, f"{32 // num_kv}x128_", ())
        for batch, num_kv in ((1, 4), (4, 8))
    ],
    "delta_step": [
        (partial(gpu_programs.delta, batch), 2, "16x128_32x128", ((1, 4), (1, 8)))
        for batch in (1, 8)
    ],
    "qkv_to_cache": [
        (
            partial(gpu_programs.writing, batch, num_kv, has_norms=first > 5), 1,
            f"32_{num_kv}x128", ((1, first), (2, first + 1)),
        )
        for batch, num_kv, first in ((1, 4, 7), (64, 4, 7), (16, 8, 5))
    ],
    "peer_sum": [
        (partial(gpu_programs.peers, devices, *sizes), 1, f"{devices}x{math.prod(sizes)}", ())
        for devices, *sizes in ((2, 2048), (4, 3, 2880))
    ],
    "residual_norm": [
        (partial(gpu_programs.norm, rows, width, **how), 1, str(width), ())
        for rows, width, how in (
            (1, 2048, {}), (64, 4096, {}), (3, 8192, {"has_delta": False}), (3, 200, {}),
            (1, 2048, {"zero_centred": True}),
        )
    ],
    "router_topk": [
        (partial(gpu_programs.router, tokens, experts, chosen), 1, f"{experts}x{chosen}n", ())
        for tokens, experts, chosen in ((1, 128, 8), (2048, 128, 8), (4, 8, 2), (5, 60, 5))
    ],
}  # fmt: skip


def pairs_of_gpu_and_program() -> list[tuple[str, str]]:
    return [
        (gpu, program) for gpu in GPUS for program in (PROGRAMS if gpu == "H100" else EVERYWHERE)
    ]


def stacks_touched(text: str, program: Program) -> set[str]:
    """Operations on whole stacks of packed weights other than launches and calls."""
    found = set()
    stacks = [part.words for of in program.weights for part in (of, *of.refinements)]
    for words in stacks:
        sizes = "x".join(map(str, words.shape))
        whole = f"tensor<{sizes}x{MLIR_TYPES[words.dtype.name]}>"
        for line in text.splitlines():
            if whole in line:
                found |= set(re.findall(r"(?<!#)stablehlo\.(\w+)", line))
    return found - {"custom_call"}


class LoweringTest(parameterized.TestCase):
    """The program for CUDA, made without a GPU."""

    # Of a token's kernels the next test lowers the same programs.
    @slow.where(
        lambda gpu, name: gpu != "H100" or name not in EVERYWHERE
        or name.startswith(("attention_", "chunk_", "router_", "norm_", "sum_", "writing_"))
    )  # fmt: skip
    @parameterized.parameters(pairs_of_gpu_and_program())
    def test_launches_read_the_weights_where_they_lie(self, gpu, name):
        program = PROGRAMS[name]()
        text = program.lower(GPUS[gpu]).as_text()
        launches = text.count("stablehlo.custom_call")
        self.assertBetween(launches, 1, program.max_launches)
        self.assertEmpty(stacks_touched(text, program))

    @parameterized.parameters(*LAUNCHED)
    def test_a_kernel_is_launched_and_nothing_else(self, kernel):
        for make, launches, name, aliases in LAUNCHED[kernel]:
            text = make().lower(GPUS["H100"]).as_text()
            operations = re.findall(r"stablehlo\.(\w+)[ (]", text)
            if kernel == "peer_sum":  # the operand's and the result's shape
                operations = [of for of in operations if of != "reshape"]
            if kernel == "delta_step":  # between its launches arrays get other shapes
                moves = ("slice", "dynamic_", "gather", "scatter", "custom_call")
                operations = [of for of in operations if of.startswith(moves)]
            self.assertEqual(operations, ["custom_call"] * launches)
            dtype = "" if kernel == "router_topk" else "bfloat16_"
            self.assertIn(f"{kernel}_{dtype}{name}", text)
            for output, operand in aliases:
                self.assertRegex(
                    text, rf"output_tuple_indices = \[{output}\],\s+operand_index = {operand},"
                )

    @parameterized.parameters(*GPUS)
    def test_tiles_of_terms_fit_in_shared_memory(self, gpu):
        # What XLA asks for each stage but one, of 128 rows of x and V in INT3.
        stage, most = 68608, GPUS[gpu].shared_kib - 1 << 10
        program = PROGRAMS["layer_prefill_int3_rank_16"]()
        with mock.patch.object(launch, "triton_call", wraps=launch.triton_call) as call:
            jax.eval_shape(partial(program.function, target=GPUS[gpu].target), *program.operands)
        launches = [given.kwargs for given in call.call_args_list]
        thin = [of["num_stages"] for of in launches if re.search("_thin_.*_m128n", of["name"])]
        self.assertEqual(thin, [min(3, 1 + most // stage)] * 2)

    def test_a_copy_of_the_weights_is_seen(self):
        program = PROGRAMS["dense_decode_int3"]()
        words = "x".join(map(str, program.weights[0].words.shape))
        line = f"%3 = stablehlo.slice %arg0 : (tensor<{words}xui32>) -> tensor<1xui32>"
        self.assertEqual(stacks_touched(line, program), {"slice"})


class CompilingTest(parameterized.TestCase):
    """XLA and Triton down to machine code, by JAX's CUDA plugin; in a process of its own."""

    @parameterized.parameters(sorted(GPUS))
    @pytest.mark.slow
    def test_every_program_compiles(self, gpu):
        if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
            self.skipTest("JAX's CUDA plugin is not installed")
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu_programs", gpu],
            cwd=ROOT,
            env=os.environ | {SKIP_CHECKS: "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        self.assertEqual(done.returncode, 0, done.stderr[-4000:])
        compiled = [line for line in done.stdout.splitlines() if line.startswith(gpu)]
        self.assertLen(compiled, len(PROGRAMS), done.stdout[-4000:])
        self.assertEmpty([line for line in compiled if "FAILED" in line])
