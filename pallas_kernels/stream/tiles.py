"""How the streaming kernels share out their work."""

import dataclasses
from collections.abc import Callable, Sequence

from pallas_kernels.packed import PLAIN_BITS
from pallas_kernels.stream.fragments import Form
from pallas_kernels.stream.matrix import COLUMNS, ROWS, Matrix, tile_bytes
from pallas_kernels.stream.terms import Share, Term


@dataclasses.dataclass(frozen=True)
class StreamTiles:
    """A thread block has warps_n x warps_k warps; a warp owns row_tiles x 16 rows."""

    row_tiles: int  # of 16 rows, of a warp
    warps_n: int  # along the rows
    warps_k: int  # along K
    depth: int = 3  # row tiles of a warp in shared memory, on their way or there
    span: int = 1  # blocks of K of each
    column_tiles: int = 1  # of 8 rows of x at a time, in the experts' kernels

    @property
    def rows(self) -> int:
        """Outputs of a thread block."""
        return 16 * self.row_tiles * self.warps_n

    @property
    def num_warps(self) -> int:
        """Of a thread block; a multiple of 4."""
        return self.warps_n * self.warps_k

    def check(self, num_outputs: int, matrices: Sequence[Matrix]) -> None:
        """Raises ValueError where they do not fit the outputs or the blocks of K."""
        for matrix in matrices:
            if matrix.num_blocks % (span := self.span_of(matrix.form)):
                raise ValueError(f"stages of {span} blocks do not divide {matrix.num_blocks}")
        if self.rows > num_outputs:
            raise ValueError(f"tiles {self.describe()} have {self.rows} rows of {num_outputs}")
        if self.num_warps % 4:
            raise ValueError(f"tiles {self.describe()} have {self.num_warps} warps, not 4, 8, ...")

    def span_of(self, form: Form) -> int:
        """`span`, but no more than a stage of the form may have."""
        return min(self.span, form.longest_span)

    def describe(self) -> str:
        """Such as "r2n2k4d3s1c1"."""
        warps = f"r{self.row_tiles}n{self.warps_n}k{self.warps_k}"
        return f"{warps}d{self.depth}s{self.span}c{self.column_tiles}"


# Shared memory of a block of threads, less what Mosaic takes (bytes, Hopper).
SHARED_BYTES = 225 * 1024
MOST_TILES = 7  # row tiles of a warp; more do not fit its registers
FEW_COLUMNS = 8  # rows of x that one column tile holds


def dense_tiles(
    matrix: Matrix, num_x: int, num_processors: int, terms: Sequence[Term] = ()
) -> StreamTiles:
    """Blocks of threads of equal work, in as few full waves as the registers allow.

    Measured for K 4096, N 14336 (H200, jax 0.11.2, 2026-11-21): 16 warps along K were best with
    one column tile, 8 with two, whose x takes twice the registers.
    """
    warps = 16 if num_x <= FEW_COLUMNS and matrix.form.bits < PLAIN_BITS else 8
    warps_k, warps_n = share_out(matrix.num_blocks, warps, matrix.num_rows // ROWS)
    columns = -(-num_x // COLUMNS)
    row_tiles = even_tiles(matrix.num_rows // ROWS, warps_n, num_processors, columns, MOST_TILES)
    tiles = StreamTiles(row_tiles, warps_n, warps_k, depth=2 if warps == 16 else 3)
    return fitted(tiles, [matrix], lambda t: dense_share(t, num_x, matrix.num_rows).room(terms))


def expert_tiles(
    tiers: Sequence[Matrix],
    num_tokens: int,
    width: int,
    gated: bool,
    num_processors: int,
    terms: Sequence[Sequence[Term]] = (),
) -> StreamTiles:
    """The same for experts of a few tokens; rows count outputs, of a gate and an up row each."""
    matrix = tiers[0]
    halves = 2 if gated else 1
    tiles_of_pair = matrix.num_rows // halves // ROWS
    warps_k, warps_n = share_out(min(tier.num_blocks for tier in tiers), 8, tiles_of_pair)
    pairs = num_tokens * width
    # Tokens that share one of few experts are worth two column tiles.
    columns = 1 if num_tokens <= FEW_COLUMNS or width >= 4 else 2
    most = MOST_TILES // halves
    row_tiles = even_tiles(tiles_of_pair, warps_n, num_processors, columns, most, pairs)
    tiles = StreamTiles(row_tiles, warps_n, warps_k, depth=3, column_tiles=columns)

    def room(tiles: StreamTiles) -> int:
        share = expert_share(tiles, gated, matrix.num_rows // halves)
        return max((share.room(of_tier) for of_tier in terms), default=0)

    return fitted(tiles, tiers, room)


def share_out(blocks: int, warps: int, row_tiles: int) -> tuple[int, int]:
    """Warps along K and along the rows, of which there are at most as many as row tiles."""
    warps_k = warps
    while warps_k > blocks and 2 * warps // warps_k <= row_tiles:
        warps_k //= 2
    return warps_k, warps // warps_k


def even_tiles(
    tiles: int, warps_n: int, num_processors: int, column_tiles: int, most: int, copies: int = 1
) -> int:
    """Row tiles of a warp that take the fewest steps: waves of blocks times tiles of a warp.

    A warp's x costs it about as much as a row tile for each column tile, whatever its tiles.

    Args:
      tiles: of 16 rows, of a matrix.
      warps_n: warps along the rows.
      num_processors: blocks of a wave.
      column_tiles: of x.
      most: row tiles of a warp that its registers hold.
      copies: matrices.
    """

    def steps(row_tiles: int) -> int:
        blocks = copies * -(-tiles // (row_tiles * warps_n))
        return -(-blocks // num_processors) * (row_tiles + column_tiles)

    fitting = [r for r in range(1, most + 1) if r * warps_n <= tiles]
    return min(fitting or [1], key=lambda r: (steps(r), -r))


def dense_share(tiles: StreamTiles, num_x: int, num_outputs: int) -> Share:
    """What a thread block of one matrix does."""
    columns = -(-num_x // COLUMNS) * COLUMNS
    return Share(tiles.num_warps, columns, tiles.rows, 1, num_outputs)


def expert_share(tiles: StreamTiles, gated: bool, num_outputs: int) -> Share:
    """The same of experts; outputs are those of a pair."""
    columns = COLUMNS * tiles.column_tiles
    return Share(tiles.num_warps, columns, tiles.rows, 2 if gated else 1, num_outputs)


def fitted(
    tiles: StreamTiles,
    matrices: Sequence[Matrix],
    terms: Callable[[StreamTiles], int] = lambda tiles: 0,
) -> StreamTiles:
    """With rings no deeper, and then no more warps and rows, than shared memory allows.

    Args:
      tiles: wanted.
      matrices: of the launch.
      terms: bytes that low-rank terms take with given tiles.
    """
    each = max(tile_bytes(m, tiles.span_of(m.form)) for m in matrices)
    while True:
        room = SHARED_BYTES - terms(tiles)
        depth = max(1, min(tiles.depth, room // (each * tiles.num_warps)))
        tiles = dataclasses.replace(tiles, depth=depth)
        if each * tiles.num_warps * depth <= room:
            return tiles
        if tiles.num_warps > 4 and tiles.warps_k > 1:
            tiles = dataclasses.replace(tiles, warps_k=tiles.warps_k // 2)
        elif tiles.row_tiles > 1:
            tiles = dataclasses.replace(tiles, row_tiles=tiles.row_tiles - 1)
        else:
            return tiles
