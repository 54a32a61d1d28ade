"""Tile sizes of the grouped kernels, measured or by rule."""

import dataclasses
from collections.abc import Sequence

from pallas_kernels.dequant_matmul.tiles import TritonTiles as TritonTiles
from pallas_kernels.dequant_matmul.tiles import (
    decode_step,
    fitted,
    is_measured_form,
    prefill_tiles,
    split_to_fill,
)
from pallas_kernels.mosaic_decode.tiles import StreamTiles
from pallas_kernels.mosaic_prefill.tiles import WgmmaTiles
from pallas_kernels.packed import PackedMatrices
from pallas_kernels.target import Target
from pallas_kernels.triton.elements import power_above

MAX_DECODE_PAIRS = 256  # up to which programs find the pairs of their matrix by themselves
MAX_BLOCK_ROWS = 128

Tiles = TritonTiles | StreamTiles | WgmmaTiles

# (compute capability, "gate_up" or "down", bits, T, A, N, K) -> the fastest tiles found of each
# implementation, for one tier in groups of 64 with float zeros; T as M in `dequant_matmul.tiles`.
MEASURED: dict[tuple[tuple[int, int], str, int, int, int, int, int], tuple[Tiles, ...]] = {
    # Mixtral, NVIDIA H200, jax 0.11.2, 2026-11-21: 37.44 us, by rule 40.51 and 41.06
    ((9, 0), "gate_up", 3, 1, 2, 28672, 4096): (StreamTiles(3, 1, 8, depth=4, workers=132),),
    # Same shape: 111.0 us, with two column tiles 187.2 and 190.3
    ((9, 0), "down", 3, 32, 2, 4096, 14336): (StreamTiles(2, 3, 4, depth=4, workers=132),),
    # Qwen3-30B, NVIDIA H200, jax 0.11.2, 2026-11-28: 42.33 us, by rule 47.41 twice
    ((9, 0), "gate_up", 4, 16, 8, 1536, 2048): (StreamTiles(1, 1, 8, depth=4, workers=132),),
    # Same shape: 53.48 us, by rule 62.22 and 62.17
    ((9, 0), "gate_up", 4, 32, 8, 1536, 2048): (StreamTiles(3, 1, 8, depth=4, workers=132),),
    # Same shape, 2026-11-21: 66.23 us, by rule 70.50 and 70.08
    ((9, 0), "gate_up", 4, 64, 8, 1536, 2048): (
        StreamTiles(3, 2, 8, depth=4, kept=True, workers=132),
    ),
    # Same shape: 40.76 us, by rule 44.26 and 44.32
    ((9, 0), "down", 4, 64, 8, 2048, 768): (StreamTiles(4, 8, 1, depth=4, workers=132),),
}


def measured(
    op: str,
    num_tokens: int,
    width: int,
    tiers: Sequence[PackedMatrices],
    target: Target,
    kinds: tuple[type, ...],
) -> Tiles | None:
    """Looks up `MEASURED` tiles of one of the kinds; None if there are none."""
    if len(tiers) > 1 or target.simulated or target.capability is None:
        return None
    if not is_measured_form(tiers[0]):
        return None
    shape = (power_above(num_tokens), width, tiers[0].num_outputs, tiers[0].num_inputs)
    found = MEASURED.get((target.capability, op, tiers[0].bits, *shape), ())
    tiles = next((tiles for tiles in found if isinstance(tiles, kinds)), None)
    if isinstance(tiles, StreamTiles) and tiles.workers:  # one a multiprocessor, of which an H100
        return dataclasses.replace(tiles, workers=target.num_processors)  # may have fewer
    return tiles


def by_blocks(num_tokens: int, width: int) -> bool:
    """Whether pairs are sorted into blocks of one matrix each before the launch."""
    return num_tokens > 1 and num_tokens * width > MAX_DECODE_PAIRS


def gate_up_tiles(
    num_tokens: int, width: int, tiers: Sequence[PackedMatrices], target: Target
) -> TritonTiles:
    """Chooses tiles by rule; block_n counts rows of gate, and as many of up."""
    found = measured("gate_up", num_tokens, width, tiers, target, (TritonTiles,))
    if isinstance(found, TritonTiles):
        return found
    if by_blocks(num_tokens, width):
        tiles = prefill_tiles(_block_rows(num_tokens, width, tiers), 64, tiers, target)
        return fitted(tiles, tiers, 2, target)
    # The sums of gate and up meet in SwiGLU, so K is not split: with few pairs, small tiles.
    few = num_tokens * width <= 16
    tiles = TritonTiles(
        block_m=_decode_columns(num_tokens), block_n=16 if few else 32, step=decode_step(tiers),
        split_k=1, num_warps=1 if few else 2, num_stages=3,
    )  # fmt: skip
    return fitted(tiles, tiers, 2, target)


def down_tiles(
    num_tokens: int, width: int, tiers: Sequence[PackedMatrices], target: Target
) -> TritonTiles:
    """Chooses tiles by rule; the combine adds the parts of K in its own launch."""
    found = measured("down", num_tokens, width, tiers, target, (TritonTiles,))
    if isinstance(found, TritonTiles):
        return found
    if by_blocks(num_tokens, width):
        return prefill_tiles(_block_rows(num_tokens, width, tiers), 128, tiers, target)
    block_n = 64
    programs = num_tokens * width * -(-tiers[0].num_outputs // block_n)
    tiles = TritonTiles(
        block_m=_decode_columns(num_tokens), block_n=block_n, step=decode_step(tiers),
        split_k=split_to_fill(programs, tiers[0].num_inputs, target), num_warps=2, num_stages=3,
    )  # fmt: skip
    return fitted(tiles, tiers, 1, target)


def _decode_columns(num_tokens: int) -> int:
    """Pairs of one matrix per job: a token chooses a matrix once."""
    return min(16, max(8, power_above(num_tokens)))


def _block_rows(num_tokens: int, width: int, tiers: Sequence[PackedMatrices]) -> int:
    """Rows per block: the load of one of 2 A^2 experts (Mixtral has 8 of which 2 run)."""
    experts = min(2 * width * width, sum(weights.num_slots for weights in tiers))
    load = max(1, num_tokens * width // experts)
    return min(MAX_BLOCK_ROWS, max(16, power_above(load)))
