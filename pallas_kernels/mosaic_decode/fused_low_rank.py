"""Streams V's row tiles of a low-rank term among its matrix's: one pass, ring and x."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from pallas_kernels.mosaic_decode.emit import Value
from pallas_kernels.mosaic_decode.product import BlockOfX, Rows, Stream

_Totals = TypeVar("_Totals")


class FusedStream(Generic[_Totals]):
    """A stream with another's tiles among its own, as a warp copies and multiplies them.

    The other tiles come after some of the stream's own, so that the values their addresses depend
    on are known when their first copy starts. They have the stream's form, groups and K, and
    take no more shared memory.
    """

    def __init__(
        self, stream: Stream, make: Callable[[], Stream], count: int, after: int, totals: _Totals,
        pause: Callable[[], None],
    ):  # fmt: skip
        """Fuses two streams without running a step.

        Args:
          make: makes the other stream, of `count` tiles; called once, at the first use.
          pause: called once among the tiles; `paused` records whether it was.
        """
        self.e, self.matrix = stream.e, stream.matrix
        self.stream, self.make, self.rows = stream, make, stream.rows
        self.totals, self.pause, self.paused = totals, pause, False
        self.tile_bytes, self.own_tiles = stream.tile_bytes, stream.num_tiles
        self.count, self.after = count, after
        self.num_tiles = self.own_tiles + count
        self.operands, self.prepare_x = stream.operands, stream.prepare_x
        self.other: Stream | None = None

    def other_stream(self) -> Stream:
        """Makes the other stream; at its first use, all threads must see its values."""
        if self.other is None:
            self.other = self.make()
        return self.other

    def number(self, tile: int) -> tuple[bool, int]:
        """Whether a tile is the other stream's, and its number in its own stream."""
        if tile < self.after:
            return False, tile
        return (True, tile - self.after) if tile < self.after + self.count else (
            False, tile - self.count)  # fmt: skip

    def after_tile(self, tile: int, depth: int) -> None:
        """Runs after a tile of the only stage; copies before tile `depth` are then complete."""
        if not self.paused and tile >= max(self.after + self.count - 1, depth):
            self.paused = True
            self.pause()

    def _of(self, tile: int) -> tuple[Stream, int]:
        other, number = self.number(tile)
        return self.other_stream() if other else self.stream, number

    def fetch(
        self, tile: int, stage: Value, present: Value, to: Value, row: Rows | None = None
    ) -> None:
        """Fetches like `Stream.fetch`."""
        stream, number = self._of(tile)
        stream.fetch(number, stage, present, to, row)

    def multiply(
        self, tile: int, at: Value, stage: Value, x: BlockOfX, totals: Sequence[Value]
    ) -> list[Value]:
        """Multiplies like `Stream.multiply`."""
        stream, number = self._of(tile)
        return stream.multiply(number, at, stage, x, list(totals))
