"""Row tiles of V of a low-rank term among those of its matrix: one walk, one ring, the same x."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from pallas_kernels.mosaic_decode.emit import Value
from pallas_kernels.mosaic_decode.product import BlockOfX, Stream

_Totals = TypeVar("_Totals")


class Joined(Generic[_Totals]):
    """A stream with tiles of another, as a warp copies and multiplies them.

    The others come after some of the stream's own, so that what their addresses wait for is known
    when their first copy starts. They have the stream's form, groups, K and span, and take no more
    shared memory.
    """

    def __init__(
        self, stream: Stream, make: Callable[[], Stream], count: int, after: int, totals: _Totals,
        pause: Callable[[], None],
    ):  # fmt: skip
        """Takes no step yet.

        Args:
          stream: of the own tiles.
          make: the other one, of `count` tiles; called once, by `meet` or the first copy.
          count: static.
          after: how many of the own tiles come before.
          totals: where those of the others are kept.
          pause: done once among the tiles, if `paused` says so in the end.
        """
        self.e, self.matrix, self.span = stream.e, stream.matrix, stream.span
        self.stream, self.make, self.rows = stream, make, stream.rows
        self.totals, self.pause, self.paused = totals, pause, False
        self.tile_bytes, self.own_tiles = stream.tile_bytes, stream.num_tiles
        self.count, self.after = count, after
        self.num_tiles = self.own_tiles + count
        self.operands, self.prepare_x = stream.operands, stream.prepare_x
        self.other: Stream | None = None

    def meet(self) -> Stream:
        """The other stream; where it is first asked for, its values have to be seen by all."""
        if self.other is None:
            self.other = self.make()
        return self.other

    def number(self, tile: int) -> tuple[bool, int]:
        """Whether a tile is the other stream's, and its number there or in the own one."""
        if tile < self.after:
            return False, tile
        return (True, tile - self.after) if tile < self.after + self.count else (
            False, tile - self.count)  # fmt: skip

    def between(self, tile: int, depth: int) -> None:
        """After a tile of the only stage; what was copied before tile `depth` is there with it."""
        if not self.paused and tile >= max(self.after + self.count - 1, depth):
            self.paused = True
            self.pause()

    def _of(self, tile: int) -> tuple[Stream, int]:
        other, number = self.number(tile)
        return self.meet() if other else self.stream, number

    def fetch(
        self, tile: int, stage: Value, present: Value, to: Value, row: Value | None = None
    ) -> None:
        """As `Stream.fetch`."""
        stream, number = self._of(tile)
        stream.fetch(number, stage, present, to, row)

    def multiply(
        self, tile: int, at: Value, stage: Value, block: int, x: BlockOfX, totals: Sequence[Value]
    ) -> list[Value]:
        """As `Stream.multiply`."""
        stream, number = self._of(tile)
        return stream.multiply(number, at, stage, block, x, list(totals))
