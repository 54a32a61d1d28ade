"""Contract of MoE layers with packed weights: operands, values, broken kernels.

Products, tolerances and the check are those of `packed_operands`; SwiGLU and the weighted combine
are float64 here.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels import grouped_dequant_matmul as package
from pallas_kernels.gating import SWIGLU
from pallas_kernels.grouped_dequant_matmul import api
from pallas_kernels.packed import LowRank, PackedMatrices
from pallas_kernels.target import SIMULATED, current_target
from tests import packed_operands
from tests.packed_operands import ROUNDOFF, UNIT_ROUNDOFF, Form, Terms

SKIPPED = (-1, 1 << 20)  # (tier, slot); there is no such slot, so nothing may read it
BEYOND = (9, 0)  # a tier too high skips as well

Pairs = tuple[tuple[tuple[int, int], ...], ...]


class Tier(NamedTuple):
    """Experts of one stored form."""

    gate_up: Form
    down: Form
    slots: int = 3
    gate_up_terms: tuple[Terms, ...] = ()
    down_terms: tuple[Terms, ...] = ()


def alike(form: Form, slots: int = 3) -> Tier:
    """A tier whose matrices are all of one form."""
    return Tier(form, form, slots)


class Case(NamedTuple):
    """One layer: T tokens of A pairs, D and F."""

    tiers: tuple[Tier, ...]
    tokens: int = 4
    width: int = 2
    model_dim: int = 96
    expert_dim: int = 64
    dtype: str = "bfloat16"
    pairs: Pairs | None = None  # (tier, slot) of each; None: drawn among all experts
    skipped: float = 0.0  # share of drawn pairs


class Operands(NamedTuple):
    """On the host; of each tier one part of each list."""

    x: np.ndarray  # [T, D]
    tier: np.ndarray  # int32[T, A]
    slot: np.ndarray
    weight: np.ndarray  # float32[T, A]; NaN where skipped
    gate_up: list[PackedMatrices]
    down: list[PackedMatrices]
    gate_up_low_rank: list[tuple[LowRank, ...]]
    down_low_rank: list[tuple[LowRank, ...]]


def random_operands(case: Case, seed: int) -> Operands:
    """Fresh operands; experts without a pair are NaN, and so are weights of skipped pairs."""
    rng = np.random.default_rng(seed)
    pairs = _draw_pairs(case, rng) if case.pairs is None else np.asarray(case.pairs)
    tier, slot = (np.ascontiguousarray(pairs[..., i], np.int32) for i in range(2))
    weight = rng.dirichlet(np.ones(case.width), case.tokens).astype(np.float32)
    weight[(tier < 0) | (tier >= len(case.tiers))] = np.nan
    operands = Operands(
        packed_operands.random_activations(rng, (case.tokens, case.model_dim), case.dtype),
        tier, slot, weight, [], [], [], [],
    )  # fmt: skip
    gate_up_shape = (2 * case.expert_dim, case.model_dim)
    down_shape = (case.model_dim, case.expert_dim)
    for i, of_tier in enumerate(case.tiers):
        used = set(slot[tier == i].tolist())
        for form, terms, shape, stacks, low_rank in (
            (of_tier.gate_up, of_tier.gate_up_terms, gate_up_shape,
             operands.gate_up, operands.gate_up_low_rank),
            (of_tier.down, of_tier.down_terms, down_shape,
             operands.down, operands.down_low_rank),
        ):  # fmt: skip
            stack = packed_operands.random_matrices(
                rng, form, num_slots=of_tier.slots, shape=shape, used=used
            )
            stacks.append(stack)
            low_rank.append(tuple(packed_operands.random_terms(rng, t, stack, used) for t in terms))
    return operands


def _draw_pairs(case: Case, rng: np.random.Generator) -> np.ndarray:
    """int[T, A, 2]: distinct experts for each token, some far more often than others."""
    experts = [(i, slot) for i, tier in enumerate(case.tiers) for slot in range(tier.slots)]
    popularity = rng.dirichlet(np.full(len(experts), 0.5))
    popularity = 0.9 * popularity + 0.1 / len(experts)
    drawn = [
        rng.choice(len(experts), case.width, replace=False, p=popularity)
        for _ in range(case.tokens)
    ]
    pairs = np.asarray(experts)[np.asarray(drawn)]
    pairs[rng.random(pairs.shape[:2]) < case.skipped] = SKIPPED
    return pairs


def _runs(operands: Operands) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """(tier, slot, tokens, places) of each expert that runs."""
    ran = (operands.tier >= 0) & (operands.tier < len(operands.gate_up))
    experts = zip(operands.tier[ran].tolist(), operands.slot[ran].tolist(), strict=True)
    for tier, slot in sorted(set(experts)):
        yield tier, slot, *np.nonzero((operands.tier == tier) & (operands.slot == slot))


def expected_hidden(
    operands: Operands, rounds_weights: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """float64[T, A, F] of silu(gate) up, exactly 0 where skipped, and its slack.

    An error of the gate or the up value goes through SwiGLU; |d silu| <= 1.1.
    """
    width = operands.gate_up[0].num_outputs // 2
    hidden = np.zeros((*operands.tier.shape, width))
    slack = np.zeros_like(hidden)
    for tier, slot, tokens, places in _runs(operands):
        y, error = packed_operands.product(
            operands.x[tokens], operands.gate_up[tier], slot, operands.gate_up_low_rank[tier],
            rounds_weights,
        )  # fmt: skip
        (gate, up), (gate_error, up_error) = np.split(y, 2, axis=1), np.split(error, 2, axis=1)
        silu = gate / (1 + np.exp(-gate))
        hidden[tokens, places] = silu * up
        slack[tokens, places] = (
            1.1 * gate_error * (np.abs(up) + up_error)
            + np.abs(silu) * up_error
            + 8 * UNIT_ROUNDOFF * np.abs(silu * up)  # exp, divide, two products
        )
    return hidden, slack


def expected_down(
    hidden: np.ndarray, operands: Operands, rounds_weights: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """float64[T, D] of the weighted combine of `hidden` [T, A, F], and its slack."""
    y = np.zeros((len(hidden), operands.down[0].num_outputs))
    slack = np.zeros_like(y)
    for tier, slot, tokens, places in _runs(operands):
        term, error = packed_operands.product(
            hidden[tokens, places], operands.down[tier], slot, operands.down_low_rank[tier],
            rounds_weights,
        )  # fmt: skip
        weight = operands.weight[tokens, places].astype(np.float64)[:, None]
        np.add.at(y, tokens, weight * term)
        np.add.at(slack, tokens, weight * (error + 4 * UNIT_ROUNDOFF * np.abs(term)))
    return y, slack


def expected_layer(
    operands: Operands, rounds_weights: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """float64[T, D] of both products, hidden values rounded between them, and its slack.

    Any of them may be rounded the other way, so that all their roundings together are allowed.
    """
    dtype = operands.x.dtype
    hidden, hidden_slack = expected_hidden(operands, rounds_weights)
    y, slack = expected_down(hidden.astype(dtype), operands, rounds_weights)
    variance = np.zeros_like(y)
    error = hidden_slack + ROUNDOFF[dtype.name] * np.abs(hidden)
    for tier, slot, tokens, places in _runs(operands):
        matrix = packed_operands.dense(operands.down[tier], slot, operands.down_low_rank[tier])
        weight = operands.weight[tokens, places].astype(np.float64)[:, None]
        np.add.at(variance, tokens, (weight * error[tokens, places]) ** 2 @ (matrix**2).T)
    return y, slack + 4 * np.sqrt(variance)


def product_by_product(
    operands: Operands, implementation: str, tiles: Any = None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Hidden values and the weighted combine, by calls of their own."""
    pairs = package.Assignments(operands.tier, operands.slot, operands.weight)
    how = tiles, SIMULATED if interpret else current_target()
    product, ups, downs = api.PRODUCT[implementation], operands.gate_up, operands.down
    hidden = product(operands.x, pairs, ups, operands.gate_up_low_rank, *how, gating=SWIGLU)
    products = product(hidden, pairs, downs, operands.down_low_rank, *how)
    ran = (operands.tier >= 0) & (operands.tier < len(downs))
    return hidden, package.combine(products, ran, operands.weight, hidden.dtype)


