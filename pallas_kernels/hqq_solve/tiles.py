"""Tile sizes of the HQQ kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What one program holds in registers: `rows` groups, cut into parts of `columns` inputs."""

    rows: int
    columns: int
    num_warps: int


def default_tiles(num_rows: int, group_size: int) -> Tiles:
    """512 weights a warp, 16 a thread, and no row of the tile spread over warps.

    A group's sum is mostly within threads: the parts of a group are added first, and the 16
    columns of a part lie on 4 threads, so a sum over a group costs two shuffles, not four or five.
    One warp a program needs no barrier.
    """
    rows = 1
    while rows < max(512 // group_size, 1) and num_rows % (2 * rows) == 0:
        rows *= 2
    return Tiles(rows=rows, columns=min(16, group_size), num_warps=1)
