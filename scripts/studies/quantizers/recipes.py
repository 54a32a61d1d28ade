"""The rows that `demo_quantization.py` measures, and what is claimed of them."""

import dataclasses
import math
from collections.abc import Sequence

from scripts.studies.quantizers.methods import Measured, Recipe

FULL = Recipe(method="fp")
HQQ = Recipe(method="hqq")
GPTQ = Recipe(method="gptq")
INT4 = Recipe(method="rtn", bits=4, zero_kind="integer")
SMALLER_GROUPS = (Recipe(method="hqq", group_size=32), Recipe(method="hqq", group_size=16))
NEEDED_SHARE = 0.59  # of HQQ's loss, what MiLo recovers on Mixtral (MiLo, Table 3)

_PLAIN = (
    FULL,
    INT4,
    Recipe(method="rtn", bits=4),
    Recipe(method="rtn", zero_kind="integer"),
    Recipe(method="rtn"),
    GPTQ,
    Recipe(method="gptq", zero_kind="integer"),
    Recipe(method="autoround"),
    HQQ,
    *SMALLER_GROUPS,
    Recipe(method="least_squares"),
)
# Ranks are shares of the width: experts are 64 wide, attention 256 and 128.
_MILO_POLICIES = (
    "Uniform-6.25%",
    "Uniform-12.5%",
    "Dense-12.5%",
    "Dense-25%",
    "Dense-50%",
    "Dense-25% + Sparse-8",
    "Dense-25% + Kurtosis-8",
    "Dense-25% + Frequency-8",
    "Dense-50% + Sparse-8",
    "Dense-50% + Sparse-16",
)
_PLUS_POLICIES = (
    "Dense-12.5%",
    "Dense-25%",
    "Dense-25% + Sparse-2",
    "Dense-25% + Sparse-4",
    "Dense-25% + Kurtosis-4",
    "Dense-25% + Frequency-4",
    "Dense-25% + Sparse-8",
    "Dense-50% + Sparse-8",
    "Dense-50% + Sparse-12",
    "Dense-50% + Sparse-16",
    "Dense-50% + Sparse-24",
)
_VALUES_FIRST = (("v", 110), ("o", 64), ("q", 16), ("k", 16))
PLUS = Recipe(method="milo+", zero_kind="symmetric", factor_bits=3)
TABLE = (
    *_PLAIN,
    *(
        Recipe(method="milo", policy=policy, factor_bits=bits)
        for bits in (8, 3)
        for policy in _MILO_POLICIES
    ),
    *(dataclasses.replace(PLUS, policy=policy) for policy in _PLUS_POLICIES),
    # Nothing but the signed symmetric grid.
    PLUS,
    dataclasses.replace(PLUS, group_size=32),
    # Values and outputs of the attention are more sensitive than queries and keys.
    *(
        dataclasses.replace(PLUS, policy=policy, named_ranks=_VALUES_FIRST)
        for policy in ("Sparse-2", "Sparse-4", "Sparse-8", "Sparse-12", "Sparse-14", "Sparse-16")
    ),
    # The grid that MiLo has, to see what the symmetric one brings.
    *(
        dataclasses.replace(PLUS, policy=policy, zero_kind="float")
        for policy in ("Dense-25%", "Dense-25% + Sparse-4", "Dense-50% + Sparse-8")
    ),
)

RANKS = tuple(
    dataclasses.replace(recipe, policy=f"Uniform-{rank}")
    for recipe in (
        Recipe(method="milo", factor_bits=8),
        Recipe(method="milo", factor_bits=3),
        PLUS,
    )
    for rank in (2, 4, 8, 16, 32)
)

