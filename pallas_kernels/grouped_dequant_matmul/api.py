"""Public calls of the grouped product, and their operation."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.assignments import Assignments, Turn
from pallas_kernels.gating import SWIGLU, Gating
from pallas_kernels.grouped_dequant_matmul import mosaic, triton
from pallas_kernels.grouped_dequant_matmul.reference import product_reference
from pallas_kernels.grouped_dequant_matmul.tiles import Tiles
from pallas_kernels.op import REFERENCE, Implementation, Operation, not_half
from pallas_kernels.packed import LowRank, PackedMatrices

Tiers = Sequence[PackedMatrices]
LowRanks = Sequence[tuple[LowRank, ...]]
# A product takes rows (x [T, D], or hidden [T, A, F]), assignments, tiers, each tier's low-rank
# terms, tiles or None, the target, and by name a bias and a gating: with one it gives the hidden
# values [T, A, F] in the rows' dtype, without one float32[P, T, A, D], P parts for `combine`.
PRODUCT: dict[str, Callable[..., jax.Array]] = {
    "mosaic": mosaic.product_mosaic,
    "triton": triton.product_triton,
    REFERENCE: product_reference,
}


class _Layer(NamedTuple):
    """Operands of both products, whose matrices and low-rank terms go together."""

    x: jax.Array
    assignments: Assignments
    gate_up: tuple[Tiers, LowRanks]
    down: tuple[Tiers, LowRanks]
    bias: jax.Array | None
    turn: Turn | None


def _by(name: str) -> Callable[..., jax.Array]:
    """Returns the function that computes both products of a layer by one implementation."""

    def products(
        of: _Layer, *, gating: Gating, target: Any = None, tiles: Tiles | None = None
    ) -> jax.Array:
        each, turn = (of.gate_up, of.down), of.turn
        if name == "mosaic" and mosaic.has_many_rows(of.assignments, each, tiles, target):
            return mosaic.layer_mosaic(
                of.x, of.assignments, each, tiles, target, of.bias, gating, turn
            )
        own = turn.pairs(of.assignments) if turn else of.assignments
        product = PRODUCT[name]
        hidden = product(of.x, own, *of.gate_up, tiles, target, bias=of.bias, gating=gating)
        found = product(hidden, own, *of.down, tiles, target)
        return turn.joined(found, of.assignments.tier) if turn else found

    return products


def _abstract(of: _Layer, *, gating: Gating) -> tuple[Any, ...]:
    (ups, up_terms), (downs, down_terms) = of.gate_up, of.down
    is_plain = of.bias is None and gating == SWIGLU
    return of.x, of.assignments.slot.shape[1], ups, downs, [*up_terms, *down_terms], is_plain


# A choice is for x [T, D], A experts a token, each tier's matrices of both products, all low-rank
# terms, in any order, and whether the hidden values are SwiGLU's without a bias.
OPERATION = Operation(
    "grouped_dequant_matmul",
    kernels=(
        Implementation("mosaic", mosaic.refusal, _by("mosaic")),
        Implementation("triton", triton.refusal, _by("triton")),
    ),
    reference=_by(REFERENCE),
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
    ups, downs = (gate_up_tiers, gate_up_terms), (down_tiers, down_terms)
    return OPERATION(
        _Layer(x, assignments, ups, downs, bias, turn),
        gating=gating, implementation=implementation, tiles=tiles, interpret=interpret,
    )  # fmt: skip


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
