"""Kernel for x W^T with many rows of x."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launch
from pallas_kernels.mosaic_decode.support import KINDS, of_row_ends
from pallas_kernels.mosaic_prefill import lanes, registers
from pallas_kernels.mosaic_prefill.fragments import BLOCK, ROWS, MatrixFormat, form_of
from pallas_kernels.mosaic_prefill.product import Item, pipeline, scratch, work
from pallas_kernels.mosaic_prefill.rounds import Rounds
from pallas_kernels.mosaic_prefill.tiles import WgmmaTiles, dense_tiles
from pallas_kernels.packed import PLAIN_BITS, PackedMatrices
from pallas_kernels.target import Target

Operand = jax.Array | jax.ShapeDtypeStruct


def refusals(x: Operand, tiers: Sequence[PackedMatrices], target: Target) -> list[str]:
    """Lists every reason against multiplying rows like x [..., K] by the tiers' matrices."""
    reasons = [reason for weights in tiers for reason in _of_matrices(x, weights, target)]
    return list(dict.fromkeys(reasons))


def _of_matrices(x: Operand, weights: PackedMatrices, target: Target) -> list[str]:
    found = []
    if jax.__version_info__ < (0, 11, 2):
        found.append(f"jax {jax.__version__} is older than 0.11.2")
    if target.platform != "gpu" or target.capability != (9, 0):
        found.append(f"wgmma needs a gpu sm_90, this is {target.describe()}")
    if x.dtype.name not in KINDS:
        found.append(f"x is {x.dtype}, not bfloat16 or float16")
    rest = weights.num_inputs % BLOCK
    takes_half = weights.bits != PLAIN_BITS and len(weights.widths) == 1
    if rest and (2 * rest != BLOCK or weights.num_inputs < BLOCK or not takes_half):
        found.append(f"K {weights.num_inputs} is no multiple of {BLOCK}")
    if weights.num_outputs % ROWS:
        found.append(f"N {weights.num_outputs} is no multiple of {ROWS}")
    if weights.bits == PLAIN_BITS:
        if weights.words.dtype != x.dtype:
            found.append(f"plain weights are {weights.words.dtype} and x {x.dtype}")
        return found
    if len(weights.widths) > 2:
        found.append(f"it merges two planes, not {len(weights.widths)}")
    if weights.is_mxfp4:
        found.append("it decodes no MXFP4")
    group = weights.group_size
    if rest and group < BLOCK:
        found += of_row_ends(weights, 4)  # copied by words
    if group < weights.num_inputs and (group % 16 or (BLOCK % group and group % BLOCK)):
        found.append(f"groups of {group}: not 16, 32, 64, 128, a multiple of {BLOCK} or a row")
    return found


