"""Windows of a stream of tokens: what a prediction sees, and which targets it scores."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from moejax.errors import MoejaxError


@dataclasses.dataclass(frozen=True)
class Windowing:
    """How a stream is cut: `stride` is 1 to `window`, all that a prediction sees."""

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
        """Number of windows that cover the `num_tokens` - 1 targets of a stream."""
        return 1 + max(0, -(-(num_tokens - 1 - self.window) // self.stride))


# Windowings that papers print; figures of different ones cannot be compared.
PRESETS = {"2048/2048": Windowing(2048, 2048), "2048/512": Windowing(2048, 512)}


def windows(
    ids: np.ndarray, windowing: Windowing, batch_size: int, chosen: Sequence[int] | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields batches of one shape: inputs, their number, and the target after each.

    Args:
      ids: integer[n], at least two.
      batch_size: windows of a batch; the last batch is filled with empty ones.

    Yields:
      tokens int32[B, T], lengths int32[B], targets int32[B, T] with -1 for "not scored"; T is the
      window, or less where the whole stream is shorter.
    """
    length = min(windowing.window, len(ids) - 1)
    num_windows = windowing.num_windows(len(ids))
    batch_size = min(batch_size, num_windows)
    wanted = range(num_windows) if chosen is None else chosen
    for first in range(0, len(wanted), batch_size):
        tokens = np.zeros((batch_size, length), np.int32)
        targets = np.full((batch_size, length), -1, np.int32)
        lengths = np.zeros(batch_size, np.int32)
        for row, index in enumerate(wanted[first : first + batch_size]):
            begin = index * windowing.stride
            part = ids[begin : begin + length + 1]
            lengths[row] = len(part) - 1
            tokens[row, : len(part) - 1] = part[:-1]
            seen = 0 if index == 0 else windowing.window - windowing.stride
            targets[row, seen : len(part) - 1] = part[1 + seen :]
        yield tokens, lengths, targets
