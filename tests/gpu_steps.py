"""Steps compiled for an H100 without one: a resident model's, and those of cached experts.

    python -m tests.gpu_steps pools                # banks that are not copied
    python -m tests.gpu_steps tiers                # temporary memory and launches under policies
    python -m tests.gpu_steps terms                # a prompt's temporary memory, and its plan
    python -m tests.gpu_steps mesh                 # the step of two GPUs beside that of one
    python -m tests.gpu_steps pages                # a running batch's beside that of one piece
    python -m tests.gpu_steps Qwen3-Next-80B-A3B --layers=4 --batch=8   # of a resident model

Attention and experts in INT4, all else as the shape has it. Needs JAX's CUDA plugin and no GPU.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import os
import pkgutil
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from moejax.benchmarking.random_weights import Packing, expert_terms
from moejax.devices import MESH_AXIS, REPLICATED, DeviceMesh, specs_of
from moejax.experts.budget.planned import RunSizes
from moejax.experts.budget.workspace import workspace_nbytes
from moejax.experts.placement import _hand_out
from moejax.experts.residency import CacheSizes, empty, no_counts
from moejax.experts.state import (
    CacheSpec,
    ExpertCache,
    HostJobs,
    HostRows,
    TierSlots,
    TierSpec,
    compiler_options,
    no_gate,
)
from moejax.inference import steps
from moejax.inference.steps import Sampling
from moejax.models.config import ModelConfig, Pages, leaf_dtype, weight_shapes
from moejax.models.head_shares import HEAD_LEAVES, HeadShares
from moejax.models.kv_cache import empty_cache
from moejax.models.leaf_kinds import EXPERT_LEAVES, leaves_of
from moejax.models.shapes import CONFIGS, with_layers
from moejax.models.transformer import ChunkSpec, model_definition
from moejax.policies.base import AnyPolicy, PolicySpec
from moejax.policies.baselines import OnDemand
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from moejax.weights import linear as ops
from moejax.weights.qtensor import QTensor
from pallas_kernels import layout, op
from tests.cached_device_test import CONFIGS as SMALL
from tests.gpu_targets import GPUS, SKIP_CHECKS, described, devices_of
from tests.packed_weights import num_bytes

GPU = GPUS["H100"]
CONTEXT, STEPS, CHUNK = 512, 8, 64
LAYERS, REPLAYED, MOST_BYTES = 4, 64, 2**20  # of tiers
HALF = jnp.dtype("bfloat16")
# Slots of a layer, experts ahead, sequences: served by the cache alone, and in waves. Last, whether
# attention is in bf16, that of all layers of which XLA would copy at once.
CASES = (
    (8, 4, 1, False), (8, 4, 4, False), (8, 0, 1, False), (4, 2, 4, False), (0, 0, 1, False),
    (8, 4, 1, True),
)  # fmt: skip
# Of a chunk, in waves: slots per layer, prefetched experts, transient slots apart.
CHUNKS = ((8, 4, 0), (4, 0, 0), (8, 4, 2), (4, 0, 2))
LAUNCH = re.compile(
    r" (fusion|custom-call|copy|dot|reduce|sort|scatter|dynamic-slice|dynamic-update-slice)\("
)


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


def leaf_of(shape: tuple[int, ...], dtype: Any = HALF) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def packed(shape: tuple[int, ...], bits: int = 4) -> QTensor:
    groups = (*shape[:-1], layout.num_groups(shape[-1], 64))
    return QTensor(
        words=leaf_of((*shape[:-1], layout.num_words(shape[-1], bits)), jnp.uint32),
        scales=leaf_of(groups, jnp.float16), zeros=leaf_of(groups, jnp.float16),
        num_inputs=shape[-1], bits=bits, group_size=64,
    )  # fmt: skip


def weights_of(config: ModelConfig, are_packed: Sequence[str]) -> dict[str, Any]:
    """Shapes of a model's leaves."""
    return {
        leaf: packed(shape) if leaf in are_packed and len(shape) > 2 else
        leaf_of(shape, leaf_dtype(leaf, HALF))
        for leaf, shape in weight_shapes(config).items()
    }  # fmt: skip


