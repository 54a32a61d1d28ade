"""Tile sizes of the grouped kernels, measured and by rule."""

from collections.abc import Sequence

from pallas_kernels.dequant_matmul.tiles import TritonTiles as TritonTiles
from pallas_kernels.dequant_matmul.tiles import (
    decode_step,
    fitted,
    power_above,
    prefill_tiles,
    split_to_fill,
)
from pallas_kernels.packed import PackedMatrices
from pallas_kernels.stream.tiles import StreamTiles
from pallas_kernels.target import Target
from pallas_kernels.wgmma.tiles import WgmmaTiles

MAX_DECODE_PAIRS = 256  # up to which programs find the pairs of their matrix by themselves
MAX_BLOCK_ROWS = 128

Tiles = TritonTiles | StreamTiles | WgmmaTiles

# (compute capability, "gate_up" or "down", bits, T, A, N, K) -> the fastest tiles found (one tier),
# with device, JAX version and date; T as a power of two, as M in `dequant_matmul.tiles`.
MEASURED: dict[tuple[tuple[int, int], str, int, int, int, int, int], Tiles] = {}


def by_blocks(num_tokens: int, width: int) -> bool:
    """Whether pairs are sorted into blocks of one matrix each before the launch."""
    return num_tokens > 1 and num_tokens * width > MAX_DECODE_PAIRS


def gate_up_tiles(
    num_tokens: int, width: int, tiers: Sequence[PackedMatrices], target: Target
) -> TritonTiles:
    """By rule; block_n counts rows of gate, and as many of up.

    Args:
      num_tokens: T.
      width: A.
      tiers: arrays, their shapes or refs.
      target: how many multiprocessors there are to fill, and their shared memory.
    """
    if found := _measured("gate_up", num_tokens, width, tiers, target):
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
    """By rule, as `gate_up_tiles`; the combine adds the parts of K in its own launch."""
    if found := _measured("down", num_tokens, width, tiers, target):
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


def _measured(
    op: str, num_tokens: int, width: int, tiers: Sequence[PackedMatrices], target: Target
) -> TritonTiles | None:
    if len(tiers) > 1 or target.capability is None:
        return None
    shape = (power_above(num_tokens), width, tiers[0].num_outputs, tiers[0].num_inputs)
    found = MEASURED.get((target.capability, op, tiers[0].bits, *shape))
    return found if isinstance(found, TritonTiles) else None


def _decode_columns(num_tokens: int) -> int:
    """Pairs of one matrix that a job takes: a token chooses a matrix once."""
    return min(16, max(8, power_above(num_tokens)))


def _block_rows(num_tokens: int, width: int, tiers: Sequence[PackedMatrices]) -> int:
    """About the load of one of 2 A^2 experts: Mixtral has 8 of which 2 run, Qwen3 128 of 8."""
    experts = min(2 * width * width, sum(weights.num_slots for weights in tiers))
    load = max(1, num_tokens * width // experts)
    return min(MAX_BLOCK_ROWS, max(16, power_above(load)))
