"""Decode steps whose experts lie in tiers, compiled for an H100 without one.

    python -m tests.tiered_programs                # needs JAX's CUDA plugin

Temporary memory and launches, by the routers and by routing that is replayed. DyMoE 4/2 on layers
of Mixtral's, INT4 in slots and INT2 in passing alone, with look-ahead; and on layers of Qwen3-30B's
what policies launch beside the same cache without one.
"""

import dataclasses
import functools
import importlib
import importlib.util
import os
import pkgutil
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import pallas_kernels
from moejax.experts.residency import CacheSizes, empty, no_counts
from moejax.experts.state import (
    CacheSpec,
    ExpertCache,
    HostRows,
    TierSlots,
    TierSpec,
    compiler_options,
    no_gate,
)
from moejax.inference import steps
from moejax.models.config import ModelConfig
from moejax.models.shapes import CONFIGS, with_layers
from moejax.models.transformer import ChunkSpec, model_definition
from moejax.policies.base import AnyPolicy, PolicySpec
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from moejax.policies.on_demand import OnDemand
from moejax.weights import linear as ops
from pallas_kernels import op
from tests.decode_programs import num_launches
from tests.gpu_targets import GPUS, SKIP_CHECKS, described
from tests.pooled_programs import CONTEXT, GPU, decode_operands, leaf_of, packed

LAYERS, STEPS, REPLAYED, MOST_BYTES = 4, 8, 64, 2**20


@dataclasses.dataclass(frozen=True)
class Case:
    """Tiers under a policy.

    Attributes:
      shape: whose layers.
      policy: who decides.
      tiers: bits and slots of a layer.
      transient: slots for what passes.
      banks: 2 with look-ahead.
    """

    shape: str
    policy: AnyPolicy
    tiers: tuple[tuple[int, int], ...]
    transient: int
    banks: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"int{bits}" for bits, _ in self.tiers)


LOOKS_AHEAD = Case(
    "Mixtral-8x7B", DyMoE(prefetch=-1, retention=0.75), ((4, 4), (2, 0)), transient=4, banks=2
)
QWEN3 = functools.partial(Case, "Qwen3-30B-A3B", transient=8)
NO_POLICY = "on_demand"
POLICIES = {
    NO_POLICY: QWEN3(OnDemand(), ((4, 64),)),
    "dymoe": QWEN3(DyMoE(prefetch=0), ((4, 64), (2, 8))),
    "dynaexq": QWEN3(DynaExq(), ((4, 32), (2, 128))),
}


def rows(config: ModelConfig, num: int, bits: int) -> tuple[Any, Any]:
    """Gates, ups and downs of so many experts."""
    width, hidden = config.model_dim, config.expert_dim
    return packed((num, 2 * hidden, width), bits), packed((num, width, hidden), bits)


def tier(
    case: Case, config: ModelConfig, bits: int, slots: int
) -> tuple[TierSpec, TierSlots, HostRows]:
    """The pool of a tier, and all rows of the host."""
    num = config.num_layers, config.num_experts
    cache = CacheSizes(
        num_layers=num[0], num_experts=num[1], slots=slots, transient=case.transient,
        banks=case.banks,
    )  # fmt: skip
    pool = TierSlots(
        tuple(rows(config, cache.num_slots, bits) for _ in range(case.banks)),
        jax.eval_shape(lambda: empty(cache)),
        jax.eval_shape(lambda: no_counts(num[0])),
    )
    store = HostRows(*rows(config, num[0] * num[1], bits), leaf_of(num, jnp.int32))
    ahead = config.experts_per_token if case.banks > 1 else 0
    return TierSpec(cache, ahead, is_complete=slots == num[1]), pool, store


def with_replay(store: HostRows, config: ModelConfig) -> HostRows:
    """Adds a replay like `benchmarking.shape_memory.replay`."""
    said = leaf_of((REPLAYED, config.num_layers, 1, config.num_experts), jnp.float32)
    return dataclasses.replace(store, replay=said, replay_predicted=said)


def compiled(case: Case, replays: bool, sharding: Any) -> jax.stages.Compiled:
    """A call of eight steps."""
    config, policy = with_layers(CONFIGS[case.shape], LAYERS), case.policy
    specs, pools, stores = zip(*(tier(case, config, *of) for of in case.tiers), strict=True)
    about = PolicySpec(
        num_layers=config.num_layers, num_experts=config.num_experts,
        width=config.experts_per_token, tiers=case.names, slots=tuple(n for _, n in case.tiers),
        expert_bytes=tuple(range(len(case.tiers), 0, -1)),
    )  # fmt: skip
    between = policy.transfer_tiers(about)
    specs = [dataclasses.replace(s, between_steps=i in between) for i, s in enumerate(specs)]
    spec = CacheSpec(policy, case.names, tuple(specs))
    pool = ExpertCache(
        pools,
        jax.eval_shape(lambda: policy.init(about)),
        jax.eval_shape(lambda: no_gate(config.num_layers, len(case.tiers))),
    )
    if replays:
        stores = (with_replay(stores[0], config), *stores[1:])
    state, _, inputs, *rest = decode_operands(config, specs[0], 1, True)
    program = steps.Program(
        model_definition(config, ops.Kernels(GPUS[GPU].target), holds_experts=False), spec
    )
    impl = ("grouped_kernel",) * len(case.tiers)
    chunk = ChunkSpec(CONTEXT, False, impl[0], "xla", "kernel", tiers=impl)
    step = functools.partial(steps.decode, program, chunk, True, STEPS, True)
    operands = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (state, pool, inputs._replace(rows=tuple(stores)), *rest),
    )
    with described(GPUS[GPU]):
        traced = jax.jit(step, donate_argnums=(0, 1)).trace(*operands)
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=compiler_options(specs, is_prefill=False))


def main() -> None:
    """A line a case: name; temporary bytes, and launches of a step."""
    from jax.experimental import topologies

    os.environ[SKIP_CHECKS] = "1"
    mock.patch.object(op, "current_target", lambda: GPUS[GPU].target).start()
    for package in pkgutil.iter_modules(pallas_kernels.__path__):
        if package.ispkg and importlib.util.find_spec(f"pallas_kernels.{package.name}.api"):
            api = importlib.import_module(f"pallas_kernels.{package.name}.api")
            if hasattr(api, "current_target"):
                mock.patch.object(api, "current_target", lambda: GPUS[GPU].target).start()
    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1",
        target_config=GPUS[GPU].description,
    ).devices  # fmt: skip
    mesh = jax.sharding.Mesh(devices, ("gpu",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    cases = {"ahead_routed": LOOKS_AHEAD, "ahead_replayed": LOOKS_AHEAD}
    cases |= {f"{name}_routed": case for name, case in POLICIES.items()}
    cases |= {f"{name}_replayed": case for name, case in POLICIES.items()}
    for name, case in cases.items():
        program = compiled(case, name.endswith("_replayed"), sharding)
        memory = program.memory_analysis()
        assert memory is not None
        print(name, memory.temp_size_in_bytes, num_launches(program.as_text()), flush=True)


if __name__ == "__main__":
    main()
