"""Temporary memory of decode steps whose experts lie in tiers, compiled for an H100 without one.

    python -m tests.tiered_programs                # needs JAX's CUDA plugin

DyMoE 4/2 on layers of Mixtral's, INT4 in slots and INT2 in passing alone, with look-ahead, once by
the routers and once by routing that is replayed.
"""

import dataclasses
import functools
import importlib
import os
import pkgutil
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import pallas_kernels
from moejax import ops, steps
from moejax.benchmarking.shapes import CONFIGS, with_layers
from moejax.ledger import no_counts
from moejax.memory.expert_pool import ExpertPool, ExpertStore, PoolSpec, compiler_options
from moejax.memory.residency import CacheSpec, empty
from moejax.memory.tiered import TieredPool, TieredSpec, no_gate
from moejax.models.assembly import model_definition
from moejax.models.config import ModelConfig
from moejax.models.transformer import ChunkSpec
from moejax.policies.dymoe import DyMoE
from moejax.policies.interface import PolicySpec
from tests.gpu_targets import GPUS, SKIP_CHECKS, described
from tests.pooled_programs import CONTEXT, GPU, decode_operands, leaf_of, packed

LAYERS, STEPS, REPLAYED, MOST_BYTES = 4, 8, 64, 2**20
TIERS = ((4, 4), (2, 0))  # bits, slots of a layer
NAMES = tuple(f"int{bits}" for bits, _ in TIERS)


def rows(config: ModelConfig, num: int, bits: int) -> tuple[Any, Any]:
    """Gates, ups and downs of so many experts."""
    width, hidden = config.model_dim, config.expert_dim
    return packed((num, 2 * hidden, width), bits), packed((num, width, hidden), bits)


def tier(config: ModelConfig, bits: int, slots: int) -> tuple[PoolSpec, ExpertPool, ExpertStore]:
    """The pool of a tier, and all rows of the host."""
    num = config.num_layers, config.num_experts
    cache = CacheSpec(num_layers=num[0], num_experts=num[1], slots=slots, transient=4, banks=2)
    pool = ExpertPool(
        tuple(rows(config, cache.num_slots, bits) for _ in range(2)),
        jax.eval_shape(lambda: empty(cache)),
        jax.eval_shape(lambda: no_counts(num[0])),
    )
    store = ExpertStore(*rows(config, num[0] * num[1], bits), leaf_of(num, jnp.int32))
    return PoolSpec(cache, config.experts_per_token), pool, store


def with_replay(store: ExpertStore, config: ModelConfig) -> ExpertStore:
    """As `benchmarking.shape_memory.replay` has it."""
    shape = (REPLAYED, config.num_layers, 1)
    said = leaf_of((*shape, config.num_experts), jnp.float32)
    return dataclasses.replace(
        store, replay=leaf_of((*shape, config.experts_per_token), jnp.int32),
        replay_probabilities=said, replay_predicted=said,
        replay_weights=leaf_of((*shape, config.experts_per_token), jnp.float32),
    )  # fmt: skip


def compiled(config: ModelConfig, replays: bool, sharding: Any) -> jax.stages.Compiled:
    """A call of eight steps."""
    specs, pools, stores = zip(*(tier(config, *of) for of in TIERS), strict=True)
    policy = DyMoE(prefetch=-1, retention=0.75)
    spec = TieredSpec(policy, NAMES, specs)
    about = PolicySpec(
        num_layers=config.num_layers, num_experts=config.num_experts,
        width=config.experts_per_token, tiers=NAMES, expert_bytes=(2, 1),
        slots=tuple(slots for _, slots in TIERS),
    )  # fmt: skip
    pool = TieredPool(
        pools,
        jax.eval_shape(lambda: policy.init(about)),
        jax.eval_shape(lambda: no_gate(config.num_layers, len(TIERS))),
    )
    if replays:
        stores = (with_replay(stores[0], config), *stores[1:])
    state, _, weights, _, *rest = decode_operands(config, specs[0], 1, True)
    program = steps.Program(
        model_definition(config, ops.Kernels(GPUS[GPU].target), holds_experts=False), spec
    )
    via = ("grouped_kernel",) * len(TIERS)
    chunk = ChunkSpec(CONTEXT, False, via[0], "xla", "kernel", tiers=via)
    step = functools.partial(steps.decode, program, chunk, True, STEPS, True)
    operands = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (state, pool, weights, tuple(stores), *rest),
    )
    with described(GPUS[GPU]):
        traced = jax.jit(step, donate_argnums=(0, 1)).trace(*operands)
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=compiler_options(spec.cache))


def main() -> None:
    """A line a case: name; temporary bytes."""
    from jax.experimental import topologies

    os.environ[SKIP_CHECKS] = "1"
    for package in pkgutil.iter_modules(pallas_kernels.__path__):
        if package.ispkg and package.name not in ("stream", "wgmma"):
            api = importlib.import_module(f"pallas_kernels.{package.name}.api")
            if hasattr(api, "current_target"):
                mock.patch.object(api, "current_target", lambda: GPUS[GPU].target).start()
    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1",
        target_config=GPUS[GPU].description,
    ).devices  # fmt: skip
    mesh = jax.sharding.Mesh(devices, ("gpu",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    config = with_layers(CONFIGS["Mixtral-8x7B"], LAYERS)
    for replays in (False, True):
        memory = compiled(config, replays, sharding).memory_analysis()
        assert memory is not None
        print("replayed" if replays else "routed", memory.temp_size_in_bytes, flush=True)


if __name__ == "__main__":
    main()
