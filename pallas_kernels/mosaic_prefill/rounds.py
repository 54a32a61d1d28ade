"""Rounds of tiles over thread blocks: the last ones are shared evenly, along K.

As many tiles as blocks are a round. What whole rounds leave over and one round with it are one
sequence of blocks of K, tile after tile, of which every thread block takes an equal run
(Osama et al. 2023, "Stream-K", section 4.2). A run's last tile may go on in the next run: its sums
are left to the thread block that ends the tile, which adds them in the order of K. It was started
later, so it never waits for one that has no place on the device yet; and a run is worked off from
its end, so that those sums are ready when others need them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LEAST_RUN = 4  # blocks of K: shorter runs take longer to begin and to add than to multiply


class Piece(NamedTuple):
    """Scalars of a tile, or of a part of its K."""

    tile: Any
    block: Any  # the first of K
    num_blocks: Any
    first_worker: Any  # thread block with the tile's first block of K
    last_worker: Any  # the one with its last, which adds all sums and stores the tile


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Static facts of a launch."""

    num_tiles: int
    num_blocks: int  # of K, of a tile
    processors: int
    shares_k: bool

    @property
    def num_workers(self) -> int:
        """Thread blocks of the launch."""
        if not self.shares_k:
            return min(self.num_tiles, self.processors)
        runs = self.num_tiles * self.num_blocks // LEAST_RUN
        return min(max(self.num_tiles, runs), self.processors)

    @property
    def num_shared(self) -> int:
        """Tiles that are shared; the first ones."""
        rest = self.num_tiles % self.num_workers
        return min(self.num_tiles, rest + self.num_workers) if self.shares_k and rest else 0

    def _span(self, worker: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First block of K of a thread block's run, and the one after its last."""
        of, blocks = jnp.int32(self.num_workers), self.num_shared * self.num_blocks
        return lax.div(worker * blocks, of), lax.div((worker + 1) * blocks, of)

    def _num_shares(self, worker: jax.Array) -> jax.Array:
        first, after = self._span(worker)
        of = jnp.int32(self.num_blocks)
        return lax.div(after - 1, of) - lax.div(first, of) + 1

    def num_pieces(self, worker: jax.Array) -> jax.Array:
        """Pieces of a thread block."""
        whole, of = self.num_tiles - self.num_shared, self.num_workers
        mine = lax.div(whole - worker + (of - 1), jnp.int32(of))
        return mine + self._num_shares(worker) if self.num_shared else mine

    def piece(self, worker: jax.Array, i: jax.Array) -> Piece:
        """Piece i of a thread block."""
        if not self.num_shared:
            return self._whole(worker, worker + i * self.num_workers)
        size, of = jnp.int32(self.num_blocks), jnp.int32(self.num_workers)
        first, after = self._span(worker)
        tile = lax.div(after - 1, size) - i
        start, end = lax.max(first, tile * size), lax.min(after, (tile + 1) * size)
        # The last runs that begin at or before the tile's first block, and its last.
        runs = (tile * size + 1, (tile + 1) * size)
        workers = [lax.div(r * of - 1, jnp.int32(self.num_shared * self.num_blocks)) for r in runs]
        shared = Piece(tile, start - tile * size, end - start, *workers)
        num_shares = self._num_shares(worker)
        tile = self.num_shared + worker + (i - num_shares) * self.num_workers
        whole = self._whole(worker, tile)
        return jax.tree.map(lambda a, b: lax.select(i < num_shares, a, b), shared, whole)

    def _whole(self, worker: jax.Array, tile: jax.Array) -> Piece:
        blocks = jnp.int32(self.num_blocks)
        return Piece(tile, jnp.int32(0), blocks, worker, worker)
