"""Progress of a run: a bar with the time left, and the seconds of each phase."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import tqdm


class Meter:
    """Counts source bytes on a bar, and seconds by phase.

    Attributes:
      bar: of `tqdm`, in bytes of the source; `expect` raises its total.
      seconds: of each phase so far, in the order in which they began.
    """

    def __init__(self, *, visible: bool) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.bar = tqdm.tqdm(
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

    def expect(self, num_bytes: int) -> None:
        """Adds bytes to the total."""
        self.bar.total += num_bytes
        self.bar.refresh()
