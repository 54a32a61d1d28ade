"""Tiles of the streaming kernels: how blocks and warps split the work."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from pallas_kernels.mosaic_decode.low_rank_spec import Share, Term
from pallas_kernels.mosaic_decode.matrix import COLUMNS, ROWS, Matrix, tile_bytes, x_sums_bytes
from pallas_kernels.packed import PLAIN_BITS


@dataclasses.dataclass(frozen=True)
class StreamTiles:
    """Tiles: a thread block has warps_n x warps_k warps; a warp owns row_tiles x 16 rows."""

    row_tiles: int  # of 16 rows, of a warp
    warps_n: int  # along the rows
    warps_k: int  # along K
    depth: int = 3  # row tiles of a warp in shared memory, on their way or there
    kept: bool = False  # sums of x in shared memory, not in registers; of one matrix totals too
    cluster: int = 1  # thread blocks that share out K of the same rows (one matrix)
    workers: int = 0  # thread blocks that share out all work; 0: one for each piece (experts)
    thin: int = 0  # row tiles of a low-rank term's V among a warp's own; 0: V apart (one matrix)
    sharers: int = 1  # thread blocks of a cluster that share out V's row tiles

    @property
    def rows(self) -> int:
        """Outputs per thread block or cluster."""
        return 16 * self.row_tiles * self.warps_n

    @property
    def outputs(self) -> int:
        """Outputs that each block of a cluster sums."""
        return self.rows // self.cluster

    @property
    def num_warps(self) -> int:
        """Warps per thread block; a multiple of 4."""
        return self.warps_n * self.warps_k

    def check(self, num_outputs: int) -> None:
        """Raises ValueError if the tiles do not fit the outputs."""
        if self.rows > num_outputs:
            raise ValueError(f"tiles {self.describe()} have {self.rows} rows of {num_outputs}")
        if self.launched not in (1, 2, 4, 8):
            raise ValueError(f"clusters of {self.launched} thread blocks, not of 1, 2, 4 or 8")
        if self.thin and (self.cluster > 1 or self.warps_n > 1):
            raise ValueError(f"tiles {self.describe()} have V among rows that warps share")
        if self.num_warps % 4:
            raise ValueError(f"tiles {self.describe()} have {self.num_warps} warps, not 4, 8, ...")

    def describe(self) -> str:
        """Describes the tiles, such as "r2n2k4d3"."""
        warps = f"r{self.row_tiles}n{self.warps_n}k{self.warps_k}"
        more = f"x{self.cluster}" if self.cluster > 1 else ""
        more += "kept" if self.kept else ""
        more += f"v{self.thin}x{self.sharers}" if self.thin else ""
        more += f"w{self.workers}" if self.workers else ""
        return f"{warps}d{self.depth}{more}"

    @property
    def launched(self) -> int:
        """Thread blocks per launched cluster."""
        return self.cluster * self.sharers

    @property
    def pitch(self) -> int:
        """Floats per column of sums; four more spread a warp's columns over all banks."""
        return self.rows + 4

    def sums_bytes(self, columns: int) -> int:
        """Shared memory of the sums of one matrix's product: every warp's part along K."""
        return 4 * self.warps_k * columns * self.pitch

    def team_pitch(self, halves: int) -> int:
        """Floats per column of sums in the expert kernels, for the warps that share rows."""
        return 16 * self.row_tiles * halves + 4

    def team_bytes(self, halves: int) -> int:
        """Shared memory of the sums of warps that share rows: every warp's part along K."""
        return 4 * self.warps_k * COLUMNS * self.team_pitch(halves)

    def expert_bytes(self, matrices: Sequence[Matrix], halves: int) -> int:
        """Shared memory of the expert kernels beside rings, jobs and terms."""
        sums = self.warps_n * self.team_bytes(halves)
        return sums + self.num_warps * self.expert_x_bytes(matrices)

    def expert_x_bytes(self, matrices: Sequence[Matrix]) -> int:
        """Shared memory of a warp's sums of x, if they are kept."""
        return max(map(x_sums_bytes, matrices)) if self.kept else 0

    def dense_bytes(self, matrix: Matrix, columns: int) -> int:
        """Shared memory of one matrix's product without its terms, a multiple of 16.

        Rings and then, in their place, sums; or both and the sums of x, if they are kept.
        """
        sums, beside = self.sums_bytes(columns), self._beside_rings(matrix, columns)
        rings = self.num_warps * self.depth * tile_bytes(matrix)
        return rings + beside if self.kept else max(rings, sums)

    def _beside_rings(self, matrix: Matrix, columns: int) -> int:
        """Shared memory that cannot reuse the rings."""
        of_x = self.num_warps * x_sums_bytes(matrix, columns // COLUMNS)
        return self.sums_bytes(columns) + of_x if self.kept else 0


# Shared memory of a block of threads, less what Mosaic takes (bytes, Hopper).
SHARED_BYTES = 225 * 1024
MOST_TILES = 7  # row tiles of a warp; more do not fit its registers
MOST_KEPT = 8  # the same where totals are in shared memory
MOST_CLUSTER = 2  # blocks of a cluster; more do not fit every group of processors
JOBS_BYTES = 8 * 1024  # of shared memory, more than the list of 512 pairs' jobs takes


def dense_tiles(
    matrix: Matrix, num_x: int, num_processors: int, terms: Sequence[Term] = ()
) -> StreamTiles:
    """Chooses blocks of equal work, in as few full waves as the registers allow.

    16 warps along K are best with one column tile, and with two if totals lie in shared memory: K
    4096, N 14336 and 16 rows of x take 15.7 us in place of 17.2 in INT3, and in INT4 17.4 either
    way (H200, jax 0.11.2, 2026-11-21).
    """
    columns = -(-num_x // COLUMNS)

    def beside(tiles: StreamTiles) -> int:
        of_terms = dense_share(tiles, num_x, matrix.num_rows).room(terms)
        return of_terms + tiles._beside_rings(matrix, COLUMNS * columns)

    def of_warps(warps: int, kept: bool) -> StreamTiles:
        row_blocks = matrix.num_rows // ROWS
        warps_k, warps_n = _share_out(matrix.num_blocks, warps, row_blocks)
        row_tiles = _even_tiles(row_blocks, warps_n, num_processors, columns, MOST_TILES)
        depth = 2 if warps == 16 else 3
        tiles = StreamTiles(row_tiles, warps_n, warps_k, depth, kept=kept)
        tiles = _with_less_x(tiles, matrix, num_x) if kept else tiles
        return _fitted(_with_v(tiles, matrix, terms), [matrix], beside)

    if matrix.form.bits < PLAIN_BITS and columns == 2:
        tiles = of_warps(16, kept=True)
        if tiles.depth > 1:  # else no copies are under way while a warp multiplies
            return tiles
    few = matrix.form.bits < PLAIN_BITS and columns == 1
    return of_warps(16 if few else 8, kept=False)


def _with_less_x(tiles: StreamTiles, matrix: Matrix, num_x: int) -> StreamTiles:
    """Makes clusters that split K, if blocks would each read more bytes of x than of words.

    Clusters have as many times more rows, so the number of blocks and their work stay equal.
    """
    while (
        16 * num_x > matrix.form.bits * tiles.rows
        and 2 * tiles.row_tiles <= MOST_KEPT
        and 2 * tiles.rows <= matrix.num_rows
        and 2 * tiles.cluster * tiles.warps_k <= matrix.num_blocks
        and tiles.cluster < MOST_CLUSTER
    ):
        row_tiles, cluster = 2 * tiles.row_tiles, 2 * tiles.cluster
        tiles = dataclasses.replace(tiles, row_tiles=row_tiles, cluster=cluster)
    return tiles


def _with_v(tiles: StreamTiles, matrix: Matrix, terms: Sequence[Term]) -> StreamTiles:
    """Puts V of the only term among the warps' own rows, if x serves both alike.

    Clusters of two split V's rows, since every block needs all of V x.
    """
    if len(terms) != 1 or tiles.warps_n * tiles.cluster > 1:
        return tiles
    (term,) = terms
    alike = term.v.form == matrix.form and term.v.group == matrix.group
    fits = tile_bytes(term.v) <= tile_bytes(matrix)
    if not (alike and fits and term.covers(0, matrix.num_rows)):
        return tiles
    several = term.num_tiles > 1 and tiles.rows < matrix.num_rows
    sharers = MOST_CLUSTER if several else 1
    return dataclasses.replace(tiles, thin=-(-term.num_tiles // sharers), sharers=sharers)


def expert_tiles(
    tiers: Sequence[Matrix],
    num_tokens: int,
    width: int,
    gated: bool,
    num_processors: int,
    terms: Sequence[Sequence[Term]] = (),
) -> StreamTiles:
    """Chooses tiles for experts of a few tokens; rows count outputs (a gate and an up row)."""
    matrix = tiers[0]
    halves = 2 if gated else 1
    outputs = matrix.num_rows // halves
    blocks = min(tier.num_blocks for tier in tiers)
    are_packed = all(tier.form.bits < PLAIN_BITS for tier in tiers)
    if num_tokens <= COLUMNS and are_packed and blocks > 8 and blocks % 8 == 4:
        # Of 8 warps half would idle in the last round. Three row tiles are the best of one to five
        # for 1 and 2 tokens' experts at K 2880, and within 2 % (INT4) and 5 % (MXFP4) of the best
        # for 4 and 8 (H100, jax 0.11.2, 2026-11-26).
        tiles = StreamTiles(min(3, outputs // ROWS), 1, 4, depth=3)
    elif num_tokens <= COLUMNS:
        warps_k, warps_n = _share_out(blocks, 8, outputs // ROWS)
        pairs, most = num_tokens * width, MOST_TILES // halves
        row_tiles = _even_tiles(outputs // ROWS, warps_n, num_processors, 1, most, pairs)
        tiles = StreamTiles(row_tiles, warps_n, warps_k, depth=3)
    else:
        tiles = _sharing_tiles(tiers, halves, num_processors)

    def room(tiles: StreamTiles) -> int:
        share = expert_share(tiles, gated, outputs)
        of_terms = max((share.room(of_tier) for of_tier in terms), default=0)
        return of_terms + JOBS_BYTES + tiles.expert_bytes(tiers, halves)

    return _fitted(tiles, tiers, room)


def _sharing_tiles(tiers: Sequence[Matrix], halves: int, num_processors: int) -> StreamTiles:
    """Chooses one block per multiprocessor, each with a share of the work.

    If there are as many blocks of K as warps along K, a warp has one block, and keeps x of an
    expert's tokens for all of its outputs. An expert of more than 8 tokens is read again: with two
    column tiles only 8 warps fit, and Mixtral's gate and up of 32 tokens took 256 us in place of
    174 (INT3, H200, jax 0.11.2, 2026-11-21).
    """
    blocks = min(tier.num_blocks for tier in tiers)
    tiles_of_pair = tiers[0].num_rows // halves // ROWS
    warps = next((w for w in (16, 12) if w % blocks == 0), 16)
    warps_k = math.gcd(warps, blocks)
    while warps // warps_k > tiles_of_pair:
        warps_k *= 2
    warps_n = warps // warps_k
    # Row tiles that fit a warp's registers; gate and up have one each.
    few = (halves == 2 and warps_n > 1) or 2 * warps_n > tiles_of_pair
    return StreamTiles(1 if few else 2, warps_n, warps_k, workers=num_processors)


def _share_out(blocks: int, warps: int, row_tiles: int) -> tuple[int, int]:
    """Splits warps along K and along the rows, at most as many as row tiles."""
    warps_k = warps
    while warps_k > blocks and 2 * warps // warps_k <= row_tiles:
        warps_k //= 2
    return warps_k, warps // warps_k


def _even_tiles(
    tiles: int, warps_n: int, num_processors: int, column_tiles: int, most: int, copies: int = 1
) -> int:
    """Chooses row tiles per warp for the fewest steps: waves times tiles per warp.

    Loading x costs a warp about as much as a row tile for each column tile, whatever its tiles.
    """

    def steps(row_tiles: int) -> int:
        blocks = copies * -(-tiles // (row_tiles * warps_n))
        return -(-blocks // num_processors) * (row_tiles + column_tiles)

    fitting = [r for r in range(1, most + 1) if r * warps_n <= tiles]
    return min(fitting or [1], key=lambda r: (steps(r), -r))


def dense_share(tiles: StreamTiles, num_x: int, num_outputs: int) -> Share:
    """Share of a thread block in one matrix's product."""
    columns = -(-num_x // COLUMNS) * COLUMNS
    return Share(tiles.num_warps, columns, tiles.outputs, 1, num_outputs, num_x, tiles.thin)


def expert_share(tiles: StreamTiles, gated: bool, num_outputs: int) -> Share:
    """Share of a thread block in the expert kernels; outputs are a pair's."""
    halves = 2 if gated else 1
    return Share(tiles.num_warps, COLUMNS, tiles.rows, halves, num_outputs, COLUMNS)


def _fitted(
    tiles: StreamTiles,
    matrices: Sequence[Matrix],
    beside: Callable[[StreamTiles], int] = lambda tiles: 0,
) -> StreamTiles:
    """Limits ring depth, then warps and rows, to shared memory.

    Args:
      beside: bytes beside the rings, low-rank terms included, for given tiles.
    """
    each = max(map(tile_bytes, matrices))
    while True:
        room = SHARED_BYTES - beside(tiles)
        depth = max(1, min(tiles.depth, room // (each * tiles.num_warps)))
        tiles = dataclasses.replace(tiles, depth=depth)
        if each * tiles.num_warps * depth <= room:
            return tiles
        if tiles.num_warps > 4 and tiles.warps_k > 1:
            fewer = 2 * tiles.warps_k // 3 if tiles.num_warps == 12 else tiles.warps_k // 2
            tiles = dataclasses.replace(tiles, warps_k=fewer)
        elif tiles.row_tiles > 1:
            tiles = dataclasses.replace(tiles, row_tiles=tiles.row_tiles - 1)
        else:
            return tiles
