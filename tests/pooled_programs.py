"""Steps of pooled experts, compiled for an H100 without one; needs JAX's CUDA plugin.

python -m tests.pooled_programs
"""

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from moejax.experts.residency import CacheSizes, empty, no_counts
from moejax.experts.state import (
    CacheSpec,
    ExpertCache,
    HostRows,
    TierSlots,
    TierSpec,
    compiler_options,
)
from moejax.inference import steps
from moejax.inference.sampling import Sampling
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.kernel_choice import EXPERT_LEAVES
from moejax.models.kv_cache import empty_cache
from moejax.models.transformer import ChunkSpec, model_definition
from moejax.weights import linear as ops
from moejax.weights.qtensor import QTensor
from pallas_kernels import layout, op
from tests.gpu_targets import GPUS, SKIP_CHECKS, described
from tests.pooled_device_test import CONFIGS, CONTEXT

GPU = "H100"
PACKAGES = (
    "cache_plan", "expert_fetch", "grouped_dequant_matmul", "dequant_matmul", "router_topk",
    "decode_attention", "residual_norm", "qkv_to_cache", "delta_step",
)  # fmt: skip
# Slots of a layer, experts ahead, sequences: served by the cache alone, and in waves.
CASES = [(8, 4, 1), (8, 4, 4), (8, 0, 1), (4, 2, 4), (0, 0, 1)]
# Attention in bf16: XLA would copy that of all layers at once.
PLAIN = (8, 4, 1, True)
# Cases of a chunk, in waves: slots per layer, prefetched experts.
CHUNKS = [(8, 4), (4, 0)]
CHUNK = 64  # tokens


def leaf_of(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def packed(shape: tuple[int, ...], bits: int = 4) -> QTensor:
    groups = (*shape[:-1], layout.num_groups(shape[-1], 64))
    return QTensor(
        words=leaf_of((*shape[:-1], layout.num_words(shape[-1], bits)), jnp.uint32),
        scales=leaf_of(groups, jnp.float16), zeros=leaf_of(groups, jnp.float16),
        num_inputs=shape[-1], bits=bits, group_size=64,
    )  # fmt: skip


def decode_operands(
    config: ModelConfig, spec: TierSpec, batch: int, plain_attention: bool = False
) -> tuple[Any, ...]:
    """Shapes of what `steps.decode` takes; experts and, unless plain, attention in INT4."""

    def is_packed(leaf: str, shape: tuple[int, ...]) -> bool:
        return leaf.startswith("attention.") and len(shape) == 3 and not plain_attention

    weights = {
        leaf: packed(shape) if is_packed(leaf, shape) else leaf_of(shape)
        for leaf, shape in weight_shapes(config).items()
        if leaf not in EXPERT_LEAVES
    }
    width, hidden = config.model_dim, config.expert_dim

    def rows(num: int) -> tuple[QTensor, QTensor]:
        return packed((num, 2 * hidden, width)), packed((num, width, hidden))

    cache, experts = spec.cache, (config.num_layers, config.num_experts)
    pool = TierSlots(
        tuple(rows(cache.num_slots) for _ in range(cache.banks)),
        jax.eval_shape(lambda: empty(cache)),
        jax.eval_shape(lambda: no_counts(config.num_layers)),
    )
    store = HostRows(*rows(experts[0] * experts[1]), leaf_of(experts, jnp.int32))
    kv = jax.eval_shape(lambda: empty_cache(config, batch, CONTEXT, jnp.bfloat16))
    keys = jax.eval_shape(lambda: jax.vmap(jax.random.key)(jnp.zeros(batch, jnp.uint32)))

    def each(dtype: Any) -> jax.ShapeDtypeStruct:
        return leaf_of((batch,), dtype)

    state = steps.DecodeState(kv, each(jnp.int32), each(jnp.int32), each(bool), keys, None)
    f32 = each(jnp.float32)
    sampling = Sampling(f32, each(jnp.int32), f32, f32, f32)
    ends, count = leaf_of((batch, 1), jnp.int32), leaf_of((), jnp.int32)
    cached = ExpertCache((pool,), (), None)
    return state, cached, steps.StepInputs(weights, (store,)), sampling, ends, count


def _program(config: ModelConfig, slots: int, ahead: int) -> steps.Program:
    cache = CacheSizes(
        num_layers=config.num_layers, num_experts=config.num_experts, slots=slots, transient=4,
        banks=2 if ahead else 1,
    )  # fmt: skip
    kernels = ops.Kernels(GPUS[GPU].target)
    definition = model_definition(config, kernels, holds_experts=False)
    spec = CacheSpec(None, ("stored",), (TierSpec(cache, ahead),))
    return steps.Program(definition, spec)


def _compiled(
    step: Callable[..., Any], operands: Any, donated: tuple[int, ...], spec: CacheSpec,
    sharding: Any, is_prefill: bool,
) -> jax.stages.Compiled:  # fmt: skip
    """Compiles a step like `Runner`."""
    operands = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), operands
    )
    with described(GPUS[GPU]):
        traced = jax.jit(step, donate_argnums=donated).trace(*operands)
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=compiler_options(spec.tiers, is_prefill))


