"""The model with the kernel of decode attention: when it serves, what it gives, its launches."""

import dataclasses
import functools
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax import nnx

from moejax.models import attention
from moejax.models.config import LatentAttention, ModelConfig
from moejax.models.kv_cache import KVCache, empty_cache
from moejax.models.shapes import (
    DEEPSEEK_V2_LITE,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B_A3B,
)
from moejax.models.transformer import ChunkSpec, Transformer
from pallas_kernels import decode_attention as package
from pallas_kernels import op
from pallas_kernels.target import Target
from tests import gpu_targets
from tests.host_test_case import HostTestCase

SMALL = dataclasses.replace(
    QWEN3_30B_A3B, vocab_size=32, model_dim=32, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=16, num_experts=4, experts_per_token=2, expert_dim=16, moe_layers=(0, 1, 2),
)  # fmt: skip
LATENT = dataclasses.replace(
    DEEPSEEK_V2_LITE, vocab_size=32, model_dim=32, num_layers=3, num_heads=4, num_kv_heads=4,
    head_dim=40, num_experts=4, experts_per_token=2, expert_dim=16, moe_layers=(0, 1, 2),
    shared_dim=16,
    latent=LatentAttention(kv_rank=32, query_rank=None, nope_dim=24, rope_dim=16, value_dim=8),
)  # fmt: skip


def decoding(config: ModelConfig = SMALL) -> Any:
    """A small model in bfloat16, a filled cache of 64 slots, what a decode step is told."""
    model = Transformer(config, rngs=nnx.Rngs(0), dtype=jnp.dtype("bfloat16"))
    cache = empty_cache(config, 2, 64, jnp.dtype("bfloat16"))
    keys, values = (
        jax.random.normal(jax.random.key(i), of.shape, of.dtype)
        for i, of in enumerate((cache.keys, cache.values))
    )
    spec = ChunkSpec(kv_length=48, is_first=False, experts="dense", attention="xla")
    return model, KVCache(keys, values), spec


class WiringTest(HostTestCase):
    """The model runs the kernel that it chose."""

    @parameterized.parameters(QWEN3_30B_A3B, MIXTRAL_8X7B, DEEPSEEK_V2_LITE, QWEN3_NEXT_80B_A3B)
    def test_what_serves_decode(self, config):
        gpu, half = Target("gpu", (8, 6)), jnp.dtype("bfloat16")
        choose = functools.partial(attention.choose_cached, config)
        self.assertEqual(choose(half, gpu), ("triton", {}))
        self.assertEqual(attention.decode_impl(choose(half, gpu)), "kernel")
        self.assertEqual(choose(half, gpu, "xla"), ("xla", {}))
        for dtype, target in ((jnp.dtype("float32"), gpu), (half, Target("cpu", None))):
            found = choose(dtype, target)
            self.assertEqual(attention.decode_impl(found), "xla")
            self.assertNotEmpty(found.refusals["triton"])
            with self.assertRaisesRegex(ValueError, "by the kernel: "):
                choose(dtype, target, "kernel")

    @parameterized.parameters(SMALL, LATENT)
    @pytest.mark.slow
    def test_the_model_gives_what_it_gave(self, config):
        model, cache, spec = decoding(config)
        tokens, positions = jnp.array([[3], [5]], jnp.int32), jnp.array([[4], [9]], jnp.int32)
        mask = jnp.ones((2, 1), bool)
        call = functools.partial(package.decode_attention, interpret=True)
        attention.token_attention.clear_cache()
        with mock.patch.object(attention.decode_attention, "decode_attention", call):
            kernel = model(tokens, positions, mask, cache, spec._replace(cached="kernel"))
        attention.token_attention.clear_cache()
        plain = model(tokens, positions, mask, cache, spec)
        found, expected = (np.asarray(out[1]).astype(np.float64) for out in (kernel, plain))
        self.assertLess(np.linalg.norm(found - expected), 0.02 * np.linalg.norm(expected))
        self.assertGreater(np.abs(found - expected).max(), 0)  # it was the kernel

    @pytest.mark.slow
    def test_layers_share_a_kernel_and_none_slices_the_cache(self):
        model, cache, spec = decoding()
        gpu = gpu_targets.GPUS["H100"]
        tokens, mask = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1), bool)
        attention.token_attention.clear_cache()

        def text_of(spec: Any) -> str:
            step = jax.jit(lambda cache: model(tokens, tokens, mask, cache, spec))
            with gpu_targets.described(gpu):
                return step.trace(cache).lower(lowering_platforms=("cuda",)).as_text()

        with mock.patch.object(op, "current_target", lambda: gpu.target):
            text = text_of(spec._replace(cached="kernel"))
        attention.token_attention.clear_cache()
        self.assertEqual(text.count("__gpu$xla.gpu.triton"), 1)
        self.assertEqual(text.count("call @token_attention"), 3)
        whole = f"tensor<{'x'.join(map(str, cache.keys.shape))}xbf16>"
        sliced = rf"stablehlo\.(slice|dynamic_slice|gather).*{re.escape(whole)}"
        self.assertEmpty(re.findall(sliced, text))
        self.assertNotEmpty(re.findall(sliced, text_of(spec)))  # it is seen where it is done


if __name__ == "__main__":
    absltest.main()
