"""The public calls: which implementation runs, and why others refuse."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_dequant_matmul import mosaic, triton
from pallas_kernels.grouped_dequant_matmul.reference import (
    Assignments,
    combine,
    down_reference,
    gate_up_reference,
)
from pallas_kernels.grouped_dequant_matmul.tiles import Tiles
from pallas_kernels.packed import LowRank, PackedMatrices
from pallas_kernels.target import SIMULATED, Choice, Target, current_target

Operand = jax.Array | jax.ShapeDtypeStruct
ACTIVATIONS = (jnp.bfloat16, jnp.float16)
Tiers = Sequence[PackedMatrices]
LowRanks = Sequence[tuple[LowRank, ...]]

# In order of preference. The reference serves every platform and is the last.
REFUSALS: dict[str, Callable[..., str | None]] = {
    "mosaic": mosaic.refusal,
    "triton": triton.refusal,
}
IMPLEMENTATIONS = (*REFUSALS, "reference")


def refusal(
    implementation: str,
    x: Operand,
    width: int,
    gate_up_tiers: Tiers,
    down_tiers: Tiers,
    low_rank: LowRanks = (),
    target: Target | None = None,
) -> str | None:
    """Why an implementation cannot serve a MoE layer of these shapes on a target, or None.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      x: [T, D].
      width: A, experts a token.
      gate_up_tiers: of each tier S matrices [2F, D], arrays or their shapes.
      down_tiers: of each tier S matrices [D, F].
      low_rank: all terms of both, in any order.
      target: None for the default device.
    """
    if implementation == "reference":
        return None
    reasons = []
    if x.dtype not in ACTIVATIONS:
        reasons.append(f"x is {x.dtype}, not bfloat16 or float16")
    found = REFUSALS[implementation](
        x, width, gate_up_tiers, down_tiers, low_rank, target or current_target()
    )
    if found:
        reasons.append(found)
    return "; ".join(reasons) or None


def choose(
    x: Operand,
    width: int,
    gate_up_tiers: Tiers,
    down_tiers: Tiers,
    low_rank: LowRanks = (),
    target: Target | None = None,
) -> Choice:
    """The first implementation in the order of preference that does not refuse."""
    refusals: dict[str, str] = {}
    for name in IMPLEMENTATIONS:
        reason = refusal(name, x, width, gate_up_tiers, down_tiers, low_rank, target)
        if reason is None:
            return Choice(name, refusals)
        refusals[name] = reason
    raise AssertionError("the reference refuses nothing")


def moe_layer(
    x: jax.Array,
    assignments: Assignments,
    gate_up_tiers: Tiers,
    down_tiers: Tiers,
    *,
    gate_up_low_rank: LowRanks | None = None,
    down_low_rank: LowRanks | None = None,
    implementation: str | None = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """sum_a weight[t, a] down_e(silu(gate_e x_t) * up_e x_t), each pair by its own packed matrix.

    Args:
      x: [T, D] in bfloat16 or float16 (the reference takes float32 too).
      assignments: which tier and slot each of the A pairs of a token runs, and its weight.
      gate_up_tiers: of each tier S matrices [2F, D], gate rows first.
      down_tiers: of each tier S matrices [D, F]; the same slots.
      gate_up_low_rank: of each tier its terms; None for none.
      down_low_rank: the same.
      implementation: "mosaic", "triton" or "reference"; None for `choose`'s.
      tiles: None for the measured or the heuristic ones; only with a kernel.
      interpret: runs the kernels on the CPU, for tests.

    Returns:
      [T, D] in `x.dtype`. The hidden values between the products are rounded to `x.dtype`.

    Raises:
      ValueError: operands that do not fit, or the reasons why the asked implementation refuses.
    """
    products = moe_products(
        x, assignments, gate_up_tiers, down_tiers, gate_up_low_rank=gate_up_low_rank,
        down_low_rank=down_low_rank, implementation=implementation, tiles=tiles,
        interpret=interpret,
    )  # fmt: skip
    return combine(products, ran(assignments, down_tiers), assignments.weight, x.dtype)


def moe_products(
    x: jax.Array,
    assignments: Assignments,
    gate_up_tiers: Tiers,
    down_tiers: Tiers,
    *,
    gate_up_low_rank: LowRanks | None = None,
    down_low_rank: LowRanks | None = None,
    implementation: str | None = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """down_e(silu(gate_e x_t) * up_e x_t) of each pair apart; arguments as in `moe_layer`.

    For a layer that runs in several calls, of some of its pairs each: a pair's product does not
    depend on which others run, so `combine` of all gives what `moe_layer` would.

    Returns:
      float32[P, T, A, D], P parts of each product; anything where a pair is skipped.
    """
    terms = [*(gate_up_low_rank or ()), *(down_low_rank or ())]
    layer = (x, assignments.slot.shape[1], gate_up_tiers, down_tiers, terms)
    chosen = implementation or choose(*layer).implementation
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {chosen!r} is none of {', '.join(IMPLEMENTATIONS)}")
    if reason := refusal(chosen, *layer, target=_target(interpret)):
        raise ValueError(f"grouped_dequant_matmul by {chosen} refuses: {reason}")
    hidden = gate_up(
        x, assignments, gate_up_tiers, low_rank=gate_up_low_rank, implementation=chosen,
        tiles=tiles, interpret=interpret,
    )  # fmt: skip
    return down_products(
        hidden, assignments, down_tiers, low_rank=down_low_rank, implementation=chosen,
        tiles=tiles, interpret=interpret,
    )  # fmt: skip


def ran(assignments: Assignments, tiers: Tiers) -> jax.Array:
    """bool[T, A]: the pairs that are not skipped."""
    return (assignments.tier >= 0) & (assignments.tier < len(tiers))


def gate_up(
    x: jax.Array,
    assignments: Assignments,
    tiers: Tiers,
    *,
    low_rank: LowRanks | None = None,
    implementation: str,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """silu(gate_e x_t) * up_e x_t: [T, D] to [T, A, F]; arguments as in `moe_layer`."""
    num_inputs, terms = _check(x.shape[-1], assignments, tiers, low_rank)
    if x.shape != (assignments.slot.shape[0], num_inputs):
        raise ValueError(f"x is {x.shape}, expected {(assignments.slot.shape[0], num_inputs)}")
    if implementation == "reference":
        return gate_up_reference(x, assignments, tiers, terms)
    run = {"mosaic": mosaic.gate_up_mosaic, "triton": triton.gate_up_triton}[implementation]
    return run(x, assignments, tiers, terms, tiles, _target(interpret), interpret)


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
    """sum_a weight[t, a] down_e hidden[t, a]: [T, A, F] to [T, D]; arguments as in `moe_layer`."""
    products = down_products(
        hidden, assignments, tiers, low_rank=low_rank, implementation=implementation,
        tiles=tiles, interpret=interpret,
    )  # fmt: skip
    return combine(products, ran(assignments, tiers), assignments.weight, hidden.dtype)


def down_products(
    hidden: jax.Array,
    assignments: Assignments,
    tiers: Tiers,
    *,
    low_rank: LowRanks | None = None,
    implementation: str,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """down_e hidden[t, a]: [T, A, F] to float32[P, T, A, D]; see `moe_products`."""
    num_inputs, terms = _check(hidden.shape[-1], assignments, tiers, low_rank)
    if hidden.shape != (*assignments.slot.shape, num_inputs):
        expected = (*assignments.slot.shape, num_inputs)
        raise ValueError(f"hidden is {hidden.shape}, expected {expected}")
    if implementation == "reference":
        return down_reference(hidden, assignments, tiers, terms)
    run = {"mosaic": mosaic.down_mosaic, "triton": triton.down_triton}[implementation]
    return run(hidden, assignments, tiers, terms, tiles, _target(interpret), interpret)


def _target(interpret: bool) -> Target:
    return SIMULATED if interpret else current_target()


def _check(
    num_inputs: int, assignments: Assignments, tiers: Tiers, low_rank: LowRanks | None
) -> tuple[int, LowRanks]:
    """K of the tiers and the terms of each; raises ValueError for what does not fit."""
    if not tiers:
        raise ValueError("no tiers")
    terms = [()] * len(tiers) if low_rank is None else low_rank
    if len(terms) != len(tiers):
        raise ValueError(f"low-rank terms of {len(terms)} tiers, there are {len(tiers)}")
    for weights, of_tier in zip(tiers, terms, strict=True):
        weights.check()
        shape = (weights.num_outputs, weights.num_inputs)
        if shape != (tiers[0].num_outputs, num_inputs):
            raise ValueError(f"a tier of matrices {shape}, expected {num_inputs} inputs")
        for term in of_tier:
            term.check(weights)
    if not assignments.tier.shape == assignments.slot.shape == assignments.weight.shape:
        raise ValueError("assignments of different shapes")
    return num_inputs, terms
