"""The packed products as programs for GPUs that are not there: lowered, or compiled in full.

    python -m tests.gpu_programs H100      # compiles all for one GPU; needs JAX's CUDA plugin

Compiling needs the plugin's wheels (`pip install "jax[cuda13]"`) and no GPU.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.ledger import no_counts
from moejax.memory import residency
from moejax.memory.placing import COLUMNS, tables_of
from moejax.memory.residency import CacheSpec
from pallas_kernels import layout, residency_plan, tiered_plan
from pallas_kernels.buddy_search import triton as buddy_triton
from pallas_kernels.decode_attention import triton as attention_triton
from pallas_kernels.dequant_matmul import triton as dense_triton
from pallas_kernels.grouped_dequant_matmul import Assignments
from pallas_kernels.grouped_dequant_matmul import triton as grouped_triton
from pallas_kernels.packed import LowRank, PackedMatrices
from pallas_kernels.qkv_to_cache import HeadNorms
from pallas_kernels.qkv_to_cache import triton as writing_triton
from pallas_kernels.residency_plan import triton as plan_triton
from pallas_kernels.residual_norm import triton as norm_triton
from pallas_kernels.router_topk import triton as router_triton
from pallas_kernels.target import Target
from pallas_kernels.tiered_plan import triton as tiered_triton
from tests.packed_operands import Form

SKIP_CHECKS = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # the plugin looks for CUDA libraries otherwise


class Gpu(NamedTuple):
    """What NVIDIA's data sheets and CUDA's table of compute capabilities say."""

    kind: str
    capability: tuple[int, int]
    num_processors: int
    shared_kib: int  # of a multiprocessor; a program may have 1 KiB less
    threads: int  # of a multiprocessor
    l2_mib: int
    bandwidth_gb: int  # a second

    @property
    def target(self) -> Target:
        return Target("gpu", self.capability, self.num_processors)

    @property
    def description(self) -> str:
        """XLA's text proto of it."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 fpus_per_core: 128
              shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_kib << 10}
              shared_memory_per_block_optin: {self.shared_kib - 1 << 10}
              threads_per_core_limit: {self.threads} core_count: {self.num_processors}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth_gb}000000000 l2_cache_size: {self.l2_mib << 20}
              clock_rate_ghz: 1.7 device_memory_size: 23622320128
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.kind}"
        """


GPUS = {
    "A100": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 164, 2048, 40, 1555),
    "A10": Gpu("NVIDIA A10", (8, 6), 72, 100, 1536, 6, 600),
    "L4": Gpu("NVIDIA L4", (8, 9), 58, 100, 1536, 48, 300),
    "H100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 228, 2048, 50, 3352),
    "B200": Gpu("NVIDIA B200", (10, 0), 148, 228, 2048, 126, 8000),
    "RTX_PRO_6000": Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, 100, 1536,
                        128, 1597),
}  # fmt: skip


@contextlib.contextmanager
def described(gpu: Gpu) -> Iterator[None]:
    """From jax 0.11.2 on, Triton's lowering asks for a device: an abstract one does."""
    if jax.__version_info__ < (0, 11, 2):
        yield
        return
    device = jax.sharding.AbstractDevice(device_kind=gpu.kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


class Program(NamedTuple):
    """A product by Triton: its function for a target, its operands' shapes."""

    function: Callable[..., Any]  # takes `target`
    operands: tuple[Any, ...]
    weights: tuple[PackedMatrices, ...]  # among the operands
    max_launches: int

    def lower(self, gpu: Gpu, sharding: Any = None) -> Any:
        """For CUDA; `sharding` of every operand."""

        def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        function = jax.jit(functools.partial(self.function, target=gpu.target))
        with described(gpu):
            traced = function.trace(*jax.tree.map(placed, self.operands))
            return traced.lower(lowering_platforms=("cuda",))


def shapes_of_matrices(form: Form, slots: int, rows: int, inputs: int) -> PackedMatrices:
    """Matrices as shapes."""
    leaf = functools.partial(_leaf, slots, rows)
    if form.bits == 16:
        return PackedMatrices(
            words=leaf(inputs, dtype=form.dtype), scales=None, zeros=None,
            num_inputs=inputs, bits=16, group_size=inputs,
        )  # fmt: skip
    group_size = form.group_size or inputs
    groups = layout.num_groups(inputs, group_size)
    zero_dtypes = {"float": form.dtype, "integer": "uint8"}
    zeros = zero_dtypes.get(form.zero_kind)
    return PackedMatrices(
        words=leaf(layout.num_words(inputs, form.bits), dtype="uint32"),
        scales=leaf(groups, dtype=form.dtype),
        zeros=None if zeros is None else leaf(groups, dtype=zeros),
        num_inputs=inputs, bits=form.bits, group_size=group_size,
    )  # fmt: skip


def shapes_of_terms(form: Form, weights: PackedMatrices, rank: int) -> LowRank:
    """Terms of all rows as shapes."""
    form = form._replace(zero_kind="symmetric")
    total = rank * weights.num_slots
    return LowRank(
        u=shapes_of_matrices(form, 1, total, weights.num_outputs),
        v=shapes_of_matrices(form, 1, total, weights.num_inputs),
        start=_leaf(weights.num_slots, dtype="int32"), rank=_leaf(weights.num_slots, dtype="int32"),
        first_row=0, max_rank=rank,
    )  # fmt: skip


def _leaf(*sizes: int, dtype: str) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def dense(
    form: Form, rows: int, *, inputs: int = 4096, outputs: int = 14336, rank: int = 0
) -> Program:
    """x [rows, inputs] by one matrix of a stack of three."""
    weights = shapes_of_matrices(form, 3, outputs, inputs)
    low_rank = (shapes_of_terms(Form(3), weights, rank),) if rank else ()

    def function(x: Any, weights: Any, slot: Any, low_rank: Any, target: Target) -> Any:
        return dense_triton.dequant_matmul_triton(
            x, weights, slot, low_rank, jnp.dtype("bfloat16"), None, target, False
        )

    operands = (_leaf(rows, inputs, dtype="bfloat16"), weights, _leaf(dtype="int32"), low_rank)
    return Program(function, operands, (weights,), 2 if rank else 1)


def layer(
    forms: tuple[Form, ...], tokens: int, *, width: int, model_dim: int, expert_dim: int,
    slots: int = 16, rank: int = 0,
) -> Program:  # fmt: skip
    """A MoE layer with a tier of each form."""
    gate_up = [shapes_of_matrices(form, slots, 2 * expert_dim, model_dim) for form in forms]
    down = [shapes_of_matrices(form, slots, model_dim, expert_dim) for form in forms]
    terms = [
        [(shapes_of_terms(Form(3), stack, rank),) if rank else () for stack in stacks]
        for stacks in (gate_up, down)
    ]

    def function(x: Any, pairs: Any, gate_up: Any, down: Any, terms: Any, target: Target) -> Any:
        hidden = grouped_triton.gate_up_triton(x, pairs, gate_up, terms[0], None, target, False)
        return grouped_triton.down_triton(hidden, pairs, down, terms[1], None, target, False)

    index, weight = (_leaf(tokens, width, dtype=dtype) for dtype in ("int32", "float32"))
    pairs = Assignments(index, index, weight)
    operands = (_leaf(tokens, model_dim, dtype="bfloat16"), pairs, gate_up, down, terms)
    return Program(function, operands, (*gate_up, *down), 5 if rank else 3)


def attention(
    batch: int, num_kv: int, *, kv_length: int = 1024, length: int = 4096, head_dim: int = 128,
    num_heads: int = 32, num_layers: int = 32, window: int | None = None,
) -> Program:  # fmt: skip
    """Decode attention over a whole cache; no packed weights."""
    q = _leaf(batch, num_heads, head_dim, dtype="bfloat16")
    cache = _leaf(num_layers, batch, num_kv, length, head_dim, dtype="bfloat16")

    def function(q: Any, keys: Any, values: Any, index: Any, positions: Any, target: Target) -> Any:
        return attention_triton.decode_attention_triton(
            q, keys, values, index, positions, kv_length=kv_length, window=window, tiles=None,
            target=target, interpret=False,
        )  # fmt: skip

    operands = (q, cache, cache, _leaf(dtype="int32"), _leaf(batch, dtype="int32"))
    return Program(function, operands, (), 2)


def router(
    num_tokens: int, num_experts: int, chosen: int, normalise: bool = True, has_first: bool = False
) -> Program:
    """Softmax and top-k of a router's products; no weights."""

    def function(logits: Any, first: Any, target: Target) -> Any:
        del target  # the same for all
        return router_triton.top_k_triton(
            logits, first, k=chosen, normalise=normalise, interpret=False
        )

    first = _leaf(dtype="int32") if has_first else None
    return Program(function, (_leaf(num_tokens, num_experts, dtype="float32"), first), (), 1)


def norm(
    num_rows: int, width: int, *, num_layers: int = 48, has_delta: bool = True,
    zero_centred: bool = False,
) -> Program:  # fmt: skip
    """A residual sum and its norm; no packed weights."""
    x = _leaf(num_rows, width, dtype="bfloat16")

    def function(x: Any, delta: Any, scales: Any, layer: Any, target: Target) -> Any:
        del target  # the same for all
        how = {"eps": 1e-6, "zero_centred": zero_centred, "interpret": False}
        return norm_triton.residual_norm_triton(x, delta, scales, layer, **how)

    scales = _leaf(num_layers, width, dtype="bfloat16")
    operands = (x, x if has_delta else None, scales, _leaf(dtype="int32"))
    return Program(function, operands, (), 1)


def writing(
    batch: int, num_kv: int, *, length: int = 4096, head_dim: int = 128, num_heads: int = 32,
    num_layers: int = 32, has_norms: bool = True,
) -> Program:  # fmt: skip
    """Queries and cache from a token's products; no packed weights."""
    cache = _leaf(num_layers, batch, num_kv, length, head_dim, dtype="bfloat16")
    scales = _leaf(num_layers, head_dim, dtype="bfloat16") if has_norms else None
    angles = _leaf(batch, head_dim // 2, dtype="float32")
    index, positions = _leaf(dtype="int32"), _leaf(batch, dtype="int32")

    def function(*operands: Any, target: Target) -> Any:
        del target  # the same for all
        *others, q_scales, k_scales = operands
        norms = HeadNorms(q_scales, k_scales, 1e-6) if has_norms else None
        return writing_triton.qkv_to_cache_triton(*others, norms, interpret=False)

    qkv = _leaf(batch, (num_heads + 2 * num_kv) * head_dim, dtype="bfloat16")
    operands = (qkv, cache, cache, index, positions, angles, angles, scales, scales)
    return Program(function, operands, (), 1)


def plan(slots: tuple[int, ...], *, num_experts: int, pairs: int, num_layers: int = 48) -> Program:
    """Where a layer's pairs run, of pools of so many slots: one pool, or the tiers of a policy."""
    specs = [
        CacheSpec(num_layers=num_layers, num_experts=num_experts, slots=size, transient=pairs)
        for size in slots
    ]

    def empty() -> list[Any]:
        states = [(residency.empty(spec), no_counts(num_layers)) for spec in specs]
        rows = jnp.zeros((num_layers, num_experts), jnp.int32)
        return [tiered_plan.Tier(tables_of(state), state[0].pinned, rows) for state in states]

    tiers = jax.eval_shape(empty)
    ids, weights = (_leaf(1, pairs, dtype=dtype) for dtype in ("int32", "float32"))
    layer = _leaf(dtype="int32")

    def of_one(tier: Any, layer: Any, ids: Any, weights: Any, target: Target) -> Any:
        del target  # the same for all
        return plan_triton.plan_triton(
            *tier, layer, ids, jnp.ones(1, bool), weights, None, waves=residency_plan.Waves(0, 1),
            banks=1, columns=COLUMNS, num_warps=None, interpret=False,
        )  # fmt: skip

    def of_tiers(tiers: Any, layer: Any, ids: Any, weights: Any, target: Target) -> Any:
        del target
        full = [(size == num_experts,) * 2 + (0 if size else pairs,) for size in slots]
        forms = tuple(tiered_plan.Form(1, *of) for of in full)
        gate = jnp.zeros((num_layers, len(slots) + 3), jnp.float32)
        asked = tiered_plan.Asked(ids, ids % len(slots), weights, ids > 0, ids, weights)
        return tiered_triton.place_triton(
            tuple(tiers), gate, layer, asked, jnp.ones(1, bool), forms=forms, columns=COLUMNS,
            num_warps=None, interpret=False,
        )  # fmt: skip

    if len(slots) == 1:
        return Program(of_one, (tiers[0], layer, ids, weights), (), 1)
    return Program(of_tiers, (tiers, layer, ids, weights), (), 1)


def buddies(pairs: int, num_experts: int, places: int, *, num_layers: int = 48) -> Program:
    """Substitutes of a token's experts."""
    ids, number = _leaf(1, pairs, dtype="int32"), _leaf(dtype="int32")
    lists = _leaf(num_layers, num_experts, places, dtype="int32")

    def function(*operands: Any, target: Target) -> Any:
        del target  # the same for all
        return buddy_triton.search_triton(*operands, last_first=False, interpret=False)

    operands = (
        ids, lists, number, _leaf(num_experts, dtype="bool"), _leaf(1, pairs, dtype="bool"),
        number, number,
    )  # fmt: skip
    return Program(function, operands, (), 1)


QWEN = {"width": 8, "model_dim": 2048, "expert_dim": 768}
MIXTRAL = {"width": 2, "model_dim": 4096, "expert_dim": 14336, "slots": 8}
PLAIN = Form(16, dtype="bfloat16")

# Made when asked for: the heuristics of tiles need a target, but no GPU.
PROGRAMS: dict[str, Callable[[], Program]] = {
    "dense_decode_int3": lambda: dense(Form(3), 1),
    "dense_decode_int3_rank_32": lambda: dense(Form(3), 4, rank=32),
    "dense_prefill_int3": lambda: dense(Form(3), 1024),
    "dense_decode_int2": lambda: dense(Form(2, 128, "integer"), 16, inputs=14336, outputs=4096),
    "dense_decode_int4": lambda: dense(Form(4, 32, "symmetric"), 16),
    "dense_decode_int8_by_row": lambda: dense(Form(8, 0, dtype="float32"), 3),
    "dense_prefill_int4_rank_32": lambda: dense(Form(4), 300, rank=32),
    "dense_prefill_int8": lambda: dense(Form(8), 1024),
    "dense_prefill_plain": lambda: dense(PLAIN, 1024),
    "dense_plain": lambda: dense(PLAIN, 16),
    "layer_decode": lambda: layer((Form(4), Form(2)), 1, **QWEN),
    "layer_decode_int3_rank_16": lambda: layer((Form(3),), 4, rank=16, **MIXTRAL),
    "layer_decode_32_tokens": lambda: layer((Form(4),), 32, **QWEN),
    "layer_decode_three_tiers": lambda: layer((Form(4), Form(2), PLAIN), 4, **QWEN),
    "layer_prefill": lambda: layer((Form(4), Form(2)), 2048, **QWEN),
    "layer_prefill_int3_rank_16": lambda: layer((Form(3),), 1024, rank=16, **MIXTRAL),
    "attention_qwen": lambda: attention(1, 4),
    "attention_mixtral_32": lambda: attention(32, 8, kv_length=4096),
    "attention_mixtral_window": lambda: attention(4, 8, window=1000),
    "attention_demo": lambda: attention(1, 2, head_dim=64, num_heads=4, length=512, kv_length=500),
    "attention_32_bits": lambda: attention(1, 8, length=512, kv_length=512, num_heads=40),
    "attention_wide": lambda: attention(2, 1, head_dim=256, num_heads=64, num_layers=2),
    "router_qwen": lambda: router(1, 128, 8),
    "router_qwen_prefill": lambda: router(2048, 128, 8),
    "router_mixtral": lambda: router(4, 8, 2),
    "router_demo": lambda: router(3, 32, 4, normalise=False),
    "router_odd": lambda: router(5, 60, 5),
    "router_one": lambda: router(1, 1, 1),
    "norm_qwen": lambda: norm(1, 2048),
    "norm_mixtral_64": lambda: norm(64, 4096),
    "norm_widest": lambda: norm(2, norm_triton.MAX_WIDTH, has_delta=False),
    "norm_odd": lambda: norm(3, 200),
    "writing_qwen": lambda: writing(1, 4),
    "writing_mixtral_64": lambda: writing(64, 8, has_norms=False, num_layers=2),
    "writing_demo": lambda: writing(1, 2, head_dim=64, num_heads=4, length=512),
    "writing_32_bits": lambda: writing(32, 8, num_layers=64),
    "writing_wide": lambda: writing(2, 1, head_dim=256, num_heads=64, num_layers=2),
    "writing_narrow": lambda: writing(2, 2, head_dim=16, num_heads=4, num_layers=2),
    "plan_qwen": lambda: plan((24,), num_experts=128, pairs=8),
    "plan_mixtral_32": lambda: plan((6,), num_experts=8, pairs=64),
    "plan_tiers_qwen": lambda: plan((32, 128), num_experts=128, pairs=8),
    "plan_tiers_mixtral": lambda: plan((4, 3), num_experts=8, pairs=2),
    "plan_tiers_streaming": lambda: plan((4, 0), num_experts=8, pairs=2),
    "buddies_qwen": lambda: buddies(8, 128, 16),
    "buddies_8_tokens": lambda: buddies(8, 64, 8),
    "router_from": lambda: router(1, 128, 8, has_first=True),
    "router_most": lambda: router(2, router_triton.MAX_EXPERTS, router_triton.MAX_CHOSEN),
}


def main(names: list[str]) -> None:
    """Compiles every program for the GPUs; a line each, with the compiler's complaint if it has."""
    os.environ[SKIP_CHECKS] = "1"
    from jax.experimental import topologies

    for name in names:
        gpu = GPUS[name]
        devices = topologies.get_topology_desc(
            platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=gpu.description
        ).devices
        mesh = jax.sharding.Mesh(devices, ("gpu",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        for program, make in PROGRAMS.items():
            lowered = make().lower(gpu, sharding)
            try:
                memory = lowered.compile().memory_analysis()
            except jax.errors.JaxRuntimeError as error:
                print(f"{name} {program} FAILED: {str(error).splitlines()[0]}", flush=True)
            else:
                print(f"{name} {program} temporaries: {memory.temp_size_in_bytes}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