def decode_operands(config: ModelConfig, batch: int, pages: Pages | None = None) -> tuple[Any, ...]:
    """Shapes of what `steps.decode` takes: its state, then all after the weights and the rows."""
    cache = jax.eval_shape(lambda: empty_cache(config, batch, CONTEXT, HALF, pages))
    keys = jax.eval_shape(lambda: jax.vmap(jax.random.key)(jnp.zeros(batch, jnp.uint32)))
    each = functools.partial(leaf_of, (batch,))
    state = steps.DecodeState(cache, each(jnp.int32), each(jnp.int32), each(bool), keys, None)
    f32 = each(jnp.float32)
    sampling = Sampling(f32, each(jnp.int32), f32, f32, f32)
    return state, sampling, leaf_of((batch, 1), jnp.int32), leaf_of((), jnp.int32)


def tier(
    config: ModelConfig,
    slots: int,
    bits: int = 4,
    *,
    transient: int,
    banks: int,
    ahead: int,
    apart: int = 0,
) -> tuple[TierSpec, TierSlots, HostRows]:
    """The pool of a tier, and all rows of the host."""
    num = config.num_layers, config.num_experts
    cache = CacheSizes(
        num_layers=num[0],
        num_experts=num[1],
        slots=slots,
        transient=transient,
        banks=banks,
        apart=apart,
    )

    def rows(count: int) -> tuple[QTensor, QTensor]:
        width, hidden = config.model_dim, config.expert_dim
        return packed((count, 2 * hidden, width), bits), packed((count, width, hidden), bits)

    pool = TierSlots(
        tuple(rows(cache.num_slots) for _ in range(banks)),
        jax.eval_shape(lambda: empty(cache)),
        jax.eval_shape(lambda: no_counts(num[0])),
        apart=rows(apart) if apart else None,
    )
    store = HostRows(*rows(num[0] * num[1]), leaf_of(num, jnp.int32))
    return TierSpec(cache, ahead, is_complete=slots == num[1]), pool, store


def under_no_policy(
    config: ModelConfig, slots: int, ahead: int, apart: int = 0
) -> tuple[CacheSpec, ExpertCache, tuple[HostRows, ...]]:
    banks = 2 if ahead else 1
    spec, pool, store = tier(config, slots, transient=4, banks=banks, ahead=ahead, apart=apart)
    spec = dataclasses.replace(spec, is_complete=False)
    return CacheSpec(None, ("stored",), (spec,)), ExpertCache((pool,), (), None), (store,)


def with_jobs(cached: Any, config: ModelConfig) -> Any:
    """Adds jobs for the host's cores to a cache under no policy."""
    spec, pool, (store,) = cached
    table = leaf_of((config.experts_per_token + 1,), jnp.int32)
    two = leaf_of((2,), jnp.int32)
    pool = dataclasses.replace(pool, tiers=(dataclasses.replace(pool.tiers[0], jobs=two),))
    return spec, pool, (dataclasses.replace(store, jobs=HostJobs(table, two)),)


def under_policy(
    case: Case, config: ModelConfig
) -> tuple[CacheSpec, ExpertCache, tuple[HostRows, ...]]:
    policy, names = case.policy, tuple(f"int{bits}" for bits, _ in case.tiers)
    how = {"transient": case.transient, "banks": case.banks}
    how["ahead"] = config.experts_per_token if case.banks > 1 else 0
    tiers = [tier(config, slots, bits, **how) for bits, slots in case.tiers]
    specs, pools, stores = zip(*tiers, strict=True)
    about = PolicySpec(
        num_layers=config.num_layers, num_experts=config.num_experts,
        width=config.experts_per_token, tiers=names, slots=tuple(n for _, n in case.tiers),
        expert_bytes=tuple(range(len(case.tiers), 0, -1)),
    )  # fmt: skip
    between = policy.transfer_tiers(about)
    specs = [dataclasses.replace(s, between_steps=i in between) for i, s in enumerate(specs)]
    pool = ExpertCache(
        pools,
        jax.eval_shape(lambda: policy.init(about)),
        jax.eval_shape(lambda: no_gate(config.num_layers, len(case.tiers))),
    )
    return CacheSpec(policy, names, tuple(specs)), pool, stores


