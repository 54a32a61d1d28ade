"""Reads experts that are on the disk alone, and keeps them in host rows.

`_DiskReader` reads in a thread, into a ring of blocks:

    request = reader.request((layer, expert))      # a future of the arrays in a block
    if request.done():                             # between steps
        row = request.result()                     # MoejaxError says why there are none
        reader.release(row)                        # the block may be written to again

An expert that cannot be read stays where it was. `DiskExperts` stands above it. Three ways lead
here. A transfer asks for an expert (`DiskExperts.acquire`), which a thread reads
while steps run. Or a running step needs one NOW, calls `DiskExperts.read` and goes on with what it
returns: the waiting mode. Or a policy expects that it will be asked for (`DiskExperts.prefetch`),
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
import heapq
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from moejax.errors import MoejaxError
from moejax.experts.host_store import Expert, HostStore, RowSource, copy_row
from moejax.experts.pinned_memory import plain_memory_errors
from moejax.experts.transfer_programs import is_ready

_FIRST_PAUSE_SECONDS = 0.01  # before the first retry; twice as long before each that follows


Row = list[np.ndarray]  # arrays of an expert
Request = concurrent.futures.Future[Row]


@dataclasses.dataclass(kw_only=True)
class Counters:
    """Counts since a reader was made."""

    reads: int = 0  # experts
    bytes: int = 0  # of these
    retries: int = 0  # reads that had to be repeated
    errors: int = 0  # experts given up
    waits: int = 0  # experts that a step waited for (`_read_now`)
    wait_seconds: float = 0.0  # that steps spent in `DiskExperts.read`
    ahead: int = 0  # experts read by a prefetch; not those that a transfer asked for meanwhile
    ahead_used: int = 0  # of them, those that were then asked for and still in host memory


class _DiskReader:
    """Reads experts in the background; its methods may be called by any thread.

    A request waits in a queue, urgent ones first, until the thread and a block are free. A failed
    read is tried again, then reported; a row whose checksum is not that of its first read is such a
    failure.
    """

    def __init__(self, source: RowSource, *, ring_blocks: int, retries: int) -> None:
        """Allocates a ring of so many experts; the first request starts the thread."""
        self.source, self._retries = source, retries
        self.counters = Counters()
        with plain_memory_errors(ring_blocks * source.row_nbytes, "host memory"):
            self._free = [self._empty_row() for _ in range(ring_blocks)]
        # a heap, urgent ones first; those that were cancelled among them
        self._queue: list[tuple[bool, int, Expert, Request]] = []
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def _empty_row(self) -> Row:
        return [np.empty(part.shape, part.dtype) for part in self.source.row]

    def count(self, **amounts: float) -> None:
        """Adds to the counters, by name."""
        with self._changed:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)

    def request(self, expert: Expert, *, urgent: bool = False) -> Request:
        """Queues a read; ValueError once the reader is closed."""
        with self._changed:
            self._check_open()
            if self._thread is None:  # it keeps the reader alive until that is closed
                thread = threading.Thread(target=self._work, name="moejax-ssd", daemon=True)
                thread.start()  # one that cannot be had is tried again with the next request
                self._thread = thread
            request = Request()
            heapq.heappush(self._queue, (not urgent, next(self._numbers), expert, request))
            self._changed.notify_all()
            return request

    def forget(self, request: Request) -> None:
        """Takes a request back, before its row was: the block that it may have is freed."""
        if not request.cancel():
            request.add_done_callback(self._release_unread)

    def _release_unread(self, request: Request) -> None:
        if request.exception() is None:
            self.release(request.result())

    def release(self, row: Row) -> None:
        """Gives the block of a request's row back."""
        with self._changed:
            self._free.append(row)
            self._changed.notify_all()

    def _read_now(self, expert: Expert) -> Row:
        """Reads an expert in the calling thread, to new arrays, whatever the queue holds.

        For a callback inside the step, which needs the expert before it can go on. MoejaxError
        where it cannot be read, ValueError once the reader is closed.
        """
        with self._changed:
            self._check_open()
        row = self._empty_row()
        if error := self._read(expert, row):
            raise MoejaxError(error)
        self.count(waits=1)
        return row

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Ends the thread; requests that wait are never done. A second call does nothing.

        Args:
          timeout_seconds: for a read that is going on. A thread that is stuck in the operating
            system for longer is left behind, and said so; it holds its own memory.
        """
        with self._changed:
            self._closing.set()
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                logging.warning(
                    "%s did not end in %g s; left behind", self._thread.name, timeout_seconds
                )

    def _work(self) -> None:
        while (found := self._next()) is not None:
            expert, request, row = found
            if (error := self._read(expert, row)) is not None:
                self.release(row)
                request.set_exception(MoejaxError(error))
            else:
                request.set_result(row)

    def _next(self) -> tuple[Expert, Request, Row] | None:
        """Waits for the next request and a block; None once the reader is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(
                    lambda: self._closing.is_set() or (self._free and self._queue)
                )
                if self._closing.is_set():
                    return None
                _, _, expert, request = heapq.heappop(self._queue)
                if request.set_running_or_notify_cancel():
                    return expert, request, self._free.pop()

    def _read(self, expert: Expert, row: Sequence[np.ndarray]) -> str | None:
        """Fills a row; returns why it could not after all retries."""
        for retries in range(self._retries + 1):
            try:
                self.source.read(*expert, row)
                error = None
                break
            except Exception as raised:  # a thread that dies would leave its request for ever
                error = f"{raised}" if isinstance(raised, MoejaxError) else f"{raised!r}"
            pause = _FIRST_PAUSE_SECONDS * 2**retries
            if retries == self._retries or self._closing.wait(pause):
                break
        if error is None:
            self.count(retries=retries, reads=1, bytes=self.source.row_nbytes)
            return None
        self.count(retries=retries, errors=1)
        logging.error("expert %d of sparse layer %d was not read: %s", expert[1], expert[0], error)
        return error

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ValueError("the reader is closed")


