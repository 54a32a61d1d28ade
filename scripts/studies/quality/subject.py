"""The model and texts of a run of `policies.py`."""

import dataclasses
from typing import Any

import numpy as np

from moejax.policies.baselines import Resident
from scripts.studies.quality.bench import Measured, Model, Served, Texts, Windows
from scripts.studies.quality.cases import Point

BATCH = 5  # windows at once: of the mixed text, one of each domain


@dataclasses.dataclass
class Subject:
    """A model, texts that are scored, and others of their kind that are not."""

    model: Model
    texts: Texts
    wiki: Windows
    mixed: Windows
    calibration: Windows
    others: dict[str, Windows]
    origins: int = 0  # expert e is a replica of shard e mod this; 0: replicas are not known
    _uniform: dict[str, Served] = dataclasses.field(default_factory=dict)

    @property
    def both(self) -> tuple[Windows, Windows]:
        """The texts that are scored."""
        return self.wiki, self.mixed

    @property
    def num_experts(self) -> int:
        """E."""
        return self.model.config.num_experts

    def part(self, share: float) -> int:
        """So much of the experts of a layer, one at least."""
        return max(1, round(share * self.num_experts))

    def uniform(self, tier: str, windows: Windows, batch: int = BATCH) -> Measured:
        """Every expert in one precision."""
        served = self.served_uniform(tier)
        served.begin(Resident())
        return served.run(windows, batch)

    def served_uniform(self, tier: str) -> Served:
        """The program that runs every expert in one precision, made once."""
        if tier not in self._uniform:
            made = Served(self.model, Resident(), (tier,), (self.num_experts,))
            self._uniform[tier] = made
        return self._uniform[tier]

    def none_held(self) -> np.ndarray:
        """No expert of any layer, for `Served.begin`."""
        return np.zeros((self.model.num_layers, 0), np.int32)


def point(text: Windows, series: str, x: float, found: Measured, **more: Any) -> Point:
    """The row of a run, with its shares of the gate mass."""
    shares = {f"gate {name}": share for name, share in found.shares.items()}
    moved = {"promoted": found.promoted} if found.shares else {}
    return Point(
        text.name, series, x, found.perplexity, found.by_window, shares | moved | more,
        found=found.more,
    )  # fmt: skip
