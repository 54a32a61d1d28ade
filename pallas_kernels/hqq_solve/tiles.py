"""Tile sizes of the HQQ kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Registers of one program: `rows` groups, cut into parts of `columns` inputs."""

    rows: int
    columns: int
    num_warps: int


def default_tiles(num_rows: int, group_size: int) -> Tiles:
    """Chooses 512 weights per warp, 16 per thread, and no row spread over warps.

    A group's sum is mostly within threads: the parts of a group are added first, and the 16
    columns of a part lie on 4 threads, so a sum over a group costs two shuffles, not four or five.
    One warp a program needs no barrier.
    """
    rows = 1
    while rows < max(512 // group_size, 1) and num_rows % (2 * rows) == 0:
        rows *= 2
    return Tiles(rows=rows, columns=min(16, group_size), num_warps=1)
