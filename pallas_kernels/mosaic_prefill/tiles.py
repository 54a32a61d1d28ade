"""Tiles of the prefill kernels: how blocks and warpgroups split the work."""

import dataclasses

from pallas_kernels.mosaic_prefill.rounds import Rounds
from pallas_kernels.packed import PLAIN_BITS

SHARED_BYTES = 226 * 1024  # of a block, less barriers and the places of their alignment


@dataclasses.dataclass(frozen=True)
class WgmmaTiles:
    """Tiles of a thread block: 64 rows per warpgroup of a matrix by `tokens` rows of x."""

    tokens: int  # a multiple of 8, at most 256
    x_stages: int  # of 64 k, held in shared memory; a multiple of 4
    word_blocks: int  # of 256 k, held in shared memory
    warpgroups: int = 2  # that multiply; one more copies
    shares_k: bool = False  # blocks share tiles along K where rounds of whole ones do not fill
    band: int = 8  # tiles of tokens that are worked off together

    def __post_init__(self) -> None:
        """Raises ValueError for tiles that the kernels do not support."""
        if self.tokens % 8 or not 8 <= self.tokens <= 256:
            raise ValueError(f"tokens {self.tokens} is no multiple of 8 in 8..256")
        if self.x_stages % 4 or min(self.x_stages, self.word_blocks) < 1:
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
        """Describes the tiles, such as "t256x4w3k"; "k": with a shared K."""
        shared = "k" if self.shares_k else ""
        return f"t{self.tokens}x{self.x_stages}w{self.word_blocks}{shared}"


def dense_tiles(
    num_tokens: int, num_rows: int, num_inputs: int, bits: int, processors: int
) -> WgmmaTiles:
    """Chooses large tiles, whole or shared along K, or halves of them: the cheapest."""
    most = min(256, -(-num_tokens // 8) * 8)
    sizes = (most, 128) if most > 128 else (most,)
    every = [fitted_tiles(n, bits, shares_k=shares) for n in sizes for shares in (False, True)]

    def cost(tiles: WgmmaTiles) -> float:
        num_tiles = -(-num_rows // tiles.rows) * -(-num_tokens // tiles.tokens)
        num_blocks = -(-num_inputs // 256)
        return _cost(tiles.tokens, Rounds(num_tiles, num_blocks, processors, tiles.shares_k))

    return min(every, key=cost)


def _cost(tokens: int, rounds: Rounds) -> float:
    """Estimates a launch's time, in those of a block of 256 k for 256 tokens; fitted on an H100.

    Thread blocks at different k share little of what the L2 cache holds, so that shared blocks are
    slower; sums that others end are stored and read again.
    """
    whole = rounds.num_tiles - rounds.num_shared
    blocks = -(-whole // rounds.num_workers) * rounds.num_blocks
    block_cost = 0.25 + 0.75 * tokens / 256
    if not rounds.num_shared:
        return block_cost * blocks
    shared = -(-rounds.num_shared * rounds.num_blocks // rounds.num_workers)
    parts = rounds.num_workers / rounds.num_shared * tokens / 256
    return block_cost * (blocks + 1.02 * shared) + 1 + 0.5 * parts


def fitted_tiles(tokens: int, bits: int, *, shares_k: bool = False) -> WgmmaTiles:
    """Chooses as many stages as shared memory holds.

    Raises:
      ValueError: not even the smallest fit.
    """
    for x_stages, word_blocks in ((8, 4), (8, 3), (8, 2), (4, 4), (4, 3), (4, 2), (4, 1)):
        found = WgmmaTiles(tokens, x_stages, word_blocks, shares_k=shares_k)
        if _shared_bytes(found, bits) <= SHARED_BYTES:
            return found
    raise ValueError(f"no tiles of {tokens} tokens for {bits} bits")


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
