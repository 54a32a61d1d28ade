"""Reads experts that are on the disk alone, and keeps them in host rows.

Three ways lead here. A transfer asks for an expert (`DiskExperts.borrow`), which a thread reads
while steps run. Or a running step needs one NOW, calls `DiskExperts.read` and goes on with what it
returns: the waiting mode. Or a policy foresees that it will be asked for (`DiskExperts.foresee`),
and it is read while the disk has nothing else to do. In each case the expert then takes a row of
the host store, which is a cache of the disk, least recently used first, and steps to come fetch it
from there.

Nothing waits for a row. Victims are chosen by what steps used (`advance` gets a copy of their last
uses, which is ready when all steps before it are over); steps dispatched from then on know that the
victim is gone; and when those before are over, which the next such copy tells, a thread overwrites
the row.
"""

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from moejax.errors import MoejaxError
from moejax.experts.disk_reader import SsdReader, State, Ticket
from moejax.experts.host_store import Expert, HostCache, HostStore, copy_row
from moejax.experts.transfer_programs import is_ready


@dataclasses.dataclass(eq=False)
class _Arrival:
    """An expert that was read and has no row yet.

    Attributes:
      parts: the bytes; they lie in the reader's ring where there is a ticket.
      ticket: to be released; None where the bytes have memory of their own.
      is_wanted: whether a transfer asked for the bytes and has not read them yet.
      is_borrowed: whether a transfer is reading them.
      has_row: whether a row is reserved.
      written: the bytes on their way to it.
    """

    parts: Sequence[np.ndarray]
    ticket: Ticket | None = None
    is_wanted: bool = False
    is_borrowed: bool = False
    has_row: bool = False
    written: concurrent.futures.Future[None] | None = None


