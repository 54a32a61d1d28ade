"""Experts in host memory: one array a part of the row, filled in place from the checkpoint.

On a GPU the arrays are pinned, so that the step's kernels read rows over the link themselves and
copies run at its full speed; on a CPU they are ordinary memory. They are operands of the step and
never donated. Whoever writes to a row sees to it that no step that may read it is running.
"""

import concurrent.futures
import itertools
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np
import tqdm

from moejax.devices import DeviceMesh
from moejax.experts.pinned_memory import allocate_host_arrays

_THREADS = 4

Expert = tuple[int, int]  # sparse layer, expert


class RowSource(Protocol):
    """Source that rows are filled from: `moejax.checkpoints.experts.ExpertReader`.

    Attributes:
      row: the arrays of one expert, of `row_nbytes` bytes.
      uses_jax: reading computes on JAX's CPU device.
    """

    num_layers: int
    num_experts: int
    row: tuple[jax.ShapeDtypeStruct, ...]
    row_nbytes: int
    uses_jax: bool

    def read(
        self, layer: int, expert: int, into: Sequence[np.ndarray], *, check: bool = True
    ) -> None:
        """Fills one row; on a mesh the row of each device, one after another."""


class HostStore:
    """R rows of host memory.

    Attributes:
      num_rows: R.
      arrays: [R, ...] in the order of the source's `row`; operands of the step. On a mesh each
        device has R rows, of its shares.
      row_of: int32[M, E], the row of each expert, -1 where it is in none.
      views: numpy's of the arrays, those of the first device first.
    """

    def __init__(
        self, source: RowSource, num_rows: int, device: jax.Device, mesh: DeviceMesh | None = None
    ) -> None:
        """Allocates memory; its content is undefined."""
        self._source, self.num_rows = source, num_rows
        shapes = [jax.ShapeDtypeStruct((num_rows, *part.shape), part.dtype) for part in source.row]
        held = allocate_host_arrays(shapes, device, mesh)
        self.arrays = tuple(one.array for one in held)
        self.views = [
            view for views in zip(*(one.views for one in held), strict=True) for view in views
        ]
        self.row_of = np.full((source.num_layers, source.num_experts), -1, np.int32)

    def rows(self, row: int) -> list[np.ndarray]:
        """The memory of one row, to be written to while no step that reads it runs."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        return [view[row] for view in self.views]

    def acquire(self, expert: Expert) -> Sequence[np.ndarray]:
        """Returns an expert's arrays for a transfer, where the store holds every expert."""
        return self.rows(int(self.row_of[expert]))

    def release(self, expert: Expert) -> None:
        """Ends the use of what `acquire` returned: nothing, as rows stay for ever."""

    def fill(self, *, progress: bool = True) -> None:
        """Reads the first R experts into the rows, in order of layer, then expert.

        After a MoejaxError, where one cannot be read, the store holds none.
        """
        source, self.row_of[...] = self._source, -1
        experts = list(itertools.islice(np.ndindex(self.row_of.shape), self.num_rows))
        # An expert that stays is read once and never compared.
        check = len(experts) < self.row_of.size
        with (
            tqdm.tqdm(
                total=len(experts) * source.row_nbytes,
                desc="experts to host memory",
                unit="B",
                unit_scale=True,
                disable=not progress,
            ) as bar,
            concurrent.futures.ThreadPoolExecutor(_THREADS) as threads,
        ):
            jobs = [
                threads.submit(source.read, layer, expert, self.rows(row), check=check)
                for row, (layer, expert) in enumerate(experts)
            ]
            try:
                for job in concurrent.futures.as_completed(jobs):
                    job.result()
                    bar.update(source.row_nbytes)
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        self.row_of.flat[: len(experts)] = range(len(experts))


def copy_row(into: Sequence[np.ndarray], row: Sequence[np.ndarray]) -> None:
    """Copies an expert's parts."""
    for view, part in zip(into, row, strict=True):
        np.copyto(view, part)
