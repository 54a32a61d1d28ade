"""Products of each chosen expert for each token, before the weighted sum, in three forms.

By row and by block they run as plain operations; grouped ones read weights as they are packed, by
`pallas_kernels.grouped_dequant_matmul`.

All take pairs (token n, a) and stacks of experts [M, E, ...] (a resident model) or [1, S, ...] (the
slots of a pool), and yield parts [P, N, A, D] whose sums over P are down_e(gating(gate_e x_n,
up_e x_n)). Biases of gates and ups come with the pairs; those of down are added by `combine`. A
pair's product does not depend on which other pairs are active, to the bit: a layer may run in
several calls, of some pairs each, and `combine` of all of them gives what one call gives.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.models.config import ModelConfig
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from moejax.weights.qtensor import Weight
from pallas_kernels import grouped_dequant_matmul
from pallas_kernels.gating import SWIGLU, Gating
from pallas_kernels.grouped_dequant_matmul import Turn
from pallas_kernels.packed import PLAIN_BITS
from pallas_kernels.target import Choice

# Tokens of plain experts that Triton serves first: 1 to 21 % faster than Mosaic for 1 to 32 of
# Qwen3-30B-A3B's and Mixtral's (H200, jax 0.11.2, 2026-11-22 and 2026-11-24).
FEW_TOKENS = 32


class PairBiases(NamedTuple):
    """Biases of the experts that pairs run, wherever the experts' matrices are."""

    gate_up: jax.Array  # [N, A, 2F]
    down: jax.Array  # [N, A, D]


class ExpertPairs(NamedTuple):
    """The experts that each of N tokens runs, A of them."""

    expert: jax.Array  # int32[N, A], along the second axis of the stacks
    active: jax.Array  # bool[N, A]; what is not costs nothing where a form can help it
    tier: jax.Array | None = None  # int32[N, A], where a plan has it: 0 where active, -1 elsewhere
    biases: PairBiases | None = None


class ExpertStacks(NamedTuple):
    """Two stacks of matrices with equal leading axes, and an index of the first axis."""

    gate_up: Weight  # [M, E, 2F, D]
    down: Weight  # [M, E, D, F]
    layer: Index  # in 0..M - 1


def gated(gate_up: jax.Array, gating: Gating = SWIGLU) -> jax.Array:
    """silu(gate) * up (Shazeer 2020, eq. 6), or another gating: [..., 2F] to [..., F]."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return gating(gate, up)


def combine(
    products: jax.Array, pairs: ExpertPairs, weights: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Sums weights[n, a] product[n, a] over a, in order, in float32: [N, D] in `dtype`.

    Args:
      products: [P, N, A, D]; anything where a pair is not active.
    """
    if pairs.biases is not None:
        first = products[:1].astype(jnp.float32) + pairs.biases.down.astype(jnp.float32)[None]
        products = jnp.concatenate([first, products[1:].astype(jnp.float32)])
    return grouped_dequant_matmul.combine(products, pairs.active, weights, dtype)


def products_by_row(
    x: jax.Array, pairs: ExpertPairs, experts: ExpertStacks, gating: Gating = SWIGLU
) -> jax.Array:
    """Unrolls one slice and two thin products per pair, active or not; `x.dtype`[1, N, A, D]."""

    def matrix(stacked: Weight, index: jax.Array) -> jax.Array:
        return ops.expert_matrix(stacked, experts.layer, index, x.dtype)

    rows = []
    for n in range(x.shape[0]):
        for a in range(pairs.expert.shape[1]):
            index = jnp.maximum(pairs.expert[n, a], 0)
            gate_up = jnp.einsum("nd,fd->nf", x[n : n + 1], matrix(experts.gate_up, index))
            if pairs.biases is not None:
                gate_up = gate_up + pairs.biases.gate_up[n, a][None]
            hidden = gated(gate_up, gating)
            rows.append(jnp.einsum("nf,df->nd", hidden, matrix(experts.down, index)))
    return jnp.concatenate(rows).reshape(1, *pairs.expert.shape, -1)