class DiskExperts:
    """Reads experts for steps and transfers; caches them between steps.

    Attributes:
      reader: its counters say how much was read from the disk.
      cache: which experts the rows of the host store hold; None where it has no rows.
      row_of: int32[M, E], the table for the steps to come.
      failures: times that a step asked for an expert and went on with zeros: its results, what it
        cached, and later steps that read that cache are invalid. It never falls, so that a caller
        who noted it before a step can compare.
      error: why the last failed read failed, in one line.
    """

    def __init__(
        self,
        reader: SsdReader,
        store: HostStore | None,
        row: Any,
        row_of: np.ndarray,
        most_kept: int,
        most_ahead: int = 1,
    ):
        """Starts on an open reader.

        Args:
          store: host rows; None for none.
          row: the arrays of one expert, shapes and dtypes.
          row_of: int32[M, E] of the store; -1 everywhere where there is none.
          most_kept: experts that a step waited for and that have no row yet; more are read again.
          most_ahead: experts that the reader is asked for at once.
        """
        self._most_kept, self._most_ahead = most_kept, most_ahead
        self.reader, self._store, self._row = reader, store, row
        self.cache = None
        if store is not None and store.in_place:
            self.cache = HostCache(row_of, store.num_rows)
        self.row_of = row_of
        self.failures, self.error = 0, ""
        self._told: dict[str, Any] = {}
        self._arrived: dict[Expert, _Arrival] = {}
        self._tickets: dict[Expert, Ticket] = {}
        self._failed: dict[Expert, str] = {}
        self._foreseen: dict[Expert, None] = {}  # in order; of which nothing was begun
        self._ahead: set[Expert] = set()  # of the tickets, those that nobody waits for
        self._brought: set[Expert] = set()  # read ahead, and not asked for since
        self._num_ahead = self._num_ahead_used = 0
        self._wait_seconds = 0.0  # that steps spent in `read`
        self._uses: jax.Array | None = None  # a copy of last uses that is not applied yet
        self._seen = np.zeros(row_of.shape, np.int32)
        self._lock = threading.RLock()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "moejax-rows")

    def read(self, layer: Any, experts: Any) -> tuple[np.ndarray, ...]:
        """Returns the rows of experts (-1: none), stacked [J, ...]; steps call it.

        Args:
          layer: int32[].
          experts: int32[J].

        An error would end the step with more than one line, and take its donated arrays with it:
        it is counted in `failures`. The time is counted too: the step waits for it.
        """
        start = time.monotonic()
        try:
            found = [np.zeros((len(experts), *part.shape), part.dtype) for part in self._row]
            wanted = np.asarray(experts)
            for place in np.flatnonzero(wanted >= 0):
                self._read((int(layer), int(wanted[place])), [array[place] for array in found])
        except BaseException as error:  # the host raises it where it reads results
            self._count(error)
            # Without memory of their own: the lack of it may be what failed.
            found = [
                np.broadcast_to(part.dtype.type(0), (len(experts), *part.shape))
                for part in self._row
            ]
        with self._lock:
            self._wait_seconds += time.monotonic() - start
        return tuple(found)

    def _count(self, error: BaseException) -> None:
        # The text alone: an error that is kept keeps the frames that it went through.
        reason = str(error) if isinstance(error, MoejaxError) else repr(error)
        with self._lock:
            self.error, self.failures = reason, self.failures + 1

    def _read(self, expert: Expert, into: list[np.ndarray]) -> None:
        with self._lock:  # while bytes are copied, nobody may release a block or give a row away
            self._collect()
            if (arrival := self._arrived.get(expert)) is not None:
                return copy_row(into, arrival.parts)
            if self.cache is not None and self.row_of[expert] >= 0:  # since the step was dispatched
                assert self._store is not None
                return copy_row(into, self._store.rows(int(self.row_of[expert])))
        parts = self.reader.read_now(*expert)
        copy_row(into, parts)
        with self._lock:
            kept = sum(arrival.ticket is None for arrival in self._arrived.values())
            is_there = expert in self._arrived or self.row_of[expert] >= 0
            if self.cache is not None and kept < self._most_kept and not is_there:
                self._arrived[expert] = _Arrival(parts)

    def foresee(self, experts: Sequence[Expert]) -> None:
        """Reads experts ahead into host rows while no transfer waits for the disk.

        Args:
          experts: the most urgent first; only as many as half of the rows count, since more would
            evict the first. Experts that have a row keep it as if they had just been used. Experts
            of an earlier call that were not begun are forgotten.
        """
        with self._lock:
            most = self._store.num_rows // 2 if self._store is not None else 0
            self._foreseen = dict.fromkeys(experts[:most])
            if self.cache is not None:
                for expert in reversed(self._foreseen):
                    self.cache.touch(expert)

    def borrow(self, expert: Expert) -> Sequence[np.ndarray] | None:
        """See `host_store.RowSupply`; asks the reader where the expert is nowhere else."""
        with self._lock:
            self._count_use(expert)
            if self.row_of[expert] >= 0:
                assert self._store is not None
                self._withdraw(expert)
                if self.cache is not None:
                    self.cache.pin(expert)
                return self._store.rows(int(self.row_of[expert]))
            self._collect()
            if (arrival := self._arrived.get(expert)) is not None:
                self._withdraw(expert)
                arrival.is_borrowed = True
                return arrival.parts
            if (error := self._failed.pop(expert, None)) is not None:
                raise MoejaxError(error)
            if expert not in self._tickets and len(self._tickets) < self._most_ahead:
                ticket = self.reader.request(*expert, urgent=True)
                if ticket is not None:
                    self._tickets[expert] = ticket
            return None

    def give_back(self, expert: Expert) -> None:
        """See `host_store.RowSupply`."""
        with self._lock:
            if self.cache is not None:
                self.cache.unpin(expert)
            if (arrival := self._arrived.get(expert)) is not None:
                arrival.is_wanted = arrival.is_borrowed = False
                if self.cache is None:
                    self._drop(expert)

    def forget(self, expert: Expert) -> None:
        """See `host_store.RowSupply`; what was read already stays where there are rows for it."""
        with self._lock:
            self._withdraw(expert)
            if (arrival := self._arrived.get(expert)) is not None:
                arrival.is_wanted = False
                if self.cache is None:
                    self._drop(expert)

    def advance(self, last_uses: Callable[[], jax.Array]) -> bool:
        """Moves arrived experts towards host rows between steps; never waits.

        Args:
          last_uses: dispatches a copy of int32[M, E], the clock of the last use of every expert,
            which is ready when all steps so far are over.

        Returns:
          Whether `row_of` changed, which the next step has to know.
        """
        with self._lock:
            self._collect()
            if self.cache is None:
                return False
            self._read_ahead()
            changed = self._publish()
            if self._uses is not None and is_ready(self._uses):
                uses, self._uses = self._uses, None
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a pool that is lost
                    self._touch(jax.device_get(uses))
                    self._write()
                    changed |= self._reserve()
            if self._uses is None and any(a.written is None for a in self._arrived.values()):
                self._uses = last_uses()
                self._uses.copy_to_host_async()
            return changed

    def read_since(self) -> dict[str, float]:
        """Returns the counts since the last call.

        By the names of `ssd.Counters`; "ahead" and "ahead_used" as `Ledger.disk_ahead` and
        `disk_ahead_used`; "wait_seconds" that steps spent in `read`.
        """
        told, self._told = self._told, dataclasses.asdict(self.reader.counters)
        with self._lock:
            self._told |= {"ahead": self._num_ahead, "ahead_used": self._num_ahead_used}
            self._told["wait_seconds"] = self._wait_seconds
        return {name: n - told.get(name, 0) for name, n in self._told.items() if name != "seconds"}

    def close(self) -> None:
        """Ends the threads; a step that needs the disk afterwards fails."""
        self._writer.shutdown(wait=True, cancel_futures=True)
        self.reader.close()

    def _withdraw(self, expert: Expert) -> None:
        """Cancels a request that nobody waits for; its failure is not reported."""
        self._failed.pop(expert, None)
        self._ahead.discard(expert)
        ticket = self._tickets.get(expert)
        if ticket is not None and self.reader.cancel(ticket):
            del self._tickets[expert]

    def _collect(self) -> None:
        """Takes what the reader has finished."""
        for ticket, arrays in self.reader.done():
            expert = (ticket.layer, ticket.expert)
            wanted, ahead = self._tickets.get(expert) is ticket, False
            if wanted:
                del self._tickets[expert]
                ahead = expert in self._ahead
                self._ahead.discard(expert)
            if arrays is None:
                if wanted and not ahead:
                    self._failed[expert] = ticket.error or "it was not read"
                self.reader.release(ticket)
            elif expert in self._arrived or self.row_of[expert] >= 0:
                self.reader.release(ticket)  # a step has read it meanwhile
            else:
                wanted = wanted and not ahead
                self._arrived[expert] = _Arrival(self.reader.views(ticket), ticket, wanted)
                if ahead:
                    self._num_ahead += 1
                    self._brought.add(expert)

    def _read_ahead(self) -> None:
        """Requests foreseen experts while nobody waits; leaves one block free."""
        if len(self._tickets) > len(self._ahead):
            return
        most = max(1, self._most_ahead - 1)
        most -= sum(arrival.ticket is not None for arrival in self._arrived.values())
        while self._foreseen and len(self._tickets) < most:
            expert = next(iter(self._foreseen))
            known = expert in self._arrived or expert in self._tickets
            if not (known or self.row_of[expert] >= 0):
                ticket = self.reader.request(*expert)
                if ticket is None:
                    return
                self._tickets[expert] = ticket
                self._ahead.add(expert)
            del self._foreseen[expert]

    def _count_use(self, expert: Expert) -> None:
        """Counts a use of an expert that may have been read ahead."""
        self._foreseen.pop(expert, None)
        if expert in self._ahead:  # nobody waited for it: where it has not begun it is asked anew
            self._ahead.discard(expert)
            ticket = self._tickets[expert]
            if ticket.state is State.QUEUED and self.reader.cancel(ticket):
                del self._tickets[expert]
        if expert in self._brought:
            self._brought.discard(expert)
            self._num_ahead_used += expert in self._arrived or bool(self.row_of[expert] >= 0)

    def _touch(self, uses: np.ndarray) -> None:
        """Marks experts used since the last copy, in the order of their last uses."""
        assert self.cache is not None
        layers, experts = np.nonzero((uses != self._seen) & (uses > 0))
        order = np.argsort(uses[layers, experts], kind="stable")
        for layer, expert in zip(layers[order].tolist(), experts[order].tolist(), strict=True):
            self.cache.touch((layer, expert))
        self._seen = uses

    def _reserve(self) -> bool:
        """Reserves rows for arrivals; their former owners are evicted."""
        assert self.cache is not None
        changed = False
        for expert, arrival in list(self._arrived.items()):
            if arrival.has_row:
                continue
            evictions = self.cache.evictions
            if self.cache.reserve(expert) is not None:
                arrival.has_row = True
                changed |= self.cache.evictions > evictions
            elif not (arrival.is_wanted or arrival.is_borrowed):
                self._drop(expert)  # every row is taken: it is read again when it is needed
        return changed

    def _write(self) -> None:
        """Writes bytes to reserved rows that no step reads any more."""
        assert self._store is not None
        assert self.cache is not None
        for expert, arrival in self._arrived.items():
            if arrival.has_row and arrival.written is None:
                rows = self._store.rows(self.cache.reserved_row(expert))
                arrival.written = self._writer.submit(copy_row, rows, arrival.parts)

    def _publish(self) -> bool:
        assert self.cache is not None
        changed = False
        for expert, arrival in list(self._arrived.items()):
            if arrival.written is None or not arrival.written.done() or arrival.is_borrowed:
                continue
            if arrival.written.exception() is None:
                self.cache.publish(expert)
                changed = True
            else:
                self.cache.cancel(expert)
            self._drop(expert)
        return changed

    def _drop(self, expert: Expert) -> None:
        arrival = self._arrived.pop(expert)
        if arrival.ticket is not None and arrival.ticket.state is not State.OVER:
            self.reader.release(arrival.ticket)
