"""Reads experts from disk in a thread, into a ring of blocks.

    ticket = reader.request((layer, expert))
    for ticket in reader.done():                   # between steps
        ...                                        # ticket.row, or ticket.error says why not
        reader.release(ticket)                     # the block may be written to again

An expert that cannot be read stays where it was: nothing here changes what the steps use.
"""

import dataclasses
import enum
import heapq
import itertools
import threading
from collections.abc import Sequence

import jax
import numpy as np
from absl import logging

from moejax.errors import MoejaxError
from moejax.experts.host_store import Expert, RowSource
from moejax.experts.pinned_memory import plain_memory_errors

_FIRST_PAUSE_SECONDS = 0.01  # before the first retry; twice as long before each that follows


class State(enum.Enum):
    """Progress of a request."""

    QUEUED = "queued"
    READING = "reading"
    DONE = "done"  # its row is full, or `error` says why not; `done` has not returned it yet
    DELIVERED = "delivered"  # `done` returned it
    OVER = "over"  # released or cancelled: its block is another's


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request. Its fields are for reading; they change under the reader's lock."""

    expert: Expert
    urgent: bool  # whether somebody waits for it
    state: State = State.QUEUED
    error: str | None = None  # why the expert could not be read
    row: list[np.ndarray] | None = None  # its arrays in a block of the ring


@dataclasses.dataclass(kw_only=True)
class Counters:
    """Counts since a reader was made."""

    reads: int = 0  # experts
    bytes: int = 0  # of these
    retries: int = 0  # reads that had to be repeated
    errors: int = 0  # experts given up
    waits: int = 0  # experts that a step waited for (`read_now`)
    wait_seconds: float = 0.0  # that steps spent in `DiskExperts.read`
    ahead: int = 0  # experts read by a prefetch; not those that a transfer asked for meanwhile
    ahead_used: int = 0  # of them, those that were then asked for and still in host memory


class DiskReader:
    """Reads experts in the background; its methods may be called by any thread.

    A request waits in a queue, urgent ones first, until the thread and a block are free. A failed
    read is tried again, then reported; a row whose checksum is not that of its first read is such a
    failure.
    """

    def __init__(self, source: RowSource, *, ring_blocks: int, retries: int = 2) -> None:
        """Allocates a ring of so many experts; the first request starts the thread."""
        self.source, self._retries = source, retries
        self.counters = Counters()
        with plain_memory_errors(ring_blocks * source.row_nbytes, "host memory"):
            self._free = [self._empty_row() for _ in range(ring_blocks)]
        self._queue: list[tuple[bool, int, Ticket]] = []  # a heap, urgent ones first
        self._done: list[Ticket] = []
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def _empty_row(self) -> list[np.ndarray]:
        return [np.empty(part.shape, part.dtype) for part in self.source.row]

    def count(self, **amounts: float) -> None:
        """Adds to the counters, by name."""
        with self._changed:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)

    def request(self, expert: Expert, *, urgent: bool = False) -> Ticket:
        """Queues a read; ValueError once the reader is closed."""
        with self._changed:
            self._check_open()
            if self._thread is None:  # it keeps the reader alive until that is closed
                thread = threading.Thread(target=self._work, name="moejax-ssd", daemon=True)
                thread.start()  # one that cannot be had is tried again with the next request
                self._thread = thread
            ticket = Ticket(expert, urgent)
            heapq.heappush(self._queue, (not urgent, next(self._numbers), ticket))
            self._changed.notify_all()
            return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """Takes a request back, so that `done` does not return it.

        Returns:
          False where it is too late: `done` has returned it, and who called that releases it.
        """
        with self._changed:
            if ticket.state in (State.DELIVERED, State.OVER):
                return ticket.state is State.OVER
            if ticket.state is State.QUEUED:
                self._queue = [item for item in self._queue if item[-1] is not ticket]
                heapq.heapify(self._queue)
            elif ticket.state is State.DONE:
                self._done.remove(ticket)
                self._free_block(ticket)
            ticket.state = State.OVER  # the block of one that is being read is freed by the thread
            return True

    def done(self) -> list[Ticket]:
        """Returns the reads finished since the last call, in order; each is to be released."""
        with self._changed:
            finished, self._done = self._done, []
            for ticket in finished:
                ticket.state = State.DELIVERED
            return finished

    def release(self, ticket: Ticket) -> None:
        """Gives a delivered ticket's block back; ValueError in any other state."""
        with self._changed:
            if ticket.state is not State.DELIVERED:
                raise ValueError(f"a ticket that is {ticket.state.value} cannot be released")
            self._free_block(ticket)
            ticket.state = State.OVER

    def read_now(self, expert: Expert) -> list[np.ndarray]:
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
        """Ends the thread; requests that wait are cancelled. A second call does nothing.

        Args:
          timeout_seconds: for a read that is going on. A thread that is stuck in the operating
            system for longer is left behind, and said so; it holds its own memory.
        """
        with self._changed:
            self._closing.set()
            for _, _, ticket in self._queue:
                ticket.state = State.OVER
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                logging.warning(
                    "%s did not end in %g s; left behind", self._thread.name, timeout_seconds
                )

    def _work(self) -> None:
        while (ticket := self._next()) is not None:
            assert ticket.row is not None
            error = self._read(ticket.expert, ticket.row)
            with self._changed:
                if error is not None or ticket.state is State.OVER:
                    self._free_block(ticket)
                if ticket.state is State.READING:
                    ticket.error, ticket.state = error, State.DONE
                    self._done.append(ticket)

    def _next(self) -> Ticket | None:
        """Waits for the next request and a block; None once the reader is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing.is_set() or (self._free and self._queue))
            if self._closing.is_set():
                return None
            ticket = heapq.heappop(self._queue)[-1]
            ticket.state, ticket.row = State.READING, self._free.pop()
            return ticket

    def _read(self, expert: Expert, row: Sequence[np.ndarray]) -> str | None:
        """Fills a row; returns why it could not after all retries."""
        for retries in range(self._retries + 1):
            try:
                self.source.read(*expert, row)
                error = None
                break
            except Exception as raised:  # a thread that dies would leave its ticket for ever
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

    def _free_block(self, ticket: Ticket) -> None:
        if ticket.row is not None:
            self._free.append(ticket.row)
            ticket.row = None
            self._changed.notify_all()

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
