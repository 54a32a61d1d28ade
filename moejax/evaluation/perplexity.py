"""Perplexity of a stream of tokens, in windows that advance by a stride.

The rule: a window feeds up to `window` tokens and predicts the one after each. The first window
scores all of its targets, each later one its last `stride`, so that every token but the first is
scored once, with at least `window - stride` + 1 tokens before it where the stream has so many. A
stream that begins with a BOS token thereby scores every token of the text.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moejax.errors import MoejaxError
from moejax.text.windows import Windowing, windows

# (tokens int32[B, T], lengths int32[B], targets int32[B, T] with -1 for "not scored") to nats
# float64[B], summed over each row's scored targets.
Score = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

RULE = (
    "each window feeds up to `window` tokens and predicts the one after each; the first window "
    "scores all its targets, later ones the last `stride`; every token but the first is scored once"
)
STANDARD_ERROR = (
    "over windows, taken for independent: of the mean nats a token, a ratio of sums over windows, "
    "sqrt(m / (m - 1) * sum((nats - mean * tokens)**2)) / sum(tokens) of m windows; of perplexity "
    "by the delta method, perplexity times that"
)


class WindowScore(NamedTuple):
    """Nats over the tokens that one window scores."""

    nats: float
    num_scored: int


@dataclasses.dataclass(frozen=True)
class LogLikelihood:
    """Measured likelihood: nats over `num_scored` tokens, in `num_windows` windows."""

    nats: float  # sum over all scored tokens
    num_scored: int  # tokens
    num_windows: int  # windows
    # of `nats` / `num_scored`, by `STANDARD_ERROR`; None for a single window
    stderr: float | None = None

    @classmethod
    def of(cls, scores: Sequence[WindowScore]) -> "LogLikelihood":
        """Sums the scores of all windows, in any order."""
        nats = math.fsum(score.nats for score in scores)
        num_scored, count = sum(score.num_scored for score in scores), len(scores)
        if count < 2:
            return cls(nats, num_scored, count)
        mean = nats / num_scored
        squares = math.fsum((score.nats - mean * score.num_scored) ** 2 for score in scores)
        stderr = math.sqrt(count / (count - 1) * squares) / num_scored
        return cls(nats, num_scored, count, stderr)

    @property
    def perplexity(self) -> float:
        """Perplexity: exp of the mean negative log-likelihood, infinite if that overflows."""
        mean = self.nats / self.num_scored
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def perplexity_stderr(self) -> float | None:
        """Standard error of `perplexity`; None if either is unknown."""
        if self.stderr is None or math.isinf(self.perplexity):
            return None
        return self.perplexity * self.stderr

    def bits_per_byte(self, num_bytes: int) -> float:
        """Bits per byte of the whole text, an unscored first token included."""
        return self.nats / math.log(2) / num_bytes


def log_likelihood(
    ids: Sequence[int] | np.ndarray,
    windowing: Windowing,
    score: Score,
    *,
    batch_size: int,
    known: Mapping[int, WindowScore] | None = None,
    on_batch: Callable[[dict[int, WindowScore]], None] = lambda scores: None,
) -> LogLikelihood:
    """Scores a stream.

    Known windows and windows scored now give equal bits if their batches are equal.

    Args:
      score: of a model, such as `Engine.score`.
      known: scores of earlier windows, by index.
      on_batch: called with the scores of each batch, by index.

    Raises:
      MoejaxError: fewer than two tokens, or a likelihood that is not finite.
    """
    stream = np.asarray(ids)
    if len(stream) < 2:
        raise MoejaxError(f"the text has {len(stream)} tokens; two are the least to score one")
    windowing.check()
    every = range(windowing.num_windows(len(stream)))
    scores = {index: found for index, found in (known or {}).items() if index in every}
    missing = [index for index in every if index not in scores]
    left = iter(missing)
    for tokens, lengths, targets in windows(stream, windowing, batch_size, missing):
        nats = np.asarray(score(tokens, lengths, targets))
        indices = list(itertools.islice(left, int((lengths > 0).sum())))
        if not np.isfinite(nats).all():
            raise MoejaxError(
                f"the model gives {nats.sum()} nats in the windows from token "
                f"{indices[0] * windowing.stride} on: its weights hold NaN or infinite values, or "
                "the dtype is too small for it (try float32)"
            )
        counts = (targets >= 0).sum(axis=1)
        rows = zip(indices, nats, counts, strict=False)  # what fills the batch is left out
        found = {index: WindowScore(float(sum_), int(count)) for index, sum_, count in rows}
        scores |= found
        on_batch(found)
    return LogLikelihood.of([scores[index] for index in every])
