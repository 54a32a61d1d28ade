"""Tile sizes of the kernels, measured or by rule."""

import dataclasses
from collections.abc import Sequence

from pallas_kernels.layout import BLOCK
from pallas_kernels.mosaic_decode.tiles import StreamTiles
from pallas_kernels.mosaic_prefill.tiles import WgmmaTiles
from pallas_kernels.packed import PLAIN_BITS, PackedMatrices
from pallas_kernels.target import Target
from pallas_kernels.triton import product as triton_product
from pallas_kernels.triton.elements import power_above

MAX_DECODE_ROWS = 32  # rows of x up to which one tile holds them all
MAX_ROW_OUTPUTS = 1023  # of products by `RowTiles`; more outputs fill a device with large tiles
MAX_ROW_VALUES = 8192  # of W, of one of their programs
ROW_WARP_VALUES = 1024  # of a warp: 32 a thread
# Rows of x, one after the other: a router of 128 x 2,048 takes 16 in 7.5 us by eights, in 5.0 by
# fours, in under 3.1 by twos (H200, jax 0.11.2, 2026-11-28; no other size was measured).
ROW_BLOCK_M = 2
# Shared memory that a program may use (CUDA programming guide, table of
# compute capabilities), and what Triton needs beside the stages of its pipeline.
SHARED_BYTES = {(8, 0): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}
LEAST_SHARED_BYTES = 99 * 1024
RESERVED_BYTES = 12 * 1024


