"""Prompts whose chunks attend to the cache by the kernel: what they give, and what is planned."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx

from moejax.experts.budget import RunSizes, workspace_nbytes
from moejax.inference import runner as runners
from moejax.inference.chunking import MAX_PREFILL_TOKENS, planned_chunks
from moejax.inference.runner import Runner
from moejax.models import attention
from moejax.models.kv_cache import empty_cache
from moejax.models.moe import ResidentExperts
from moejax.models.shapes import SHAPES
from moejax.models.transformer import ChunkSpec, Transformer
from moejax.weights import linear as ops
from pallas_kernels.target import SIMULATED, Choice, Target
from tests import gpu_targets, tiny_engine
from tests.host_test_case import HostTestCase

DEEPSEEK_V2_LITE, MIXTRAL_8X7B, QWEN3_30B_A3B, QWEN3_NEXT_80B_A3B = (
    SHAPES[name]
    for name in ("DeepSeek-V2-Lite", "Mixtral-8x7B", "Qwen3-30B-A3B", "Qwen3-Next-80B-A3B")
)

HALF = jnp.dtype("bfloat16")
AMPERE = Target("gpu", (8, 0))
TINY = dataclasses.replace(tiny_engine.CONFIG, head_dim=16)
SLOTS, CHUNK = 40, 12


def relative(found: jax.Array, expected: jax.Array) -> float:
    found, expected = (np.asarray(of).astype(np.float64) for of in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def hidden_by_chunks(cached: str, lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Outputs [B, 3 T, D] of unequal prompts, in three chunks that all read the cache."""
    config = dataclasses.replace(TINY, sliding_window=window)
    model = Transformer(config, rngs=nnx.Rngs(0), dtype=HALF, kernels=ops.NO_KERNELS)
    spec = ChunkSpec(SLOTS, False, "dense", "xla", cached)
    cache = empty_cache(config, len(lengths), SLOTS, HALF)
    tokens = np.random.default_rng(0).integers(0, 32, (len(lengths), 3 * CHUNK), np.int32)

    def step(tokens, positions, cache):
        mask = positions < lengths[:, None]
        experts = ResidentExperts(model.moe, spec.experts)
        return model(tokens, positions, mask, cache, spec, experts)[:2]

    found = []
    for start in range(0, 3 * CHUNK, CHUNK):
        part = tokens[:, start : start + CHUNK]
        positions = np.broadcast_to(np.arange(start, start + CHUNK, dtype=np.int32), part.shape)
        cache, hidden = jax.jit(step)(part, positions, cache)
        found.append(hidden)
    return np.concatenate(found, axis=1)


class PromptTest(HostTestCase):
    @parameterized.parameters(None, 7)
    @pytest.mark.slow
    def test_unequal_prompts_give_what_xla_gives(self, window):
        lengths = np.array([36, 5, 20])
        expected = hidden_by_chunks("xla", lengths, window)
        with gpu_targets.pretended(SIMULATED):
            found = hidden_by_chunks("kernel", lengths, window)
        self.assertTrue(np.isfinite(found).all())  # padding too
        for row, length in enumerate(lengths):
            self.assertLess(relative(found[row, :length], expected[row, :length]), 0.02)

    @pytest.mark.slow
    def test_a_runner_reads_prompts_by_the_kernel(self):
        """From the first chunk on, since nothing but XLA would run that one."""
        weights = tiny_engine.random_weights(TINY)
        half = {name: jnp.asarray(of, HALF) for name, of in weights.items()}
        cpu = jax.devices("cpu")[0]
        tokens = np.random.default_rng(1).integers(0, 32, (2, 29), np.int32)
        with (
            mock.patch.object(runners, "longest_chunk", lambda *_: 16),
            gpu_targets.pretended(SIMULATED),
            mock.patch.object(
                attention, "_prompt_attention", side_effect=attention._prompt_attention
            ) as calls,
        ):
            by_xla = Runner(TINY, half, cpu, kernels=ops.NO_KERNELS)
            by_xla._chunked = Choice("xla", {})
            expected = by_xla.logits(tokens)
            self.assertEqual(calls.call_count, 0)
            by_kernel = Runner(TINY, half, cpu, kernels=ops.NO_KERNELS)
            found = by_kernel.logits(tokens)
            self.assertGreaterEqual(calls.call_count, 2)
            # A chunk of one token is no decode step: it knows its prompt's length.
            specs = [by_kernel._chunk_spec(2, 16, size, 32) for size in (1, 16)]
            self.assertEqual([spec.cached for spec in specs], ["xla", "kernel"])
        self.assertLess(relative(found, expected), 0.02)
        said = by_kernel.products["prefill"]["attention to the cache"].describe()
        self.assertRegex(said, "^triton, bfloat16 .mosaic: C=16 is none of 64, 128, 256")


