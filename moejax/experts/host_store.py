"""Experts in host memory: one array a part of the row, filled in place from the checkpoint.

On a GPU the arrays are pinned, so that the step's kernels read rows over the link themselves and
copies run at its full speed; on a CPU they are ordinary memory. They are operands of the step and
never donated. Whoever writes to a row sees to it that no step that may read it is running.
"""

import concurrent.futures
import itertools
from collections import OrderedDict
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


class HostCache:
    """Least-recently-used cache of the disk: which experts the rows of a store hold.

    It decides; who reads the bytes says when they are there. An expert's row is either published
    (`row_of` names it), or reserved for bytes that are on their way, or free.

    Attributes:
      row_of: int32[M, E]; the table that was given, changed in place.
      evictions: experts that left for another one.
    """

    def __init__(self, row_of: np.ndarray, num_rows: int) -> None:
        """Starts with the rows of a store and the experts that they hold."""
        self.row_of = row_of
        self.evictions = 0
        held = [(int(layer), int(expert)) for layer, expert in np.argwhere(row_of >= 0)]
        # The first is the one that was used longest ago; at the start, the one in the first row.
        self._held = OrderedDict.fromkeys(sorted(held, key=lambda expert: int(row_of[expert])))
        self._free = sorted(set(range(num_rows)) - set(row_of[row_of >= 0].tolist()), reverse=True)
        self._reserved: dict[Expert, int] = {}
        self._pinned: set[Expert] = set()

    def touch(self, expert: Expert) -> None:
        """Records a use of an expert, whether it is in a row or not."""
        if expert in self._held:
            self._held.move_to_end(expert)

    def reserve(self, expert: Expert) -> int | None:
        """Reserves a row for an expert to be read: a free one, or a victim's.

        The victim is gone at once: its row is about to be written to. So no step that may read the
        row is running, and steps to come are given the new `row_of`. None where every row is pinned
        or reserved.
        """
        if self.row_of[expert] >= 0 or expert in self._reserved:
            raise ValueError(f"expert {expert} has a row already")
        if self._free:
            row = self._free.pop()
        else:
            victim = next((held for held in self._held if held not in self._pinned), None)
            if victim is None:
                return None
            row = int(self.row_of[victim])
            del self._held[victim]
            self.row_of[victim] = -1
            self.evictions += 1
        self._reserved[expert] = row
        return row

    def publish(self, expert: Expert) -> None:
        """Marks an expert as read into its reserved row, and as just used."""
        self.row_of[expert] = self._reserved.pop(expert)
        self._held[expert] = None

    def cancel(self, expert: Expert) -> None:
        """Frees the row reserved for an expert that could not be read."""
        self._free.append(self._reserved.pop(expert))

    def pin(self, expert: Expert) -> None:
        """Keeps an expert from being evicted, now or once it is there."""
        self._pinned.add(expert)

    def unpin(self, expert: Expert) -> None:
        """Undoes `pin`; does nothing where the expert is not pinned."""
        self._pinned.discard(expert)


def copy_row(into: Sequence[np.ndarray], row: Sequence[np.ndarray]) -> None:
    """Copies an expert's parts."""
    for view, part in zip(into, row, strict=True):
        np.copyto(view, part)
