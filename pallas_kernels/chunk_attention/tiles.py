"""Tiles of chunk attention: queries of a program, and slots that it reads at a time."""

import dataclasses

from pallas_kernels.dequant_matmul.tiles import LEAST_SHARED_BYTES, RESERVED_BYTES, SHARED_BYTES
from pallas_kernels.target import Target
from pallas_kernels.triton.elements import power_above

MIN_ROWS = 16  # of a matrix product
ROWS = 128
BLOCK = 64
STAGES = 3
WARP_SUMS = 2048  # float32 sums that a warp holds, 64 a thread


@dataclasses.dataclass(frozen=True)
class ChunkTiles:
    """Rows, each a token and a query head, of a program; slots of a block.

    Invariants: both are powers of two; rows >= 16, block >= 16.
    """

    rows: int
    block: int
    num_warps: int
    num_stages: int

    def describe(self) -> str:
        """Describes the tiles, such as "r128s64w8p3"."""
        return f"r{self.rows}s{self.block}w{self.num_warps}p{self.num_stages}"

    def check(self) -> None:
        """Raises ValueError unless the invariants hold."""
        if self.rows < MIN_ROWS or self.block < MIN_ROWS:
            raise ValueError(f"tiles {self.describe()}: fewer than {MIN_ROWS} rows or slots")
        if any(size & (size - 1) for size in (self.rows, self.block)):
            raise ValueError(f"tiles {self.describe()} are no powers of two")


def default_tiles(num_rows: int, head_dim: int, num_bytes: int, target: Target) -> ChunkTiles:
    """Chooses as many rows as registers hold, then slots and stages that fit shared memory.

    Args:
      num_rows: tokens of the chunk times query heads of a kv head.
    """
    rows = min(ROWS, max(MIN_ROWS, power_above(num_rows)))
    while rows > 64 and rows * head_dim > ROWS * 128:
        rows //= 2
    room = SHARED_BYTES.get(target.capability or (9, 0), LEAST_SHARED_BYTES) - RESERVED_BYTES
    room -= rows * head_dim * num_bytes  # of q
    block, slot_bytes = BLOCK, 2 * head_dim * num_bytes
    while block > MIN_ROWS and 2 * block * slot_bytes > room:
        block //= 2
    stages = max(2, min(STAGES, room // (block * slot_bytes)))
    num_warps = min(8, max(4, rows * head_dim // WARP_SUMS))
    return ChunkTiles(rows=rows, block=block, num_warps=num_warps, num_stages=stages)