class ChoiceTest(HostTestCase):
    @parameterized.parameters(QWEN3_30B_A3B, MIXTRAL_8X7B, QWEN3_NEXT_80B_A3B)
    def test_the_kernel_serves_where_it_is_chosen(self, config):
        found = attention.choose_chunked(config, HALF, AMPERE)
        self.assertEqual(found.implementation, "triton")
        self.assertEqual([*found.refusals], ["mosaic"])
        on_hopper = attention.choose_chunked(config, HALF, Target("gpu", (9, 0)))
        self.assertEqual(on_hopper, ("mosaic", {}))
        on_cpu = attention.choose_chunked(config, HALF, Target("cpu", None))
        self.assertEqual(on_cpu.implementation, "xla")
        self.assertIn("it runs on GPUs", on_cpu.refusals["triton"])

    def test_refusals_are_said(self):
        latents = attention.choose_chunked(DEEPSEEK_V2_LITE, HALF, AMPERE)
        self.assertIn("keys of 64 and values of 512", latents.refusals["triton"])
        wide = attention.choose_chunked(QWEN3_30B_A3B, jnp.dtype("float32"), AMPERE)
        self.assertEqual(wide.implementation, "xla")
        self.assertRegex("; ".join(wide.refusals.values()), "q is f.*sm_80")


class PlanTest(HostTestCase):
    # Compiled for an H100 without one (jax 0.10.2, 2026-11-25): a chunk of 1,024 tokens of 6 layers
    # of Qwen3-30B, attention and experts in INT4, with 32,768 slots takes 6,574.7 MiB by XLA and
    # 89.0 by the kernel, and the cache is changed in place.
    @parameterized.parameters((True, 6574.7), (False, 89.0))
    def test_scores_are_in_the_plan_only_where_they_are_stored(self, stored, compiled_mib):
        run = RunSizes(
            config=QWEN3_30B_A3B, weights_nbytes={}, batch=1, context=32768, chunk=1024,
            platform="gpu", stores_scores=stored,
        )  # fmt: skip
        planned = workspace_nbytes(run, is_packed=True) / 2**20
        self.assertBetween(planned, compiled_mib, 1.3 * compiled_mib if stored else 300)

    # Compiled as above (jax 0.11.2, 2026-11-26): a greedy decode step of 64 rows of 4,096 slots, in
    # pages, takes 39.2 MB, of which the logits 38.9.
    @parameterized.parameters((True, False, 1809), (False, False, 694), (False, True, 234))
    def test_a_decode_step_by_the_kernel_copies_no_cache(self, copied, is_running, planned_mib):
        """Prompts of a running batch come one by one, too."""
        run = RunSizes(
            config=QWEN3_30B_A3B, weights_nbytes={}, batch=64, context=4096, chunk=16,
            platform="gpu", stores_scores=False, copies_cache=copied, is_running=is_running,
        )  # fmt: skip
        planned = workspace_nbytes(run, is_packed=True) / 2**20
        self.assertAlmostEqual(planned, planned_mib, delta=1)

    def test_chunks_do_not_shorten_with_the_cache(self):
        gpu, cpu = Target("gpu", None), Target("cpu", None)
        old = Target("gpu", (7, 5))  # without the kernel
        for shape, batch, context, target, expected in (
            (QWEN3_30B_A3B, 1, 32768, gpu, (1024, 2048, 4096)),
            (QWEN3_30B_A3B, 2, 32768, gpu, (1024, 2048)),
            (QWEN3_30B_A3B, 16, 32768, gpu, (MAX_PREFILL_TOKENS // 16,)),
            (QWEN3_30B_A3B, 1, 3000, gpu, (1024, 2048)),
            (QWEN3_30B_A3B, 1, 600, gpu, (600,)),
            (QWEN3_30B_A3B, 1, 32768, cpu, (256,)),
            (DEEPSEEK_V2_LITE, 1, 32768, gpu, (512,)),
            # Not shorter than by XLA, or experts that move would move more often.
            (QWEN3_30B_A3B, 16, 1024, gpu, (512,)),
            (QWEN3_30B_A3B, 1, 32768, old, (256,)),
        ):
            with self.subTest(batch=batch, context=context, target=target):
                found = planned_chunks(shape, batch, context, 2, target)
                self.assertEqual(found, expected)