def with_replay(store: HostRows, config: ModelConfig) -> HostRows:
    """Adds a replay like `benchmarking.models._replay`."""
    said = leaf_of((REPLAYED, config.num_layers, 1, config.num_experts), jnp.float32)
    return dataclasses.replace(store, replay=said, replay_predicted=said)


def compiled(
    step: Callable[..., Any], operands: Any, donated: tuple[int, ...],
    spec: CacheSpec | None = None, is_prefill: bool = False,
) -> jax.stages.Compiled:  # fmt: skip
    """Compiles a step like `Runner`."""
    mesh = jax.sharding.Mesh(devices_of(GPU), ("gpu",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    operands = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), operands
    )
    with described(GPU):
        traced = jax.jit(step, donate_argnums=donated).trace(*operands)
        lowered = traced.lower(lowering_platforms=("cuda",))
    options = compiler_options(spec.tiers, is_prefill) if spec else None
    return lowered.compile(compiler_options=options)


def compiled_decode(
    config: ModelConfig, cached: Any, batch: int = 1, is_plain: bool = True
) -> jax.stages.Compiled:
    """A call of eight steps with cached experts; attention plain or in INT4."""
    spec, pool, stores = cached
    impl = ("grouped_kernel",) * len(stores)
    chunk = ChunkSpec(CONTEXT, False, impl[0], "xla", "kernel", tiers=impl if spec.policy else ())
    definition = model_definition(config, ops.Kernels(GPU.target), holds_experts=False)
    step = functools.partial(
        steps.decode, steps.StepProgram(definition, spec), chunk, True, STEPS, True
    )
    return compiled(step, decode_and_dense(config, batch, is_plain, pool, stores), (0, 1), spec)


def decode_and_dense(
    config: ModelConfig, batch: int, is_plain: bool, pool: Any, stores: Any
) -> tuple[Any, ...]:
    state, *rest = decode_operands(config, batch)
    weights = weights_of(config, () if is_plain else leaves_of("attention"))
    dense = {leaf: shape for leaf, shape in weights.items() if leaf not in EXPERT_LEAVES}
    return state, pool, steps.StepInputs(dense, tuple(stores)), *rest


def compiled_prefill(
    config: ModelConfig, cached: Any, is_first: bool, tokens: int = CHUNK
) -> jax.stages.Compiled:
    """A chunk of one sequence."""
    spec, pool, stores = cached
    state, _, inputs, *_ = decode_and_dense(config, 1, False, pool, stores)
    chunk = ChunkSpec(0 if is_first else CONTEXT, is_first, "grouped_kernel", "xla")
    definition = model_definition(config, ops.Kernels(GPU.target), holds_experts=False)
    first = steps.PrefillState(state.cache, leaf_of((1, config.model_dim)))
    part = steps.TokenChunk(
        leaf_of((1, tokens), jnp.int32), leaf_of((), jnp.int32), leaf_of((1,), jnp.int32)
    )
    step = functools.partial(steps.prefill_chunk, steps.StepProgram(definition, spec), chunk)
    return compiled(step, (first, pool, inputs, part), (0, 1), spec, True)


def compiled_resident(
    config: ModelConfig, batch: int, pages: Pages | None = None
) -> jax.stages.Compiled:
    """A call of eight steps of a resident model, attention and experts in INT4."""
    program = steps.StepProgram(model_definition(config, ops.Kernels(GPU.target)), None)
    chunk = ChunkSpec(CONTEXT, False, "grouped_kernel", "xla", "kernel")
    step = functools.partial(steps.decode, program, chunk, True, STEPS, True)
    state, *rest = decode_operands(config, batch, pages)
    weights = weights_of(config, leaves_of("attention", "experts"))
    return compiled(step, (state, None, steps.StepInputs(weights, None), *rest), (0,))


