"""Kernels that multiply each row of x by its own matrix: gate and up, then down.

A warpgroup's sums are scattered to the rows of device memory that the sorted pairs name. A block's
tokens are the pairs order[first], order[first + 1], .. order[end - 1]; columns of the tile beyond
them belong to another block and are not stored.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launch
from pallas_kernels.assignments import Assignments, Turn
from pallas_kernels.mosaic_decode.emit import Value
from pallas_kernels.mosaic_decode.support import KINDS
from pallas_kernels.mosaic_prefill import lanes, registers
from pallas_kernels.mosaic_prefill.emit import Emitter
from pallas_kernels.mosaic_prefill.fragments import BLOCK, ROWS, MatrixFormat, form_of
from pallas_kernels.mosaic_prefill.product import Item, pipeline, scratch, work
from pallas_kernels.mosaic_prefill.tiles import WgmmaTiles, fitted_tiles, grouped_tokens
from pallas_kernels.packed import PLAIN_BITS, PackedMatrices
from pallas_kernels.target import Target

Tiers = Sequence[PackedMatrices]
SLOT, FIRST, END, BAND_FIRST, BAND_LENGTH = range(5)  # columns of `_ExpertBlocks.table`
BAND_TOKENS = 2048  # of one matrix whose tiles are worked off together: their x stays in L2


class _ExpertBlocks(NamedTuple):
    """Blocks of pairs of one matrix; device data of static shapes."""

    order: jax.Array  # int32[P]: pairs t A + a by tier and slot, those that are skipped last
    # int32[num_blocks, 5]: the matrix's slot; the span of `order`; the blocks of the same matrix
    # that are worked off together. What is beyond the last tier's blocks means nothing.
    table: jax.Array
    first_block: jax.Array  # int32[tiers + 1]: of each tier, then the end of the last


def gate_up(
    x: jax.Array,  # [T, D] in bfloat16 or float16
    assignments: Assignments,
    tiers: Tiers,  # for each tier S matrices [2F, D], gate rows first
    tiles: WgmmaTiles | None,
    target: Target,
    turn: Turn | None = None,  # as in `layer`
) -> jax.Array:
    """Computes silu(gate x_t) * up x_t for each pair, [T, A, F]; see `grouped_dequant_matmul`."""
    call = _Call(assignments, tiers, tiles, target, paired=True, turn=turn)
    hidden = call.run(call.rows_of(x), x.dtype)
    if turn:  # nobody reads the rows of others
        return hidden.reshape(*assignments.slot.shape, -1)
    return _zero_where_skipped(hidden, assignments, tiers)


def layer(
    x: jax.Array,
    assignments: Assignments,
    gate_up_tiers: Tiers,
    down_tiers: Tiers,
    tiles: Sequence[WgmmaTiles | None],  # of each product
    target: Target,
    # the tiers that it counts are those of all calls, and this one has its own alone
    turn: Turn | None = None,
) -> jax.Array:
    """Computes `products` of what `gate_up` gives, whose rows stay in the order of matrices."""
    ups = _Call(assignments, gate_up_tiers, tiles[0], target, paired=True, turn=turn)
    downs = _Call(assignments, down_tiers, tiles[1], target, paired=False, turn=turn)
    rows = ups.rows_of(x)  # of all turns, and XLA sorts and gathers once
    hidden = ups.run(rows, x.dtype, order=jnp.arange(len(rows), dtype=jnp.int32))
    found = downs.run(hidden, jnp.float32, before=turn.before if turn else None)
    return found.reshape(*assignments.slot.shape, -1)


def products(
    rows: jax.Array,  # [T, A, K], or [T, K] if the pairs of a token share a row
    assignments: Assignments,
    tiers: Tiers,  # for each tier S matrices [N, K]
    tiles: WgmmaTiles | None,
    target: Target,
    before: jax.Array | None = None,  # float32[1, T, A, N], donated: of pairs that are skipped
    turn: Turn | None = None,  # as in `layer`
) -> jax.Array:
    """Multiplies each pair's row by its matrix [N, K]: [T, A, N], undefined if skipped."""
    call = _Call(assignments, tiers, tiles, target, paired=False, turn=turn)
    order, width = call.runs.order, assignments.slot.shape[1]
    flat = rows.reshape(-1, rows.shape[-1])
    found = call.run(flat[order if rows.ndim == 3 else order // width], jnp.float32, before=before)
    return found.reshape(*assignments.slot.shape, -1)


def _zero_where_skipped(found: jax.Array, assignments: Assignments, tiers: Tiers) -> jax.Array:
    ran = (assignments.tier >= 0) & (assignments.tier < len(tiers))
    found = found.reshape(*ran.shape, -1)
    return jnp.where(ran[..., None], found, jnp.zeros((), found.dtype))


class _Call:
    """One product of a layer: a launch per tier, whose blocks it finds in device memory."""

    def __init__(
        self, assignments: Assignments, tiers: Tiers, tiles: WgmmaTiles | None,
        target: Target, paired: bool, turn: Turn | None = None,
    ) -> None:  # fmt: skip
        num_tokens, self.width = assignments.slot.shape
        counts = [weights.num_slots for weights in tiers]
        if turn:
            counts = [turn.slots] * turn.count
        tokens = tiles.tokens if tiles else grouped_tokens(num_tokens, self.width, sum(counts))
        self.tiles = [tiles or fitted_tiles(tokens, weights.bits) for weights in tiers]
        self.tiers, self.paired = tiers, paired
        self.num_thread_blocks = target.num_processors - (turn.spared if turn else 0)
        band = max(1, BAND_TOKENS // tokens)
        runs = _expert_blocks(assignments.tier, assignments.slot, counts, tokens, band)
        if turn:
            ends = jax.lax.dynamic_slice(runs.first_block, (turn.number,), (2,))
            runs = runs._replace(first_block=ends)
        self.runs = runs
        self.num_columns = tiers[0].num_outputs // (2 if paired else 1)

    def rows_of(self, x: jax.Array) -> jax.Array:
        """Rows [P, D] of tokens [T, D], a pair's in its place of the order."""
        return x[self.runs.order // self.width]

    def run(
        self, rows: jax.Array, dtype: Any, *, order: jax.Array | None = None,
        before: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """Runs all tiers: [P, columns], from sorted rows [P, K].

        Args:
          order: int32[P], the result's row of each sorted one; None: the pairs' own order.
          before: [..., columns], donated, whose rows stay where no tier of these writes.
        """
        out = jax.ShapeDtypeStruct((rows.shape[0], self.num_columns), dtype)
        found = None if before is None else before.reshape(out.shape)
        runs = self.runs if order is None else self.runs._replace(order=order)
        for tier, (weights, tiles) in enumerate(zip(self.tiers, self.tiles, strict=True)):
            found = self._launch(tier, weights, tiles, runs, rows, out, found)
        assert found is not None
        return found

    def _launch(
        self, tier: int, weights: PackedMatrices, tiles: WgmmaTiles, runs: _ExpertBlocks,
        rows: jax.Array, out: jax.ShapeDtypeStruct, before: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        """Runs the rows of one tier, written to `before`, which has the earlier tiers' rows."""
        packed = weights.bits != PLAIN_BITS
        form = form_of(weights, KINDS[rows.dtype.name], self.paired) if packed else None
        rooms = scratch(form, tiles, rows.dtype, self.paired)
        if out.dtype.name in KINDS:
            shape = (tiles.warpgroups, 2, tiles.chunk, ROWS // 2)
            rooms["out_room"] = plgpu.SMEM(shape, out.dtype)
        arrays = weights.arrays
        operands = [*runs, rows, *arrays]
        what = "gate_up" if self.paired else "down"
        call = launch.mosaic_pipeline_call(
            functools.partial(
                _body, tier=tier, form=form, tiles=tiles, paired=self.paired,
                num_arrays=len(arrays),
            ),
            name=f"grouped_{what}_{weights.describe().replace(' ', '_')}_{tiles.describe()}",
            num_blocks=self.num_thread_blocks,
            out_shape=out,
            scratch=rooms,
            num_warpgroups=tiles.warpgroups + 1,
            alias=None if before is None else len(operands),
        )  # fmt: skip
        found: jax.Array = call(*operands) if before is None else call(*operands, before)
        return found


@dataclasses.dataclass(frozen=True)
class _Item(Item):
    """One tile of one block of pairs."""

    end: Any  # of the block's span, which begins with `token`


def _body(
    order: Any, table: Any, first_block: Any, x: Any, *rest: Any,
    tier: int, form: MatrixFormat | None, tiles: WgmmaTiles, paired: bool, num_arrays: int,
    **rooms: Any,
) -> None:  # fmt: skip
    arrays, out = rest[:num_arrays], rest[-1]
    parts = pipeline(form, tiles, x, arrays, rooms, paired)
    rows = tiles.rows // (2 if paired else 1)
    row_tiles = -(-out.shape[1] // rows)
    first, after = first_block[tier], first_block[tier + 1]

    thread_block, stride = lax.axis_index("block"), lax.axis_size("block")
    num_items = (after - first) * row_tiles - thread_block

    def item_of(i: jax.Array) -> _Item:
        index = thread_block + i * stride
        known = first + lax.div(index, jnp.int32(row_tiles))  # a block of the same band
        band, length = table[known, BAND_FIRST], table[known, BAND_LENGTH]
        inside = index - (band - first) * row_tiles
        block = band + lax.rem(inside, length)
        return _Item(
            row=lax.div(inside, length) * rows, token=table[block, FIRST],
            slot=table[block, SLOT], block=jnp.int32(0),
            num_blocks=jnp.int32(-(-x.shape[1] // BLOCK)), end=table[block, END],
        )  # fmt: skip

    def store(item: _Item, sums: jax.Array) -> None:
        emit = _stored(tiles, out)
        places, refs = [item.row, item.token, item.end], [order, out]
        if "out_room" in rooms:
            room = rooms["out_room"].at[lax.axis_index("warpgroup")]
            refs = [room.at[0], room.at[1], *refs]
        registers.store(emit, sums, places, refs)

    work(parts, lax.div(num_items + (stride - 1), jnp.int32(stride)), item_of, store)


def _stored(tiles: WgmmaTiles, out: Any) -> Any:
    """Store instructions of a tile."""
    kind, num_columns = KINDS.get(out.dtype.name), out.shape[1]

    def emit(e: Any, sums: Any, row: Any, first: Any, end: Any, *refs: Any) -> None:
        place = _Destination(row, first, end)
        if kind is None:
            _scatter_sums(e, sums, place, num_columns, refs)
        else:
            _scatter_hidden(e, kind, sums, place, tiles.chunk, num_columns, refs)

    return emit


Columns = Sequence[Sequence[Value]]  # of `lanes.write_rounded`


class _Destination(NamedTuple):
    """_Destination of a tile's sums, for a thread block."""

    row: Value  # the first of the matrix, or of each of its halves
    first: Value  # the span of the order
    end: Value


def _swiglu(e: Emitter, sums: Columns) -> list[list[Value]]:
    """Computes silu(gate) up of sums with gate in rows g and up in rows g + 8."""
    return [
        [e.fmul(e.fmul(gate, e.quotient_of_exp(gate)), up) for gate, up in ((a, c), (b, d))]
        for a, b, c, d in sums
    ]


def _scatter_hidden(
    e: Emitter, kind: str, sums: Columns, place: _Destination, chunk: int, num_columns: int,
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

    _scatter_chunks(e, write, 8 * len(sums), place, chunk, num_columns, refs)


def _scatter_chunks(
    e: Emitter, write: Callable[[Value, int], None], num_tokens: int, place: _Destination,
    chunk: int, num_columns: int, refs: Sequence[Value],
) -> None:  # fmt: skip
    """Scatters tokens through shared memory, storing 16 bytes of a row per lane."""
    *rooms, order, out = refs
    thread = e.special("tid.x")
    warpgroup, index = e.shr(thread, 7), e.band(thread, 127)
    width, pieces = ROWS // 2, 4  # of a token: columns, and pieces of 16 bytes
    column = e.add(place.row, e.mul(warpgroup, width))
    inside = e.compare(column, "lt", num_columns)
    piece, token = e.band(index, pieces - 1), e.shr(index, 2)
    step = 128 // pieces  # tokens that the lanes take at a time
    turn = e.band(e.shr(token, 1), 3)
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


def _scatter_sums(
    e: Emitter, sums: Columns, place: _Destination, num_columns: int, refs: Sequence[Value]
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


def _expert_blocks(
    tier: jax.Array, slot: jax.Array, counts: Sequence[int], rows: int, band: int
) -> _ExpertBlocks:
    """Sorts pairs by tier and slot, those of one matrix in their order.

    Nothing but the pairs and the tiers is counted: a stack may have the matrices of all layers.

    Args:
      tier: int32[T, A]; outside 0 .. tiers - 1 for pairs that are skipped.
      slot: int32[T, A]; clipped to the tier's, as JAX does.
      counts: slots of each tier.
    """
    tier, slot = tier.reshape(-1), slot.reshape(-1)
    num_pairs, num_tiers, most = tier.shape[0], len(counts), max(counts)
    runs = (tier >= 0) & (tier < num_tiers)
    last = jnp.asarray(counts, jnp.int32)[jnp.where(runs, tier, 0)] - 1
    skipped, pairs = num_tiers * most, jnp.arange(num_pairs, dtype=jnp.int32)
    keys = jnp.where(runs, tier * most + jnp.clip(slot, 0, last), skipped).astype(jnp.int32)
    keys, order = jax.lax.sort((keys, pairs), num_keys=1, is_stable=True)

    start = _search(keys, keys, "left")  # of each pair its matrix's first one
    begins = ((pairs - start) % rows == 0) & (keys < skipped)
    number = jnp.cumsum(begins, dtype=jnp.int32) - 1
    # Each matrix adds at most one partial block.
    num_blocks = min(num_pairs, num_pairs // rows + sum(counts))
    places = jnp.where(begins, number, num_blocks)
    first = jnp.full(num_blocks, num_pairs - 1, jnp.int32).at[places].set(pairs, mode="drop")

    matrix, start = keys[first], start[first]
    end = _search(keys, matrix, "right")
    within = (first - start) // rows
    banded = within // band * band
    columns = [
        matrix % most,
        first,
        jnp.minimum(first + rows, end),
        jnp.arange(num_blocks, dtype=jnp.int32) - within + banded,
        jnp.minimum(band, -(-(end - start) // rows) - banded),
    ]
    firsts = jnp.arange(num_tiers + 1, dtype=jnp.int32) * most  # keys of the tiers' first matrices
    before = jnp.sum(begins[None] & (keys[None] < firsts[:, None]), axis=1, dtype=jnp.int32)
    return _ExpertBlocks(order=order, table=jnp.stack(columns, axis=1), first_block=before)


def _search(ordered: jax.Array, values: jax.Array, side: str) -> jax.Array:
    # Few kernels either way: a loop would launch some for each of its steps.
    few = ordered.shape[0] * values.shape[0] <= 2**23
    method = "compare_all" if few else "scan_unrolled"
    found = jnp.searchsorted(ordered, values, side=side, method=method)
    return found.astype(jnp.int32)
