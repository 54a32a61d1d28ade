"""Tile sizes of the two kernels."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows and columns of the weight tile that a program multiplies at a time."""

    gate_up_rows: int
    gate_up_columns: int
    down_rows: int
    down_columns: int
    num_warps: int
    num_stages: int


def power_of_two_divisor(size: int, largest: int) -> int:
    """Largest power of two that divides `size`, at most `largest`."""
    divisor = 1
    while divisor < largest and size % (2 * divisor) == 0:
        divisor *= 2
    return divisor


def default_tiles(model_dim: int, expert_dim: int) -> Tiles:
    """Chooses tiles that divide the matrices, so that no load needs a mask.

    A program keeps one tile of float32 partial products in registers for each matrix: 8 x 512
    values on 4 warps are 32 registers a thread, and 8 KiB a load in bf16.
    """
    return Tiles(
        gate_up_rows=power_of_two_divisor(expert_dim, 8),
        gate_up_columns=power_of_two_divisor(model_dim, 512),
        down_rows=power_of_two_divisor(model_dim, 8),
        down_columns=power_of_two_divisor(expert_dim, 512),
        num_warps=4,
        num_stages=2,
    )