@dataclasses.dataclass(frozen=True)
class TritonTiles:
    """Tile of one program: block_n outputs of block_m rows of x, over 1 / split_k of K.

    Invariants: block_m, block_n and step are powers of two; block_m >= 8, block_n >= 16; step, the
    codes of K that the loop takes at a time, lies in `triton_product.min_step(weights)` .. 256.
    """

    block_m: int
    block_n: int
    step: int
    split_k: int
    num_warps: int
    num_stages: int

    def describe(self) -> str:
        """Describes the tiles, such as "m16n64k256s4w2p3"."""
        return (
            f"m{self.block_m}n{self.block_n}k{self.step}s{self.split_k}"
            f"w{self.num_warps}p{self.num_stages}"
        )

    def check(self, weights: PackedMatrices) -> None:
        """Raises ValueError unless the tiles suit the matrices."""
        low = triton_product.min_step(weights)
        if not low <= self.step <= 256 or self.step & (self.step - 1):
            raise ValueError(f"step {self.step} is no power of two in {low}..256")
        if self.block_m < 8 or self.block_n < 16 or self.split_k < 1:
            raise ValueError(f"tiles {self.describe()}: under 16 x 8, or none")
        if any(size & (size - 1) for size in (self.block_m, self.block_n)):
            raise ValueError(f"tiles {self.describe()} are no powers of two")


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Tile of one program for few plain rows of W: whole products with block_m rows of x.

    A router's product, or another of few outputs, has too little to read for a loop over tiles: all
    of a program's weights are loaded at once, and no part of the sum over K is left for a second
    launch.

    Invariants: powers of two; block_n rows of K, padded, are held in registers.
    """

    block_m: int
    block_n: int
    num_warps: int

    def describe(self) -> str:
        """Describes the tiles, such as "rows4m8w4"."""
        return f"rows{self.block_n}m{self.block_m}w{self.num_warps}"


Tiles = TritonTiles | RowTiles | StreamTiles | WgmmaTiles

# (compute capability, bits, M, N, K) -> the fastest tiles found of each implementation, for groups
# of 64 with float zeros; M as a power of two, which serves what is above the next smaller one.
MEASURED: dict[tuple[tuple[int, int], int, int, int, int], tuple[Tiles, ...]] = {
    # NVIDIA H200, jax 0.11.2, 2026-11-21: 16.62 us, by rule 17.40 and 17.63
    ((9, 0), 4, 16, 14336, 4096): (StreamTiles(7, 1, 12, depth=2, kept=True),),
    # NVIDIA H200, jax 0.11.2, 2026-11-21: 18.58 us, by rule 19.32 and 19.38
    ((9, 0), 3, 16, 4096, 14336): (StreamTiles(4, 1, 8, depth=4, cluster=2),),
}


def is_measured_form(weights: PackedMatrices) -> bool:
    """Whether the measured tables apply to a form of matrices."""
    return weights.group_size == 64 and weights.zero_kind == "float"


def measured(
    num_rows: int, weights: PackedMatrices, target: Target, kinds: tuple[type, ...]
) -> Tiles | None:
    """Looks up `MEASURED` tiles of one of the kinds; None if there are none."""
    if target.simulated or target.capability is None or not is_measured_form(weights):
        return None
    shape = (power_above(num_rows), weights.num_outputs, weights.num_inputs)
    found = MEASURED.get((target.capability, weights.bits, *shape), ())
    return next((tiles for tiles in found if isinstance(tiles, kinds)), None)


def _row_tiles(num_rows: int, weights: PackedMatrices, target: Target) -> RowTiles | None:
    """Chooses row tiles for few rows of x and few plain outputs; else None."""
    few = num_rows <= MAX_DECODE_ROWS and weights.num_outputs <= MAX_ROW_OUTPUTS
    padded = power_above(weights.num_inputs)
    if weights.bits != PLAIN_BITS or not few or padded > MAX_ROW_VALUES:
        return None
    wanted = power_above(-(-weights.num_outputs // target.num_processors))
    block_n = min(wanted, MAX_ROW_VALUES // padded)
    return RowTiles(
        block_m=min(ROW_BLOCK_M, power_above(num_rows)), block_n=block_n,
        num_warps=min(8, max(1, block_n * padded // ROW_WARP_VALUES)),
    )  # fmt: skip


def triton_tiles(
    num_rows: int, weights: PackedMatrices, target: Target, *, has_terms: bool = False
) -> TritonTiles | RowTiles:
    """Chooses tiles, measured or by rule: small programs at decode, else large tiles."""
    found = measured(num_rows, weights, target, (TritonTiles,))
    if isinstance(found, TritonTiles):
        return found
    whole_rows = None if has_terms else _row_tiles(num_rows, weights, target)
    if whole_rows is not None:
        return whole_rows
    if num_rows > MAX_DECODE_ROWS:
        block_m = 64 if num_rows < 1024 else 128
        return prefill_tiles(block_m, 128, [weights], target)
    block_m = max(8, power_above(num_rows))
    # 32 rows of W a warp: the constant operand of the sums of x is shared by two products. Two
    # warps and not four: below 64 rows a warp group has no matrix instruction of its own.
    block_n, num_warps = 64, 2
    programs = -(-weights.num_outputs // block_n)
    tiles = TritonTiles(
        block_m=block_m, block_n=block_n, step=decode_step([weights]),
        split_k=split_to_fill(programs, weights.num_inputs, target), num_warps=num_warps,
        num_stages=3,
    )  # fmt: skip
    return fitted(tiles, [weights], 1, target)


def decode_step(tiers: Sequence[PackedMatrices]) -> int:
    """Codes per step: a block of packed codes; half for plain values, which are larger."""
    return 128 if any(weights.bits == PLAIN_BITS for weights in tiers) else 256


def split_to_fill(programs: int, num_inputs: int, target: Target) -> int:
    """Parts of K that give each multiprocessor four programs of two blocks or more."""
    blocks, parts = max(1, num_inputs // BLOCK), 1
    while programs * parts < 4 * target.num_processors and 4 * parts <= blocks:
        parts *= 2
    return parts


def prefill_tiles(
    block_m: int, block_n: int, tiers: Sequence[PackedMatrices], target: Target
) -> TritonTiles:
    """Chooses large tiles with steps as short as the widest form allows, at least 64."""
    step = max(64, *(triton_product.min_step(weights) for weights in tiers))
    packed = [weights for weights in tiers if weights.bits != PLAIN_BITS]
    if not all(triton_product.sum_size(weights, step) for weights in packed):
        # Products by piece, and of the sums: too many accumulators for larger tiles on sm_100.
        block_m = min(block_m, MAX_DECODE_ROWS)
    tiles = TritonTiles(
        block_m=block_m, block_n=block_n, step=step, split_k=1,
        num_warps=8 if block_m * block_n > 4096 else 4, num_stages=3,
    )  # fmt: skip
    return fitted(tiles, tiers, 1, target)


def fitted(
    tiles: TritonTiles, tiers: Sequence[PackedMatrices], num_halves: int, target: Target
) -> TritonTiles:
    """Limits stages to shared memory, `num_stages` at most; then reduces rows of x.

    Args:
      num_halves: 2 for gate and up, whose tiles a program multiplies at once; else 1.
    """
    room = SHARED_BYTES.get(target.capability or (9, 0), LEAST_SHARED_BYTES) - RESERVED_BYTES
    while True:
        stage = max(stage_bytes(tiles, weights, num_halves) for weights in tiers)
        stages = min(tiles.num_stages, room // stage)
        if stages >= 2 or tiles.block_m <= 16:
            return dataclasses.replace(tiles, num_stages=max(1, stages))
        tiles = dataclasses.replace(tiles, block_m=tiles.block_m // 2)


def stage_bytes(tiles: TritonTiles, weights: PackedMatrices, num_halves: int) -> int:
    """Shared memory of one stage of the pipeline."""
    step = max(tiles.step, triton_product.min_step(weights))
    # A packed step reads the words of its whole block.
    row_bytes = step * 2 if weights.bits == PLAIN_BITS else BLOCK * weights.bits // 8
    return num_halves * tiles.block_n * row_bytes + tiles.block_m * step * 2
