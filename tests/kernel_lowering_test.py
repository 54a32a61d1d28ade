"""The packed products lowered for every GPU without one, and compiled where JAX's plugin is."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from absl.testing import absltest, parameterized

from tests import slow
from tests.gpu_programs import PROGRAMS
from tests.gpu_targets import GPUS, SKIP_CHECKS, Program

ROOT = Path(__file__).parents[1]
# Cases that every GPU lowers; the H100 lowers all.
EVERYWHERE = (
    "dense_decode_int3_rank_32", "dense_prefill_int3", "layer_decode", "layer_prefill",
    "attention_qwen", "attention_mixtral_32", "router_qwen", "router_mixtral",
    "norm_qwen", "norm_mixtral_64", "writing_qwen", "writing_mixtral_64",
    "plan_qwen", "plan_tiers_qwen", "buddies_qwen",
)  # fmt: skip
MLIR_TYPES = {"uint32": "ui32", "bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def pairs_of_gpu_and_program() -> list[tuple[str, str]]:
    return [
        (gpu, program) for gpu in GPUS for program in (PROGRAMS if gpu == "H100" else EVERYWHERE)
    ]


def stacks_touched(text: str, program: Program) -> set[str]:
    """Operations on whole stacks of packed weights other than launches and calls."""
    found = set()
    for weights in program.weights:
        sizes = "x".join(map(str, weights.words.shape))
        whole = f"tensor<{sizes}x{MLIR_TYPES[weights.words.dtype.name]}>"
        for line in text.splitlines():
            if whole in line:
                found |= set(re.findall(r"stablehlo\.(\w+)", line))
    return found - {"custom_call"}


class LoweringTest(parameterized.TestCase):
    """The program for CUDA, made without a GPU."""

    @slow.where(lambda gpu, name: gpu != "H100" or name not in EVERYWHERE)
    @parameterized.parameters(pairs_of_gpu_and_program())
    def test_launches_read_the_weights_where_they_lie(self, gpu, name):
        program = PROGRAMS[name]()
        text = program.lower(GPUS[gpu]).as_text()
        launches = text.count("stablehlo.custom_call")
        self.assertBetween(launches, 1, program.max_launches)
        self.assertEmpty(stacks_touched(text, program))

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


if __name__ == "__main__":
    absltest.main()
