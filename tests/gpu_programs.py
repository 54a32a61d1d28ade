"""The packed products as programs for GPUs that are not there: lowered, or compiled in full.

    python -m tests.gpu_programs H100      # compiles all for one GPU; needs JAX's CUDA plugin

Compiling needs the plugin's wheels (`pip install "jax[cuda13]"`) and no GPU.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import host_job, layout
from pallas_kernels.chunk_attention import ChunkTiles
from pallas_kernels.chunk_attention import triton as chunk_triton
from pallas_kernels.decode_attention import Latent
from pallas_kernels.decode_attention import triton as attention_triton
from pallas_kernels.delta_step import DeltaWeights, Projection
from pallas_kernels.delta_step import triton as delta_triton
from pallas_kernels.dequant_matmul import triton as dense_triton
from pallas_kernels.dequant_matmul.low_rank import MAX_FEW_ROWS
from pallas_kernels.gating import SWIGLU, Gating
from pallas_kernels.grouped_dequant_matmul import Assignments
from pallas_kernels.grouped_dequant_matmul import mosaic as grouped_mosaic
from pallas_kernels.grouped_dequant_matmul import triton as grouped_triton
from pallas_kernels.mosaic_decode.low_rank_spec import MAX_RANK
from pallas_kernels.packed import LowRank, PackedMatrices, Refinement
from pallas_kernels.peer_sum import triton as sum_triton
from pallas_kernels.qkv_to_cache import HeadNorms
from pallas_kernels.qkv_to_cache import triton as writing_triton
from pallas_kernels.residual_norm import triton as norm_triton
from pallas_kernels.router_topk import triton as router_triton
from pallas_kernels.target import Target
from tests.gpu_plans import buddies, plan, planes
from tests.gpu_targets import GPUS, SKIP_CHECKS, Program, devices_of, leaf
from tests.packed_operands import Form


def shapes_of_matrices(form: Form, slots: int, rows: int, inputs: int) -> PackedMatrices:
    """Matrices as shapes."""
    part = functools.partial(leaf, slots, rows)
    if form.bits == 16:
        return PackedMatrices(
            words=part(inputs, dtype=form.dtype), scales=None, zeros=None,
            num_inputs=inputs, bits=16, group_size=inputs,
        )  # fmt: skip
    group_size = form.group_size or inputs
    groups = layout.num_groups(inputs, group_size)
    zero_dtypes = {"float": form.dtype, "integer": "uint8"}
    zeros = zero_dtypes.get(form.zero_kind)
    width, refinements = form.bits, ()
    if form.apart:
        width, *others = form.widths
        refinements = tuple(
            Refinement(
                words=leaf(slots + 1, rows, layout.num_plane_words(inputs, other), dtype="uint32"),
                slots=leaf(slots, dtype="int32"),
            )
            for other in others
        )
    return PackedMatrices(
        words=part(layout.num_plane_words(inputs, width), dtype="uint32"),
        scales=part(groups, dtype="uint8" if form.zero_kind == "mxfp4" else form.dtype),
        zeros=None if zeros is None else part(groups, dtype=zeros),
        num_inputs=inputs, bits=form.bits, group_size=group_size, refinements=refinements,
    )  # fmt: skip


def shapes_of_terms(form: Form, weights: PackedMatrices, rank: int) -> LowRank:
    """Terms of all rows as shapes."""
    form = form._replace(zero_kind="symmetric")
    total = rank * weights.num_slots
    return LowRank(
        u=shapes_of_matrices(form, 1, total, weights.num_outputs),
        v=shapes_of_matrices(form, 1, total, weights.num_inputs),
        start=leaf(weights.num_slots, dtype="int32"), rank=leaf(weights.num_slots, dtype="int32"),
        first_row=0, max_rank=rank,
    )  # fmt: skip


def dense(
    form: Form, rows: int, *, inputs: int = 4096, outputs: int = 14336, rank: int = 0
) -> Program:
    """x [rows, inputs] by one matrix of a stack of three."""
    weights = shapes_of_matrices(form, 3, outputs, inputs)
    low_rank = (shapes_of_terms(Form(3), weights, rank),) if rank else ()

    def function(x: Any, weights: Any, slot: Any, low_rank: Any, target: Target) -> Any:
        return dense_triton.dequant_matmul_triton(
            x, weights, slot, low_rank, out_dtype=jnp.dtype("bfloat16"), target=target
        )

    operands = (leaf(rows, inputs, dtype="bfloat16"), weights, leaf(dtype="int32"), low_rank)
    # Large ranks have launches of their own; many rows multiply by them without one.
    launches = 1 if rank > MAX_RANK and rows > MAX_FEW_ROWS else 1 + (rank > 0) + (rank > MAX_RANK)
    return Program(function, operands, (weights,), launches)


def layer(
    forms: tuple[Form, ...], tokens: int, *, width: int, model_dim: int, expert_dim: int,
    slots: int = 16, rank: int = 0, gating: Gating = SWIGLU, are_given: bool = False,
    is_streamed: bool = False,
) -> Program:  # fmt: skip
    """A MoE layer with a tier of each form; with another gating than SwiGLU there are biases.

    Args:
      are_given: whether products without terms are operands.
      is_streamed: whether Mosaic's kernels for few tokens serve them where they run.
    """
    gate_up = [shapes_of_matrices(form, slots, 2 * expert_dim, model_dim) for form in forms]
    down = [shapes_of_matrices(form, slots, model_dim, expert_dim) for form in forms]
    terms = [
        [(shapes_of_terms(Form(3), stack, rank),) if rank else () for stack in stacks]
        for stacks in (gate_up, down)
    ]

    def function(
        x: Any, pairs: Any, gate_up: Any, down: Any, terms: Any, bias: Any, given: Any,
        target: Target,
    ) -> Any:  # fmt: skip
        if is_streamed and target.capability == (9, 0):
            mosaic = grouped_mosaic.product_mosaic
            hidden = mosaic(x, pairs, gate_up, terms[0], None, target, gating=gating)
            return mosaic(hidden, pairs, down, terms[1], None, target)
        triton = grouped_triton.product_triton
        hidden = triton(x, pairs, gate_up, terms[0], None, target, bias, gating, given[0])
        return triton(hidden, pairs, down, terms[1], None, target, products=given[1])

    index, weight = (leaf(tokens, width, dtype=dtype) for dtype in ("int32", "float32"))
    pairs = Assignments(index, index, weight)
    bias = leaf(tokens, width, 2 * expert_dim, dtype="bfloat16") if gating != SWIGLU else None
    given = [
        leaf(tokens, width, size, dtype="float32") if are_given else None
        for size in (2 * expert_dim, model_dim)
    ]
    operands = (leaf(tokens, model_dim, dtype="bfloat16"), pairs, gate_up, down, terms, bias, given)
    return Program(function, operands, (*gate_up, *down), 5 if rank else 3)


def chunk_attention(
    batch: int, num_kv: int, *, chunk: int = 1024, length: int = 4096, head_dim: int = 128,
    num_heads: int = 32, num_layers: int = 32, window: int | None = None,
    tiles: ChunkTiles | None = None,
) -> Program:  # fmt: skip
    """Attention of a chunk to a whole cache; no packed weights."""

    def function(*operands: Any, target: Target) -> Any:
        return chunk_triton.chunk_attention_triton(
            *operands, kv_length=length, window=window, scale=float(head_dim) ** -0.5,
            target=target, tiles=tiles,
        )  # fmt: skip

    cache = leaf(num_layers, batch, num_kv, length, head_dim, dtype="bfloat16")
    q = leaf(batch, chunk, num_heads, head_dim, dtype="bfloat16")
    rows = leaf(batch, dtype="int32")
    return Program(function, (q, cache, cache, leaf(dtype="int32"), rows, rows), (), 1)


def attention(
    batch: int, num_kv: int, *, kv_length: int = 1024, length: int = 4096, head_dim: int = 128,
    num_heads: int = 32, num_layers: int = 32, window: int | None = None, more_dim: int = 0,
    has_sinks: bool = False,
) -> Program:  # fmt: skip
    """Decode attention over a whole cache; no packed weights."""

    def queries(width: int) -> Any:
        return leaf(batch, num_heads, width, dtype="bfloat16")

    def cache(width: int) -> Any:
        return leaf(num_layers, batch, num_kv, length, width, dtype="bfloat16")

    latent = Latent(queries(more_dim), cache(more_dim))

    def function(*operands: Any, target: Target) -> Any:
        return attention_triton.decode_attention_triton(
            *operands, kv_length=kv_length, window=window,
            scale=float(head_dim + more_dim) ** -0.5, target=target,
        )  # fmt: skip

    values = latent if more_dim else cache(head_dim)
    numbers = (leaf(dtype="int32"), leaf(batch, dtype="int32"))
    sinks = (leaf(num_layers, num_heads, dtype="bfloat16"),) if has_sinks else ()
    operands = (queries(head_dim), cache(head_dim), values, *numbers, *sinks)
    return Program(function, operands, (), 2)


def router(
    num_tokens: int, num_experts: int, chosen: int, normalise: bool = True, has_first: bool = False
) -> Program:
    """Softmax and top-k of a router's products; no weights."""

    def function(logits: Any, first: Any, target: Target) -> Any:
        return router_triton.top_k_triton(
            logits, first, k=chosen, normalise=normalise, target=target
        )

    first = leaf(dtype="int32") if has_first else None
    return Program(function, (leaf(num_tokens, num_experts, dtype="float32"), first), (), 1)