def dense(
    x: jax.Array,  # [M, K] in bfloat16 or float16
    weights: PackedMatrices,  # S matrices [N, K]
    slot: jax.Array,  # int32[], index of the matrix
    out_dtype: jnp.dtype,  # bfloat16, float16 or float32
    tiles: WgmmaTiles | None,
    target: Target,
) -> jax.Array:
    """Multiplies x by one matrix, [M, N]; see `dequant_matmul.api`.

    Every weight is rounded once, from float32 to x's dtype; products and sums are float32.
    """
    num_tokens, num_inputs = x.shape
    num_rows = weights.num_outputs
    tiles = tiles or dense_tiles(
        num_tokens, num_rows, num_inputs, weights.bits, target.num_processors
    )
    form = None if weights.bits == PLAIN_BITS else form_of(weights, KINDS[x.dtype.name])
    rounds = Rounds(
        num_tiles=-(-num_rows // tiles.rows) * -(-num_tokens // tiles.tokens),
        num_blocks=-(-num_inputs // BLOCK),
        processors=target.num_processors,
        shares_k=tiles.shares_k,
    )
    rooms = scratch(form, tiles, x.dtype)
    if jnp.dtype(out_dtype).name in KINDS:
        shape = (tiles.warpgroups, 2, tiles.chunk, ROWS)
        rooms["out_room"] = plgpu.SMEM(shape, out_dtype, transforms=(registers.ROW_OF_128,))
    out = [jax.ShapeDtypeStruct((num_tokens, num_rows), out_dtype)]
    if rounds.num_shared:
        parts = (rounds.num_workers, tiles.warpgroups, ROWS * tiles.tokens)
        out.append(jax.ShapeDtypeStruct(parts, jnp.float32))
    call = launch.mosaic_pipeline_call(
        functools.partial(
            _body, form=form, tiles=tiles, rounds=rounds, num_arrays=len(weights.arrays)
        ),
        name=f"dequant_matmul_{weights.describe().replace(' ', '_')}_{tiles.describe()}",
        num_blocks=rounds.num_workers,
        out_shape=out,
        scratch=rooms,
        num_warpgroups=tiles.warpgroups + 1,
    )  # fmt: skip
    found: jax.Array = call(slot.reshape(1), x, *weights.arrays)[0]
    return found


@dataclasses.dataclass(frozen=True)
class _Item(Item):
    """A piece of a tile."""

    first_worker: Any
    last_worker: Any


def _body(
    slot_ref: Any, x: Any, *rest: Any,
    form: MatrixFormat | None, tiles: WgmmaTiles, rounds: Rounds, num_arrays: int, **rooms: Any,
) -> None:  # fmt: skip
    arrays, out = rest[:num_arrays], rest[num_arrays]
    shared = rest[num_arrays + 1 :]  # sums of tiles that others end
    parts = pipeline(form, tiles, x, arrays, rooms)
    num_tokens, num_rows = out.shape
    row_tiles = -(-num_rows // tiles.rows)
    token_tiles = -(-num_tokens // tiles.tokens)
    slot, worker = slot_ref[0], lax.axis_index("block")

    def item_of(i: jax.Array) -> _Item:
        piece = rounds.piece(worker, i)
        band = lax.div(piece.tile, jnp.int32(row_tiles * tiles.band))
        inside = lax.rem(piece.tile, jnp.int32(row_tiles * tiles.band))
        width = lax.min(jnp.int32(tiles.band), token_tiles - band * tiles.band)
        return _Item(
            row=lax.div(inside, width) * tiles.rows,
            token=(band * tiles.band + lax.rem(inside, width)) * tiles.tokens,
            slot=slot, block=piece.block, num_blocks=piece.num_blocks,
            first_worker=piece.first_worker, last_worker=piece.last_worker,
        )  # fmt: skip

    def store_tile(item: _Item, sums: jax.Array) -> None:
        if "out_room" in rooms:
            _store_rounded(tiles, item.row, item.token, sums, rooms["out_room"], out)
        else:
            write = functools.partial(lanes.write_sums, shape=(num_tokens, num_rows))
            registers.store(write, sums, [item.row, item.token], [out])

    if not shared:
        work(parts, rounds.num_pieces(worker), item_of, store_tile)
        return
    stored = pl.get_global(plgpu.SemaphoreType.REGULAR((rounds.num_workers * tiles.warpgroups,)))

    def parts_stored(of: jax.Array) -> Any:
        """Counts the parts of a tile that a thread block ends; it ends one such at most."""
        return stored.at[of * tiles.warpgroups + lax.axis_index("warpgroup")]

    def add(peer: jax.Array, sums: jax.Array) -> jax.Array:
        return registers.add_part(sums, peer, shared[0])

    def store(item: _Item, sums: jax.Array) -> None:
        is_last = item.last_worker == worker
        first = lax.select(is_last, item.first_worker, worker)

        @pl.when(first < worker)
        def _() -> None:
            plgpu.semaphore_wait(
                parts_stored(worker), worker - first, decrement=False, memory_scope="gpu"
            )

        sums = lax.fori_loop(first, worker, add, sums)
        pl.when(is_last)(functools.partial(store_tile, item, sums))

        @pl.when(jnp.logical_not(is_last))
        def _() -> None:
            registers.store(lanes.write_part, sums, [worker], shared)
            plgpu.semaphore_signal(parts_stored(item.last_worker), memory_scope="gpu")

    work(parts, rounds.num_pieces(worker), item_of, store)


def _store_rounded(
    tiles: WgmmaTiles, row: jax.Array, token: jax.Array, sums: jax.Array, room: Any, out: Any
) -> None:
    """Stores a warpgroup's sums [64, tokens], rounded, in `out` [M, N].

    Rows and tokens beyond `out` are left out by the copy.
    """
    warpgroup = lax.axis_index("warpgroup")
    kind = KINDS[out.dtype.name]
    for i, first in enumerate(range(0, tiles.tokens, tiles.chunk)):
        count = min(tiles.chunk, tiles.tokens - first)
        place = room.at[warpgroup, i % 2, pl.ds(0, count)]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        registers.store_rounded(kind, sums, place, first)
        plgpu.commit_smem()
        target = out.at[pl.ds(token + first, count), pl.ds(row + warpgroup * ROWS, ROWS)]
        plgpu.copy_smem_to_gmem(place, target)
    if -(-tiles.tokens // tiles.chunk) % 2:  # the next item begins with the room of the last chunk
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
