"""Tiles of decode attention: blocks of a sequence's slots, and programs."""

import dataclasses

from pallas_kernels.dequant_matmul.tiles import LEAST_SHARED_BYTES, RESERVED_BYTES, SHARED_BYTES
from pallas_kernels.target import Target
from pallas_kernels.triton.elements import power_above

MIN_BLOCK = 16  # slots; the least that Triton's matrix product takes
BLOCK = 64
STAGES = 4
MAX_SUMS = 16384  # of four warps; 64 heads of 256
MAX_SPLITS = 64  # whose sums one program adds up in registers


@dataclasses.dataclass(frozen=True)
class AttentionTiles:
    """Slots that a program reads at a time, and programs that share the slots of a kv head.

    Invariants: both are powers of two; block >= 16.
    """

    block: int
    splits: int
    num_warps: int
    num_stages: int

    def describe(self) -> str:
        """Describes the tiles, such as "s64x16w4p3"."""
        return f"s{self.block}x{self.splits}w{self.num_warps}p{self.num_stages}"

    def check(self) -> None:
        """Raises ValueError unless the invariants hold."""
        if self.block < MIN_BLOCK or self.splits < 1:
            raise ValueError(f"tiles {self.describe()}: blocks of less than {MIN_BLOCK}, or none")
        if any(size & (size - 1) for size in (self.block, self.splits)):
            raise ValueError(f"tiles {self.describe()} are no powers of two")


def default_tiles(
    num_heads: int,
    rows: int,
    kv_length: int,
    head_dim: int,
    num_bytes: int,
    target: Target,
    *,
    more_dim: int = 0,  # P, where keys of C + P numbers have their values among them
    page: int = BLOCK,  # slots of a page, which holds whole blocks
) -> AttentionTiles:
    """Chooses one program per kv head if they fill the device; else splits the slots.

    A second launch then adds the splits: it costs as much as reading some 30 KB by one program.
    """
    block = min(BLOCK, page, max(MIN_BLOCK, power_above(kv_length)))
    room = SHARED_BYTES.get(target.capability or (9, 0), LEAST_SHARED_BYTES) - RESERVED_BYTES
    room -= rows * (head_dim + more_dim) * num_bytes  # of q, which lies in shared memory too
    # Triton keeps n - 1 of n stages in shared memory. Two programs of a multiprocessor have room
    # there: while one sums up, the other's loads are on their way.
    slot_bytes = (head_dim + (more_dim or head_dim)) * num_bytes
    stages = max(2, min(STAGES, room // 2 // (block * slot_bytes) + 1))
    while block > MIN_BLOCK and (stages - 1) * block * slot_bytes > room:
        block //= 2
    num_blocks = -(-kv_length // block)
    splits = 1
    while (
        2 * splits * num_heads <= target.num_processors
        and 2 * splits <= min(MAX_SPLITS, num_blocks)
    ):  # fmt: skip
        splits *= 2
    # A thread of four warps holds 64 of the sums of 16 heads of 512.
    num_warps = 8 if rows * head_dim > MAX_SUMS else 4
    return AttentionTiles(block=block, splits=splits, num_warps=num_warps, num_stages=stages)