def compiled_decode(
    config: ModelConfig, slots: int, ahead: int, batch: int, sharding: Any,
    plain_attention: bool = False,
) -> tuple[jax.stages.Compiled, int]:  # fmt: skip
    """A call of eight steps, and the bytes of its pool."""
    program = _program(config, slots, ahead)
    assert program.experts is not None
    chunk = ChunkSpec(CONTEXT, False, "grouped_kernel", "xla", "kernel")
    operands = decode_operands(config, program.experts.tiers[0], batch, plain_attention)
    step = functools.partial(steps.decode, program, chunk, True, 8, True)
    return _compiled(step, operands, (0, 1), program.experts, sharding, False), _num_bytes(
        operands[1]
    )


def compiled_prefill(
    config: ModelConfig, slots: int, ahead: int, is_first: bool, sharding: Any
) -> tuple[jax.stages.Compiled, int, int]:
    """A chunk, the bytes that it donates, and those of a bank."""
    program = _program(config, slots, ahead)
    assert program.experts is not None
    chunk = ChunkSpec(0 if is_first else CONTEXT, is_first, "grouped_kernel", "xla")
    state, pool, inputs, *_ = decode_operands(config, program.experts.tiers[0], 1)
    part = steps.Chunk(
        leaf_of((1, CHUNK), jnp.int32), leaf_of((), jnp.int32), leaf_of((1,), jnp.int32)
    )
    first = steps.PrefillState(state.cache, leaf_of((1, config.model_dim)))
    operands = first, pool, inputs, part
    step = functools.partial(steps.prefill_chunk, program, chunk)
    compiled = _compiled(step, operands, (0, 1), program.experts, sharding, True)
    return compiled, _num_bytes((state.cache, pool)), _num_bytes(pool.tiers[0].banks[0])


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def main() -> None:
    """A line a case: name; temporary bytes and their bound; aliased ones, and those donated."""
    os.environ[SKIP_CHECKS] = "1"
    from jax.experimental import topologies

    mock.patch.object(op, "current_target", lambda: GPUS[GPU].target).start()
    for name in PACKAGES:
        api = importlib.import_module(f"pallas_kernels.{name}.api")
        if hasattr(api, "current_target"):
            mock.patch.object(api, "current_target", lambda: GPUS[GPU].target).start()
    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1",
        target_config=GPUS[GPU].description,
    ).devices  # fmt: skip
    mesh = jax.sharding.Mesh(devices, ("gpu",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for name, config in CONFIGS.items():
        config = dataclasses.replace(config, num_layers=3, moe_layers=(0, 1, 2))
        for slots, ahead, batch, is_plain in [*((*case, False) for case in CASES), PLAIN]:
            program, pool = compiled_decode(config, slots, ahead, batch, sharding, is_plain)
            memory = program.memory_analysis()
            assert memory is not None
            label = f"{name}_{slots}_slots_{ahead}_ahead_{batch}_sequences"
            label += "_plain_attention" * is_plain
            temporary, aliased = memory.temp_size_in_bytes, memory.alias_size_in_bytes
            print(label, temporary, 2**20, aliased, pool, flush=True)
        # In a loop; one layer is left after it where there are two banks.
        config = dataclasses.replace(config, num_layers=5, moe_layers=tuple(range(5)))
        for (slots, ahead), is_first in zip(CHUNKS, (True, False), strict=True):
            program, donated, bank = compiled_prefill(config, slots, ahead, is_first, sharding)
            memory = program.memory_analysis()
            assert memory is not None
            label = f"{name}_{slots}_slots_{ahead}_ahead_chunk"
            temporary, aliased = memory.temp_size_in_bytes, memory.alias_size_in_bytes
            print(label, temporary, bank, aliased, donated, flush=True)


if __name__ == "__main__":
    main()