# Table 7: one pass. The left half gives every policy the bytes of Dense-25%; in the right half the
# policies share what experts get beside Dense-25%.
_BUDGET = "650 KB"
POLICIES = tuple(
    Recipe(method="milo", policy=policy, factor_bits=8, passes=1)
    for policy in (
        f"Uniform-8 within {_BUDGET}",
        f"Dense-8 within {_BUDGET}",
        f"Sparse-8 within {_BUDGET}",
        "Dense-25% + Sparse-8",
        "Dense-25% + Kurtosis-8",
        "Dense-25% + Frequency-8",
    )
)


def recovered(row: Measured, full: Measured, hqq: Measured) -> float:
    """Share of HQQ's loss of perplexity that a row does not have."""
    return (hqq.perplexity - row.perplexity) / (hqq.perplexity - full.perplexity)


def verdicts(rows: Sequence[Measured]) -> list[str]:
    """Claims, and whether the rows bear them out; a claim whose rows lack is left out."""
    by_recipe = {row.recipe: row for row in rows}
    full, hqq = by_recipe.get(FULL), by_recipe.get(HQQ)
    if full is None or hqq is None:
        return []
    milo = [row for row in rows if row.recipe.method == "milo" and row.recipe.passes > 1]
    plus = [row for row in rows if row.recipe.method == "milo+"]

    def said(row: Measured) -> str:
        extra = 100 * (row.bits_per_weight / hqq.bits_per_weight - 1)
        return (
            f"{100 * recovered(row, full, hqq):.1f} % of HQQ's loss at {row.bits_per_weight:.3f} "
            f"bits a weight (+{extra:.1f} %; {row.recipe.label})"
        )

    lines = []
    for recipe in SMALLER_GROUPS:
        rival = by_recipe.get(recipe)
        best = _best(milo, rival.bits_per_weight) if rival else None
        if rival and best:
            mark = _mark(best.perplexity < rival.perplexity)
            lines.append(f"{mark} MiLo against smaller groups: {said(best)}; {said(rival)}")
    enough = [row for row in milo if recovered(row, full, hqq) >= NEEDED_SHARE]
    if milo:
        shown = min(enough, key=lambda row: row.bits_per_weight, default=_best(milo, math.inf))
        assert shown is not None
        lines.append(f"{_mark(bool(enough))} MiLo recovers 59 % somewhere: {said(shown)}")
    for row in sorted(milo, key=lambda row: row.bits_per_weight):
        best = _best(plus, row.bits_per_weight)
        if best:
            mark = _mark(best.perplexity < row.perplexity)
            lines.append(f"{mark} milo+ beats MiLo: {said(best)}; {said(row)}")
    return lines + _against_int4(plus, by_recipe.get(INT4)) + _times(milo, by_recipe.get(GPTQ))


def _against_int4(plus: Sequence[Measured], int4: Measured | None) -> list[str]:
    lines = []
    for name, limit in (("at no more bytes", int4.bits_per_weight), ("", math.inf)) if int4 else ():
        best = _best(plus, limit)
        if best and int4:
            lines.append(
                f"{_mark(best.perplexity < int4.perplexity)} INT3 milo+ beats INT4 RTN {name}: "
                f"perplexity {best.perplexity:.4f} at {best.bits_per_weight:.3f} bits against "
                f"{int4.perplexity:.4f} at {int4.bits_per_weight:.3f} ({best.recipe.label})"
            )
    return lines


def _times(milo: Sequence[Measured], gptq: Measured | None) -> list[str]:
    if not milo or gptq is None:
        return []
    seconds = sorted(row.quantized.seconds for row in milo)
    return [
        f"seconds: GPTQ {gptq.quantized.seconds:.2f} (and its calibration), MiLo {seconds[0]:.2f} "
        f"to {seconds[-1]:.2f}"
    ]


def _best(rows: Sequence[Measured], bits_per_weight: float) -> Measured | None:
    """The row of lowest perplexity among those of no more bits."""
    fitting = [row for row in rows if row.bits_per_weight <= bits_per_weight]
    return min(fitting, key=lambda row: row.perplexity, default=None)


def _mark(holds: bool) -> str:
    return "[holds]" if holds else "[FAILS]"
