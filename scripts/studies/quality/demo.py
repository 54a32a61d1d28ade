"""The demo model, texts and findings of `routing_and_weights.py`."""

import dataclasses
from typing import Any

import jax
import numpy as np

from moejax.checkpoints.open import open_checkpoint
from moejax.models.config import ModelConfig
from moejax.text.tokenizer import Tokenizer
from scripts.studies.quality.bench import DOMAINS, Texts, Windows

WIKI = "wikitext-2"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One figure, and the numbers that a plot of it draws."""

    what: str
    figure: float
    unit: str
    more: dict[str, Any]


@dataclasses.dataclass
class Demo:
    """The model in float32, and the texts."""

    config: ModelConfig
    weights: dict[str, Any]
    tokenizer: Tokenizer
    device: jax.Device
    texts: Texts | None = None
    num_windows: int = 0
    layers: tuple[int, ...] = ()  # whose matrices are measured; (): all

    @classmethod
    def load(cls, checkpoint: str, device: jax.Device) -> "Demo":
        """From a directory, or "demo"."""
        opened = open_checkpoint(checkpoint)
        tokenizer = Tokenizer.from_directory(opened.directory)
        assert tokenizer is not None
        weights = dict(opened.load(dtype="float32", device=device, progress=False))
        return cls(opened.config, weights, tokenizer, device)

    def windows(self) -> dict[str, Windows]:
        """Windows of WikiText-2's test text and of each held-out domain, spread over the text."""
        assert self.texts is not None
        found = {WIKI: self.texts.wikitext(self.num_windows)}
        return found | {name: self.texts.domain(name, self.num_windows) for name in DOMAINS}


def listed(values: Any, digits: int | None = None) -> Any:
    """Numbers as JSON takes them: whole, or rounded."""
    array = np.asarray(values)
    return (array if digits is None else array.astype(np.float64).round(digits)).tolist()
