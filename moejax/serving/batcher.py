"""The thread that owns the engine; rows that wait together run together.

A batch takes rows of the queue, as many as it holds, in turns of clients and of their requests; who
comes later waits until all of its rows have ended. Rows of a batch may differ in everything that a
request can say: temperature, filters, penalty, seed, stop strings, length, whether
log-probabilities are told. Empty rows fill what a program has more (`moejax.serving.programs`).
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from moejax.engine import STEPS_PER_CALL, Engine
from moejax.errors import MoejaxError
from moejax.inference.batch import RowBatch, RowDelta
from moejax.serving.errors import ApiError, deadline_passed, queue_full, unavailable
from moejax.serving.metrics import Metrics
from moejax.serving.programs import ServerPrograms
from moejax.serving.rows import AnswerPart, FairQueue, Row

_LOG = logging.getLogger(__name__)
ENDING = "the server is shutting down"
RESERVE = 4  # this part of the queue's limit is kept beyond it for clients of whom nothing waits


class Batcher:
    """A queue of rows, and the thread that runs them."""

    def __init__(
        self,
        load: Callable[[], Engine],  # gives the engine; called in the thread
        metrics: Metrics,  # told what happens
        *,
        max_batch: int,  # most rows of a batch
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
        self._programs: ServerPrograms | None = None
        self._on_loaded = on_loaded
        self._waiting = FairQueue()
        self._running: list[Row] = []
        self._changed = threading.Condition()
        self._is_draining = False
        self._is_cut = False
        self._batch_s = 1.0  # of the last batches, a moving mean
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
                batches = 1 + waiting / self._max_batch
                retry_s = max(1, math.ceil(self._batch_s * batches))
                raise queue_full(len(rows), waiting, limit, retry_s)
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
            rows = [*self._running, *self._waiting.take(len(self._waiting))]
        for row in rows:
            row.fail(unavailable(ENDING))

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end; returns whether it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = self._load()
            self._programs = ServerPrograms.of(engine, self._max_batch)
            if self._warms_up:
                self._programs.compile(engine)
            self._metrics.programs(engine.num_traces, engine.compile_seconds)
            self.engine = engine
        except Exception as error:  # the main thread says it
            self.load_error = error
        self._on_loaded()
        while self.engine is not None and (rows := self._next_rows()):
            try:
                self._run_batch(self.engine, rows)
            except Exception as error:  # a fault of one batch is not the end of the server
                said = "the server's log says why"
                if isinstance(error, MoejaxError):
                    said = str(error)
                else:
                    _LOG.exception("a batch failed")
                for row in rows:
                    row.fail(_engine_failed(said))

    def _next_rows(self) -> list[Row]:
        """The rows of the next batch, when there are some; [] at the end."""
        with self._changed:
            while True:
                self._waiting.drop(self._is_over)
                self._running = self._waiting.take(self._max_batch)
                if self._running:
                    return self._running
                if self._is_draining:
                    return []
                self._changed.wait(timeout=0.5 if self._deadline_s else None)

    def _is_over(self, row: Row) -> bool:
        """Whether a row is to end now; its client is told why."""
        if row.cancelled or self._is_cut:
            return True
        if self._deadline_s and time.monotonic() - row.arrived > self._deadline_s:
            row.fail(deadline_passed(self._deadline_s))
            return True
        return False

    def _run_batch(self, engine: Engine, rows: list[Row]) -> None:
        started = time.monotonic()
        self._metrics.batch_size.observe(len(rows))
        self._metrics.running.set(len(rows))
        assert self._programs is not None
        live = self._programs.begin(
            engine, [row.prompt for row in rows], [row.settings for row in rows],
            any(row.wants_logprobs for row in rows),
        )  # fmt: skip
        left = set(range(len(rows)))
        try:
            live.steps_per_call = _steps_per_call(rows)
            for pieces in live.steps():
                for i, piece in enumerate(pieces):
                    if piece is not None and i in left:
                        self._tell(rows[i], piece)
                        if piece.finish_reason or piece.error:
                            left.discard(i)
                self._end_rows(live, rows, left)
                going = [rows[i] for i in left]
                self._metrics.running.set(len(going))
                live.steps_per_call = _steps_per_call(going)
        finally:
            self._metrics.running.set(0)
            self._batch_s += 0.3 * (time.monotonic() - started - self._batch_s)
            self._metrics.programs(engine.num_traces, engine.compile_seconds)
            self._metrics.ledger(engine.ledger)

    def _end_rows(self, live: RowBatch, rows: list[Row], left: set[int]) -> None:
        for i in sorted(left):
            if self._is_over(rows[i]):
                live.finish_row(i)
                left.discard(i)

    def _tell(self, row: Row, piece: RowDelta) -> None:
        now = time.monotonic()
        if piece.tokens and row.first_token_at is None:
            row.first_token_at = now
            self._metrics.ttft.observe(now - row.arrived)
            self._metrics.prompt_tokens.inc(len(row.prompt))
        self._metrics.generated_tokens.inc(len(piece.tokens))
        told = piece.logprobs if row.wants_logprobs else ()
        row.tell(AnswerPart(row.index, piece.text, len(piece.tokens), told, piece.finish_reason))
        if piece.error:
            row.fail(_engine_failed(piece.error))
        if piece.finish_reason and row.num_tokens > 1 and row.first_token_at is not None:
            self._metrics.tpot.observe((now - row.first_token_at) / (row.num_tokens - 1))


def _engine_failed(why: str) -> ApiError:
    return ApiError(f"the engine failed: {why}", status=500, code="engine_error")


def _steps_per_call(rows: Sequence[Row]) -> int:
    """Decode steps of a call: one where a client streams."""
    return 1 if any(row.stream for row in rows) else STEPS_PER_CALL