def norm(
    num_rows: int, width: int, *, num_layers: int = 48, has_delta: bool = True,
    zero_centred: bool = False,
) -> Program:  # fmt: skip
    """A residual sum and its norm; no packed weights."""
    x = leaf(num_rows, width, dtype="bfloat16")

    def function(x: Any, delta: Any, scales: Any, layer: Any, target: Target) -> Any:
        how = {"eps": 1e-6, "zero_centred": zero_centred, "target": target}
        return norm_triton.residual_norm_triton(x, delta, scales, layer, **how)

    scales = leaf(num_layers, width, dtype="bfloat16")
    operands = (x, x if has_delta else None, scales, leaf(dtype="int32"))
    return Program(function, operands, (), 1)


def peers(num_devices: int, *sizes: int) -> Program:
    """A device's part of a sum over several, x [sizes]; no packed weights."""

    def function(x: Any, peers: Any, target: Target) -> Any:
        how: dict[str, Any] = {"axis": "", "dtype": jnp.dtype("bfloat16"), "target": target}
        return sum_triton.peer_sum_triton(x, peers, **how)

    rows = leaf(1, 1 + 2 * num_devices, dtype="int32")
    return Program(function, (leaf(*sizes, dtype="float32"), rows), (), 1)


def writing(
    batch: int, num_kv: int, *, length: int = 4096, head_dim: int = 128, num_heads: int = 32,
    num_layers: int = 32, has_norms: bool = True,
) -> Program:  # fmt: skip
    """Queries and cache from a token's products; no packed weights."""
    cache = leaf(num_layers, batch, num_kv, length, head_dim, dtype="bfloat16")
    scales = leaf(num_layers, head_dim, dtype="bfloat16") if has_norms else None
    angles = leaf(batch, head_dim // 2, dtype="float32")
    index, positions = leaf(dtype="int32"), leaf(batch, dtype="int32")

    def function(*operands: Any, target: Target) -> Any:
        *others, q_scales, k_scales = operands
        norms = HeadNorms(q_scales, k_scales, 1e-6) if has_norms else None
        return writing_triton.qkv_to_cache_triton(*others, norms, target=target)

    qkv = leaf(batch, (num_heads + 2 * num_kv) * head_dim, dtype="bfloat16")
    operands = (qkv, cache, cache, index, positions, angles, angles, scales, scales)
    return Program(function, operands, (), 1)


def delta(batch: int, *, num_layers: int = 36, rows_by_head: bool = True) -> Program:
    """A token's delta rule at the shape of Qwen3-Next and Qwen3.5; no packed weights."""
    keys, values, dim, taps = 16, 32, 128, 4
    channels = (2 * keys + values) * dim
    bf16, wide = (functools.partial(leaf, dtype=dtype) for dtype in ("bfloat16", "float32"))
    projection = Projection(bf16(batch, channels + values * dim), wide(batch, 2 * values))
    weights = DeltaWeights(
        conv=bf16(num_layers, channels, 1, taps), dt_bias=wide(num_layers, values),
        a_log=wide(num_layers, values), norm=bf16(num_layers, dim),
    )  # fmt: skip

    def function(*operands: Any, target: Target) -> Any:
        how = {"eps": 1e-6, "floor": 1e-6, "rows_by_head": rows_by_head}
        return delta_triton.delta_step_triton(*operands, **how, target=target)

    states = wide(num_layers, batch, values, dim, dim)
    tails = bf16(num_layers, batch, taps - 1, channels)
    index, active = leaf(dtype="int32"), leaf(batch, dtype="bool")
    return Program(function, (projection, states, tails, weights, index, active), (), 2)


QWEN = {"width": 8, "model_dim": 2048, "expert_dim": 768}
MIXTRAL = {"width": 2, "model_dim": 4096, "expert_dim": 14336, "slots": 8}
CLAMPED = Gating(alpha=1.702, limit=7.0, up_offset=1.0)
OSS: dict[str, Any] = {"width": 4, "model_dim": 2880, "expert_dim": 2880, "gating": CLAMPED}
PLAIN, MXFP4 = Form(16, dtype="bfloat16"), Form(4, 32, "mxfp4")
APART, APART_INT3 = Form(4, apart="own"), Form(3, apart="own")


# Made when asked for: the heuristics of tiles need a target, but no GPU.
def host_layer(width: int, model_dim: int, **_: Any) -> Program:
    """A job for the host's cores and its reply."""

    def function(x: Any, y: Any, rows: Any, weights: Any, state: Any, target: Target) -> Any:
        del target
        address = jnp.zeros(2, jnp.int32)
        sent = host_job.post(x, rows, weights, state, address)
        return host_job.add_reply(y, rows, sent, address, jnp.dtype("bfloat16"))

    numbers = (leaf(1, model_dim, dtype=name) for name in ("bfloat16", "float32"))
    job = leaf(1, width, dtype="int32"), leaf(1, width, dtype="float32"), leaf(2, dtype="int32")
    return Program(function, (*numbers, *job), (), 2)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "dense_decode_int3": lambda: dense(Form(3), 1),
    "dense_decode_int3_rank_32": lambda: dense(Form(3), 4, rank=32),
    "dense_prefill_int3": lambda: dense(Form(3), 1024),
    "dense_decode_int2": lambda: dense(Form(2, 128, "integer"), 16, inputs=14336, outputs=4096),
    "dense_decode_int4": lambda: dense(Form(4, 32, "symmetric"), 16),
    "dense_decode_int8_by_row": lambda: dense(Form(8, 0, dtype="float32"), 3),
    "dense_prefill_int4_rank_32": lambda: dense(Form(4), 300, rank=32),
    "dense_decode_int3_rank_1024": lambda: dense(Form(3), 1, rank=1024),
    "dense_decode_int4_rank_512": lambda: dense(Form(4), 32, rank=512),
    "dense_prefill_int3_rank_512": lambda: dense(Form(3), 1024, rank=512),
    "dense_prefill_int8": lambda: dense(Form(8), 1024),
    "dense_prefill_plain": lambda: dense(PLAIN, 1024),
    "dense_plain": lambda: dense(PLAIN, 16),
    "dense_decode_planes": lambda: dense(APART, 1),
    "dense_prefill_planes": lambda: dense(APART, 1024),
    "layer_decode_planes": lambda: layer((APART, Form(2)), 4, **QWEN),
    "layer_prefill_planes": lambda: layer((APART_INT3,), 1024, **MIXTRAL),
    "dense_decode_mxfp4": lambda: dense(MXFP4, 4),
    "layer_decode_mxfp4": lambda: layer((MXFP4, Form(2)), 1, **OSS),
    "layer_prefill_mxfp4": lambda: layer((MXFP4,), 512, **OSS),
    "attention_gpt_oss": lambda: attention(
        1, 8, head_dim=64, num_heads=64, num_layers=36, window=128, has_sinks=True
    ),
    "layer_decode": lambda: layer((Form(4), Form(2)), 1, **QWEN),
    "layer_decode_int3_rank_16": lambda: layer((Form(3),), 4, rank=16, **MIXTRAL),
    "layer_decode_16_tokens_rank_16": lambda: layer(
        (Form(3),), 16, rank=16, is_streamed=True, **MIXTRAL
    ),
    "layer_decode_32_tokens": lambda: layer((Form(4),), 32, **QWEN),
    "layer_decode_three_tiers": lambda: layer((Form(4), Form(2), PLAIN), 4, **QWEN),
    "layer_prefill": lambda: layer((Form(4), Form(2)), 2048, **QWEN),
    "layer_prefill_int3_rank_16": lambda: layer((Form(3),), 1024, rank=16, **MIXTRAL),
    "layer_prefill_given_rank_16": lambda: layer(
        (Form(3),), 1024, rank=16, are_given=True, **MIXTRAL
    ),
    "attention_qwen": lambda: attention(1, 4),
    "attention_mixtral_32": lambda: attention(32, 8, kv_length=4096),
    "attention_mixtral_window": lambda: attention(4, 8, window=1000),
    "attention_demo": lambda: attention(1, 2, head_dim=64, num_heads=4, length=512, kv_length=500),
    "attention_32_bits": lambda: attention(1, 8, length=512, kv_length=512, num_heads=40),
    "attention_latent": lambda: attention(
        1, 1, kv_length=4096, head_dim=512, num_heads=16, num_layers=27, more_dim=64
    ),
    "attention_qwen3_next": lambda: attention(1, 2, head_dim=256, num_heads=16, num_layers=12),
    "attention_wide": lambda: attention(2, 1, head_dim=256, num_heads=64, num_layers=2),
    "chunk_qwen": lambda: chunk_attention(1, 4),
    "chunk_mixtral_window": lambda: chunk_attention(4, 8, window=1000),
    "chunk_demo": lambda: chunk_attention(1, 2, chunk=16, head_dim=64, num_heads=4, length=512),
    "chunk_qwen3_next": lambda: chunk_attention(1, 2, head_dim=256, num_heads=16, num_layers=12),
    "chunk_32_bits": lambda: chunk_attention(8, 8, num_layers=65),
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
    "sum_of_2": lambda: peers(2, 1, 2048),
    "sum_of_8": lambda: peers(8, 64, 2880),
    "writing_qwen": lambda: writing(1, 4),
    "writing_mixtral_64": lambda: writing(64, 8, has_norms=False, num_layers=2),
    "writing_demo": lambda: writing(1, 2, head_dim=64, num_heads=4, length=512),
    "writing_32_bits": lambda: writing(32, 8, num_layers=64),
    "writing_wide": lambda: writing(2, 1, head_dim=256, num_heads=64, num_layers=2),
    "writing_narrow": lambda: writing(2, 2, head_dim=16, num_heads=4, num_layers=2),
    "delta_qwen3_next": lambda: delta(1),
    "delta_qwen3_next_64": lambda: delta(64),
    "delta_qwen3_5": lambda: delta(1, num_layers=30, rows_by_head=False),
    "dense_router": lambda: dense(PLAIN, 1, inputs=2048, outputs=128),
    "dense_router_32": lambda: dense(PLAIN, 32, inputs=2048, outputs=512),
    "plan_beside_the_host": lambda: plan((13,), num_experts=128, pairs=8, by_host=True),
    "host_job": lambda: host_layer(**QWEN),
    "host_job_oss": lambda: host_layer(**OSS),
    "plan_qwen": lambda: plan((24,), num_experts=128, pairs=8),
    "plan_waves": lambda: plan((24,), num_experts=128, pairs=32, tokens=4, waves=2),
    "plan_no_cache": lambda: plan((0,), num_experts=128, pairs=8, waves=1),
    "plan_by_rule": lambda: plan((64, 8), num_experts=128, pairs=8, by_rule=True),
    "plan_tokens_by_rule": lambda: plan((64, 8), num_experts=128, pairs=32, tokens=4, by_rule=True),
    "plan_32_tokens_by_rule": lambda: plan(
        (32, 128), num_experts=128, pairs=256, tokens=32, by_rule=True
    ),
    "plan_mixtral_32": lambda: plan((6,), num_experts=8, pairs=64),
    "plan_tiers_qwen": lambda: plan((32, 128), num_experts=128, pairs=8),
    "plan_tiers_mixtral": lambda: plan((4, 3), num_experts=8, pairs=2),
    "plan_tiers_streaming": lambda: plan((4, 0), num_experts=8, pairs=2),
    "plan_planes_qwen": lambda: planes(110, num_experts=128, pairs=8),
    "plan_planes_waves": lambda: planes(110, num_experts=128, pairs=128, tokens=16, waves=8),
    "plan_planes_mixtral": lambda: planes(6, num_experts=8, pairs=2),
    "plan_planes_next": lambda: planes(800, num_experts=512, pairs=10),
    "plan_planes_next_waves": lambda: planes(434, num_experts=512, pairs=160, tokens=16, waves=20),
    "predict_planes_next": lambda: planes(1023, num_experts=512, pairs=10, ahead=10),
    "predict_planes_qwen": lambda: planes(110, num_experts=128, pairs=16, tokens=2, ahead=16),
    "buddies_qwen": lambda: buddies(8, 128, 16),
    "buddies_by_pair": lambda: buddies(8, 128, 16, by_pair=True),
    "buddies_8_tokens": lambda: buddies(8, 64, 8),
    "router_from": lambda: router(1, 128, 8, has_first=True),
    "router_most": lambda: router(2, router_triton.MAX_EXPERTS, router_triton.MAX_CHOSEN),
}


def main(names: list[str]) -> None:
    """Compiles every program for the GPUs; a line each, with the compiler's complaint if it has."""
    os.environ[SKIP_CHECKS] = "1"
    for name in names:
        gpu = GPUS[name]
        mesh = jax.sharding.Mesh(devices_of(gpu), ("gpu",))
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
