"""x W^T of a few rows of x: the kernel."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.packed import LowRank, PackedMatrices
from pallas_kernels.stream.emit import Mlir, Value
from pallas_kernels.stream.launching import launch_blocks
from pallas_kernels.stream.low_rank import BlockTerms
from pallas_kernels.stream.matrix import (
    COLUMNS,
    ROWS,
    Matrix,
    addressed,
    matrix_of,
    num_arrays,
    tile_bytes,
)
from pallas_kernels.stream.product import Lane, Ring, Stream, walk
from pallas_kernels.stream.terms import (
    Share,
    Term,
    operands_of,
    suffix,
    terms_of,
    with_addresses,
)
from pallas_kernels.stream.tiles import StreamTiles, dense_share

KINDS = {"bfloat16": "bf16", "float16": "f16"}


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
    """[M, N]: x times one matrix and its terms; see `dequant_matmul.api`.

    A thread block owns `tiles.rows` outputs. Its warps share out these and the blocks of K, and
    add their parts through shared memory in the order of the warps.
    """
    matrix = matrix_of(weights, KINDS[x.dtype.name])
    tiles.check(weights.num_outputs, [matrix])
    columns = -(-x.shape[0] // COLUMNS) * COLUMNS
    arrays = [a for a in (weights.words, weights.scales, weights.zeros) if a is not None]
    form = weights.describe().replace(" ", "_")
    sums = tiles.warps_k * columns * (tiles.rows + 1)
    stage = tile_bytes(matrix, tiles.span)
    terms = terms_of(low_rank, KINDS[x.dtype.name])
    share = dense_share(tiles, x.shape[0], weights.num_outputs)
    main = -(-max(sums, tiles.num_warps * tiles.depth * stage // 4) // 4) * 4
    (y,) = launch_blocks(
        functools.partial(
            _body, matrix=matrix, terms=terms, share=share, tiles=tiles, num_x=x.shape[0],
            columns=columns, terms_at=4 * main,
            out_kind=KINDS.get(jnp.dtype(out_dtype).name, "f32"),
        ),
        [slot.reshape(1), x, *arrays, *operands_of(low_rank)],
        name=f"dequant_matmul_{form}_m{columns}_{tiles.describe()}{suffix(terms)}",
        num_blocks=-(-weights.num_outputs // tiles.rows),
        num_warps=tiles.num_warps,
        out_shapes=[jax.ShapeDtypeStruct((x.shape[0], weights.num_outputs), out_dtype)],
        shared_floats=main + share.room(terms) // 4,
        interpret=interpret,
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
    warp, lane = e.shr(thread, 5), Lane.here(e, e.band(thread, 31))
    warp_n, warp_k = e.rem(warp, tiles.warps_n), e.div(warp, tiles.warps_n)
    (slot,) = e.load(slot_at, 0, 1)
    # The last block's rows may lie beyond the matrix; then it repeats the last ones.
    first_row = e.smaller(e.mul(block, tiles.rows), matrix.num_rows - tiles.rows)
    local = e.mul(warp_n, ROWS * tiles.row_tiles)
    starts = [e.add(first_row, e.add(local, ROWS * tile)) for tile in range(tiles.row_tiles)]
    stream = Stream(e, matrix, slot, starts, lane, tiles.span)
    x = []
    for first in range(0, columns, COLUMNS):
        row = e.smaller(e.add(lane.g, first), num_x - 1)
        x.append(e.offset(e.offset(x_at, row, 2 * matrix.num_inputs), lane.t, 16))
    ring = e.add(parts, e.mul(warp, tiles.depth * stream.tile_bytes))
    totals: list[Value] = [0.0] * (4 * tiles.row_tiles * len(x))
    extra = BlockTerms(e, terms, share, slot, [first_row], e.add(parts, terms_at), thread)
    begin = functools.partial(extra.begin, x, lane)
    totals = walk(stream, warp_k, tiles.warps_k, x, totals, Ring(ring, tiles.depth), begin)

    e.copies_wait(0)
    e.block_barrier()  # the sums take the place of the rings
    pitch = tiles.rows + 1  # floats of a column; the one more spreads columns over the banks
    mine = e.add(e.mul(warp_k, columns * pitch), e.add(local, lane.g))
    mine = e.add(parts, e.mul(e.add(mine, e.mul(lane.t, 2 * pitch)), 4))
    for tile in range(tiles.row_tiles):
        for j in range(len(x)):
            for c in range(4):
                row, column = ROWS * tile + 8 * (c // 2), COLUMNS * j + c % 2
                value = totals[4 * (tile * len(x) + j) + c]
                e.store_shared(mine, 4 * (column * pitch + row), e.const_f32(value))
    extra.reduce()
    e.block_barrier()

    def element(index: Value, _: list[Value]) -> list[Value]:
        column, row = e.div(index, tiles.rows), e.rem(index, tiles.rows)
        at = e.add(parts, e.mul(e.add(e.mul(column, pitch), row), 4))
        total = e.load_shared(at, 0)
        for part in range(1, tiles.warps_k):
            total = e.fadd(total, e.load_shared(at, 4 * part * columns * pitch))
        total = extra.add(total, 0, column, row)
        place = e.add(e.mul(column, matrix.num_rows), e.add(first_row, row))
        if out_kind == "f32":
            e.store(e.offset(out_at, place, 4), 0, total, "f32")
        else:
            e.store(e.offset(out_at, place, 2), 0, e.f32_to_16(out_kind, total), "b16")
        return []

    e.loop(thread, num_x * tiles.rows, 32 * tiles.num_warps, [], element)
