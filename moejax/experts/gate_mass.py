"""The fidelity ledger: what a policy made of the router's gate mass, beside what moved for it.

Axes: M sparse layers, T tiers.
"""

import dataclasses
from typing import Any

import numpy as np

from moejax.experts.ledger import Ledger


@dataclasses.dataclass
class TieredLedger:
    """Sums over calls: a ledger of each tier's pool, and the gate mass of all layers.

    Attributes:
      tiers: of each tier by name, of falling fidelity.
      gate: float64[M, T + 3]: the router's gate mass that each tier served, that was skipped, that
        another expert than the router's served (which is in its tier's too), and of all.
      asked: how often the policy was asked between steps what to move; None: it moves nothing then.
    """

    tiers: dict[str, Ledger]
    gate: np.ndarray | None = None
    asked: int | None = None

    def add(self, gate: np.ndarray) -> None:
        """Adds float64[M, T + 3] of a call.

        Raises:
          RuntimeError: mass is missing: a pair was neither served nor skipped.
        """
        self.gate = gate if self.gate is None else self.gate + gate
        served, total = gate[:, : len(self.tiers) + 1].sum(axis=1), gate[:, -1]
        if not np.allclose(served, total, rtol=1e-3, atol=1e-3):
            raise RuntimeError(f"gate mass {total.tolist()}, of which {served.tolist()} is known")

    @property
    def shares(self) -> dict[str, float]:
        """Of the gate mass: by tier, "skipped", "substituted"; NaN before any token."""
        return self._shares(None if self.gate is None else self.gate.sum(axis=0))

    @property
    def shares_by_layer(self) -> list[dict[str, float]]:
        """The same of each layer."""
        return [] if self.gate is None else [self._shares(row) for row in self.gate]

    def _shares(self, row: np.ndarray | None) -> dict[str, float]:
        names = [*self.tiers, "skipped", "substituted"]
        if row is None or not row[-1]:
            return dict.fromkeys(names, float("nan"))
        return dict(zip(names, (row[:-1] / row[-1]).tolist(), strict=True))

    @property
    def layers(self) -> list[dict[str, int]]:
        """Counts of each layer by the names of `ledger.EVENTS`, over all tiers."""
        return [
            {name: sum(one[name] for one in of_layer) for name in of_layer[0]}
            for of_layer in zip(*(tier.layers for tier in self.tiers.values()), strict=True)
        ]

    def total(self, event: str) -> int:
        """Of one of `ledger.EVENTS`, over all layers and tiers."""
        return sum(tier.total(event) for tier in self.tiers.values())

    @property
    def hit_rate(self) -> float:
        """Share of needed experts that were in a slot of their tier; NaN before any."""
        needed = self.total("needed")
        return self.total("hits") / needed if needed else float("nan")

    @property
    def link_bytes(self) -> int:
        """Bytes from host to device, for whatever cause."""
        return sum(tier.link_bytes for tier in self.tiers.values())

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "tiers": {name: tier.as_dict() for name, tier in self.tiers.items()},
            "asked": self.asked,
            "hit_rate": None if np.isnan(self.hit_rate) else self.hit_rate,
            "gate_shares": {n: None if np.isnan(s) else s for n, s in self.shares.items()},
            "gate_shares_by_layer": self.shares_by_layer,
        }

    def describe(self) -> list[str]:
        """Lines of a report."""
        lines = []
        for name, tier in self.tiers.items():
            prefix = f"{name}: " if len(self.tiers) > 1 else ""
            lines += [prefix + line for line in tier.describe()]
        *better, _ = self.tiers.items()
        for name, tier in better:
            arrived = sum(map(tier.total, ("admitted", "prefetched", "bulk")))
            lines.append(f"promotions to {name} {arrived}, demotions {tier.total('evictions')}")
        if self.asked is not None:
            lines.append(f"between steps the policy was asked {self.asked} times what to move")
        if self.asked == 0:
            lines[-1] = f"WARNING: {lines[-1]}, so it moved nothing: the run was too short for it"
        return [*lines, "gate mass: " + _percents(self.shares)]

    def describe_layers(self) -> list[str]:
        """A line for each layer."""
        shares = self.shares_by_layer
        return [f"layer {i}: {_percents(row)}" for i, row in enumerate(shares)]


def _percents(shares: dict[str, float]) -> str:
    """The tiers, and what else there is any of."""
    kept = {n: s for n, s in shares.items() if n not in ("skipped", "substituted") or s}
    return ", ".join(f"{name} {100 * share:.2f} %" for name, share in kept.items())
