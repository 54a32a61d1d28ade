"""Operands of the kernels' benchmark: shapes, random packed weights, float64 values.

Scales and zero points are multiples of powers of two that bf16 and fp16 both hold, so that every
library multiplies by the same weights. Their products with codes are exact in float32.
"""

import dataclasses
import functools
import math
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout, mxfp4
from pallas_kernels.packed import (
    PLAIN_BITS,
    LowRank,
    PackedMatrices,
    Refinement,
    dequantize,
    low_rank_factors,
    plain,
)

GROUP_SIZE = 64
RANK = 32
SAMPLED_ROWS = 1024  # of a matrix, unpacked at a time on the host
ERROR_LIMIT = 3e-3  # relative Frobenius error of a kernel of ours, bf16 outputs
# The same of a MoE layer: two products in a row (gate and up, then down), whose errors are
# independent and add up in squares. Hidden values are not rounded in the float64 value.
LAYER_ERROR_LIMIT = math.sqrt(2) * ERROR_LIMIT
PEER_ERROR_LIMIT = 2e-2  # some round zero points or whole weights to bf16


class Dense(NamedTuple):
    """One product; K inputs, N outputs."""

    num_inputs: int
    num_outputs: int

    @property
    def name(self) -> str:
        """Such as "4096x14336", K first."""
        return f"{self.num_inputs}x{self.num_outputs}"


class Moe(NamedTuple):
    """One MoE layer of a model; `num_layers` of them are stacked, so that calls take turns."""

    name: str
    num_experts: int
    width: int  # A
    model_dim: int
    expert_dim: int
    bits: int
    tokens: tuple[int, ...]
    num_layers: int = 2
    is_mxfp4: bool = False  # its 4 bits are MXFP4's


DENSE = (Dense(4096, 14336), Dense(14336, 4096), Dense(2048, 1536), Dense(768, 2048))
# Measured only where named: Mixtral's attention, and eight that no table of tiles names, of
# Llama-2-13B, Qwen2.5-7B, Phi-3-mini, GLM-4.5-Air and Qwen3-235B-A22B.
ASKED_DENSE = (
    Dense(4096, 4096), Dense(5120, 13824), Dense(13824, 5120), Dense(3584, 18944),
    Dense(18944, 3584), Dense(3072, 8192), Dense(8192, 3072), Dense(4096, 2816), Dense(4096, 9216),
)  # fmt: skip
MOE: tuple[Moe, ...] = (
    Moe("qwen3-30b", 128, 8, 2048, 768, 4, (1, 4, 16, 32, 64)),
    Moe("mixtral", 8, 2, 4096, 14336, 3, (1, 16, 32)),
)
# Measured only where named: gpt-oss-120b's experts, as published and in INT4.
ASKED_MOE: tuple[Moe, ...] = (
    Moe("gpt-oss-120b", 128, 4, 2880, 2880, 4, (1, 4, 16, 64, 512)),
    Moe("gpt-oss-120b-mxfp4", 128, 4, 2880, 2880, 4, (1, 4, 16, 64, 512), is_mxfp4=True),
)
SMOKE_DENSE = (Dense(256, 96),)
SMOKE_MOE: tuple[Moe, ...] = (
    Moe("smoke", 4, 2, 128, 64, 4, (1, 3)),
    Moe("smoke-mxfp4", 4, 2, 128, 64, 4, (1, 3), is_mxfp4=True),
)


@functools.partial(jax.jit, static_argnames=("slots", "rows", "inputs", "bits", "zeros"))
def random_stack(
    seed: jax.Array, *, slots: int, rows: int, inputs: int, bits: int, zeros: bool = True
) -> PackedMatrices:
    """Uniform codes in groups of 64 with fp16 scales; float zero points, or symmetric; or bf16.

    Values have a standard deviation near inputs^-0.5, so that products are near one.
    """
    words_key, scales_key, zeros_key = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
    std = inputs**-0.5
    if bits == PLAIN_BITS:
        values = jax.random.normal(words_key, (slots, rows, inputs), jnp.bfloat16)
        return plain(values * jnp.bfloat16(std))
    groups = (slots, rows, layout.num_groups(inputs, GROUP_SIZE))
    words = (slots, rows, layout.num_words(inputs, bits))
    middle = (2**bits - 1) / 2
    spread = jax.random.uniform(scales_key, groups, minval=0.5, maxval=1.5)
    scales = (spread * (std / (2**bits / 12**0.5))).astype(jnp.bfloat16).astype(jnp.float16)
    steps = 2 ** (8 - bits)  # of a zero point: 8 significant bits hold any below 2^bits
    shift = jnp.round(jax.random.uniform(zeros_key, groups, minval=-0.5, maxval=0.5) * steps)
    return PackedMatrices(
        words=jax.random.bits(words_key, words, jnp.uint32),
        scales=scales,
        zeros=(jnp.floor(middle) + shift / steps).astype(jnp.float16) if zeros else None,
        num_inputs=inputs,
        bits=bits,
        group_size=GROUP_SIZE,
    )


