"""Kernel for x W^T with a few rows of x."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_decode.accumulate import Ring, SharedAccumulators, Totals, accumulate
from pallas_kernels.mosaic_decode.emit import Mlir, Value
from pallas_kernels.mosaic_decode.fused_low_rank import FusedStream
from pallas_kernels.mosaic_decode.launch_blocks import launch_blocks
from pallas_kernels.mosaic_decode.low_rank import BlockTerms
from pallas_kernels.mosaic_decode.low_rank_spec import (
    Share,
    Term,
    operands_of,
    suffix,
    terms_of,
    with_addresses,
)
from pallas_kernels.mosaic_decode.matrix import (
    COLUMNS,
    ROWS,
    Matrix,
    addressed,
    matrix_of,
    num_arrays,
    x_sums_bytes,
)
from pallas_kernels.mosaic_decode.product import Lane, Stream
from pallas_kernels.mosaic_decode.support import KINDS
from pallas_kernels.mosaic_decode.tiles import StreamTiles, dense_share
from pallas_kernels.packed import LowRank, PackedMatrices


# Traced and lowered once for all calls of a program that are alike: emitting one takes 0.1 s.
@functools.partial(jax.jit, static_argnames=("out_dtype", "tiles", "interpret"))
def dense(
    x: jax.Array,
    weights: PackedMatrices,
    slot: jax.Array,
    out_dtype: jnp.dtype,
    tiles: StreamTiles,
    interpret: bool = False,
    low_rank: tuple[LowRank, ...] = (),
) -> jax.Array:
    """Multiplies x by one matrix and its terms, [M, N]; see `dequant_matmul.api`.

    A cluster of thread blocks, mostly of one, owns `tiles.rows` outputs. Its warps split these and
    the blocks of K, and add their parts through shared memory in the order of the warps. The more
    blocks of a cluster split K, the less of x each has to read. If they split V of a low-rank term,
    each has its own outputs and reads the others' parts of V x.
    """
    matrix = matrix_of(weights, KINDS[x.dtype.name])
    tiles.check(weights.num_outputs)
    columns = -(-x.shape[0] // COLUMNS) * COLUMNS
    form = weights.describe().replace(" ", "_")
    terms = terms_of(low_rank, KINDS[x.dtype.name])
    share = dense_share(tiles, x.shape[0], weights.num_outputs)
    main = tiles.dense_bytes(matrix, columns)
    (y,) = launch_blocks(
        functools.partial(
            _body, matrix=matrix, terms=terms, share=share, tiles=tiles, num_x=x.shape[0],
            columns=columns, terms_at=main,
            out_kind=KINDS.get(jnp.dtype(out_dtype).name, "f32"),
        ),
        [slot.reshape(1), x, *weights.arrays, *operands_of(low_rank)],
        name=f"dequant_matmul_{form}_m{columns}_{tiles.describe()}{suffix(terms)}",
        num_blocks=-(-weights.num_outputs // (tiles.rows * tiles.sharers)),
        num_warps=tiles.num_warps,
        out_shapes=[jax.ShapeDtypeStruct((x.shape[0], weights.num_outputs), out_dtype)],
        shared_floats=(main + share.room(terms)) // 4,
        interpret=interpret,
        cluster=tiles.launched,
    )  # fmt: skip
    return y


def _body(
    e: Mlir,
    *refs: Value,
    matrix: Matrix,
    terms: Sequence[Term],
    share: Share,
    tiles: StreamTiles,
    num_x: int,
    columns: int,
    terms_at: int,
    out_kind: str,
) -> None:
    slot_at, x_at, *operands, out_at = (e.address(ref) for ref in refs[:-1])
    parts = e.shared_address(refs[-1])
    matrix = addressed(matrix, operands[: num_arrays(matrix)])
    terms = with_addresses(terms, operands[num_arrays(matrix) :])
    thread, block = e.special("tid.x"), e.special("ctaid.x")
    sharer = e.rem(block, tiles.sharers)
    part, block = e.rem(block, tiles.cluster), e.div(block, tiles.cluster)
    warp, lane = e.shr(thread, 5), Lane.here(e, e.band(thread, 31))
    warp_n, warp_k = e.rem(warp, tiles.warps_n), e.div(warp, tiles.warps_n)
    (slot,) = e.load(slot_at, 0, 1)
    # The last block's rows may lie beyond the matrix; then it repeats the last ones.
    first_row = e.smaller(e.mul(block, tiles.rows), matrix.num_rows - tiles.rows)
    local = e.mul(warp_n, ROWS * tiles.row_tiles)
    starts = [e.add(first_row, local)]
    tiles_at = range(0, ROWS * tiles.row_tiles, ROWS)
    stream: Stream | FusedStream
    stream = Stream(e, matrix, slot, starts, lane, tiles_at=tiles_at)
    x = []
    for first in range(0, columns, COLUMNS):
        row = e.smaller(e.add(lane.g, first), num_x - 1)
        x.append(e.offset(e.offset(x_at, row, 2 * matrix.num_inputs), lane.t, 16))
    rings = tiles.num_warps * tiles.depth * stream.tile_bytes
    ring = e.add(parts, e.mul(warp, tiles.depth * stream.tile_bytes))
    if tiles.kept:
        ring = e.add(ring, tiles.sums_bytes(columns))
    first_out = e.mul(part, tiles.outputs)  # of the rows, that this block adds up
    firsts = [e.add(first_row, first_out)]
    extra = BlockTerms(
        e, terms, share, slot, firsts, e.add(parts, terms_at), thread, tiles.sharers
    )  # fmt: skip
    begin = functools.partial(extra.begin, x, lane)
    if tiles.thin:
        stream = extra.fuse(stream, lane, sharer, min(tiles.depth, tiles.row_tiles))
        begin = functools.partial(extra.begin_fused, stream, lane)
    pitch = tiles.pitch
    mine = e.add(e.mul(warp_k, columns * pitch), local)
    sums = Totals.here(e, e.add(parts, e.mul(mine, 4)), lane, pitch)
    kept = None
    if tiles.kept:
        of_x = e.add(parts, tiles.sums_bytes(columns) + rings)
        of_x = e.add(of_x, e.mul(warp, x_sums_bytes(matrix, len(x))))
        kept = SharedAccumulators(sums, e.add(of_x, e.mul(lane.t, 16)))
    first, step = e.add(e.mul(warp_k, tiles.cluster), part), tiles.warps_k * tiles.cluster
    totals = accumulate(stream, first, step, x, Ring(ring, tiles.depth), begin, kept)

    if isinstance(stream, FusedStream):
        extra.end_fused(stream, lane)
    if tiles.sharers > 1:
        e.cluster_arrive()  # the parts of V x are there
    e.copies_wait(0)
    if kept is None or terms:
        e.block_barrier()  # the sums take the place of the rings; the terms' parts are there
    each = 4 * len(x)
    for tile in range(tiles.row_tiles if kept is None else 0):
        sums.store(e, tile, totals[each * tile : each * (tile + 1)])
    if tiles.sharers > 1:
        e.cluster_wait()
    extra.reduce()
    if tiles.cluster > 1:
        e.cluster_arrive()
        e.cluster_wait()
    else:
        if tiles.sharers > 1:
            e.cluster_arrive(writes=False)
        e.block_barrier()

    def element(index: Value, _: list[Value]) -> list[Value]:
        column, row = e.div(index, tiles.outputs), e.rem(index, tiles.outputs)
        at = e.add(e.mul(column, pitch), e.add(first_out, row))
        at, size = e.add(parts, e.mul(at, 4)), 4 * columns * pitch
        total: Value = 0.0
        for owner in range(tiles.cluster):
            for imm in range(0, tiles.warps_k * size, size):
                remote = tiles.cluster > 1
                found = e.load_cluster(at, owner, imm) if remote else e.load_shared(at, imm)
                total = found if owner == imm == 0 else e.fadd(total, found)
        total = extra.add(matrix.scaled(e, total), 0, column, row)
        place = e.add(e.mul(column, matrix.num_rows), e.add(firsts[0], row))
        if out_kind == "f32":
            e.store(e.offset(out_at, place, 4), 0, total, "f32")
        else:
            e.store(e.offset(out_at, place, 2), 0, e.f32_to_16(out_kind, total), "b16")
        return []

    e.loop(thread, num_x * tiles.outputs, 32 * tiles.num_warps, [], element)
    # No block ends while another reads its shared memory.
    if tiles.cluster > 1:
        e.cluster_arrive(writes=False)
    if tiles.launched > 1:
        e.cluster_wait()
