"""Public calls of the grouped product, and their operation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels.gating import SWIGLU, Gating
from pallas_kernels.grouped_dequant_matmul import mosaic, triton
from pallas_kernels.grouped_dequant_matmul.reference import (
    Assignments,
    Turn,
    combine,
    down_reference,
    gate_up_reference,
)
from pallas_kernels.grouped_dequant_matmul.tiles import Tiles
from pallas_kernels.op import REFERENCE, Implementation, Operation, not_half
from pallas_kernels.packed import LowRank, PackedMatrices
from pallas_kernels.target import SIMULATED, Target, current_target

Tiers = Sequence[PackedMatrices]
LowRanks = Sequence[tuple[LowRank, ...]]
GATE_UP: dict[str, Callable[..., jax.Array]] = {
    "mosaic": mosaic.gate_up_mosaic,
    "triton": triton.gate_up_triton,
}
DOWN: dict[str, Callable[..., jax.Array]] = {
    "mosaic": mosaic.down_mosaic,
    "triton": triton.down_triton,
}


def _run(name: str) -> Callable[..., jax.Array]:
    """Returns both products of a layer by one kernel."""

    def products(
        x: jax.Array,
        assignments: Assignments,
        gate_up_tiers: Tiers,
        down_tiers: Tiers,
        gate_up_terms: LowRanks,
        down_terms: LowRanks,
        bias: jax.Array | None = None,
        turn: Turn | None = None,
        *,
        gating: Gating = SWIGLU,
        target: Target,
        tiles: Tiles | None = None,
    ) -> jax.Array:
        of_each = (gate_up_tiers, gate_up_terms), (down_tiers, down_terms)
        if name == "mosaic" and mosaic.has_many_rows(assignments, of_each, tiles, target):
            return mosaic.layer_mosaic(x, assignments, of_each, tiles, target, bias, gating, turn)
        own = turn.pairs(assignments) if turn else assignments
        hidden = GATE_UP[name](x, own, gate_up_tiers, gate_up_terms, tiles, target, bias, gating)
        found = DOWN[name](hidden, own, down_tiers, down_terms, tiles, target)
        return turn.joined(found, assignments.tier) if turn else found

    return products


def _reference(
    x: jax.Array,
    assignments: Assignments,
    gate_up_tiers: Tiers,
    down_tiers: Tiers,
    gate_up_terms: LowRanks,
    down_terms: LowRanks,
    bias: jax.Array | None = None,
    turn: Turn | None = None,
    *,
    gating: Gating = SWIGLU,
) -> jax.Array:
    own = turn.pairs(assignments) if turn else assignments
    hidden = gate_up_reference(x, own, gate_up_tiers, gate_up_terms, bias, gating)
    found = down_reference(hidden, own, down_tiers, down_terms)
    return turn.joined(found, assignments.tier) if turn else found


def _abstract(
    x: jax.Array,
    assignments: Assignments,
    gate_up_tiers: Tiers,
    down_tiers: Tiers,
    gate_up_terms: LowRanks,
    down_terms: LowRanks,
    bias: jax.Array | None = None,
    turn: Turn | None = None,
    *,
    gating: Gating = SWIGLU,
) -> tuple[Any, ...]:
    terms, is_plain = [*gate_up_terms, *down_terms], bias is None and gating == SWIGLU
    return x, assignments.slot.shape[1], gate_up_tiers, down_tiers, terms, is_plain


# A choice is for x [T, D], A experts a token, each tier's matrices of both products, all low-rank
# terms, in any order, and whether the hidden values are SwiGLU's without a bias.
OPERATION = Operation(
    "grouped_dequant_matmul",
    kernels=(
        Implementation("mosaic", mosaic.refusal, _run("mosaic")),
        Implementation("triton", triton.refusal, _run("triton")),
    ),
    reference=_reference,
    abstract=_abstract,
    shared_refusals=lambda x, *_: not_half(("x is", x.dtype)),
)


def moe_products(
    x: jax.Array,
    assignments: Assignments,
    gate_up_tiers: Tiers,
    down_tiers: Tiers,
    *,
    gate_up_low_rank: LowRanks | None = None,
    down_low_rank: LowRanks | None = None,
    bias: jax.Array | None = None,
    turn: Turn | None = None,
    gating: Gating = SWIGLU,
    implementation: str | None = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes down_e(silu(gate_e x_t) * up_e x_t) of each pair; `combine` sums a token's.

    A pair's product does not depend on the others: a layer may run in several calls. The hidden
    values between the products are rounded to `x.dtype`.

    Args:
      x: [T, D] in bfloat16 or float16 (the reference takes float32 too).
      gate_up_tiers: for each tier S matrices [2F, D], gate rows first.
      down_tiers: for each tier S matrices [D, F] in equal slots.
      bias: [T, A, 2F], added to each pair's gates and ups; None: there is none.
      gating: what gates and ups become, silu(gate) * up by default; static.
      turn: which of several calls this is, of one tier each; it gives the products of all so far.

    Returns:
      float32[P, T, A, D], P parts of each product; undefined for skipped pairs.
    """
    gate_up_terms = _check(x, assignments, gate_up_tiers, gate_up_low_rank)
    _check_bias(bias, assignments, gate_up_tiers)
    hidden_shape = (*assignments.slot.shape, gate_up_tiers[0].num_outputs // 2)
    hidden = jax.ShapeDtypeStruct(hidden_shape, x.dtype)
    down_terms = _check(hidden, assignments, down_tiers, down_low_rank)
    return OPERATION(
        x, assignments, gate_up_tiers, down_tiers, gate_up_terms, down_terms, bias, turn,
        gating=gating, implementation=implementation, tiles=tiles, interpret=interpret,
    )  # fmt: skip


def _ran(assignments: Assignments, tiers: Tiers) -> jax.Array:
    """Mask bool[T, A] of pairs that are not skipped."""
    return (assignments.tier >= 0) & (assignments.tier < len(tiers))


def gate_up(
    x: jax.Array,
    assignments: Assignments,
    tiers: Tiers,
    *,
    low_rank: LowRanks | None = None,
    bias: jax.Array | None = None,
    gating: Gating = SWIGLU,
    implementation: str,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes silu(gate_e x_t) * up_e x_t: [T, D] to [T, A, F]; see `moe_products`."""
    terms = _check(x, assignments, tiers, low_rank)
    _check_bias(bias, assignments, tiers)
    if implementation == REFERENCE:
        return gate_up_reference(x, assignments, tiers, terms, bias, gating)
    return GATE_UP[implementation](
        x, assignments, tiers, terms, tiles, _target(interpret), bias, gating
    )


def down(
    hidden: jax.Array,
    assignments: Assignments,
    tiers: Tiers,
    *,
    low_rank: LowRanks | None = None,
    implementation: str,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes sum_a weight[t, a] down_e hidden[t, a]: [T, A, F] to [T, D]."""
    terms = _check(hidden, assignments, tiers, low_rank)
    if implementation == REFERENCE:
        products = down_reference(hidden, assignments, tiers, terms)
    else:
        products = DOWN[implementation](
            hidden, assignments, tiers, terms, tiles, _target(interpret)
        )
    return combine(products, _ran(assignments, tiers), assignments.weight, hidden.dtype)


def _target(interpret: bool) -> Target:
    return SIMULATED if interpret else current_target()


def _check_bias(bias: jax.Array | None, assignments: Assignments, tiers: Tiers) -> None:
    expected = (*assignments.slot.shape, tiers[0].num_outputs)
    if bias is not None and bias.shape != expected:
        raise ValueError(f"bias is {bias.shape}, expected {expected}")


def _check(
    rows: jax.Array | jax.ShapeDtypeStruct,
    assignments: Assignments,
    tiers: Tiers,
    low_rank: LowRanks | None,
) -> LowRanks:
    """Checks the operands and returns each tier's terms; raises ValueError otherwise."""
    if not tiers:
        raise ValueError("no tiers")
    terms = [()] * len(tiers) if low_rank is None else low_rank
    if len(terms) != len(tiers):
        raise ValueError(f"low-rank terms of {len(terms)} tiers, there are {len(tiers)}")
    for weights, of_tier in zip(tiers, terms, strict=True):
        weights.check()
        shape = (weights.num_outputs, weights.num_inputs)
        if shape != (tiers[0].num_outputs, rows.shape[-1]):
            raise ValueError(f"a tier of matrices {shape}, expected {rows.shape[-1]} inputs")
        for term in of_tier:
            term.check(weights)
    if not assignments.tier.shape == assignments.slot.shape == assignments.weight.shape:
        raise ValueError("assignments of different shapes")
    lead = assignments.slot.shape[: rows.ndim - 1]
    if rows.shape[:-1] != lead:
        name = "x" if rows.ndim == 2 else "hidden"
        raise ValueError(f"{name} is {rows.shape}, expected {(*lead, rows.shape[-1])}")
    return terms