def violation(hidden: Any, y: Any, operands: Operands, rounds_weights: bool = False) -> str | None:
    """THE check: why these are not SwiGLU's values and the combine of them, or None.

    Hidden values multiply two products, gate and up. Kernels that round weights err in both by
    about what the result's rounding errs: each then has its own share of the Frobenius bar.
    """
    dtype = operands.x.dtype.name
    for name, found in (("hidden", hidden), ("y", y)):
        if found.dtype.name != dtype:
            return f"{name} is {found.dtype} in place of {dtype}"
    expected = expected_hidden(operands, rounds_weights)
    if reason := packed_operands.violation(hidden, *expected, dtype, 1 + rounds_weights):
        return f"hidden: {reason}"
    expected = expected_down(np.asarray(hidden), operands, rounds_weights)
    return packed_operands.violation(y, *expected, dtype)


def layer_violation(y: Any, operands: Operands, rounds_weights: bool = False) -> str | None:
    """THE check of both products as one; the Frobenius bar is as in `violation`."""
    dtype = operands.x.dtype.name
    if y.dtype.name != dtype:
        return f"{y.dtype} in place of {dtype}"
    expected = expected_layer(operands, rounds_weights)
    return packed_operands.violation(y, *expected, dtype, 1 + rounds_weights)


