"""Progress of a run: a bar with the time left, and the seconds of each phase."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import tqdm


class Meter:
    """Counts source bytes on a bar, and seconds by phase.

    Attributes:
      seconds: of each phase so far, in the order in which they began.
    """

    def __init__(self, *, visible: bool) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._bar = tqdm.tqdm(
            total=0,
            desc="quantizing",
            unit="B",
            unit_scale=True,
            disable=not visible,
            smoothing=0.05,  # layers differ; the time left follows the mean of many chunks
        )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the block's seconds to a phase; phases do not nest."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def add(self, num_bytes: int) -> None:
        """Adds so many bytes to the total."""
        self._bar.total += num_bytes
        self._bar.refresh()

    def advance(self, num_bytes: int) -> None:
        """Moves the bar by so many bytes of the source."""
        self._bar.update(num_bytes)

    def title(self, text: str) -> None:
        """Sets the bar's description."""
        self._bar.set_description_str(text)

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()
