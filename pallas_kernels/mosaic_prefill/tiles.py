"""Tiles of the prefill kernels: how blocks and warpgroups split the work."""

import dataclasses

from pallas_kernels.packed import PLAIN_BITS

SHARED_BYTES = 226 * 1024  # of a block, less barriers and the places of their alignment


@dataclasses.dataclass(frozen=True)
class WgmmaTiles:
    """Tiles of a thread block: 64 rows per warpgroup of a matrix by `tokens` rows of x."""

    tokens: int  # a multiple of 8, at most 256
    x_stages: int  # of 64 k, held in shared memory; a multiple of 4
    word_blocks: int  # of 256 k, held in shared memory
    warpgroups: int = 2  # that multiply; one more copies
    splits: int = 1  # parts of K, each with its own sums
    band: int = 8  # tiles of tokens that are worked off together

    def __post_init__(self) -> None:
        """Raises ValueError for tiles that the kernels do not support."""
        if self.tokens % 8 or not 8 <= self.tokens <= 256:
            raise ValueError(f"tokens {self.tokens} is no multiple of 8 in 8..256")
        if self.x_stages % 4 or min(self.x_stages, self.word_blocks, self.splits) < 1:
            raise ValueError(f"x_stages {self.x_stages} is no multiple of 4, or a count is below 1")

    @property
    def rows(self) -> int:
        """Rows of a matrix per tile."""
        return 64 * self.warpgroups

    @property
    def chunk(self) -> int:
        """Tokens that a warpgroup stores at a time."""
        return min(self.tokens, 64)

    def describe(self) -> str:
        """Describes the tiles, such as "t256x4w3s1"."""
        return f"t{self.tokens}x{self.x_stages}w{self.word_blocks}s{self.splits}"


def dense_tiles(
    num_tokens: int, num_rows: int, num_inputs: int, bits: int, processors: int
) -> WgmmaTiles:
    """Chooses large tiles while they fill the card; for few tokens splits K until they do."""
    tokens = min(256, -(-num_tokens // 8) * 8)
    if tokens == 256:
        return _fitting(WgmmaTiles(tokens=256, x_stages=4, word_blocks=2), bits)
    stages = 8 if tokens <= 128 else 4
    items = -(-num_rows // 128)
    blocks = num_inputs // 256
    splits = max(1, min(processors // items, blocks // 4))
    tiles = WgmmaTiles(
        tokens=tokens, x_stages=stages, word_blocks=4 if tokens <= 128 else 3, splits=splits
    )
    return _fitting(tiles, bits)


def _fitting(tiles: WgmmaTiles, bits: int) -> WgmmaTiles:
    """Limits the stages to shared memory.

    Raises:
      ValueError: not even the smallest fits.
    """
    for x_stages, word_blocks in ((8, 4), (8, 3), (8, 2), (4, 4), (4, 3), (4, 2), (4, 1)):
        if x_stages > tiles.x_stages or word_blocks > tiles.word_blocks:
            continue
        found = dataclasses.replace(tiles, x_stages=x_stages, word_blocks=word_blocks)
        if _shared_bytes(found, bits) <= SHARED_BYTES:
            return found
    raise ValueError(f"no tiles of {tiles.tokens} tokens for {bits} bits")


def _shared_bytes(tiles: WgmmaTiles, bits: int) -> int:
    """Shared memory of x, of the weights and of the results."""
    weights = tiles.x_stages * 64 if bits == PLAIN_BITS else tiles.word_blocks * 256
    room = tiles.warpgroups * 2 * tiles.chunk * 128
    return tiles.x_stages * tiles.tokens * 128 + tiles.rows * weights * bits // 8 + room


def grouped_tokens(num_tokens: int, width: int, num_slots: int) -> int:
    """Tokens per tile, by the mean load of a matrix.

    A stack may hold the experts of all layers, so their number is a guess from A: Mixtral has 8 of
    which 2 run, Qwen3 128 of which 8 run.
    """
    experts = min(2 * width * width, num_slots)
    load = num_tokens * width // experts
    for tokens, most in ((32, 16), (64, 64), (128, 768)):
        if load <= most:
            return tokens
    return 256


def grouped_tiles(tokens: int, bits: int) -> WgmmaTiles:
    """Chooses as many stages as shared memory holds."""
    return _fitting(WgmmaTiles(tokens=tokens, x_stages=8, word_blocks=4), bits)
