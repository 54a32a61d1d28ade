"""Scatters a warpgroup's sums to the rows of device memory that the sorted pairs name.

A block's tokens are the pairs order[first], order[first + 1], .. order[end - 1]; columns of the
tile beyond them belong to another block and are not stored.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pallas_kernels.mosaic_decode.emit import Value
from pallas_kernels.mosaic_prefill import lanes
from pallas_kernels.mosaic_prefill.emit import Emitter
from pallas_kernels.mosaic_prefill.fragments import ROWS

Columns = Sequence[Sequence[Value]]  # of `lanes.write_rounded`


class Destination(NamedTuple):
    """Destination of a tile's sums, for a thread block."""

    row: Value  # the first of the matrix, or of each of its halves
    first: Value  # the span of the order
    end: Value


def _swiglu(e: Emitter, sums: Columns) -> list[list[Value]]:
    """Computes silu(gate) up of sums with gate in rows g and up in rows g + 8."""
    return [
        [e.fmul(e.fmul(gate, e.quotient_of_exp(gate)), up) for gate, up in ((a, c), (b, d))]
        for a, b, c, d in sums
    ]


def scatter_hidden(
    e: Emitter, kind: str, sums: Columns, place: Destination, chunk: int, num_columns: int,
    refs: Sequence[Value],
) -> None:  # fmt: skip
    """Scatters a warpgroup's SwiGLU values, 32 columns of `out`, rounded.

    Args:
      kind: the result's: "bf16" or "f16".
      chunk: tokens that go through a room; a multiple of 32.
      num_columns: F of out [P, F].
      refs: the warpgroup's two rooms [chunk, 32] in shared memory, the order, the output.
    """
    values = _swiglu(e, sums)
    words = [e.pack_pair(kind, low, high) for low, high in values]

    def write(room: Value, first: int) -> None:
        thread = e.special("tid.x")
        warp, lane = e.band(e.shr(thread, 5), 3), e.band(thread, 31)
        # Lane l gives the address of token l of four 8 x 8 matrices.
        piece = e.bxor(warp, e.band(e.shr(lane, 1), 3))
        at = e.add(e.add(e.shared_address(room), e.mul(lane, 64)), e.mul(piece, 16))
        for i in range(0, chunk // 8, 4):
            e.store_matrices(e.add(at, i * 8 * 64), words[first // 8 + i : first // 8 + i + 4])

    _scatter_chunks(e, write, 32, 8 * len(sums), place, chunk, num_columns, refs)


def scatter_rounded(
    e: Emitter, kind: str, sums: Columns, place: Destination, chunk: int, num_columns: int,
    refs: Sequence[Value],
) -> None:  # fmt: skip
    """Scatters a warpgroup's sums, 64 columns of `out`, rounded; rooms are [chunk, 64]."""

    def write(room: Value, first: int) -> None:
        lanes.write_rounded(e, kind, sums[first // 8 : (first + chunk) // 8], room)

    _scatter_chunks(e, write, ROWS, 8 * len(sums), place, chunk, num_columns, refs)


def _scatter_chunks(
    e: Emitter, write: Callable[[Value, int], None], width: int, num_tokens: int,
    place: Destination, chunk: int, num_columns: int, refs: Sequence[Value],
) -> None:  # fmt: skip
    """Scatters tokens through shared memory, storing 16 bytes of a row per lane."""
    *rooms, order, out = refs
    thread = e.special("tid.x")
    warpgroup, index = e.shr(thread, 7), e.band(thread, 127)
    column = e.add(place.row, e.mul(warpgroup, width))
    inside = e.compare(column, "lt", num_columns)
    pieces = width // 8  # of 16 bytes, of a token
    piece, token = e.band(index, pieces - 1), e.shr(index, {4: 2, 8: 3}[pieces])
    step = 128 // pieces  # tokens that the lanes take at a time
    turn = e.band(e.shr(token, 1), 3) if pieces == 4 else e.band(token, 7)
    within = e.add(e.mul(token, 2 * width), e.mul(e.bxor(piece, turn), 16))
    last = e.add(place.end, -1)
    to = e.offset(e.address(out), e.add(column, e.mul(piece, 8)), 2)
    order = e.address(order)

    def pair_of(number: Value) -> Value:
        return e.load(e.offset(order, e.smaller(number, last), 4), 0, 1)[0]

    for i, first in enumerate(range(0, num_tokens, chunk)):
        room = rooms[i % 2]
        numbers = [e.add(e.add(place.first, token), first + j) for j in range(0, chunk, step)]
        pairs = [pair_of(number) for number in numbers]  # asked for before they are needed
        write(room, first)
        # Both rooms in turn: what was read from this one was read before the barrier before.
        e.warpgroup_barrier()
        for j, (number, pair) in enumerate(zip(numbers, pairs, strict=True)):
            at = e.add(e.shared_address(room), within)
            words = e.load_shared_words(at, j * step * 2 * width, 4)
            present = e.both(inside, e.compare(number, "lt", place.end))
            e.when(present, _four(e, e.offset(to, pair, 2 * num_columns), words))
    e.warpgroup_barrier()


def _four(e: Emitter, at: Value, words: Sequence[Value]) -> Callable[[], None]:
    return lambda: e.store_four(at, 0, words)


def scatter_sums(
    e: Emitter, sums: Columns, place: Destination, num_columns: int, refs: Sequence[Value]
) -> None:
    """Scatters a warpgroup's sums, 64 columns of float32 `out`; `refs`: order and output."""
    order, out = refs
    g, t, first, warpgroup = lanes.place(e)
    start = e.add(place.row, e.mul(warpgroup, ROWS))
    inside = e.compare(start, "lt", num_columns)
    to = e.offset(e.address(out), e.add(e.add(start, first), g), 4)
    token = e.add(place.first, e.mul(t, 2))
    last = e.add(place.end, -1)
    order = e.address(order)
    for i, (a, b, c, d) in enumerate(sums):
        for half, pair in enumerate(((a, c), (b, d))):
            number = e.add(token, 8 * i + half)
            row = e.load(e.offset(order, e.smaller(number, last), 4), 0, 1)[0]
            present = e.both(inside, e.compare(number, "lt", place.end))
            e.when(present, lanes.storer(e, e.offset(to, row, 4 * num_columns), pair))
