"""Reads experts from disk in threads, into a ring of blocks.

    ticket = ssd.request(layer, expert)            # None: the queue is full, ask again later
    for ticket, arrays in ssd.done():              # between steps
        ...                                        # arrays is None where ticket.error says why
        ssd.release(ticket)                        # the block may be written to again

An expert that cannot be read stays where it was: nothing here changes what the steps use.
"""

import dataclasses
import enum
import heapq
import itertools
import threading
import time
from collections.abc import Sequence
from types import TracebackType

import jax
import numpy as np
from absl import logging

from moejax.errors import MoejaxError
from moejax.experts.host_store import RowSource
from moejax.experts.pinned_memory import allocate_blocks

_FIRST_PAUSE_SECONDS = 0.01  # before the first retry; twice as long before each that follows


class State(enum.Enum):
    """Progress of a request."""

    QUEUED = "queued"
    READING = "reading"
    DONE = "done"  # its block is full, or `error` says why not; `done` has not returned it yet
    DELIVERED = "delivered"  # `done` returned it
    OVER = "over"  # released or cancelled: its block is another's


@dataclasses.dataclass(eq=False, kw_only=True)
class Ticket:
    """A request. Its fields are for reading; they change under the reader's lock."""

    layer: int
    expert: int
    urgent: bool
    number: int  # in order of the requests
    state: State = State.QUEUED
    error: str | None = None  # why the expert could not be read
    block: int | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen to it: it was read, failed or was cancelled."""
        return self.state not in (State.QUEUED, State.READING)


@dataclasses.dataclass(kw_only=True)
class Counters:
    """Counts of a reader, summed since it was made."""

    reads: int = 0  # experts
    bytes: int = 0  # of these
    retries: int = 0
    errors: int = 0  # experts given up
    cancelled: int = 0
    refused: int = 0  # requests that found the queue full
    waits: int = 0  # reads that somebody waited for (`read_now`)
    seconds: float = 0.0  # of all reading, each thread's its own


class SsdReader:
    """Reads experts in the background; its methods may be called by any thread.

    A request waits in a queue of bounded length, urgent ones first, until a thread and a block are
    free. Blocks are pinned on a GPU. A failed read is tried again, then reported; a row whose
    checksum is not that of its first read is such a failure.
    """

    def __init__(
        self,
        source: RowSource,
        device: jax.Device,
        *,
        ring_blocks: int,
        queue_length: int,
        retries: int = 2,
        num_threads: int = 1,
    ) -> None:
        """Allocates the ring; the first request starts the threads.

        Args:
          device: reads the blocks.
          ring_blocks: experts that are being read, or are read and not released.
          queue_length: most requests that wait.
          retries: attempts after a failed read.
          num_threads: threads that read at once.

        Raises:
          MoejaxError: host memory for the ring cannot be had.
        """
        if min(ring_blocks, queue_length, num_threads) < 1 or retries < 0:
            raise ValueError("a ring, a queue and threads of at least one, retries of at least 0")
        self._source, self._device = source, device
        self._queue_length, self._retries = queue_length, retries
        self._counters = Counters()
        advice = "raise host_gib until all experts fit host memory"
        self._blocks = allocate_blocks(source.row, ring_blocks, device, advice)
        self._free = list(range(ring_blocks))
        self._queue: list[tuple[bool, int, Ticket]] = []  # a heap, urgent ones first
        self._done: list[Ticket] = []
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []  # started by the first request

    def __enter__(self) -> "SsdReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def counters(self) -> Counters:
        """Copy of the counters."""
        with self._changed:
            return dataclasses.replace(self._counters)

    def request(self, layer: int, expert: int, *, urgent: bool = False) -> Ticket | None:
        """Asks for an expert.

        Returns:
          None where the queue is full, which is counted: the caller does without, or asks again.

        Raises:
          ValueError: the reader is closed.
        """
        with self._changed:
            self._check_open()
            self._start()
            if len(self._queue) >= self._queue_length:
                self._counters.refused += 1
                return None
            ticket = Ticket(layer=layer, expert=expert, urgent=urgent, number=next(self._numbers))
            heapq.heappush(self._queue, (not urgent, ticket.number, ticket))
            self._changed.notify_all()
            return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """Takes a request back, so that `done` does not return it.

        Returns:
          False where it is too late: `done` has returned it, and who called that releases it.
        """
        with self._changed:
            if ticket.state is State.DELIVERED:
                return False
            if ticket.state is State.OVER:
                return True
            self._counters.cancelled += 1
            if ticket.state is State.QUEUED:
                self._queue = [item for item in self._queue if item[-1] is not ticket]
                heapq.heapify(self._queue)
            elif ticket.state is State.DONE:
                self._done.remove(ticket)
                self._free_block(ticket)
            ticket.state = State.OVER  # the block of one that is being read is freed by its thread
            self._changed.notify_all()
            return True

    def done(self) -> list[tuple[Ticket, tuple[jax.Array, ...] | None]]:
        """Returns the reads finished since the last call, in order.

        Returns:
          Tickets with the arrays of one row each, to be released; None for the arrays where
          `ticket.error` says why there are none.
        """
        with self._changed:
            finished, self._done = self._done, []
            for ticket in finished:
                ticket.state = State.DELIVERED
            return [(ticket, self._arrays(ticket)) for ticket in finished]

    def views(self, ticket: Ticket) -> tuple[np.ndarray, ...]:
        """Numpy's views of a delivered ticket's block, to copy from it on the host.

        Not `np.asarray` of its arrays: JAX may keep what that returned beyond the block's release.

        Raises:
          ValueError: it holds no block.
        """
        with self._changed:
            if ticket.state is not State.DELIVERED or ticket.block is None:
                raise ValueError(f"a ticket that is {ticket.state.value} holds no bytes")
            return tuple(p.view for p in self._blocks[ticket.block] if p.view is not None)

    def release(self, ticket: Ticket) -> None:
        """Gives a delivered ticket's block back.

        Whatever reads the arrays has finished: on a CPU `jax.device_put` copies nothing, so what
        was made of the arrays is computed to its end (`block_until_ready`) before.

        Raises:
          ValueError: `done` has not returned it, or it was released before.
        """
        with self._changed:
            if ticket.state is not State.DELIVERED:
                raise ValueError(f"a ticket that is {ticket.state.value} cannot be released")
            self._free_block(ticket)
            ticket.state = State.OVER
            self._changed.notify_all()

    def wait(self, ticket: Ticket, timeout_seconds: float) -> bool:
        """Waits until a ticket is finished; `done` returns it still.

        Returns:
          False where it is not finished in that time.
        """
        with self._changed:
            return (
                self._changed.wait_for(
                    lambda: ticket.finished or self._closing.is_set(), timeout_seconds
                )
                and ticket.finished
            )

    def read_now(self, layer: int, expert: int) -> tuple[np.ndarray, ...]:
        """Reads an expert in the calling thread, whatever the queue holds.

        For a callback inside the step, which needs the expert before it can go on. The arrays are
        new ones.

        Raises:
          MoejaxError: it could not be read, or not here (`check_waiting`).
          ValueError: the reader is closed.
        """
        check_waiting(self._source, self._device)
        with self._changed:
            self._check_open()
        row = [np.empty(part.shape, part.dtype) for part in self._source.row]
        if error := self._read(layer, expert, row):
            raise MoejaxError(error)
        with self._changed:
            self._counters.waits += 1
        return tuple(row)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Ends the threads; requests that wait are cancelled. A second call does nothing.

        Args:
          timeout_seconds: for reads that are going on. A thread that is stuck in the operating
            system for longer is left behind, and said so; it holds its own memory.
        """
        with self._changed:
            self._closing.set()
            for _, _, ticket in self._queue:
                ticket.state = State.OVER
                self._counters.cancelled += 1
            self._queue.clear()
            self._changed.notify_all()
        end = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if stuck := [thread.name for thread in self._threads if thread.is_alive()]:
            logging.warning("%s did not end in %g s; left behind", stuck, timeout_seconds)

    def _start(self) -> None:
        """Starts the threads, which keep the reader alive until it is closed."""
        while len(self._threads) < self._num_threads:
            name = f"moejax-ssd-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()  # first: one that cannot be had is tried again with the next request
            self._threads.append(thread)

    def _work(self) -> None:
        while (ticket := self._next()) is not None:
            assert ticket.block is not None
            views = [place.view for place in self._blocks[ticket.block] if place.view is not None]
            error = self._read(ticket.layer, ticket.expert, views)
            with self._changed:
                if error is not None or ticket.state is State.OVER:
                    self._free_block(ticket)
                if ticket.state is State.READING:
                    ticket.error, ticket.state = error, State.DONE
                    self._done.append(ticket)
                self._changed.notify_all()

    def _next(self) -> Ticket | None:
        """Waits for the next request and a block; None once the reader is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing.is_set() or (self._free and self._queue))
            if self._closing.is_set():
                return None
            ticket = heapq.heappop(self._queue)[-1]
            ticket.state, ticket.block = State.READING, self._free.pop()
            return ticket

    def _read(self, layer: int, expert: int, row: Sequence[np.ndarray]) -> str | None:
        """Fills a row; returns why it could not after all retries."""
        start, retries, error = time.monotonic(), 0, None
        while True:
            try:
                self._source.read(layer, expert, row)
                error = None
                break
            except Exception as raised:  # a thread that dies would leave its ticket for ever
                error = f"{raised}" if isinstance(raised, MoejaxError) else f"{raised!r}"
            if retries == self._retries or self._closing.wait(_FIRST_PAUSE_SECONDS * 2**retries):
                break
            retries += 1
        with self._changed:
            self._counters.retries += retries
            self._counters.seconds += time.monotonic() - start
            if error is None:
                self._counters.reads += 1
                self._counters.bytes += self._source.row_nbytes
            else:
                self._counters.errors += 1
        if error is not None:
            logging.error("expert %d of sparse layer %d was not read: %s", expert, layer, error)
        return error

    def _arrays(self, ticket: Ticket) -> tuple[jax.Array, ...] | None:
        if ticket.block is None:
            return None
        places = self._blocks[ticket.block]
        return tuple(place.array for place in places if place.array is not None)

    def _free_block(self, ticket: Ticket) -> None:
        if ticket.block is not None:
            self._free.append(ticket.block)
            ticket.block = None

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ValueError("the reader is closed")


def check_waiting(source: RowSource, device: jax.Device, name: str = "") -> None:
    """Raises MoejaxError if experts stay on the disk and no step can wait.

    Reading that computes on JAX's CPU device, inside a callback of a program that runs there, can
    wait for the program that waits for it.

    Args:
      source: reads the experts.
      device: where steps run.
      name: name of the experts for the message.

    Raises:
      MoejaxError: they are converted while they are read, and the device is the CPU.
    """
    if source.uses_jax and device.platform == "cpu":
        of = f"{name}: " if name else ""
        raise MoejaxError(
            f"{of}experts that are converted while they are read cannot be read inside a step on "
            "the CPU; write the checkpoint in the package's own format, or raise memory.host_gib "
            "until all experts fit host memory"
        )
