"""Computes tiles of x W^T: one warpgroup copies, the others unpack and multiply.

The weights are the left operand of wgmma, unpacked in registers (`fragments`), so a tile's columns
are rows of x, which stay in shared memory as they are. Two warpgroups alternate without
synchronisation: one's unpacking is hidden behind the other's products, and its next 64 k behind its
own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_decode.support import KINDS
from pallas_kernels.mosaic_prefill import registers
from pallas_kernels.mosaic_prefill.fragments import BLOCK, ROWS, STAGE, STAGES, MatrixFormat
from pallas_kernels.mosaic_prefill.tiles import WgmmaTiles

COPIER_REGISTERS = 40
PRODUCT_REGISTERS = 232
_TILED = (plgpu.TilingTransform((8, STAGE)), registers.ROW_OF_128)


@dataclasses.dataclass(frozen=True)
class Item:
    """One tile of the result, or a part of K of it; scalars of the kernel."""

    row: Any  # the first of the matrix
    token: Any  # the first of x
    slot: Any  # which matrix
    block: Any  # the first, of 256 k
    num_blocks: Any


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """References of a kernel's body."""

    form: MatrixFormat | None  # None for plain weights
    paired: bool  # an item's rows are half `tiles.rows` of each half of the matrix
    tiles: WgmmaTiles
    x: Any  # [M, K]
    weights: Any  # words uint32[S, N, W], or plain [S, N, K]
    refined: tuple[Any, ...]  # words and slots of a plane that lies apart
    constants: tuple[Any, ...]  # scales and zeros
    x_copied: Any  # [x_stages, tokens, 64], the memory of `x_read`
    x_read: Any
    words: tuple[Any, ...]  # of each of the form's tiles [word_blocks, rows, num_words]
    plain: Any  # [x_stages, rows, 64]
    x_full: Any
    x_empty: Any
    words_full: Any
    words_empty: Any

    def copy(self, item: Item, done: jax.Array) -> None:
        """Copies an item's operands as buffers become free.

        Args:
          done: int32[], blocks of K copied before.
        """
        tiles, form, matrix = self.tiles, self.form, (self.weights, item.slot)
        refined = (self.refined[0], self.refined[1][item.slot]) if self.refined else matrix

        def step(b: jax.Array, carry: None) -> None:
            count, block = done + b, item.block + b
            if form is not None:
                slot = lax.rem(count, jnp.int32(tiles.word_blocks))

                @pl.when(count >= tiles.word_blocks)
                def _() -> None:
                    plgpu.barrier_wait(self.words_empty.at[slot])

                for tile, room in zip(form.tiles, self.words, strict=True):
                    columns = pl.ds(tile.first_word + block * tile.pitch, tile.num_words)
                    of = refined if tile.refined else matrix
                    self._copy_rows(of, item, columns, room.at[slot], self.words_full.at[slot])
            for stage in range(STAGES):
                slot, used = self._stage(count, stage)

                @pl.when(used)
                def _(slot: jax.Array = slot) -> None:
                    plgpu.barrier_wait(self.x_empty.at[slot])

                columns = pl.ds(block * BLOCK + stage * STAGE, STAGE)
                source = self.x.at[pl.ds(item.token, tiles.tokens), columns]
                plgpu.copy_gmem_to_smem(source, self.x_copied.at[slot], self.x_full.at[slot])
                if form is None:
                    room = self.plain.at[slot]
                    self._copy_rows(matrix, item, columns, room, self.x_full.at[slot])
            return carry

        lax.fori_loop(0, item.num_blocks, step, None)

    def _copy_rows(
        self, matrix: tuple[Any, Any], item: Item, columns: Any, room: Any, full: Any
    ) -> None:
        """Copies columns of an item's rows, in one copy per half if they are paired.

        Args:
          matrix: the stack, and the slot in it.
        """
        (stack, slot), halves = matrix, 2 if self.paired else 1
        count, distance = self.tiles.rows // halves, stack.shape[1] // halves
        for half in range(halves):
            rows = pl.ds(item.row + half * distance, count)
            part = room.at[pl.ds(half * count, count)] if self.paired else room
            plgpu.copy_gmem_to_smem(stack.at[slot, rows, columns], part, full)

    def _stage(self, count: jax.Array, stage: int) -> tuple[jax.Array, jax.Array]:
        """Buffer of a stage of the block `count`, and whether it was used before."""
        rounds = self.tiles.x_stages // STAGES
        slot = lax.rem(count, jnp.int32(rounds)) * STAGES + stage
        return slot, count >= rounds

    def multiply(self, item: Item, done: jax.Array) -> jax.Array:
        """Multiplies this warpgroup's rows of an item: float32[64, tokens] in wgmma's layout."""
        form, last = self.form, item.block + item.num_blocks - 1

        def constants(block: jax.Array) -> jax.Array:
            assert form is not None
            at = lax.min(block, last)
            return registers.load_constants(form, item.slot, item.row, at, self.constants)

        def scoped(sums: Any) -> jax.Array:
            def step(b: jax.Array, current: Any) -> Any:
                count, block = done + b, item.block + b
                following = current
                if form is not None:
                    slot = lax.rem(count, jnp.int32(self.tiles.word_blocks))
                    plgpu.barrier_wait(self.words_full.at[slot])
                    words = registers.load_words(
                        form, block, [room.at[slot] for room in self.words]
                    )
                    plgpu.barrier_arrive(self.words_empty.at[slot])
                    following = constants(block + 1)
                for stage in range(STAGES):
                    slot, _ = self._stage(count, stage)
                    if form is not None:
                        left = registers.unpack(form, words, current, stage)
                    plgpu.barrier_wait(self.x_full.at[slot])
                    if form is None and self.paired:
                        left = registers.load_plain(KINDS[self.x.dtype.name], self.plain.at[slot])
                    elif form is None:
                        group = pl.ds(lax.axis_index("warpgroup") * ROWS, ROWS)
                        left = self.plain.at[slot, group]
                    plgpu.wgmma(sums, left, self.x_read.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(1)
                    # The buffer that earlier products read is free.
                    before, _ = self._stage(count - int(stage == 0), (stage - 1) % STAGES)
                    free = self.x_empty.at[before]
                    if stage:
                        plgpu.barrier_arrive(free)
                    else:
                        later = b > 0
                        plgpu.barrier_arrive(free, predicate=later)  # type: ignore[call-arg]
                return following

            lax.fori_loop(0, item.num_blocks, step, constants(item.block) if form else None)
            return sums[...]

        found = pl.run_scoped(
            scoped, plgpu.WGMMAAccumulatorRef((ROWS, self.tiles.tokens), jnp.float32)
        )
        slot, _ = self._stage(done + item.num_blocks - 1, STAGES - 1)
        plgpu.barrier_arrive(self.x_empty.at[slot])
        return found


def scratch(
    form: MatrixFormat | None, tiles: WgmmaTiles, x_dtype: Any, paired: bool = False
) -> dict[str, Any]:
    """Shared memory and barriers of a `_Pipeline`, by name."""
    x_shape = (tiles.x_stages, tiles.tokens, STAGE)
    copies = 2 if paired else 1  # of the weights
    found = {
        # Copies of rows beyond x need them untiled, products tiled: the bytes are the same.
        "x_room": plgpu.RefUnion(
            plgpu.SMEM(x_shape, x_dtype, transforms=(registers.ROW_OF_128,)),
            plgpu.SMEM(x_shape, x_dtype, transforms=_TILED),
        ),
        "x_full": plgpu.Barrier(
            num_arrivals=1 if form else 1 + copies, num_barriers=tiles.x_stages
        ),
        "x_empty": plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.x_stages),
    }  # fmt: skip
    if form is None:
        shape = (tiles.x_stages, tiles.rows, STAGE)
        transforms = (registers.ROW_OF_128,) if paired else _TILED
        return {**found, "plain": plgpu.SMEM(shape, x_dtype, transforms=transforms)}
    for i, tile in enumerate(form.tiles):
        shape = (tiles.word_blocks, tiles.rows, tile.num_words)
        transforms = (plgpu.SwizzleTransform(4 * tile.num_words),)
        found[f"words_{i}"] = plgpu.SMEM(shape, jnp.uint32, transforms=transforms)
    blocks = tiles.word_blocks
    found["words_full"] = plgpu.Barrier(num_arrivals=len(form.tiles) * copies, num_barriers=blocks)
    found["words_empty"] = plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=blocks)
    return found


