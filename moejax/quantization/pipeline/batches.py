"""Batches of a shard's matrices: of one shape and scheme, of a bounded size.

Every batch of a program holds an equal number of matrices (the last one is padded with zeros), so
that a program is compiled once. The content of a batch depends on the model and the recipe alone: a
run that resumes after a kill forms equal batches.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moejax.quantization.milo import width_ranks
from moejax.quantization.pipeline.inventory import Entry
from moejax.quantization.pipeline.quantizers import Program
from moejax.quantization.pipeline.recipe import Scheme

BATCH_BYTES = 64 * 2**20  # of float32 weights, unless a single matrix has more
# A matrix of more bytes than this is cut into parts of its rows where its method allows that.
MATRIX_BYTES = 256 * 2**20
# Methods to which a row is a problem of its own; hqq's stop is then the part's own.
_BY_ROWS = ("rtn", "hqq", "least_squares")
_LEAST_RANK = 8  # of a program with compensators
_MANY_MATRICES = 64  # fewer of a rank do not get a program of their own
_CALL_MATRICES = 2  # a call costs as much as so many matrices

Shape = tuple[int, ...]


class MatrixTask(NamedTuple):
    """A matrix and its quantization."""

    entry: Entry
    scheme: Scheme
    rank: int  # of its compensator, or 0; with planes that of the narrowest width

    @property
    def ranks(self) -> list[int]:
        """Ranks of the compensators of each of the grid's `widths`."""
        return width_ranks(self.rank, len(self.scheme.planes or (0,)), self.scheme.rank_divisor)

    @property
    def _key(self) -> tuple[Shape, Scheme]:
        """Shape, and scheme without its rank."""
        return self.entry.shape, dataclasses.replace(self.scheme, rank=None)


class RowRange(NamedTuple):
    """Rows of a matrix: all, unless it is very large."""

    task: MatrixTask
    first_row: int
    num_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of matrices that one compiled program quantizes together."""

    program: Program
    num_matrices: int  # C; ranges may be fewer
    num_rows: int  # N of the program; ranges may have fewer
    ranges: tuple[RowRange, ...]

    def read(self) -> np.ndarray:
        """Reads float32[C, N, K], zeros beyond the last range; MoejaxError as `Entry.read`."""
        num_inputs = self.ranges[0].task.entry.shape[1]
        weights = np.empty((self.num_matrices, self.num_rows, num_inputs), np.float32)
        for part, rows in zip(self.ranges, weights, strict=False):
            rows[part.num_rows :] = 0
            part.task.entry.read(rows[: part.num_rows], part.first_row)
        weights[len(self.ranges) :] = 0
        return weights

    def ranks(self) -> np.ndarray:
        """Ranks of the compensators, of the narrowest width: int32[C]."""
        ranks = np.zeros(self.num_matrices, np.int32)
        ranks[: len(self.ranges)] = [part.task.rank for part in self.ranges]
        return ranks


class BatchPlan:
    """Compiled programs of a model, chosen once for the quantized matrices of all shards.

    Compiling takes seconds, and a matrix takes the time of its program's rank and batch: matrices
    of one shape and scheme share few ranks, and one size of batch serves all shards.
    """

    def __init__(
        self, shards: Sequence[Sequence[MatrixTask]], passes: int, *, use_kernel: bool
    ) -> None:
        self._passes, self._use_kernel = passes, use_kernel
        ranks: dict[tuple[Shape, Scheme], list[int]] = defaultdict(list)
        for task in (task for shard in shards for task in shard):
            ranks[task._key].append(task.rank)
        self._ranks = {key: _shared_ranks(found) for key, found in ranks.items()}
        needed: dict[tuple[Shape, Program], list[int]] = defaultdict(list)
        for shard in shards:
            for place, members in self._grouped(shard).items():
                needed[place].append(len(_row_ranges(*place, members)))
        self._sizes = {
            (shape, program): _batch_size(counts, 4 * _num_rows(shape, program) * shape[1])
            for (shape, program), counts in needed.items()
        }

    def batches(self, tasks: Sequence[MatrixTask]) -> list[Batch]:
        """Batches of a shard, in the order of their first matrices."""
        found = []
        for (shape, program), members in self._grouped(tasks).items():
            ranges, size = _row_ranges(shape, program, members), self._sizes[shape, program]
            found += [
                Batch(
                    program=program,
                    num_matrices=size,
                    num_rows=_num_rows(shape, program),
                    ranges=tuple(ranges[first : first + size]),
                )
                for first in range(0, len(ranges), size)
            ]
        return found

    def _grouped(
        self, tasks: Sequence[MatrixTask]
    ) -> dict[tuple[Shape, Program], list[MatrixTask]]:
        """Groups tasks by shape and program, in the order of the first of each."""
        found: dict[tuple[Shape, Program], list[MatrixTask]] = defaultdict(list)
        for task in tasks:
            program = Program(
                scheme=task._key[1],
                max_rank=next(shared for shared in self._ranks[task._key] if task.rank <= shared),
                passes=self._passes,
                use_kernel=self._use_kernel,
            )
            found[task.entry.shape, program].append(task)
        return found


def _shared_ranks(ranks: Sequence[int]) -> list[int]:
    """Ranks of programs, rising; a matrix takes the first that is not below its own.

    They are powers of 4 times 8, without those that few matrices use; the last is the largest rank.
    Rank 0 needs no compensator and has its own program.
    """
    found, waiting, below, bound = [0] if 0 in ranks else [], 0, 0, _LEAST_RANK
    while bound < max(ranks):
        waiting += sum(below < rank <= bound for rank in ranks)
        if waiting >= _MANY_MATRICES:
            found.append(bound)
            waiting = 0
        below, bound = bound, 4 * bound
    return [*found, max(ranks)] if max(ranks) else found


def _batch_size(counts: Sequence[int], matrix_bytes: int) -> int:
    """Matrices per batch: the least work over shards of `counts` each, within `BATCH_BYTES`."""
    most = max(1, BATCH_BYTES // matrix_bytes)
    candidates = {-(-count // parts) for count in counts for parts in (1, 2, 3, 4, 6, 8)}
    candidates |= {-(-count // -(-count // most)) for count in counts} | {1}

    def work(size: int) -> tuple[int, int]:
        batches = sum(-(-count // size) for count in counts)
        return batches * (size + _CALL_MATRICES), -size

    return min((size for size in candidates if size <= most), key=work)


def _num_rows(shape: Shape, program: Program) -> int:
    """Rows of a range: all, unless the matrix is very large."""
    num_rows, num_inputs = shape
    parts = 1
    if program.scheme.method in _BY_ROWS:
        parts = -(-4 * num_rows * num_inputs // MATRIX_BYTES)
    return -(-num_rows // parts)


def _row_ranges(shape: Shape, program: Program, tasks: Sequence[MatrixTask]) -> list[RowRange]:
    step = _num_rows(shape, program)
    return [
        RowRange(task, first, min(step, shape[0] - first))
        for task in tasks
        for first in range(0, shape[0], step)
    ]