def compiled_chunk(config: ModelConfig, batch: int, pages: Pages) -> jax.stages.Compiled:
    """A chunk of a prompt of a running batch, of a resident model."""
    program = steps.StepProgram(model_definition(config, ops.Kernels(GPU.target)), None)
    chunk = ChunkSpec(CONTEXT, False, "grouped_kernel", "xla", "kernel")
    step = functools.partial(steps.prompt_chunk, program, chunk, True, CHUNK)
    state, sampling, eos_ids, _ = decode_operands(config, batch, pages)
    state = state._replace(limits=leaf_of((batch,), jnp.int32))
    row = leaf_of((5 + 2 * pages.of(CONTEXT) + CONTEXT + CHUNK,), jnp.int32)
    weights = weights_of(config, leaves_of("attention", "experts"))
    inputs = steps.StepInputs(weights, None)
    return compiled(step, (state, None, inputs, row, sampling, eos_ids), (0,), is_prefill=True)


def mesh_of_gpus(count: int) -> DeviceMesh:
    """GPUs of one process, which are not there."""
    return DeviceMesh(jax.sharding.Mesh(np.asarray(devices_of(GPU, count)), (MESH_AXIS,)))


def compiled_on_mesh(
    config: ModelConfig, slots: int, mesh: DeviceMesh | None, has_mailboxes: bool = True
) -> tuple[jax.stages.Compiled, Any]:
    """A decode call of a mesh, or of one GPU; with `slots` of a layer, else resident; its pool."""
    has_mailboxes = has_mailboxes and mesh is not None
    count, by_heads = (mesh.size, mesh.splits_heads) if mesh else (1, False)
    if by_heads:
        config = HeadShares(config, count).own
    experts = mesh.handed_out if mesh else None
    if experts is None:
        own = dataclasses.replace(config, expert_dim=config.expert_dim // count)  # of a device
    else:
        own = dataclasses.replace(config, num_experts=experts.shape[2])
    spec, pool, stores = under_no_policy(own, slots, 0) if slots else (None, None, ())
    if spec is not None and experts is not None:
        [one] = spec.tiers
        spec = dataclasses.replace(
            spec, tiers=(dataclasses.replace(one, handed_out=config.num_experts),)
        )
    definition = model_definition(
        config, ops.Kernels(GPU.target), holds_experts=not slots,
        share_axis=MESH_AXIS if mesh else "", by_heads=by_heads, has_mailboxes=has_mailboxes,
    )  # fmt: skip
    chunk = ChunkSpec(CONTEXT, False, "grouped_kernel", "xla", "kernel")
    program = steps.StepProgram(definition, spec)
    step = functools.partial(steps.decode, program, chunk, True, STEPS, True)
    state, *rest = decode_operands(config, 1)
    are_packed = leaves_of("attention") if slots else leaves_of("attention", "experts")
    of_device = weights_of(own, are_packed)
    weights = weights_of(config, are_packed) | {name: of_device[name] for name in EXPERT_LEAVES}
    if slots:
        weights = {name: of for name, of in weights.items() if name not in EXPERT_LEAVES}
    if has_mailboxes:
        weights["peers"] = leaf_of((1, 1 + 2 * count), jnp.int32)
    table = None
    if experts is not None:
        table = leaf_of((1, config.num_layers, config.num_experts), jnp.int32)
    operands = state, pool, steps.StepInputs(weights, tuple(stores) or None, table), *rest
    if mesh is None:
        return compiled(step, operands, (0, 1), spec), pool

    def placed(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        names = {getattr(key, "name", getattr(key, "key", "")) for key in path}
        of_heads = {"cache", *HEAD_LEAVES} if by_heads else set()
        of_own = {"own_experts", "table", "events", "gate"} if experts is not None else set()
        of_shares = {"banks", "apart", "gate_up", "down", "peers", *EXPERT_LEAVES}
        is_split = names & {*of_shares, *of_heads, *of_own}
        shape = (count * leaf.shape[0], *leaf.shape[1:]) if is_split else leaf.shape
        sharding = mesh.split() if is_split else mesh.replicated
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    operands = jax.tree_util.tree_map_with_path(placed, operands)
    parts: Any = (*map(specs_of, operands[:2]), REPLICATED, REPLICATED)
    several = mesh.map(lambda *given: step(*given), operands, steps.StepResult(*parts))
    with described(GPU):
        traced = jax.jit(several, donate_argnums=(0, 1)).trace(*operands)
        lowered = traced.lower(lowering_platforms=("cuda",))
    options = compiler_options(spec.tiers, False) if spec else None
    return lowered.compile(compiler_options=options), pool


def print_mesh() -> None:
    """A line a case: name; bytes of a GPU; launches; sums by XLA, and by `peer_sum`.

    The bytes are temporary ones, aliased ones, and those donated.
    """
    config = with_layers(CONFIGS["Qwen3-30B-A3B"], 2)
    two = mesh_of_gpus(2)
    by_heads = dataclasses.replace(two, splits_heads=True)
    cases = [(name, slots, mesh) for name, slots in (("resident", 0), ("slots", 32))
             for mesh in (None, two)]  # fmt: skip
    halves = _hand_out(np.ones((2, config.num_experts)), 2, config.num_experts // 2)
    apart = dataclasses.replace(two, handed_out=halves)
    of_apart = [("handed_out", 0, apart), ("handed_out_slots", 32, apart)]
    more = [("heads", 0, by_heads), *of_apart, ("without_mailboxes", 0, two)]
    for name, slots, mesh in [*cases, *more]:
        program, pool = compiled_on_mesh(config, slots, mesh, name != "without_mailboxes")
        memory, text = memory_of(program), program.as_text()
        print(
            f"{name}_{mesh.size if mesh else 1}", memory.temp_size_in_bytes,
            memory.alias_size_in_bytes, num_bytes(pool), num_launches(text),
            len(re.findall(r" all-reduce(?:-start)?\(", text)),
            len(re.findall(r" custom-call\(.*peer_sum", text)), flush=True,
        )  # fmt: skip


def memory_of(program: jax.stages.Compiled) -> Any:
    memory = program.memory_analysis()
    assert memory is not None
    return memory


def print_step(name: str, program: jax.stages.Compiled) -> None:
    """Prints a line: temporary bytes, and launches of a step."""
    temporary = memory_of(program).temp_size_in_bytes
    print(name, temporary, num_launches(program.as_text()), flush=True)


def num_launches(text: str) -> int:
    """Launches of the largest computation: the step, which a loop runs."""
    computations = re.split(r"\n(?=\S[^\n]*\{\n)", text)
    return max(sum(bool(LAUNCH.search(line)) for line in of.split("\n")) for of in computations)


def print_pools() -> None:
    """A line a case: name; temporary bytes and their bound; aliased ones, and those donated."""

    def show(label: str, program: jax.stages.Compiled, bound: int, donated: Any) -> None:
        memory = memory_of(program)
        temporary, aliased = memory.temp_size_in_bytes, memory.alias_size_in_bytes
        print(label, temporary, bound, aliased, num_bytes(donated), flush=True)

    for name, config in SMALL.items():
        config = dataclasses.replace(config, num_layers=3, moe_layers=(0, 1, 2))
        for slots, ahead, batch, is_plain in CASES:
            cached = under_no_policy(config, slots, ahead)
            label = f"{name}_{slots}_slots_{ahead}_ahead_{batch}_sequences_{is_plain}"
            show(label, compiled_decode(config, cached, batch, is_plain), MOST_BYTES, cached[1])
        # In a loop; one layer is left after it where there are two banks.
        config = dataclasses.replace(config, num_layers=5, moe_layers=tuple(range(5)))
        kv = jax.eval_shape(lambda of=config: empty_cache(of, 1, CONTEXT, HALF))
        for number, (slots, ahead, apart) in enumerate(CHUNKS):
            is_first, cached = number % 2 == 0, under_no_policy(config, slots, ahead, apart)
            bank = num_bytes(cached[1].tiers[0].banks[0])
            label = f"{name}_{slots}_slots_{ahead}_ahead_{apart}_apart_chunk"
            show(label, compiled_prefill(config, cached, is_first), bank, (kv, cached[1]))


def print_tiers() -> None:
    """A line a case: name; temporary bytes, and launches of a step."""
    for name, case in {"ahead": LOOKS_AHEAD, **POLICIES}.items():
        config = with_layers(CONFIGS[case.shape], LAYERS)
        spec, pool, stores = under_policy(case, config)
        replayed = (with_replay(stores[0], config), *stores[1:])
        for way, rows in (("routed", stores), ("replayed", replayed)):
            print_step(f"{name}_{way}", compiled_decode(config, (spec, pool, rows)))
    config = with_layers(CONFIGS["Qwen3-30B-A3B"], LAYERS)
    alone = under_no_policy(config, 13, 0)
    for name, cached in (("alone", alone), ("beside_the_host", with_jobs(alone, config))):
        print_step(name, compiled_decode(config, cached))


def print_terms() -> None:
    """A line: temporary bytes of a prompt in waves, experts with compensators, and planned ones."""
    config = with_layers(CONFIGS["Qwen3-30B-A3B"], LAYERS)
    spec, pool, store = tier(config, 40, 3, transient=26, banks=1, ahead=0)
    terms = jax.eval_shape(lambda: expert_terms(config, Packing(bits=3, expert_rank=16)))
    spec = dataclasses.replace(spec, is_complete=False)
    store = dataclasses.replace(store, terms=terms)
    cached = CacheSpec(None, ("stored",), (spec,)), ExpertCache((pool,), (), None), (store,)
    memory = memory_of(compiled_prefill(config, cached, True, CONTEXT))
    run = RunSizes(
        config=config, weights_nbytes={}, batch=1, context=CONTEXT, chunk=CONTEXT, platform="gpu",
        stores_scores=False, copies_cache=False,
    )  # fmt: skip
    planned = workspace_nbytes(run, is_packed=True, has_terms=True)
    print("terms", memory.temp_size_in_bytes, planned, flush=True)


def print_pages() -> None:
    """A line a case: name; temporary bytes; launches, or of a chunk aliased and cached bytes."""
    config = with_layers(CONFIGS["Qwen3-30B-A3B"], 2)
    paged = Pages(8 * Pages(0).of(CONTEXT))
    for name, pages in (("one_piece", None), ("pages", paged)):
        print_step(name, compiled_resident(config, 8, pages))
    for batch in (8, 64):
        pages = Pages(batch * Pages(0).of(CONTEXT))
        memory = memory_of(compiled_chunk(config, batch, pages))
        cache = num_bytes(decode_operands(config, batch, pages)[0].cache)
        aliased = memory.alias_size_in_bytes
        print(f"chunk_{batch}", memory.temp_size_in_bytes, aliased, cache, flush=True)


def print_resident(shape: str, layers: int, batch: int) -> None:
    program = compiled_resident(with_layers(CONFIGS[shape], layers), batch)
    print(
        f"{shape}, {layers} layers, batch {batch}: "
        f"{num_launches(program.as_text())} launches a step, "
        f"{memory_of(program).temp_size_in_bytes / 1e6:.1f} MB of temporary memory"
    )


PRINTED: dict[str, Callable[[], None]] = {
    "pools": print_pools, "tiers": print_tiers, "terms": print_terms, "mesh": print_mesh,
    "pages": print_pages,
}  # fmt: skip


def main() -> None:
    """Prints one of the six."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=[*PRINTED, *sorted(CONFIGS)])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    given = parser.parse_args()
    os.environ[SKIP_CHECKS] = "1"
    mock.patch.object(op, "current_target", lambda: GPU.target).start()
    for package in pkgutil.iter_modules(pallas_kernels.__path__):
        if package.ispkg and importlib.util.find_spec(f"pallas_kernels.{package.name}.api"):
            api = importlib.import_module(f"pallas_kernels.{package.name}.api")
            if hasattr(api, "current_target"):
                mock.patch.object(api, "current_target", lambda: GPU.target).start()
    if given.what in PRINTED:
        PRINTED[given.what]()
    else:
        print_resident(given.what, given.layers, given.batch)


if __name__ == "__main__":
    main()
