"""MoE layers: ours on packed weights, the same routing for all kernels."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_dequant_matmul import OPERATION, Assignments, combine, moe_products
from pallas_kernels.packed import PackedMatrices
from scripts.studies.kernels.data import (
    LAYER_ERROR_LIMIT,
    Moe,
    Sample,
    moe_sample,
    random_mxfp4,
    random_rows,
    random_stack,
    routing,
)
from scripts.studies.kernels.running import OWN, Bench
from scripts.studies.kernels.timing import SERIAL, Chain, time_jax

KERNELS = (*OWN, "reference")
CHECKED_TOKENS = 2
CALLS = 8  # of a chain with more than one token: each reads most of a layer


class Layer:
    """One model's layers, packed."""

    def __init__(self, bench: Bench, moe: Moe, make: Any = None) -> None:
        self.bench, self.moe = bench, moe
        make = make or (random_mxfp4 if moe.is_mxfp4 else random_stack)
        stack = functools.partial(make, slots=moe.num_layers * moe.num_experts, bits=moe.bits)
        self.gate_up = stack(jnp.uint32(1), rows=2 * moe.expert_dim, inputs=moe.model_dim)
        self.down = stack(jnp.uint32(2), rows=moe.model_dim, inputs=moe.expert_dim)

    @property
    def operands(self) -> tuple[PackedMatrices, PackedMatrices]:
        """Gate and up, then down."""
        return self.gate_up, self.down

    def label(self, num_tokens: int) -> str:
        """The row's name, without the implementation."""
        return f"grouped | {self.moe.name} {self.gate_up.describe()} | T {num_tokens}"


class Case(NamedTuple):
    """A layer at a number of tokens, with the routing of each call."""

    layer: Layer
    x: jax.Array
    slots: np.ndarray  # int32[calls, T, A]
    weights: np.ndarray  # float32[calls, T, A]
    assignments: tuple[Assignments, ...]  # of each call
    chain: Chain
    samples: tuple[Sample, Sample]  # of the first and of the last call
    num_pairs: int
    distinct: float  # matrices that a call reads, in the mean

    @property
    def operations(self) -> float:
        """Operations of one call."""
        return 6.0 * self.num_pairs * self.layer.moe.model_dim * self.layer.moe.expert_dim

    def num_bytes(self, slot_bytes: float) -> float:
        """Bytes that one call must read, from the bytes of an expert."""
        return self.distinct * slot_bytes + 4 * self.x.size


def deal(bench: Bench, moe: Moe, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The routing of each call of a chain."""
    once = moe.num_layers * (moe.num_experts // moe.width)  # calls that deal all experts once
    num_calls = 4 if bench.smoke else min(once, 32) if num_tokens == 1 else CALLS
    return routing(moe, num_tokens, num_calls)


def as_assignments(slots: np.ndarray, weights: np.ndarray) -> tuple[Assignments, ...]:
    """Assignments of each call; one tier."""
    pairs = zip(map(jnp.asarray, slots), map(jnp.asarray, weights), strict=True)
    return tuple(Assignments(jnp.zeros_like(slot), slot, weight) for slot, weight in pairs)


def _distinct(slots: np.ndarray) -> float:
    """How many distinct slots a call of int32[calls, T, A] reads, in the mean."""
    return float(np.mean([len(np.unique(call)) for call in slots]))


def make_assignments(
    bench: Bench, moe: Moe, num_tokens: int
) -> tuple[tuple[Assignments, ...], float]:
    """Assignments of each call of a chain, and the mean number of matrices that a call reads."""
    slots, weights = deal(bench, moe, num_tokens)
    return as_assignments(slots, weights), _distinct(slots)


def make_case(layer: Layer, num_tokens: int, checked: int = CHECKED_TOKENS) -> Case:
    """Routing, inputs, and float64 values of `checked` tokens of the first and the last call."""
    bench, moe = layer.bench, layer.moe
    slots, weights = deal(bench, moe, num_tokens)
    num_calls = len(slots)
    x = random_rows(num_tokens, (num_tokens, moe.model_dim))
    case = Case(
        layer=layer,
        x=x,
        slots=slots,
        weights=weights,
        assignments=as_assignments(slots, weights),
        chain=Chain(num_calls, num_calls, 2),
        samples=(
            moe_sample(x, slots[0], weights[0], layer.gate_up, layer.down, checked),
            moe_sample(x, slots[-1], weights[-1], layer.gate_up, layer.down, checked),
        ),
        num_pairs=num_tokens * moe.width,
        distinct=_distinct(slots),
    )
    if bench.smoke:
        return case
    guess = bench.chain(1, case.num_bytes(packed_bytes(layer)), case.operations)
    rounds = max(1, round(guess.num_rounds * guess.num_calls / num_calls))
    return case._replace(chain=case.chain._replace(num_rounds=rounds))


def packed_bytes(layer: Layer) -> int:
    """Bytes of an expert."""
    return layer.gate_up.slot_nbytes + layer.down.slot_nbytes


def bench_grouped(bench: Bench, models: Sequence[Moe], tokens: Sequence[int]) -> None:
    """All implementations at all numbers of tokens."""
    for moe in models:
        layer = Layer(bench, moe)
        for num_tokens in (t for t in moe.tokens if not tokens or t in tokens):
            label = layer.label(num_tokens)
            x = jax.ShapeDtypeStruct((num_tokens, moe.model_dim), jnp.bfloat16)
            choice = OPERATION.choose(x, moe.width, [layer.gate_up], [layer.down], (), True)
            print(f"{label}: {choice.describe()}", flush=True)
            bench.check_choice(label, choice, moe.bits)
            case = make_case(layer, num_tokens)
            for name in bench.implementations:
                if name in KERNELS:
                    part = functools.partial(_one, case, name)
                    bench.attempt(f"{label} | {name}", part, ours=True)


def _one(case: Case, name: str) -> None:
    bench, what = case.layer.bench, f"{case.layer.label(case.x.shape[0])} | {name}"
    run = layer_call(case, name)
    if isinstance(run, str):
        print(f"  {what}: refuses: {run}", flush=True)
        return
    timing = time_jax(*run, case.chain, bench.repetitions, SERIAL)
    errors = timing.errors(case.samples)
    num_bytes = case.num_bytes(packed_bytes(case.layer))
    bench.record(what, timing, errors, LAYER_ERROR_LIMIT, num_bytes, case.operations)


def layer_call(case: Case, name: str) -> str | tuple[Callable[..., jax.Array], jax.Array, Any]:
    """(call, x, operands) for `time_jax`, or why the implementation refuses."""
    layer, x = case.layer, case.x
    gate_up, down = layer.operands
    given = (x, layer.moe.width, [gate_up], [down], (), True)
    if reason := OPERATION.refusal(name, *given):
        return reason

    def call(x: jax.Array, held: Any, i: int) -> jax.Array:
        gate_up, down, assignments = held
        of = assignments[i]
        products = moe_products(x, of, [gate_up], [down], implementation=name)
        return combine(products, of.tier == 0, of.weight, x.dtype)

    return call, x, (gate_up, down, case.assignments)