def block_size(num_rows: int, num_experts: int) -> int:
    """Rows per block: an expert's mean load, as a power of two in 8..512."""
    mean = max(1, num_rows // num_experts)
    return min(512, max(8, 1 << (mean - 1).bit_length()))


def products_by_block(
    x: jax.Array, pairs: ExpertPairs, experts: ExpertStacks, num_experts: int, step_bytes: int,
    gating: Gating = SWIGLU,
) -> jax.Array:  # fmt: skip
    """Sorts pairs by expert, pads them to blocks of one expert, and runs batched products.

    The number of blocks is static: each expert adds at most one partial block. An expert's weights
    are gathered once a block, `step_bytes` at a time.

    Args:
      num_experts: E, different ones that the pairs may have; at most S.
      step_bytes: bytes of weights gathered per scan step; at least one block's.

    Returns:
      `x.dtype`[1, N, A, D], zero where a pair is not active.
    """
    num_slots, width = experts.gate_up.shape[1], pairs.expert.shape[1]
    num_rows = x.shape[0] * width
    rows_per_block = block_size(num_rows, num_experts)
    num_blocks = num_rows // rows_per_block + min(num_experts, num_rows)
    stacks = (experts.gate_up, experts.down)
    expert_bytes = x.dtype.itemsize * sum(math.prod(w.shape[2:]) for w in stacks)
    blocks_per_step = min(num_blocks, max(1, step_bytes // expert_bytes))
    num_steps = -(-num_blocks // blocks_per_step)

    biases = None
    if pairs.biases is not None:
        biases = pairs.biases.gate_up.reshape(num_rows, -1)
    # Rows in order of slot; inactive ones belong to slot S and come last.
    row_slot = jnp.where(pairs.active, pairs.expert, num_slots).reshape(-1)
    order = jnp.argsort(row_slot, stable=True)
    counts = jnp.zeros(num_slots, jnp.int32).at[row_slot].add(1, mode="drop")
    first_row = jnp.cumsum(counts) - counts
    blocks = -(-counts // rows_per_block)
    last_block = jnp.cumsum(blocks)
    block_id = jnp.arange(num_steps * blocks_per_step, dtype=jnp.int32)
    block_slot = jnp.searchsorted(last_block, block_id, side="right").astype(jnp.int32)
    safe_slot = jnp.minimum(block_slot, num_slots - 1)
    offset = (block_id - (last_block - blocks)[safe_slot]) * rows_per_block
    within = offset[:, None] + jnp.arange(rows_per_block, dtype=jnp.int32)[None]
    filled = (within < counts[safe_slot][:, None]) & (block_slot < num_slots)[:, None]
    sorted_row = jnp.where(filled, first_row[safe_slot][:, None] + within, 0)
    row = jnp.where(filled, order[sorted_row].astype(jnp.int32), num_rows)

    def step(outputs: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        rows, slots = inputs  # [blocks_per_step, rows_per_block], [blocks_per_step]
        block_x = x[jnp.minimum(rows // width, x.shape[0] - 1)]
        index = (experts.layer, slots)
        gate_up = ops.matrix(experts.gate_up, index, x.dtype)
        sums = jnp.einsum("zrd,zfd->zrf", block_x, gate_up)
        if biases is not None:
            sums = sums + biases[jnp.minimum(rows, num_rows - 1)]
        hidden = gated(sums, gating)
        out = jnp.einsum("zrf,zdf->zrd", hidden, ops.matrix(experts.down, index, x.dtype))
        return outputs.at[rows].set(out, mode="drop"), None

    outputs = jnp.zeros((num_rows, x.shape[1]), x.dtype)
    steps = (
        row.reshape(num_steps, blocks_per_step, rows_per_block),
        safe_slot.reshape(num_steps, blocks_per_step),
    )
    outputs, _ = jax.lax.scan(step, outputs, steps)
    return outputs.reshape(1, *pairs.expert.shape, -1)


def products_grouped(
    x: jax.Array,
    # `tier` says which of the tiers a pair runs in, -1: it is not active, None: in the only one;
    # `expert` is along the second axis of its tier's stacks
    pairs: ExpertPairs,
    tiers: Sequence[ExpertStacks],
    implementation: str,
    gating: Gating = SWIGLU,
    turn: Turn | None = None,
) -> jax.Array:
    """Runs `pallas_kernels.grouped_dequant_matmul`; float32[P, N, A, D].

    Experts in several precisions take as many launches as those in one.

    Raises:
      ValueError: it refuses the weights.
    """
    if reason := _kernel_refusal([(of.gate_up, of.down) for of in tiers]):
        raise ValueError(f"the grouped kernel refuses: {reason}")
    tier = pairs.tier
    if tier is None:
        tier = jnp.where(pairs.active, 0, -1).astype(jnp.int32)
    return _grouped(
        x,
        tuple(jnp.int32(of.layer * of.gate_up.shape[1]) for of in tiers),
        tier,
        pairs.expert,
        tuple(ops.operands(of.gate_up) for of in tiers),
        tuple(ops.operands(of.down) for of in tiers),
        None if pairs.biases is None else pairs.biases.gate_up,
        turn,
        implementation=implementation,
        gating=gating,
    )


@functools.partial(jax.jit, static_argnames=("implementation", "gating"))
def _grouped(
    x: jax.Array,
    first_slots: tuple[jax.Array, ...],
    tier: jax.Array,
    expert: jax.Array,
    gate_ups: tuple[ops.Operands, ...],
    downs: tuple[ops.Operands, ...],
    bias: jax.Array | None,
    turn: Turn | None,
    *,
    implementation: str,
    gating: Gating,
) -> jax.Array:
    """Runs the grouped kernel, jitted with first slots as operands: all layers share a trace."""
    slot = expert + first_slots[0]
    for i, first in enumerate(first_slots[1:], 1):
        slot = jnp.where(tier == i, expert + first, slot)
    weight = jnp.ones(tier.shape, jnp.float32)  # the combine comes later
    return grouped_dequant_matmul.moe_products(
        x,
        grouped_dequant_matmul.Assignments(tier, slot, weight),
        [of.weights for of in gate_ups],
        [of.weights for of in downs],
        gate_up_low_rank=[of.low_rank for of in gate_ups],
        down_low_rank=[of.low_rank for of in downs],
        bias=bias,
        turn=turn,
        gating=gating,
        implementation=implementation,
    )


def _kernel_refusal(tiers: Sequence[Sequence[Weight]]) -> str:
    refusals = [ops.kernel_refusal(weight) for experts in tiers for weight in experts]
    return "; ".join(dict.fromkeys(filter(None, refusals)))


def choose_grouped(
    num_tokens: int,
    config: ModelConfig,
    dtype: jnp.dtype,
    tiers: Sequence[Sequence[Weight]],
    kernels: ops.Kernels,
) -> Choice:
    """Chooses the grouped kernel's implementation for packed or plain experts, by tier.

    Returns:
      `ops.DEQUANTIZED` with the reasons where none serves.
    """
    if reason := _kernel_refusal(tiers):
        return Choice(ops.DEQUANTIZED, {"every kernel": reason})
    if kernels.implementation:
        return Choice(kernels.implementation, {})
    if kernels.target is None:
        return Choice(ops.DEQUANTIZED, {"every kernel": "no target was named"})
    x = jax.ShapeDtypeStruct((num_tokens, config.model_dim), dtype)
    shapes = [[jax.eval_shape(ops.operands, weight) for weight in experts] for experts in tiers]
    operation, both = grouped_dequant_matmul.OPERATION, [of for tier in shapes for of in tier]
    given = (
        x,
        config.experts_per_token,
        [gate_up.weights for gate_up, _ in shapes],
        [down.weights for _, down in shapes],
        [of.low_rank for of in both],
        config.gating == SWIGLU and not config.expert_bias,
    )
    are_plain = all(of.weights.bits == PLAIN_BITS and not of.low_rank for of in both)
    chosen = operation.choose(*given, target=kernels.target)
    is_slower = chosen.implementation == "mosaic" and are_plain and num_tokens <= FEW_TOKENS
    if is_slower and not operation.refusal("triton", *given, target=kernels.target):
        return Choice("triton", {"mosaic": "plain experts of few tokens are slower by it"})
    return ops.kernel_or_dequantized(chosen)
