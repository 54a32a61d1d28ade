"""The thread that owns the engine: a loop over its running batch.

Rows leave the queue in turns of clients and of their requests, as places of the batch are free, and
run as `moejax.inference.continuous` says. Rows may differ in everything that a request can say:
temperature, filters, penalty, seed, stop strings, length, whether log-probabilities are told.
"""

import collections
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from moejax.engine import Engine
from moejax.errors import MoejaxError, print_stderr
from moejax.inference.batch import RowDelta
from moejax.inference.continuous import ContinuousBatch
from moejax.serving.errors import ApiError, unavailable
from moejax.serving.metrics import Metrics
from moejax.serving.requests import MOST_LOGPROBS
from moejax.serving.rows import AnswerPart, Row

_LOG = logging.getLogger(__name__)
ENDING = "the server is shutting down"
LEDGER_S = 1.0  # between two readings of the ledger, which wait for the device
RESERVE = 4  # this part of the queue's limit is kept beyond it for clients of whom nothing waits


class _FairQueue:
    """Queue in which no client waits for all rows of another.

    `take` goes from client to client and, within a client, from request to request, one row each;
    the rows of a request keep their order. Not safe across threads.
    """

    def __init__(self) -> None:
        # Clients, their requests, rows of those; whose turn is next stands first.
        self._clients: dict[str, collections.deque[collections.deque[Row]]] = {}
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def has(self, client: str) -> bool:
        """Whether rows of a client wait."""
        return client in self._clients

    def add(self, rows: Sequence[Row]) -> None:
        """Adds the rows of one request, at least one, all of one client."""
        requests = self._clients.setdefault(rows[0].client, collections.deque())
        requests.append(collections.deque(rows))
        self._num_rows += len(rows)

    def take(self, count: int) -> list[Row]:
        """Removes the next rows, at most `count`."""
        taken: list[Row] = []
        while self._clients and len(taken) < count:
            client = next(iter(self._clients))
            requests = self._clients.pop(client)
            rows = requests.popleft()
            taken.append(rows.popleft())
            if rows:
                requests.append(rows)
            if requests:
                self._clients[client] = requests
        self._num_rows -= len(taken)
        return taken

    def drop(self, is_over: Callable[[Row], bool]) -> None:
        """Removes the rows that are over; turns stay as they are."""
        for client, requests in list(self._clients.items()):
            kept = [collections.deque(row for row in rows if not is_over(row)) for rows in requests]
            self._num_rows -= sum(map(len, requests)) - sum(map(len, kept))
            self._clients[client] = collections.deque(filter(None, kept))
            if not self._clients[client]:
                del self._clients[client]