def check_waiting(source: RowSource, device: jax.Device, name: str) -> None:
    """Raises MoejaxError if experts stay on the disk and no step can wait.

    Reading that computes on JAX's CPU device, inside a callback of a program that runs there, can
    wait for the program that waits for it.

    Args:
      device: where steps run.
      name: name of the experts for the message.
    """
    if source.uses_jax and device.platform == "cpu":
        raise MoejaxError(
            f"{name}: experts that are converted while they are read cannot be read inside a step "
            "on the CPU; write the checkpoint in the package's own format, or raise "
            "memory.host_gib until all experts fit host memory"
        )


@dataclasses.dataclass(eq=False)
class _PendingRow:
    """An expert that was read and has no row yet."""

    parts: Row  # the bytes
    in_ring: bool = False  # whether they lie in a block, to be released; else in their own memory
    is_wanted: bool = False  # whether a transfer asked for the bytes and has not read them yet
    is_acquired: bool = False  # whether a transfer is reading them
    row: int | None = None  # reserved for it; None where none is
    written: concurrent.futures.Future[None] | None = None  # the bytes on their way to it


class _HostCache:
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
        """Reserves a row for an expert that has none, to be read: a free one, or a victim's.

        The victim is gone at once: its row is about to be written to. So no step that may read the
        row is running, and steps to come are given the new `row_of`. None where every row is pinned
        or reserved.
        """
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
        source: RowSource,
        store: HostStore | None,
        *,
        ring_blocks: int,
        most_kept: int,
        retries: int = 2,
    ):
        """Opens a reader with a ring.

        Args:
          ring_blocks: experts that the reader is asked for at once.
          most_kept: experts that a step waited for and that have no row yet; more are read again.
          retries: of a read that failed.
        """
        self.reader = _DiskReader(source, ring_blocks=ring_blocks, retries=retries)
        self._most_kept, self._most_ahead = most_kept, ring_blocks
        self._store, self.cache = store, None
        shape = (source.num_layers, source.num_experts)
        self.row_of = np.full(shape, -1, np.int32)
        if store is not None:
            self.row_of = store.row_of
            self.cache = _HostCache(store.row_of, store.num_rows)
        self.failures, self.error = 0, ""
        self._counted = Counters()  # by the last `counts_since`
        self._arrived: dict[Expert, _PendingRow] = {}
        self._requests: dict[Expert, Request] = {}
        self._ahead: set[Expert] = set()  # requests that nobody waits for
        self._failed: dict[Expert, str] = {}
        self._prefetches: dict[Expert, None] = {}  # in order; of which nothing was begun
        self._prefetched: set[Expert] = set()  # read ahead, and not asked for since
        self._uses: jax.Array | None = None  # a copy of last uses that is not applied yet
        self._seen = np.zeros(self.row_of.shape, np.int32)
        self._lock = threading.RLock()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "moejax-rows")

    def read(self, layer: Any, experts: Any) -> tuple[np.ndarray, ...]:
        """Returns the rows of experts, int32[J] (-1: none), stacked [J, ...]; steps call it.

        An error would end the step with more than one line, and take its donated arrays with it:
        it is counted in `failures`. The time is counted too: the step waits for it.
        """
        start = time.monotonic()
        try:
            row = self.reader.source.row
            found = [np.zeros((len(experts), *part.shape), part.dtype) for part in row]
            wanted = np.asarray(experts)
            for place in np.flatnonzero(wanted >= 0):
                self._read((int(layer), int(wanted[place])), [array[place] for array in found])
        except BaseException as error:  # the host raises it where it reads results
            # The text alone: an error that is kept keeps the frames that it went through.
            reason = str(error) if isinstance(error, MoejaxError) else repr(error)
            with self._lock:
                self.error, self.failures = reason, self.failures + 1
            # Without memory of their own: the lack of it may be what failed.
            found = [
                np.broadcast_to(part.dtype.type(0), (len(experts), *part.shape))
                for part in self.reader.source.row
            ]
        self.reader.count(wait_seconds=time.monotonic() - start)
        return tuple(found)

    def _read(self, expert: Expert, into: list[np.ndarray]) -> None:
        with self._lock:  # while bytes are copied, nobody may release a block or give a row away
            self._collect()
            if (pending := self._arrived.get(expert)) is not None:
                return copy_row(into, pending.parts)
            if self.row_of[expert] >= 0:  # since the step was dispatched
                return copy_row(into, self._row(int(self.row_of[expert])))
        parts = self.reader._read_now(expert)
        copy_row(into, parts)
        with self._lock:
            kept = sum(not pending.in_ring for pending in self._arrived.values())
            if self.cache is not None and kept < self._most_kept and not self._has(expert):
                self._arrived[expert] = _PendingRow(parts)

    def _row(self, row: int) -> list[np.ndarray]:
        assert self._store is not None
        return self._store.rows(row)

    def _has(self, expert: Expert) -> bool:
        """Whether an expert was read or has a row."""
        return expert in self._arrived or bool(self.row_of[expert] >= 0)

    def prefetch(self, experts: Sequence[Expert]) -> None:
        """Reads experts ahead into host rows while no transfer waits for the disk.

        Args:
          experts: the most urgent first; only as many as half of the rows count, since more would
            evict the first. Experts that have a row keep it as if they had just been used. Experts
            of an earlier call that were not begun are forgotten.
        """
        with self._lock:
            most = self._store.num_rows // 2 if self._store is not None else 0
            self._prefetches = dict.fromkeys(experts[:most])
            if self.cache is not None:
                for expert in reversed(self._prefetches):
                    self.cache.touch(expert)

    def acquire(self, expert: Expert) -> Sequence[np.ndarray] | None:
        """Returns arrays that stay until `release`, or None while the disk is asked for them.

        Raises:
          MoejaxError: they cannot be had; the next call tries once more.
        """
        with self._lock:
            self._count_use(expert)
            if self.row_of[expert] >= 0:
                self._withdraw(expert)
                if self.cache is not None:
                    self.cache.pin(expert)
                return self._row(int(self.row_of[expert]))
            self._collect()
            if (pending := self._arrived.get(expert)) is not None:
                self._withdraw(expert)
                pending.is_acquired = True
                return pending.parts
            if (error := self._failed.pop(expert, None)) is not None:
                raise MoejaxError(error)
            if expert not in self._requests and len(self._requests) < self._most_ahead:
                self._requests[expert] = self.reader.request(expert, urgent=True)
            return None

    def release(self, expert: Expert) -> None:
        """Releases an expert whose arrays `acquire` returned."""
        with self._lock:
            if self.cache is not None:
                self.cache.unpin(expert)
            if (pending := self._arrived.get(expert)) is not None:
                pending.is_wanted = pending.is_acquired = False
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
            changed = self._publish(self.cache)
            if self._uses is not None and is_ready(self._uses):
                uses, self._uses = self._uses, None
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a pool that is lost
                    self._touch(self.cache, jax.device_get(uses))
                    self._write()
                    changed |= self._reserve(self.cache)
            if self._uses is None and any(p.written is None for p in self._arrived.values()):
                self._uses = last_uses()
                self._uses.copy_to_host_async()
            return changed

    def counts_since(self) -> dict[str, float]:
        """Counts since the last call, by the names of `Counters`."""
        before, self._counted = self._counted, dataclasses.replace(self.reader.counters)
        now = dataclasses.asdict(self._counted)
        return {name: n - getattr(before, name) for name, n in now.items()}

    def close(self) -> None:
        """Ends the threads; a step that needs the disk afterwards fails."""
        self._writer.shutdown(wait=True, cancel_futures=True)
        self.reader.close()

    def _withdraw(self, expert: Expert) -> None:
        """Cancels a request that nobody waits for; its failure is not reported."""
        self._failed.pop(expert, None)
        if (request := self._requests.pop(expert, None)) is not None:
            self.reader.forget(request)

    def _collect(self) -> None:
        """Takes what the reader has finished."""
        for expert in [expert for expert, of in self._requests.items() if of.done()]:
            request, is_ahead = self._requests.pop(expert), expert in self._ahead
            self._ahead.discard(expert)
            if (error := request.exception()) is not None:
                if not is_ahead:
                    self._failed[expert] = str(error)
            elif self._has(expert):
                self.reader.release(request.result())  # a step has read it meanwhile
            else:
                self._arrived[expert] = _PendingRow(request.result(), True, not is_ahead)
                if is_ahead:
                    self.reader.count(ahead=1)
                    self._prefetched.add(expert)

    def _read_ahead(self) -> None:
        """Requests experts to prefetch while nobody waits; leaves one block free."""
        if self._requests.keys() - self._ahead:
            return
        most = max(1, self._most_ahead - 1)
        most -= sum(pending.in_ring for pending in self._arrived.values())
        while self._prefetches and len(self._requests) < most:
            expert = next(iter(self._prefetches))
            del self._prefetches[expert]
            if not (self._has(expert) or expert in self._requests):
                self._requests[expert] = self.reader.request(expert)
                self._ahead.add(expert)

    def _count_use(self, expert: Expert) -> None:
        """Counts a use of an expert that may have been read ahead."""
        self._prefetches.pop(expert, None)
        if expert in self._ahead:  # where it has not begun it is asked anew
            self._ahead.discard(expert)
            if self._requests[expert].cancel():
                del self._requests[expert]
        if expert in self._prefetched:
            self._prefetched.discard(expert)
            self.reader.count(ahead_used=self._has(expert))

    def _touch(self, cache: _HostCache, uses: np.ndarray) -> None:
        """Marks experts used since the last copy, in the order of their last uses."""
        layers, experts = np.nonzero((uses != self._seen) & (uses > 0))
        order = np.argsort(uses[layers, experts], kind="stable")
        for layer, expert in zip(layers[order].tolist(), experts[order].tolist(), strict=True):
            cache.touch((layer, expert))
        self._seen = uses

    def _reserve(self, cache: _HostCache) -> bool:
        """Reserves rows for pending experts; their former owners are evicted."""
        evictions = cache.evictions
        for expert, pending in list(self._arrived.items()):
            if pending.row is None:
                pending.row = cache.reserve(expert)
                if pending.row is None and not (pending.is_wanted or pending.is_acquired):
                    self._drop(expert)  # every row is taken: it is read again when it is needed
        return cache.evictions > evictions

    def _write(self) -> None:
        """Writes bytes to reserved rows that no step reads any more."""
        for pending in self._arrived.values():
            if pending.row is not None and pending.written is None:
                rows = self._row(pending.row)
                pending.written = self._writer.submit(copy_row, rows, pending.parts)

    def _publish(self, cache: _HostCache) -> bool:
        changed = False
        for expert, pending in list(self._arrived.items()):
            if pending.written is None or not pending.written.done() or pending.is_acquired:
                continue
            if pending.written.exception() is None:
                cache.publish(expert)
                changed = True
            else:
                cache.cancel(expert)
            self._drop(expert)
        return changed

    def _drop(self, expert: Expert) -> None:
        pending = self._arrived.pop(expert)
        if pending.in_ring:
            self.reader.release(pending.parts)