@functools.partial(jax.jit, static_argnames=("slots", "rows", "inputs", "bits"))
def random_mxfp4(
    seed: jax.Array, *, slots: int, rows: int, inputs: int, bits: int = mxfp4.BITS
) -> PackedMatrices:
    """Any codes of MXFP4, with scales for a standard deviation near inputs^-0.5."""
    words_key, scales_key = jax.random.split(jax.random.key(seed, impl="rbg"))
    middle = 127 + round(math.log2(inputs**-0.5 / float(np.std(mxfp4.VALUES))))
    groups = (slots, rows, layout.num_groups(inputs, mxfp4.GROUP_SIZE))
    return PackedMatrices(
        words=jax.random.bits(words_key, (slots, rows, layout.num_words(inputs, bits)), jnp.uint32),
        scales=jax.random.randint(scales_key, groups, middle - 1, middle + 2).astype(jnp.uint8),
        zeros=None,
        num_inputs=inputs,
        bits=bits,
        group_size=mxfp4.GROUP_SIZE,
    )


def random_planes(
    seed: jax.Array, *, slots: int, rows: int, inputs: int, bits: int
) -> PackedMatrices:
    """Matrices like `random_stack`'s in two planes, each in its own array, in different orders."""
    first, width = layout.PREFIX_PLANES[bits]
    base = random_stack(seed, slots=slots, rows=rows, inputs=inputs, bits=first)
    shape = (slots + 1, rows, layout.num_plane_words(inputs, width))
    keys = jax.random.split(jax.random.key(seed, impl="rbg"))
    words = jax.jit(functools.partial(jax.random.bits, shape=shape, dtype=jnp.uint32))(keys[0])
    places = jax.random.permutation(keys[1], slots + 1)[:slots].astype(jnp.int32)
    refinement = Refinement(words=words, slots=places)
    return dataclasses.replace(base, bits=bits, refinements=(refinement,))


def random_terms(weights: PackedMatrices, rank: int, bits: int = 3) -> LowRank:
    """Compensators of a rank for every slot, a tenth of the weights' size."""
    slots = weights.num_slots
    of = functools.partial(random_stack, slots=1, rows=slots * rank, bits=bits, zeros=False)
    u = of(jnp.uint32(91), inputs=weights.num_outputs)
    v = of(jnp.uint32(92), inputs=weights.num_inputs)
    if u.scales is not None:  # the factors' deviations are N^-0.5 and K^-0.5: u v is far smaller
        scale = jnp.float16(2.0 ** round(math.log2(weights.num_outputs**0.5 / 10 / rank**0.5)))
        u = dataclasses.replace(u, scales=u.scales * scale)
    return LowRank(
        u=u,
        v=v,
        start=jnp.arange(slots, dtype=jnp.int32) * rank,
        rank=jnp.full((slots,), rank, jnp.int32),
        first_row=0,
        max_rank=rank,
    )


