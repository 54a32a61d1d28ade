"""Experts that are on the disk alone: read while the step waits, then kept in host memory.

The waiting mode of the design: a step that needs such an expert calls `DiskExperts.read` and goes
on with what it returns. Between steps what was read takes a row of the host store, which is a
cache of the disk, and steps to come fetch it from there.
"""

import threading
from typing import Any

import numpy as np

from moejax.memory.host_store import Expert, HostCache, HostStore
from moejax.memory.ssd import SsdReader


class DiskExperts:
    """What a running step asks for, and what the host makes of it between steps.

    Attributes:
      reader: of the disk; its counters say how much was read.
      cache: which experts the rows of the host store hold; None where it has no rows.
      error: why an expert could not be read, since `take_error`; the step that asked went on with
        zeros, and nothing of it or of what it cached may be used.
    """

    def __init__(
        self,
        reader: SsdReader,
        store: HostStore | None,
        row: Any,
        row_of: np.ndarray,
        most_kept: int,
    ):
        """Around an open reader.

        Args:
          reader: of the disk.
          store: host rows; None for none.
          row: the arrays of one expert, shapes and dtypes.
          row_of: int32[M, E] of the store; -1 everywhere where there is none.
          most_kept: experts that were read and have no row yet; more are read again.
        """
        self._most_kept = most_kept
        self.reader, self._store, self._row = reader, store, row
        self.cache = None
        if store is not None and store.in_place:
            self.cache = HostCache(row_of, store.num_rows)
        self.row_of = row_of
        self.error: BaseException | None = None
        self._told = (0, 0)
        self._arrived: dict[Expert, tuple[np.ndarray, ...]] = {}
        self._lock = threading.Lock()

    def read(self, layer: Any, experts: Any) -> tuple[np.ndarray, ...]:
        """Called by the step: the rows of experts (-1: none), stacked [J, ...].

        Args:
          layer: int32[].
          experts: int32[J].

        An error would end the step with more than one line, and take its donated arrays with it:
        it goes to `error`.
        """
        found = [np.zeros((len(experts), *part.shape), part.dtype) for part in self._row]
        try:
            self._read(int(layer), np.asarray(experts), found)
        except BaseException as error:  # the host raises it where it reads results
            self.error = error
        return tuple(found)

    def _read(self, layer: int, wanted: np.ndarray, found: list[np.ndarray]) -> None:
        for place in np.flatnonzero(wanted >= 0):
            expert = (layer, int(wanted[place]))
            with self._lock:
                row = self._arrived.get(expert)
            if row is None:
                row = self.reader.read_now(*expert)
                with self._lock:
                    if self.cache is not None and len(self._arrived) < self._most_kept:
                        self._arrived[expert] = row
            for array, part in zip(found, row, strict=True):
                array[place] = part

    def read_since(self) -> tuple[int, int]:
        """Experts and bytes that were read since the last call."""
        counters, told = self.reader.counters, self._told
        self._told = (counters.reads, counters.bytes)
        return counters.reads - told[0], counters.bytes - told[1]

    @property
    def has_arrived(self) -> bool:
        """Whether `settle` has something to do."""
        return bool(self._arrived)

    def settle(self) -> np.ndarray:
        """Gives what was read a row, where none is free that of what came first; no step runs.

        Which rows the steps use is not known here, so the cache is one of first in, first out.

        Returns:
          int32[M, E], the table for the steps to come.
        """
        assert self._store is not None
        assert self.cache is not None
        with self._lock:
            arrived, self._arrived = self._arrived, {}
        for expert, row in arrived.items():
            if self.cache.look_up(expert) >= 0:
                continue
            place = self.cache.reserve(expert)
            if place is None:
                continue
            for memory, part in zip(self._store.rows(place), row, strict=True):
                memory[...] = part
            self.cache.publish(expert)
        return self.cache.row_of

    def take_error(self) -> BaseException | None:
        """`error`, which is None from then on."""
        error, self.error = self.error, None
        return error
