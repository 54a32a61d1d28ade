"""A model quantized by `moejax.quantize`, read back and scored: the studies of quantizers share it.

Scored windows hold 2048 tokens after an end-of-text token and do not overlap; the model runs in
float32, by one compiled program for all of its quantizations.
"""

import contextlib
import lzma
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax import quantize
from moejax.checkpoints.open import open_checkpoint
from moejax.config.commands import QuantizeConfig
from moejax.quantization.pipeline.run import Outcome
from moejax.text.tokenizer import Tokenizer
from moejax.weights.qtensor import dense
from scripts.demo_training.scoring import Windows, cut_windows, make_scorer, score_windows

WINDOW, BATCH = 2048, 4


class Scored(NamedTuple):
    """Scores of a checkpoint."""

    mean: float  # nats a token
    nats: tuple[float, ...]  # a token, of each batch of windows
    packed_bytes: int  # of the packed leaves


class Bench:
    """A model, windows of a text, and the compiled scorer."""

    def __init__(self, checkpoint: str, text: str, count: int, device: jax.Device):
        """Cuts a text, plain or .xz, and spreads `count` windows over it; 0: all of them."""
        opened = open_checkpoint(checkpoint)
        tokenizer = Tokenizer.from_directory(opened.directory)
        assert tokenizer is not None
        path = Path(text)
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        windows = cut_windows(np.array(tokenizer.encode(raw.decode())), WINDOW, WINDOW)
        there = len(windows.tokens)
        chosen = np.linspace(0, there - 1, min(count or there, there)).astype(int)
        self.windows = Windows(windows.tokens[chosen], windows.scored[chosen])
        self.beside: dict[str, Any] = {
            "windows": len(chosen),
            "tokens": int(self.windows.scored.sum()),
        }
        self._checkpoint, self._device = checkpoint, device
        self._scorer = make_scorer(opened.config, jnp.float32, "xla")

    def score(self, directory: Path | str, read_bits: int = 0) -> Scored:
        """Scores a checkpoint, read at a width."""
        leaves = open_checkpoint(str(directory), read_bits).load(
            dtype="float32", device=self._device, progress=False
        )
        plain = {name: dense(leaf, jnp.float32) for name, leaf in leaves.items()}
        bits, nats = 0.0, []
        for first in range(0, len(self.windows.tokens), BATCH):
            some = Windows(*(part[first : first + BATCH] for part in self.windows))
            score = score_windows(self._scorer, plain, some, batch_size=BATCH)
            bits += score.bits
            nats.append(score.bits * math.log(2) / score.num_targets)
        packed = sum(leaf.nbytes for leaf in leaves.values() if not isinstance(leaf, jax.Array))
        return Scored(bits * math.log(2) / self.beside["tokens"], tuple(nats), packed)

    @contextlib.contextmanager
    def quantized(self, samples: int, settings: dict[str, Any]) -> Iterator[tuple[Path, Outcome]]:
        """Quantizes the model into a folder that goes afterwards.

        Args:
          samples: of the calibration text.
          settings: fields of `QuantizeConfig`.
        """
        with tempfile.TemporaryDirectory() as folder:
            config = QuantizeConfig(
                checkpoint=self._checkpoint, output=folder, calibration_samples=samples,
                platform=self._device.platform, **settings,
            )  # fmt: skip
            yield Path(folder), quantize.run(config, progress=False)