def pipeline(
    form: MatrixFormat | None,
    tiles: WgmmaTiles,
    x: Any,
    arrays: Sequence[Any],  # those of the matrices, in the order of `PackedMatrices.arrays`
    rooms: dict[str, Any],  # those of `scratch`
    paired: bool = False,
) -> _Pipeline:
    """Names the references by role."""
    x_copied, x_read = rooms["x_room"]
    weights, *rest = arrays
    refined = tuple(rest[-2:]) if form and form.apart else ()
    constants = rest[: len(rest) - len(refined)]
    return _Pipeline(
        form=form, paired=paired, tiles=tiles, x=x, weights=weights, refined=refined,
        constants=tuple(constants), x_copied=x_copied, x_read=x_read,
        words=tuple(rooms[f"words_{i}"] for i in range(len(form.tiles))) if form else (),
        plain=rooms.get("plain"), x_full=rooms["x_full"], x_empty=rooms["x_empty"],
        words_full=rooms.get("words_full"), words_empty=rooms.get("words_empty"),
    )  # fmt: skip


def work(
    parts: _Pipeline,
    num_items: Any,  # of this block; `item_of` takes their indices
    item_of: Callable[[jax.Array], Item],
    # stores an item's sums; called by the warpgroups that multiply
    store: Callable[[Any, jax.Array], None],
) -> None:
    """Runs a kernel's body: this block's items, in turn."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == parts.tiles.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")

        def copied(i: jax.Array, done: jax.Array) -> jax.Array:
            item = item_of(i)
            parts.copy(item, done)
            return done + item.num_blocks

        lax.fori_loop(0, num_items, copied, jnp.int32(0))

    @pl.when(warpgroup < parts.tiles.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(PRODUCT_REGISTERS, action="increase")

        def multiplied(i: jax.Array, done: jax.Array) -> jax.Array:
            item = item_of(i)
            store(item, parts.multiply(item, done))
            return done + item.num_blocks

        lax.fori_loop(0, num_items, multiplied, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what copies of results still read