class Batcher:
    """A queue of rows, and the thread that runs them."""

    def __init__(
        self,
        load: Callable[[], Engine],  # gives the engine; called in the thread
        metrics: Metrics,  # told what happens
        *,
        max_batch: int,  # most rows that run at once
        queue_limit: int,  # most rows that wait
        deadline_s: float,  # seconds from a row's arrival to its end; 0: no limit
        warms_up: bool = True,  # whether all programs are compiled before the first row is taken
        # called in the thread when `engine` or `load_error` is there
        on_loaded: Callable[[], None] = lambda: None,
    ):
        self._load = load
        self._metrics = metrics
        self._max_batch = max_batch
        self._queue_limit = queue_limit
        self._deadline_s = deadline_s
        self._warms_up = warms_up
        self._on_loaded = on_loaded
        self._waiting = _FairQueue()
        self._running: dict[int, Row] = {}  # by their numbers in the batch
        self._changed = threading.Condition()
        self._is_draining = False
        self._is_cut = False
        self._ledger_at = 0.0  # when it was read, by `time.monotonic`
        self._row_s = 1.0  # from a row's start to its end, a moving mean
        self.engine: Engine | None = None  # None until it is loaded
        self.load_error: Exception | None = None  # why it could not be
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        metrics.queue_length.set_function(lambda: len(self._waiting))

    def start(self) -> None:
        """Starts the thread, which loads the engine first."""
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Rows in the queue."""
        return len(self._waiting)

    @property
    def is_ready(self) -> bool:
        """Whether rows are accepted."""
        return self.engine is not None and not self._is_draining

    def submit(self, rows: Sequence[Row]) -> None:
        """Puts the rows of one request in the queue, all or none.

        Raises:
          ApiError: there is no room, or the server is not ready.
        """
        with self._changed:
            if not self.is_ready:
                raise unavailable(ENDING if self._is_draining else "the model is being loaded")
            self._waiting.drop(self._is_over)
            waiting, limit = len(self._waiting), self._queue_limit
            if not self._waiting.has(rows[0].client):
                limit += limit // RESERVE
            if waiting + len(rows) > limit:
                turns = 1 + waiting / self._max_batch
                retry_s = max(1, math.ceil(self._row_s * turns))
                raise ApiError(
                    f"the queue is full: {waiting} of {limit} places are taken, the request needs "
                    f"{len(rows)}",
                    status=429, code="queue_full", retry_after_s=retry_s,
                )  # fmt: skip
            self._waiting.add(rows)
            self._changed.notify()

    def drain(self) -> None:
        """Accepts no more rows; the thread ends after those it has."""
        with self._changed:
            self._is_draining = True
            self._changed.notify()

    @property
    def is_compiling(self) -> bool:
        """Whether the thread is loading the model or compiling."""
        return self.engine is None or self.engine.is_compiling

    def cut(self) -> None:
        """Ends running and waiting rows with an error, without waiting for a compiler."""
        with self._changed:
            self._is_draining = self._is_cut = True
            self._changed.notify()
            rows = [*self._running.values(), *self._waiting.take(len(self._waiting))]
        for row in rows:
            row.fail(unavailable(ENDING))

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end; returns whether it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = self._load()
            batch = engine.continuous_batch(self._max_batch, top_logprobs=MOST_LOGPROBS)
            engine.context = batch.context  # by which it checks prompts
            if self._warms_up:
                started = time.monotonic()
                print_stderr("compiling all programs")
                batch.warm_up()
                took_s = time.monotonic() - started
                print_stderr(f"compiled {engine.num_traces} programs in {took_s:.0f} s")
            self._metrics.programs(engine.num_traces, engine.compile_seconds)
            self._metrics.batch(batch, engine.device)
            self.engine = engine
        except Exception as error:  # the main thread says it
            self.load_error = error
            self._on_loaded()
            return
        self._on_loaded()
        while self._take_rows(batch):
            try:
                self._step(batch)
                self._metrics.programs(engine.num_traces, engine.compile_seconds)
                if not self._running or time.monotonic() - self._ledger_at > LEDGER_S:
                    self._metrics.ledger(engine.ledger)
                    self._ledger_at = time.monotonic()
            except Exception as error:  # a fault of one call is not the end of the server
                said = "the server's log says why"
                if isinstance(error, MoejaxError):
                    said = str(error)
                else:
                    _LOG.exception("a call failed")
                for row in self._running.values():
                    row.fail(_engine_failed(said))
                self._running = {}
                self._metrics.running.set(0)
                batch.reset()

    def _take_rows(self, batch: ContinuousBatch) -> bool:
        """Moves rows from the queue to free places; waits for one if none run; False at the end."""
        with self._changed:
            while True:
                self._waiting.drop(self._is_over)
                for row in self._waiting.take(batch.num_free):
                    try:
                        number = batch.submit(
                            row.prompt, row.settings, row.wants_logprobs, row.client, row.is_chat
                        )
                    except MoejaxError as error:
                        row.fail(_engine_failed(str(error)))
                    else:
                        self._running[number], row.started = row, time.monotonic()
                if self._running:
                    return True
                if self._is_draining:
                    return False
                self._changed.wait(timeout=0.5 if self._deadline_s else None)

    def _is_over(self, row: Row) -> bool:
        """Whether a row is to end now; its client is told why."""
        if row.cancelled or self._is_cut:
            return True
        if self._deadline_s and time.monotonic() - row.arrived > self._deadline_s:
            said = f"took longer than the server's deadline of {self._deadline_s:g} s"
            row.fail(ApiError(f"the request {said}", status=504, code="deadline_exceeded"))
            return True
        return False

    def _step(self, batch: ContinuousBatch) -> None:
        for number, row in [*self._running.items()]:
            if self._is_over(row):
                batch.end(number)
                del self._running[number]
        self._metrics.running.set(len(self._running))
        calls, rows = batch.counts.decode_calls, batch.counts.decode_rows
        deltas = batch.step()
        if batch.counts.decode_calls > calls:
            self._metrics.batch_size.observe(batch.counts.decode_rows - rows)
        for number, delta in deltas:
            row = self._running[number]
            self._tell(row, delta)
            if delta.finish_reason or delta.error:
                del self._running[number]
                self._row_s += 0.1 * (time.monotonic() - row.started - self._row_s)
        self._metrics.running.set(len(self._running))

    def _tell(self, row: Row, piece: RowDelta) -> None:
        now = time.monotonic()
        if piece.tokens and row.first_token_at is None:
            row.first_token_at, row.num_shared = now, piece.num_shared
            self._metrics.ttft.observe(now - row.arrived)
            self._metrics.prompt_tokens.inc(len(row.prompt))
        self._metrics.generated_tokens.inc(len(piece.tokens))
        num_tokens = row.num_tokens + len(piece.tokens)
        if piece.finish_reason and num_tokens > 1 and row.first_token_at is not None:
            # Before the client has its answer, and may read the metrics.
            self._metrics.tpot.observe((now - row.first_token_at) / (num_tokens - 1))
        told = piece.logprobs if row.wants_logprobs else ()
        row.tell(
            AnswerPart(
                row.index, piece.text, len(piece.tokens), told, piece.finish_reason,
                thoughts=piece.thoughts,
            )
        )  # fmt: skip
        if piece.error:
            row.fail(_engine_failed(piece.error))


def _engine_failed(why: str) -> ApiError:
    return ApiError(f"the engine failed: {why}", status=500, code="engine_error")
