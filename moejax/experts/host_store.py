"""Experts in host memory: one array a part of the row, filled in place from the checkpoint.

On a GPU the arrays are pinned, so that the step's kernels read rows over the link themselves and
copies run at its full speed; on a CPU they are ordinary memory. They are operands of the step and
never donated. Whoever writes to a row sees to it that no step that may read it is running.
"""

import concurrent.futures
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import jax
import numpy as np
import tqdm
from absl import logging

from moejax.errors import MoejaxError
from moejax.experts.pinned_memory import (
    Place,
    allocate_place,
    check_pinned_limit,
    filled_place,
    is_pinned,
    plain_memory_errors,
)

_THREADS = 4

Expert = tuple[int, int]  # sparse layer, expert


class RowSource(Protocol):
    """Source that rows are filled from: `moejax.checkpoints.experts.ExpertReader`."""

    @property
    def num_layers(self) -> int:
        """M."""

    @property
    def num_experts(self) -> int:
        """E, of a layer."""

    @property
    def row(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays of one expert."""

    @property
    def row_nbytes(self) -> int:
        """Bytes of one expert's arrays."""

    @property
    def uses_jax(self) -> bool:
        """Whether reading computes on JAX's CPU device."""

    def read(
        self, layer: int, expert: int, into: Sequence[np.ndarray], *, check: bool = True
    ) -> None:
        """Fills one row."""


class HostStore:
    """R rows of host memory, made by `allocate`.

    Attributes:
      arrays: [R, ...] in the order of the source's `row`; operands of the step.
      row_of: int32[M, E], the row of each expert, -1 where it is in none.
      device: from which the arrays are read.
      is_pinned: whether the device reads them over the link.
      in_place: whether the arrays themselves are filled. Else rows are filled in memory of numpy,
        which `fill` puts on the device whole and forgets: nothing can be written afterwards.
    """

    def __init__(
        self,
        source: RowSource,
        num_rows: int,
        device: jax.Device,
        places: Sequence[Place],
    ) -> None:
        self._source, self._places, self._num_rows = source, list(places), num_rows
        self.device = device
        self.is_pinned = is_pinned(device)
        self.in_place = all(place.array is not None for place in places)
        self.row_of = np.full((source.num_layers, source.num_experts), -1, np.int32)

    @classmethod
    def allocate(cls, source: RowSource, num_rows: int, device: jax.Device) -> "HostStore":
        """Allocates memory for `num_rows` experts; its content is undefined.

        Raises:
          MoejaxError: it cannot be had, or is more than JAX may pin.
        """
        if num_rows < 1:
            raise ValueError(f"{num_rows} rows, expected at least one")
        nbytes = num_rows * source.row_nbytes
        check_pinned_limit(nbytes, device)
        with plain_memory_errors(nbytes, device):
            places = [
                allocate_place((num_rows, *part.shape), part.dtype, device) for part in source.row
            ]
        store = cls(source, num_rows, device, places)
        if not store.in_place:
            logging.warning(
                "%s gives no pointer to its host memory: experts are read into ordinary memory "
                "first and copied, which takes twice the memory while they are loaded",
                device,
            )
        return store

    @property
    def num_rows(self) -> int:
        """R."""
        return self._num_rows

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._num_rows * self._source.row_nbytes

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """See the class.

        Raises:
          ValueError: they are not filled in place, and `fill` was not called yet.
        """
        found = tuple(place.array for place in self._places if place.array is not None)
        if len(found) < len(self._places):
            raise ValueError("the store is not on its device before it is filled")
        return found

    def rows(self, row: int) -> list[np.ndarray]:
        """The memory of one row, to be written to while no step runs.

        Raises:
          IndexError: there is no such row.
          MoejaxError: the platform gives no pointer to it.
        """
        if not 0 <= row < self._num_rows:
            raise IndexError(f"row {row} of {self._num_rows}")
        views = [place.view[row] for place in self._places if place.view is not None]
        if len(views) < len(self._places):
            raise MoejaxError(
                f"{self.device} gives no pointer to its host memory, so rows cannot be replaced "
                "while the model runs; raise host_gib until all experts fit"
            )
        return views

    def fill(
        self,
        experts: Iterable[Expert] | None = None,
        *,
        progress: bool = True,
        num_threads: int = _THREADS,
    ) -> None:
        """Reads experts into rows 0, 1, ...; `row_of` says afterwards where each is.

        Args:
          experts: (sparse layer, expert) of each row, at most R, none twice; None for the first R
            in order of layer, then expert.
          progress: show a bar over the bytes on stderr.
          num_threads: threads that read at once.

        Raises:
          MoejaxError: one cannot be read; the store holds none then.
        """
        source = self._source
        if experts is None:
            every = np.ndindex(source.num_layers, source.num_experts)
            chosen = [(layer, expert) for layer, expert in every][: self._num_rows]
        else:
            chosen = list(experts)
        if len(chosen) > self._num_rows or len(set(chosen)) < len(chosen):
            raise ValueError(f"{len(chosen)} experts, some twice or more than {self._num_rows}")
        self.row_of[...] = -1
        # An expert that stays is read once and never compared.
        check = len(chosen) < source.num_layers * source.num_experts
        with (
            tqdm.tqdm(
                total=len(chosen) * source.row_nbytes,
                desc="experts to host memory",
                unit="B",
                unit_scale=True,
                disable=not progress,
            ) as bar,
            concurrent.futures.ThreadPoolExecutor(num_threads) as threads,
        ):
            jobs = [
                threads.submit(source.read, *expert, self.rows(row), check=check)
                for row, expert in enumerate(chosen)
            ]
            try:
                for job in concurrent.futures.as_completed(jobs):
                    job.result()
                    bar.update(source.row_nbytes)
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        for row, expert in enumerate(chosen):
            self.row_of[expert] = row
        if not self.in_place:
            self._put()

    def _put(self) -> None:
        with plain_memory_errors(self.nbytes, self.device):
            for i, place in enumerate(self._places):
                assert place.view is not None
                self._places[i] = filled_place(place.view, self.device)


class HostCache:
    """Host memory as a cache: which experts the rows of a store hold.

    It decides and counts; who reads the bytes says when they are there. An expert's row is either
    published (`row_of` names it), or reserved for bytes that are on their way, or free.

    Attributes:
      row_of: int32[M, E]; the table that was given, changed in place.
      evictions: experts that left for another one.
    """

    def __init__(
        self,
        row_of: np.ndarray,
        num_rows: int,
    ) -> None:
        """Starts with the rows of a store and the experts that they hold.

        Args:
          row_of: int32[M, E] of a store.
          num_rows: R.

        Raises:
          ValueError: the table names a row twice or one that is not there.
        """
        used = row_of[row_of >= 0]
        if used.size and (used.max() >= num_rows or np.unique(used).size < used.size):
            raise ValueError(f"the table names a row twice, or one that is not in 0..{num_rows}")
        self.row_of = row_of
        self.evictions = 0
        layers, experts = np.nonzero(row_of >= 0)
        held = [(int(layer), int(expert)) for layer, expert in zip(layers, experts, strict=True)]
        # The first is the one that was used longest ago; at the start, the one in the first row.
        self._held = OrderedDict.fromkeys(sorted(held, key=lambda expert: int(row_of[expert])))
        self._free = sorted(set(range(num_rows)) - set(used.tolist()), reverse=True)
        self._reserved: dict[Expert, int] = {}
        self._pinned: set[Expert] = set()

    def touch(self, expert: Expert) -> None:
        """Records a use of an expert, whether it is in a row or not."""
        if expert in self._held:
            self._held.move_to_end(expert)

    def reserve(self, expert: Expert) -> int | None:
        """Reserves a row for an expert to be read: a free one, or a victim's.

        The victim is gone at once: its row is about to be written to. So no step that may read the
        row is running, and steps to come are given the new `row_of`.

        Returns:
          None where every row is pinned or reserved.

        Raises:
          ValueError: the expert has a row.
        """
        if self.row_of[expert] >= 0 or expert in self._reserved:
            raise ValueError(f"expert {expert} has a row already")
        if self._free:
            row = self._free.pop()
        else:
            victim = self._victim()
            if victim is None:
                return None
            row = int(self.row_of[victim])
            del self._held[victim]
            self.row_of[victim] = -1
            self.evictions += 1
        self._reserved[expert] = row
        return row

    def reserved_row(self, expert: Expert) -> int:
        """Returns the row reserved for an expert; KeyError where none is."""
        return self._reserved[expert]

    def publish(self, expert: Expert) -> None:
        """Marks an expert as read into its reserved row, and as just used.

        Raises:
          KeyError: none is reserved.
        """
        self.row_of[expert] = self._reserved.pop(expert)
        self._held[expert] = None

    def cancel(self, expert: Expert) -> None:
        """Frees the row reserved for an expert that could not be read.

        Raises:
          KeyError: none is reserved.
        """
        self._free.append(self._reserved.pop(expert))

    def pin(self, expert: Expert) -> None:
        """Keeps an expert from being evicted, now or once it is there."""
        self._pinned.add(expert)

    def unpin(self, expert: Expert) -> None:
        """Undoes `pin`; does nothing where the expert is not pinned."""
        self._pinned.discard(expert)

    def _victim(self) -> Expert | None:
        return next((expert for expert in self._held if expert not in self._pinned), None)


class RowSupply(Protocol):
    """Source of experts' arrays for transfers, in the order of `ExpertPool.slots`."""

    def borrow(self, expert: Expert) -> Sequence[np.ndarray] | None:
        """Returns arrays fixed until `give_back`, or None while they are in flight.

        Raises:
          MoejaxError: they cannot be had; the next call tries once more.
        """

    def give_back(self, expert: Expert) -> None:
        """Releases an expert whose `borrow` returned bytes."""

    def forget(self, expert: Expert) -> None:
        """Withdraws interest in an expert whose `borrow` returned None."""


@dataclasses.dataclass(frozen=True)
class HeldRows:
    """Rows of host memory that hold every expert for ever.

    Attributes:
      row_of: int32[M, E].
      rows: the arrays of a row.
    """

    row_of: np.ndarray
    rows: Callable[[int], Sequence[np.ndarray]]

    def borrow(self, expert: Expert) -> Sequence[np.ndarray] | None:
        """See `RowSupply`."""
        row = int(self.row_of[expert])
        if row < 0:
            raise MoejaxError(f"expert {expert[1]} of sparse layer {expert[0]} has no row")
        return self.rows(row)

    def give_back(self, expert: Expert) -> None:
        """See `RowSupply`."""

    def forget(self, expert: Expert) -> None:
        """See `RowSupply`."""


def copy_row(into: Sequence[np.ndarray], row: Sequence[np.ndarray]) -> None:
    """Copies an expert's parts."""
    for view, part in zip(into, row, strict=True):
        np.copyto(view, part)
