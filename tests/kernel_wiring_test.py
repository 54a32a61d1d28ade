"""The model with the kernels of a token's step: when they serve, what they give, their launches."""

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
from absl.testing import parameterized
from flax import nnx

from moejax import Engine
from moejax.inference.kernel_warnings import phase_warnings
from moejax.inference.runner import Runner
from moejax.models import attention, delta_net, moe, stacked
from moejax.models import transformer as token_step
from moejax.models.config import LatentConfig, RopeScaling
from moejax.models.kv_cache import KVCache, empty_cache
from moejax.models.moe import ResidentExperts, routing_record
from moejax.models.shapes import SHAPES
from moejax.models.transformer import ChunkSpec, Transformer
from moejax.weights import linear as ops
from moejax.weights.linear import KernelChoice
from pallas_kernels import op
from pallas_kernels.target import SIMULATED, Choice, Target
from tests import gpu_targets, model_kinds, slow, tiny_engine
from tests.host_test_case import HostTestCase

DEEPSEEK_V2_LITE, MIXTRAL_8X7B, QWEN3_30B_A3B, QWEN3_NEXT_80B_A3B = (
    SHAPES[name]
    for name in ("DeepSeek-V2-Lite", "Mixtral-8x7B", "Qwen3-30B-A3B", "Qwen3-Next-80B-A3B")
)

HALF = jnp.dtype("bfloat16")
SMALL: dict[str, Any] = {
    "vocab_size": 32, "model_dim": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "num_experts": 4, "experts_per_token": 2, "expert_dim": 16, "mlp_dim": 24,
    "moe_layers": (0, 2),
}  # fmt: skip
QWEN = dataclasses.replace(QWEN3_30B_A3B, **SMALL)
MIXTRAL = dataclasses.replace(MIXTRAL_8X7B, **SMALL | {"moe_layers": (0, 1, 2)})
NEXT = model_kinds.config_of("delta", num_layers=4, num_experts=4, head_dim=16)
BY_PART, JOINT, SPARED = (
    model_kinds.config_of(kind, num_experts=4, head_dim=16)
    for kind in ("by_part", "joint", "biased")
)
BIASED = dataclasses.replace(QWEN, attention_bias=True)
SCALED = dataclasses.replace(
    QWEN, rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_positions=16)
)
LATENT = dataclasses.replace(
    DEEPSEEK_V2_LITE, **SMALL | {"num_kv_heads": 4, "head_dim": 40, "shared_dim": 16},
    latent=LatentConfig(kv_rank=32, query_rank=None, nope_dim=24, rope_dim=16, value_dim=8),
)  # fmt: skip
AMPERE = ops.Kernels(Target("gpu", (8, 6)))
SPEC = ChunkSpec(kv_length=48, is_first=False, experts="dense", attention="xla", cached="kernel")
# Module, function: each runs interpreted, in a jitted function whose traces are forgotten.
CALLS = (
    (token_step.residual_norm, "residual_norm", stacked.norm_of_sum),
    (token_step.qkv_to_cache, "qkv_to_cache", token_step._queries_and_cache),
    (attention.decode_attention, "decode_attention", attention.token_attention),
    (moe.router_topk, "top_k", moe._routing_by_kernel),
    (delta_net.kernel, "delta_step", delta_net._states_in_place),
)


def small_model(config: Any, kernels: ops.Kernels) -> Transformer:
    model = Transformer(config, rngs=nnx.Rngs(0), dtype=HALF, kernels=kernels)
    for module in (model.attention, model):  # norms of ones would hide which one is taken
        for name, leaf in vars(module).items():
            if name.endswith("norm"):
                noise = jax.random.normal(
                    jax.random.key(sum(map(ord, name))), leaf.shape, jnp.float32
                )
                leaf[...] = (1 + 0.3 * noise).astype(HALF)
    return model


