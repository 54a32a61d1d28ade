"""Perplexity of a stream of tokens, in windows that advance by a stride.

The rule: a window feeds up to `window` tokens and predicts the one after each. The first window
scores all of its targets, each later one its last `stride`, so that every token but the first is
scored once, with at least `window - stride` + 1 tokens before it where the stream has so many. A
stream that begins with a BOS token thereby scores every token of the text.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from moejax.errors import MoejaxError

# (tokens int32[B, T], lengths int32[B], targets int32[B, T] with -1 for "not scored") to nats
# float64[B], summed over each row's scored targets.
Score = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

RULE = (
    "each window feeds up to `window` tokens and predicts the one after each; the first window "
    "scores all its targets, later ones the last `stride`; every token but the first is scored once"
)


@dataclasses.dataclass(frozen=True)
class Windowing:
    """How a stream is cut: `stride` from 1 to `window`, which is all that a prediction sees."""

    window: int
    stride: int

    def check(self) -> None:
        """Raises MoejaxError for a stride outside 1..window."""
        if self.window < 1:
            raise MoejaxError(f"window={self.window} must be a number of tokens, at least 1")
        if not 1 <= self.stride <= self.window:
            raise MoejaxError(
                f"stride={self.stride} must be from 1 to {self.window}, the window: a longer one "
                f"would leave tokens unscored"
            )

    def num_windows(self, num_tokens: int) -> int:
        """Windows that cover the `num_tokens` - 1 targets of a stream."""
        return 1 + max(0, -(-(num_tokens - 1 - self.window) // self.stride))


# What papers print; a figure of one is not to be compared with a figure of the other.
PRESETS = {"2048/2048": Windowing(2048, 2048), "2048/512": Windowing(2048, 512)}


@dataclasses.dataclass(frozen=True)
class LogLikelihood:
    """What was measured: nats over `num_scored` tokens, in `num_windows` windows."""

    nats: float
    num_scored: int
    num_windows: int

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood; infinite where that overflows."""
        mean = self.nats / self.num_scored
        return math.exp(mean) if mean < 700 else math.inf

    def bits_per_byte(self, num_bytes: int) -> float:
        """Bits over all bytes of the text, those of an unscored first token included."""
        return self.nats / math.log(2) / num_bytes


def windows(
    ids: np.ndarray, windowing: Windowing, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Batches of one shape: inputs, their number, and the target after each.

    Args:
      ids: integer[n], at least two.
      windowing: how they are cut.
      batch_size: windows of a batch; the last batch is filled with empty ones.

    Yields:
      tokens int32[B, T], lengths int32[B], targets int32[B, T] with -1 for "not scored"; T is the
      window, or less where the whole stream is shorter.
    """
    length = min(windowing.window, len(ids) - 1)
    num_windows = windowing.num_windows(len(ids))
    batch_size = min(batch_size, num_windows)
    for first in range(0, num_windows, batch_size):
        tokens = np.zeros((batch_size, length), np.int32)
        targets = np.full((batch_size, length), -1, np.int32)
        lengths = np.zeros(batch_size, np.int32)
        for row, index in enumerate(range(first, min(first + batch_size, num_windows))):
            begin = index * windowing.stride
            part = ids[begin : begin + length + 1]
            lengths[row] = len(part) - 1
            tokens[row, : len(part) - 1] = part[:-1]
            seen = 0 if index == 0 else windowing.window - windowing.stride
            targets[row, seen : len(part) - 1] = part[1 + seen :]
        yield tokens, lengths, targets


def log_likelihood(
    ids: Sequence[int] | np.ndarray,
    windowing: Windowing,
    score: Score,
    *,
    batch_size: int,
    on_batch: Callable[[LogLikelihood], None] = lambda so_far: None,
) -> LogLikelihood:
    """Scores a stream.

    Args:
      ids: token ids, at least two.
      windowing: how they are cut.
      score: of a model, such as `Engine.score`.
      batch_size: windows at once.
      on_batch: is told what was measured so far, after each batch.

    Raises:
      MoejaxError: fewer than two tokens, or a model that gives no finite likelihood.
    """
    stream = np.asarray(ids)
    if len(stream) < 2:
        raise MoejaxError(f"the text has {len(stream)} tokens; two are the least to score one")
    windowing.check()
    measured = LogLikelihood(0.0, 0, 0)
    for tokens, lengths, targets in windows(stream, windowing, batch_size):
        nats = float(score(tokens, lengths, targets).sum())
        if not math.isfinite(nats):
            at = measured.num_windows * windowing.stride
            raise MoejaxError(
                f"the model gives {nats} nats in the windows from token {at} on: its weights hold "
                "NaN or infinite values, or the dtype is too small for it (try float32)"
            )
        measured = LogLikelihood(
            measured.nats + nats,
            measured.num_scored + int((targets >= 0).sum()),
            measured.num_windows + int((lengths > 0).sum()),
        )
        on_batch(measured)
    return measured
