"""`auto`: a recommended policy for how sparse a model is and what its experts' memory holds.

Measured or swept, not believed; the sources stand beside the numbers:
  * Everything fits: no policy; in one tier: `resident`.
  * The low tier fits whole: DynaExq's hierarchy, which waits for nothing, where the low tier is
    INT4 or better, or where the hot slots serve `FLOOR` of the gate mass (`HOT_GATE_MASS`).
  * Else the cache that sweeps found fastest at `FLOOR` (`auto_table.json`, by
    `scripts/recommend_defaults.py`): one tier, in which a token's least experts are left out.
Nothing is brought ahead: on a fast link it costs more than it gains (CHANGELOG, "Numbers", H200).
Buddies are off: they lose more than leaving out the same pairs (`policy_quality.jsonl`).
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

AUTO = "auto"
FLOOR = 0.95  # of the gate mass, served as the first tier would
_TABLE = Path(__file__).with_name("auto_table.json")
# Share of a layer's experts that are hot, and of the gate mass that they serve: the lesser of two
# texts, DynaExq int4/int2 on the demo model (scripts/results/policy_quality.jsonl, 2026-11-21).
HOT_GATE_MASS = (
    (0.0, 0.0),
    (0.125, 0.280),
    (0.25, 0.440),
    (0.375, 0.563),
    (0.5, 0.678),
    (0.75, 0.865),
    (1.0, 1.0),
)
_AS_GOOD = ("stored", "int8", "int4")  # low tiers whose loss is small: 0.9 % of perplexity, demo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """Tiers that could be had, by falling fidelity, and slots of a layer that memory leaves each.

    `low` is what the last tier is made of ("stored", "int4", ...), whatever its name.
    """

    tiers: tuple[str, ...]
    slots: tuple[int, ...]
    low: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a recommendation looks at.

    Attributes:
      num_experts: E, of a layer.
      width: A, experts of a token.
      all_fit: the model as it is stored fits the device.
      options: by falling preference; the last of one tier is what sweeps are asked about.
    """

    num_experts: int
    width: int
    all_fit: bool
    options: tuple[Option, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A policy ("": none), its tiers and settings, and why, in a line."""

    policy: str
    tiers: tuple[str, ...]
    settings: Mapping[str, Any]
    why: str


def recommended(facts: Facts) -> Recommendation:
    """The same for the same facts.

    Raises:
      ValueError: nothing fits and there is no option of one tier.
    """
    if facts.all_fit:
        return Recommendation(policy="", tiers=(), settings={}, why="all experts fit the device")
    num_experts = facts.num_experts
    for option in facts.options:
        hot, cold = option.slots[0], option.slots[-1]
        if hot >= num_experts:
            why = "nothing is waited for"
            return Recommendation(policy="resident", tiers=option.tiers[:1], settings={}, why=why)
        if len(option.tiers) < 2 or cold < num_experts or hot < facts.width:
            continue
        served = hot_gate_mass(hot / num_experts)
        if option.low not in _AS_GOOD and served < FLOOR:
            continue
        why = (
            f"{option.tiers[-1]} fits whole, and experts in {option.tiers[0]} serve about "
            f"{100 * served:.0f} % of the gate mass: nothing is waited for"
        )
        return Recommendation(policy="dynaexq", tiers=option.tiers, settings={}, why=why)
    alone = [option for option in facts.options if len(option.tiers) == 1]
    if not alone:
        raise ValueError("no option of one tier")
    one = alone[-1]
    row = nearest(facts.width / num_experts, one.slots[0] / num_experts)
    why = (
        f"the fastest at {100 * FLOOR:g} % of the gate mass in a sweep of {row['width']} of "
        f"{row['num_experts']} experts a token, {100 * row['share']:g} % of them there, at "
        f"{table()['link_gib_per_s']:g} GiB/s"
    )
    return Recommendation(
        policy=row["policy"], tiers=one.tiers, settings=dict(row["settings"]), why=why
    )


def hot_gate_mass(share: float) -> float:
    """Of the gate mass, what so large a share of hot experts serves; between the measured ones."""
    x, y = zip(*HOT_GATE_MASS, strict=True)
    return float(np.interp(share, x, y))


def nearest(sparsity: float, share: float) -> Mapping[str, Any]:
    """The row of one tier nearest in experts a token, then share that fits.

    Args:
      sparsity: experts of a token, of all.
      share: of the experts that fit the device.
    """
    rows = [row for row in table()["rows"] if len(row["tiers"]) == 1]

    def distance(row: Mapping[str, Any]) -> tuple[float, float]:
        tokens = abs(float(np.log(row["width"] / row["num_experts"] / sparsity)))
        return tokens, abs(row["share"] - share)

    return min(rows, key=distance)


@functools.cache
def table() -> Mapping[str, Any]:
    """What `scripts/recommend_defaults.py` wrote."""
    found: Mapping[str, Any] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return found
