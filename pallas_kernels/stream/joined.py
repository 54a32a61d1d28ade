"""Row tiles of V of a low-rank term among those of its matrix: one walk, one ring, the same x."""

from collections.abc import Callable, Sequence

from pallas_kernels.stream.emit import Value
from pallas_kernels.stream.product import BlockOfX, Stream


class Joined:
    """A stream with tiles of another, as a warp copies and multiplies them.

    The others come `after` so many of the stream's own, so that what their addresses wait for is
    known when their first copy starts; their totals are put after all others. They have the
    stream's form, groups, K and span, and take no more shared memory.
    """

    def __init__(self, stream: Stream, make: Callable[[], Stream], count: int, after: int):
        """`make`: the other stream, of `count` tiles; called once, by `meet` or the first copy."""
        self.e, self.matrix, self.span = stream.e, stream.matrix, stream.span
        self.stream, self.make, self.rows = stream, make, stream.rows
        self.tile_bytes, own = stream.tile_bytes, list(range(stream.num_tiles))
        self.num_tiles = stream.num_tiles + count
        self.places = [*own[:after], *range(len(own), self.num_tiles), *own[after:]]
        self.operands, self.prepare_x = stream.operands, stream.prepare_x
        self.other: Stream | None = None

    def meet(self) -> Stream:
        """The other stream; where it is first asked for, its values have to be seen by all."""
        if self.other is None:
            self.other = self.make()
        return self.other

    def _of(self, tile: int) -> tuple[Stream, int]:
        number = self.places[tile]
        own = self.stream.num_tiles
        return (self.stream, number) if number < own else (self.meet(), number - own)

    def fetch(
        self, tile: int, stage: Value, present: Value, to: Value, row: Value | None = None
    ) -> None:
        """As `Stream.fetch`."""
        stream, tile = self._of(tile)
        stream.fetch(tile, stage, present, to, row)

    def multiply(
        self, tile: int, at: Value, stage: Value, block: int, x: BlockOfX, totals: Sequence[Value]
    ) -> list[Value]:
        """As `Stream.multiply`."""
        stream, tile = self._of(tile)
        return stream.multiply(tile, at, stage, block, x, list(totals))