def random_rows(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """bf16 standard normal activations."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def as_bf16(weights: PackedMatrices) -> tuple[jax.Array, ...]:
    """Each slot's matrix, rounded to bf16, as an array of its own."""
    one = jax.jit(lambda weights, slot: dequantize(weights, slot).astype(jnp.bfloat16))
    return tuple(one(weights, jnp.int32(slot)) for slot in range(weights.num_slots))


class HostMatrix(NamedTuple):
    """One slot, in numpy."""

    words: tuple[np.ndarray, ...]  # of planes that lie apart; else one array
    scales: np.ndarray | None
    zeros: np.ndarray | None
    num_inputs: int
    bits: int
    group_size: int

    def rows(self, rows: np.ndarray | slice) -> np.ndarray:
        """float32[n, K]: rows of the matrix; exact but of planes that lie apart."""
        words = [plane[rows] for plane in self.words]
        if self.scales is None:
            return words[0].astype(np.float32)
        group = np.arange(self.num_inputs) // self.group_size
        scales = self.scales[rows].astype(np.float32)
        if self.scales.dtype == np.uint8:
            codes = layout.unpack(mxfp4.packed(words[0]), self.bits, self.num_inputs)
            return mxfp4.VALUES[codes] * np.exp2(scales - np.float32(127))[:, group]
        zeros = np.full((), 2 ** (self.bits - 1), np.float32)
        if self.zeros is not None:
            zeros = self.zeros[rows].astype(np.float32)
        if len(words) == 1:
            codes = layout.unpack(words[0], self.bits, self.num_inputs)
        else:
            codes = layout.unpack_planes(words, self.bits, self.num_inputs)
            factor, offset, slope = map(np.float32, layout.prefix_constants(self.bits))
            scales, zeros = factor * scales, offset + slope * zeros
        zeros = zeros[:, group] if zeros.ndim else zeros
        return (codes.astype(np.float32) - zeros) * scales[:, group]


def host_matrix(weights: PackedMatrices, slot: int) -> HostMatrix:
    """Fetches one slot."""
    leaves = (weights.scales, weights.zeros)
    scales, zeros = (None if x is None else np.asarray(x[slot]) for x in leaves)
    places = [(weights.words, slot), *((r.words, r.slots[slot]) for r in weights.refinements)]
    words = tuple(np.asarray(stored[place]) for stored, place in places)
    return HostMatrix(words, scales, zeros, weights.num_inputs, weights.bits, weights.group_size)


def some(count: int, most: int, seed: int = 0) -> np.ndarray:
    """Indices below `count`: all, or the first, the last and random ones, in order."""
    if count <= most or most == 1:
        return np.arange(min(count, most))
    inner = np.random.default_rng(seed).choice(count - 2, most - 2, replace=False) + 1
    return np.sort(np.concatenate([inner, [0, count - 1]]))


class Sample(NamedTuple):
    """Some values of a product, in float64."""

    rows: np.ndarray  # of x
    columns: np.ndarray  # of the outputs
    values: np.ndarray  # float64[rows, columns]

    def error(self, y: np.ndarray) -> float:
        """Relative Frobenius error of an output [M, N]; inf where any of it is no number."""
        if not np.isfinite(y.astype(np.float32)).all():
            return math.inf
        found = y[np.ix_(self.rows, self.columns)].astype(np.float64)
        return float(np.linalg.norm(found - self.values) / np.linalg.norm(self.values))


def dense_sample(
    x: jax.Array, weights: PackedMatrices, slot: int, terms: LowRank | None = None
) -> Sample:
    """Up to 32 rows and 384 columns of x W^T (+ x V^T U^T)."""
    rows, columns = some(x.shape[0], 32), some(weights.num_outputs, 384)
    x64 = np.asarray(x)[rows].astype(np.float64)
    values = x64 @ host_matrix(weights, slot).rows(columns).astype(np.float64).T
    if terms is not None:
        u, v = (np.asarray(f, np.float64) for f in low_rank_factors(terms, jnp.int32(slot)))
        values = values + (x64 @ v.T) @ u[:, columns]
    return Sample(rows, columns, values)


def moe_sample(
    x: jax.Array,
    slot: np.ndarray,
    weight: np.ndarray,
    gate_up: PackedMatrices,
    down: PackedMatrices,
    most_tokens: int,
) -> Sample:
    """Some tokens' outputs of a MoE layer; hidden values are not rounded."""
    tokens, columns = some(x.shape[0], most_tokens), some(down.num_outputs, 384)
    values = np.zeros((len(tokens), len(columns)))
    for i, token in enumerate(tokens):
        row = np.asarray(x[int(token)]).astype(np.float64)
        for s, share in zip(slot[token], weight[token], strict=True):
            matrix = host_matrix(gate_up, int(s))

            def product(first: int, matrix: HostMatrix = matrix, row: np.ndarray = row) -> Any:
                return matrix.rows(slice(first, first + SAMPLED_ROWS)).astype(np.float64) @ row

            with futures.ThreadPoolExecutor() as threads:  # numpy works in parallel
                parts = threads.map(product, range(0, gate_up.num_outputs, SAMPLED_ROWS))
                gate, up = np.split(np.concatenate(list(parts)), 2)
            hidden = gate / (1 + np.exp(-gate)) * up
            down_rows = host_matrix(down, int(s)).rows(columns).astype(np.float64)
            values[i] += share * (down_rows @ hidden)
    return Sample(tokens, columns, values)


def routing(moe: Moe, num_tokens: int, num_calls: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots int32[calls, T, A] and weights float32[calls, T, A] that sum to one.

    Experts are dealt like cards: a call takes the next ones of a shuffled deck of all experts of
    its layer, so that an expert comes again as late as can be, and a token has no expert twice.
    Distinct experts of a call are counted from what was dealt.
    """
    rng = np.random.default_rng(0)
    slots = np.zeros((num_calls, num_tokens, moe.width), np.int32)
    decks: list[list[int]] = [[] for _ in range(moe.num_layers)]
    for call in range(num_calls):
        layer = call % moe.num_layers
        for token in range(num_tokens):
            if num_tokens > 1:  # as routers do: at random, some experts twice, some never
                chosen = rng.choice(moe.num_experts, moe.width, replace=False)
            else:
                if len(decks[layer]) < moe.width:
                    decks[layer] = rng.permutation(moe.num_experts).tolist()
                chosen = np.array([decks[layer].pop() for _ in range(moe.width)])
            slots[call, token] = layer * moe.num_experts + chosen
    weights = rng.uniform(0.5, 1.5, slots.shape).astype(np.float32)
    return slots, weights / weights.sum(-1, keepdims=True)
