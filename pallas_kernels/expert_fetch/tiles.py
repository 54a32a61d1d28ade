"""How many programs copy, and how much each has in flight."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CopyTiles:
    """Programs that copy and the block that one of them loads before it stores it.

    What crosses the link at full rate is bytes in flight: a read of host memory takes 1 to 2 us, so
    PCIe 5 x16 (50 GB/s) wants at least 100 KB of them; num_programs * block_bytes is that number.
    """

    num_programs: int
    block_bytes: int  # of one array; a power of two
    num_warps: int


# A launch that does nothing else: one program for each multiprocessor of the largest chips, and
# 16 KiB on 4 warps are 8 loads of 16 bytes a thread.
ALONE = CopyTiles(num_programs=128, block_bytes=16384, num_warps=4)
# Beside a product: 256 KiB in flight, a twentieth of the chip's warps. 16 such programs slowed a
# 1 GiB weight read from 1.8-2.0 to 2.3 ms while they copied 80 MB (H200, jax 0.11.2, 2026-11-20).
BESIDE = CopyTiles(num_programs=16, block_bytes=16384, num_warps=4)