def filled_cache(config: Any, batch: int) -> KVCache:
    """Keys and values (latents, their rotated parts) of 64 slots, drawn; states that are zero."""
    cache = empty_cache(config, batch, 64, HALF)
    drawn = {
        name: jax.random.normal(jax.random.key(i), getattr(cache, name).shape, HALF)
        for i, name in enumerate(("keys", "values"))
    }
    return cache._replace(**drawn)


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Traces of before are not used inside, and none of inside afterwards."""
    for _, _, jitted in CALLS:
        jitted.clear_cache()
    yield
    for _, _, jitted in CALLS:
        jitted.clear_cache()


@contextlib.contextmanager
def interpreted() -> Iterator[dict[str, mock.Mock]]:
    """The kernels run on the CPU; yields what counts their traces."""
    with forgotten(), contextlib.ExitStack() as stack:
        found = {}
        for module, name, _ in CALLS:
            call = functools.partial(getattr(module, name), interpret=True)
            found[name] = stack.enter_context(
                mock.patch.object(module, name, mock.Mock(side_effect=call))
            )
        yield found


def stepping(model: Transformer, spec: ChunkSpec) -> Any:
    """`model` compiled, with its routing: of tokens, positions and the cache."""
    experts = ResidentExperts(model.moe, spec.experts, routing_record)

    def step(tokens: jax.Array, positions: jax.Array, cache: KVCache) -> Any:
        mask = jnp.ones(tokens.shape, bool)
        cache, hidden, _, routing = model(tokens, positions, mask, cache, spec, experts)
        return cache, hidden, routing

    return jax.jit(step)


def relative(found: Any, expected: Any) -> float:
    found, expected = (np.asarray(of).astype(np.float64) for of in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


# Who chooses, by config, dtype and kernels, and configs that the kernel takes.
CHOICES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "step": (token_step._choose_token_step, (QWEN3_30B_A3B, MIXTRAL_8X7B)),
    "states": (delta_net._choose_delta_step, (NEXT,)),
    "attention": (
        lambda config, dtype, kernels: attention.choose_cached(
            config, dtype, kernels.target or Target("cpu", None)
        ),
        (QWEN3_30B_A3B, MIXTRAL_8X7B, DEEPSEEK_V2_LITE, QWEN3_NEXT_80B_A3B),
    ),
    "routing": (
        lambda config, _, kernels: moe._choose_routing(2048, config, kernels),
        (QWEN3_30B_A3B, MIXTRAL_8X7B),
    ),
}  # fmt: skip


class WiringTest(HostTestCase):
    """The model runs the kernels that it chose; products of its tiny matrices stay XLA's."""

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(ops, "MIN_ROW_OUTPUTS", ops.MIN_KERNEL_OUTPUTS))

    @parameterized.parameters(*CHOICES)
    def test_what_serves(self, choice):
        choose, configs = CHOICES[choice]
        for config in configs:
            chosen = functools.partial(choose, config)
            mosaic, reference = (
                dataclasses.replace(AMPERE, implementation=of) for of in ("mosaic", "reference")
            )
            self.assertEqual(chosen(HALF, AMPERE), ("triton", {}))
            if choice != "attention":  # which looks at the device alone
                self.assertEqual(chosen(HALF, mosaic), ("triton", {}))
                self.assertEqual(chosen(HALF, reference).describe(), "xla")
            refused = [(HALF, ops.NO_KERNELS), (HALF, ops.Kernels(Target("cpu", None)))]
            if choice != "routing":  # which is in float32
                refused.append((jnp.dtype("float32"), AMPERE))
            for dtype, kernels in refused:
                found = chosen(dtype, kernels)
                self.assertEqual(found.implementation, "xla")
                self.assertNotEmpty(found.refusals["triton"])

    @parameterized.parameters((HALF, "kernel"), (jnp.dtype("float32"), "xla"))
    def test_attention_by_the_kernel_unless_it_refuses(self, dtype, expected):
        choice = attention.choose_cached(QWEN, dtype, AMPERE.target)
        self.assertEqual(attention.cached_impl(choice), expected)

    def test_reasons_of_both_kernels_are_given(self):
        config = dataclasses.replace(QWEN, model_dim=8200, head_dim=24)
        found = token_step._choose_token_step(config, HALF, AMPERE)
        for reason in ("rows of 8200", "C=24"):
            self.assertIn(reason, found.refusals["triton"])
        wide = dataclasses.replace(QWEN, num_experts=1025)
        found = moe._choose_routing(1, wide, AMPERE)
        self.assertEqual(found, ("xla", {"triton": "1025 experts, more than 1024"}))

    # How often each kernel is traced: layers share a trace; the first norm has no sum before it.
    @slow.repeats()
    @parameterized.parameters(
        *((config, (2, 1, 1, 1, 0)) for config in (QWEN, MIXTRAL, BIASED, SCALED)),
        (NEXT, (4, 0, 1, 1, 1)), (LATENT, (2, 0, 1, 1, 0)), (BY_PART, (4, 0, 1, 1, 1)),
        (JOINT, (3, 0, 1, 1, 0)),  # queries are as wide as a token: they share its trace
        (SPARED, (4, 0, 1, 0, 0)),
    )  # fmt: skip
    def test_the_model_gives_what_it_gave(self, config, traced):
        model, plain = (small_model(config, k) for k in (ops.Kernels(SIMULATED), ops.NO_KERNELS))
        cache = expected_cache = filled_cache(config, 3)
        positions = jnp.array([[4], [9], [63]], jnp.int32)
        by_kernels, by_xla = stepping(model, SPEC), stepping(plain, SPEC._replace(cached="xla"))
        with interpreted() as calls:
            for step in range(2):  # the last row's second token is beyond the cache
                tokens = jnp.array([[3], [5], [7]], jnp.int32) + step
                cache, found, routings = by_kernels(tokens, positions, cache)
                expected_cache, expected, others = by_xla(tokens, positions, expected_cache)
                self.assertEqual((found.shape, found.dtype), (expected.shape, HALF))
                self.assertLess(relative(found, expected), 0.03)
                self.assertLen(routings.ids, len(config.moe_layers))
                for one, other in zip(routings.probabilities, others.probabilities, strict=True):
                    self.assertLess(relative(one, other), 0.03)
                for name in cache._fields:
                    new, old = getattr(cache, name), getattr(expected_cache, name)
                    if new is None:
                        continue
                    self.assertLess(relative(new, old), 0.02)
                    if name in ("keys", "values"):
                        changed = new != old
                        np.testing.assert_array_equal(changed, changed & written(positions))
                positions += 1
        self.assertEqual(tuple(call.call_count for call in calls.values()), traced)

    @parameterized.parameters((QWEN,), (LATENT,))
    @pytest.mark.slow
    def test_of_a_row_that_rests_one_slot_is_read(self, config):
        model, cache = small_model(config, ops.Kernels(SIMULATED)), filled_cache(config, 2)
        poisoned = cache._replace(
            keys=cache.keys.at[:, 1, :, 1:40].set(jnp.nan),
            values=cache.values.at[:, 1, :, 1:40].set(jnp.nan),
        )
        tokens, positions = jnp.array([[3], [5]], jnp.int32), jnp.array([[9], [40]], jnp.int32)

        step = jax.jit(lambda cache, mask: model(tokens, positions, mask, cache, SPEC)[1])

        def hidden(cache: KVCache, runs: bool) -> Any:
            return step(cache, jnp.array([[True], [runs]]))

        with interpreted():
            rests, running = hidden(poisoned, False), hidden(poisoned, True)
            expected = hidden(cache, False)
        np.testing.assert_array_equal(rests, expected)
        self.assertTrue(bool(jnp.isfinite(rests).all()))
        self.assertTrue(bool(jnp.isnan(running[1]).all()))

    def test_ids_that_the_kernel_counts_from_a_slot_are_those_of_experts(self):
        logits = jax.random.normal(jax.random.key(2), (5, 6))
        how = {"num_chosen": 2, "normalise": True}
        with interpreted() as calls:
            plain = moe._routing_by_kernel(logits, **how)
            counted = moe._routing_by_kernel(logits, jnp.int32(12), **how)
        for one, other in zip(plain, counted, strict=True):
            np.testing.assert_array_equal(one, other)
        first = [call.kwargs["first"] is None for call in calls["top_k"].call_args_list]
        self.assertEqual(first, [True, False])

    def test_prefill_and_what_is_refused_take_no_kernel_but_the_norms(self):
        cache, chunk = filled_cache(QWEN, 1), jnp.arange(4, dtype=jnp.int32)[None]
        token = chunk[:, :1]
        model = small_model(QWEN, ops.Kernels(SIMULATED))
        with interpreted() as calls:
            norms, writes = calls["residual_norm"], calls["qkv_to_cache"]
            by_xla = SPEC._replace(cached="xla")
            jax.eval_shape(stepping(model, by_xla), chunk, chunk, cache)
            jax.eval_shape(stepping(model, by_xla), token, token, cache)
            self.assertEqual(writes.call_count, 0)
            sums = [call.args[1] is not None for call in norms.call_args_list]
            self.assertNotEmpty(sums)
            self.assertFalse(any(sums))
            jax.eval_shape(stepping(model, SPEC), token, token, cache)
            self.assertEqual(writes.call_count, 1)
            sums = [call.args[1] is not None for call in norms.call_args_list]
            self.assertEqual(sum(sums), 1)

    @pytest.mark.slow
    def test_layers_share_kernels_and_xla_neither_norms_nor_writes(self):
        gpu = gpu_targets.GPUS["H100"]
        tokens, mask = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1), bool)
        cache = filled_cache(MIXTRAL, 2)

        def text_of(kernels: ops.Kernels) -> str:
            model = small_model(MIXTRAL, kernels)
            step = jax.jit(lambda cache: model(tokens, tokens, mask, cache, SPEC))
            with contextlib.ExitStack() as stack:
                stack.enter_context(forgotten())
                stack.enter_context(gpu_targets.described(gpu))
                stack.enter_context(mock.patch.object(op, "current_target", lambda: gpu.target))
                return step.trace(cache).lower(lowering_platforms=("cuda",)).as_text()

        text, plain = text_of(ops.Kernels(gpu.target)), text_of(ops.NO_KERNELS)
        self.assertEqual(text.count("__gpu$xla.gpu.triton"), 5)  # two are of norms
        called = [len(re.findall(rf"call @{jitted.__name__}\w*\(", text)) for *_, jitted in CALLS]
        self.assertEqual(called, [6, 3, 3, 3, 0])
        whole = re.escape(f"tensor<{'x'.join(map(str, cache.keys.shape))}xbf16>")
        changed = rf'stablehlo\.(slice|dynamic_\w+|gather|scatter|select)"?\(.*{whole}'
        self.assertEmpty(re.findall(changed, text))
        self.assertNotIn("stablehlo.rsqrt", text)
        self.assertIn("stablehlo.rsqrt", plain)  # it is seen where it is done
        self.assertIn("stablehlo.scatter", plain)
        self.assertNotIn("stablehlo.scatter", text)
        self.assertNotIn("top_k", text.replace("router_topk", ""))
        self.assertIn("top_k", plain)

    def test_it_is_on_record(self):
        cpu, config = jax.devices("cpu")[0], dataclasses.replace(tiny_engine.CONFIG, head_dim=16)
        weights = {name: jnp.asarray(of) for name, of in tiny_engine.random_weights(config).items()}
        engine = Engine(config, weights, device=cpu)
        said = engine.kernels["decode norms and writes"]
        self.assertRegex(said, r"^xla, float32 \(triton: q is float32.*runs on GPUs")
        self.assertNotIn("prefill norms and writes", engine.kernels)
        for phase in ("prefill", "decode"):
            self.assertRegex(engine.kernels[f"{phase} routing"], r"^xla, float32 \(triton: it runs")
        half = {name: of.astype(HALF) for name, of in weights.items()}
        name = "norms and writes"
        with gpu_targets.pretended(AMPERE.target):
            on_gpu = Runner(config, half, cpu, kernels=AMPERE)
            for kind, num_tokens, dtype in (
                (name, 1, "bfloat16"), ("routing", 1, "float32"), ("routing", 256, "float32"),
            ):  # fmt: skip
                self.assertEqual(
                    on_gpu.kernel_choices(num_tokens, 1)[kind],
                    KernelChoice("triton", dtype, False, {}),
                )
            self.assertNotIn(name, on_gpu.kernel_choices(256, 1))
            by_xla = Runner(config, half, cpu, kernels=AMPERE)
            by_xla._cached = Choice("xla", {})
            self.assertEqual(by_xla.kernel_choices(1, 1)[name].describe(), "xla, bfloat16")
            with mock.patch.object(token_step.residual_norm.triton, "MAX_WIDTH", 16):
                refused = on_gpu.kernel_choices(1, 1)
        warnings = phase_warnings("decode", refused, "triton")
        said = f"decode: {name} run without their kernel: xla, bfloat16 (triton: rows of 32"
        self.assertLen([line for line in warnings if line.startswith(said)], 1)

    def test_layers_without_experts_are_not_routed(self):
        dense = dataclasses.replace(tiny_engine.CONFIG, moe_layers=())
        weights = {name: jnp.asarray(of) for name, of in tiny_engine.random_weights(dense).items()}
        runner = Runner(dense, weights, jax.devices("cpu")[0], kernels=AMPERE)
        self.assertNotIn("routing", runner.kernel_choices(1, 1))


def written(positions: jax.Array) -> np.ndarray:
    """bool[1, B, 1, 64, 1]: the slots that tokens so far were written to."""
    slots = np.arange(64)[None]
    first = np.array([[4], [9], [63]])
    return ((slots >= first) & (slots <= np.asarray(positions)))[None, :, None, :, None]
