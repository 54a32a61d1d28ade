"""Static facts of a launch of the expert kernels."""

import dataclasses

from pallas_kernels.gating import Gating
from pallas_kernels.mosaic_decode.jobs import JobList
from pallas_kernels.mosaic_decode.low_rank_spec import Share, Term
from pallas_kernels.mosaic_decode.matrix import COLUMNS, Matrix, tile_bytes
from pallas_kernels.mosaic_decode.tiles import StreamTiles, expert_share


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of a launch of the expert kernels."""

    tiers: tuple[Matrix, ...]
    terms: tuple[tuple[Term, ...], ...]  # of each tier
    tiles: StreamTiles
    kind: str  # of x and of the hidden values
    num_pairs: int
    width: int  # pairs that share a row of x
    num_outputs: int  # of a pair
    num_slots: int  # the most of a tier
    gating: Gating | None  # rows n and num_outputs + n are gate and up of output n; None: one row
    bias_bytes: int  # of each gate's and up's; 0: they have none

    @property
    def gated(self) -> bool:
        """Whether outputs are hidden values."""
        return self.gating is not None

    @property
    def halves(self) -> int:
        """Matrix rows per output."""
        return 2 if self.gated else 1

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all rings."""
        return self.tiles.num_warps * self.tiles.depth * max(map(tile_bytes, self.tiers))

    @property
    def of_x_bytes(self) -> int:
        """Shared memory of a warp's sums of x, if they are kept."""
        return self.tiles.expert_x_bytes(self.tiers)

    @property
    def main_bytes(self) -> int:
        """Shared memory of everything but the terms."""
        beside = self.tiles.expert_bytes(self.tiers, self.halves)
        return self.jobs_bytes + self.ring_bytes + beside

    @property
    def sums_bytes(self) -> int:
        """Shared memory of all warps' sums."""
        return self.tiles.warps_n * self.tiles.team_bytes(self.halves)

    @property
    def share(self) -> Share:
        """Share of a thread block, for the terms."""
        return expert_share(self.tiles, self.gated, self.num_outputs)

    @property
    def num_items(self) -> int:
        """Tiles of outputs."""
        return -(-self.num_outputs // self.tiles.rows)

    @property
    def jobs(self) -> JobList:
        """Job list of thread blocks that share all jobs."""
        return JobList(
            num_pairs=self.num_pairs,
            weights=self.weights,
            num_slots=self.num_slots,
            num_items=self.num_items,
            workers=self.tiles.workers,
            num_warps=self.tiles.num_warps,
        )

    @property
    def weights(self) -> tuple[int, ...]:
        """Weight of the tiers' items: about their bytes, and 1 for a single tier."""
        sizes = [matrix.row_bytes for matrix in self.tiers]
        return tuple(round(4 * size / min(sizes)) if len(sizes) > 1 else 1 for size in sizes)

    @property
    def jobs_bytes(self) -> int:
        """Shared memory of the jobs, a multiple of 16."""
        return self.jobs.num_bytes if self.tiles.workers else 4 * COLUMNS