def _up_for_gate(stack: PackedMatrices) -> PackedMatrices:
    parts = {name: getattr(stack, name) for name in ("words", "scales", "zeros")}
    rolled = {
        name: None if rows is None else np.roll(rows, rows.shape[1] // 2, axis=1)
        for name, rows in parts.items()
    }
    return dataclasses.replace(stack, **rolled)


def _skips_nothing(operands: Operands) -> Operands:
    skipped = operands.tier < 0
    weight = np.where(skipped, np.float32(0.5), operands.weight)
    tier, slot = (np.where(skipped, np.int32(0), part) for part in (operands.tier, operands.slot))
    return operands._replace(tier=tier, slot=slot, weight=weight)


def _skips_one_more(operands: Operands) -> Operands:
    tier = operands.tier.copy()
    tier[-1, -1] = -1
    return operands._replace(tier=tier)


# Kernels with one mistake: the operands from which a right one computes the same, and a case.
BROKEN: dict[str, tuple[Callable[[Operands], Operands], str]] = {
    "up for gate": (
        lambda of: of._replace(gate_up=[_up_for_gate(stack) for stack in of.gate_up]), "one_token"
    ),
    "the next slot": (
        lambda of: of._replace(slot=(of.slot + 1) % np.int32(of.gate_up[0].num_slots)),
        "one_expert_owns_all_rows",
    ),
    "the other tier": (
        lambda of: of._replace(tier=np.where(of.tier < 0, of.tier, 1 - of.tier)),
        "a_tier_without_a_pair",
    ),
    "skipped pairs run the first expert": (_skips_nothing, "int4_int2_and_skipped"),
    "the last pair left out": (_skips_one_more, "prefill"),
    "rows of x gathered one off": (
        lambda of: of._replace(x=np.roll(of.x, 1, axis=0)), "prefill"
    ),
    "a mean in place of the weighted combine": (
        lambda of: of._replace(weight=np.full_like(of.weight, 1 / of.weight.shape[1])), "low_rank"
    ),
    "weights in the order of the sorted rows": (
        lambda of: of._replace(weight=np.roll(of.weight, 1, axis=1)), "prefill"
    ),
    "the first range of terms alone": (
        lambda of: of._replace(gate_up_low_rank=[terms[:1] for terms in of.gate_up_low_rank]),
        "low_rank",
    ),
    "no terms of down": (
        lambda of: of._replace(down_low_rank=[() for _ in of.down_low_rank]), "low_rank_17_tokens"
    ),
}  # fmt: skip
LEAVES_A_PART_OUT = (
    "the last pair left out", "the first range of terms alone", "no terms of down"
)  # fmt: skip
