"""Rows, answers on their way from a request to the batch and back, and their queue."""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from moejax.inference.batch import TokenLogprob
from moejax.inference.generation import FinishReason, GenerationSettings
from moejax.serving.errors import ApiError

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclasses.dataclass(frozen=True)
class AnswerPart:
    """A piece of a row's answer, all of it, or its error.

    `finish_reason` or `error` is set on a row's last part.
    """

    row: int  # of the request's rows
    text: str = ""
    num_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: ApiError | None = None
    thoughts: str = ""


@dataclasses.dataclass(eq=False)
class Row:
    """One prompt that wants one answer."""

    index: int  # among the request's rows
    prompt: list[int]  # token ids
    settings: GenerationSettings  # sampling settings, with an integer seed
    wants_logprobs: bool  # whether parts tell them
    stream: bool  # whether parts are told as they come; else one at the end
    deliver: Callable[[AnswerPart], None]  # takes parts, in the batcher's thread
    client: str = ""  # owner of the row, in whose turn it runs
    is_chat: bool = False  # whether thoughts are told apart
    cancelled: bool = False  # set from any thread when nobody reads the answer any more
    # seconds of `time.monotonic`
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    started: float = 0.0  # when it left the queue
    first_token_at: float | None = None
    num_tokens: int = 0
    num_shared: int = 0  # first tokens of its prompt that were not run again
    told: list[AnswerPart] = dataclasses.field(default_factory=list)  # what waits for the end

    def tell(self, part: AnswerPart) -> None:
        """Delivers a part, or keeps it for the end."""
        self.num_tokens += part.num_tokens
        if self.stream or part.error:
            self.deliver(part)
            return
        self.told.append(part)
        if part.finish_reason:
            self.deliver(
                AnswerPart(
                    self.index,
                    "".join(one.text for one in self.told),
                    self.num_tokens,
                    tuple(told for one in self.told for told in one.logprobs),
                    part.finish_reason,
                    thoughts="".join(one.thoughts for one in self.told),
                )
            )

    def fail(self, error: ApiError) -> None:
        """Ends the row with an error."""
        self.tell(AnswerPart(self.index, error=error))


class FairQueue:
    """Queue in which no client waits for all rows of another.

    `take` goes from client to client and, within a client, from request to request, one row each;
    the rows of a request keep their order. Not safe across threads.
    """

    def __init__(self) -> None:
        # Whose turn is next stands first; a key that is put back goes to the end.
        self._clients: dict[str, dict[int, collections.deque[Row]]] = {}
        self._num_requests = 0
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def has(self, client: str) -> bool:
        """Whether rows of a client wait."""
        return client in self._clients

    def add(self, rows: Sequence[Row]) -> None:
        """Adds the rows of one request, at least one, all of one client."""
        requests = self._clients.setdefault(rows[0].client, {})
        requests[self._num_requests] = collections.deque(rows)
        self._num_requests += 1
        self._num_rows += len(rows)

    def take(self, count: int) -> list[Row]:
        """Removes the next rows, at most `count`."""
        taken: list[Row] = []
        while self._clients and len(taken) < count:
            client, requests = _pop_first(self._clients)
            request, rows = _pop_first(requests)
            taken.append(rows.popleft())
            if rows:
                requests[request] = rows
            if requests:
                self._clients[client] = requests
        self._num_rows -= len(taken)
        return taken

    def drop(self, is_over: Callable[[Row], bool]) -> None:
        """Removes the rows that are over; turns stay as they are."""
        for client, requests in list(self._clients.items()):
            for request, rows in list(requests.items()):
                kept = collections.deque(row for row in rows if not is_over(row))
                self._num_rows -= len(rows) - len(kept)
                requests[request] = kept
                if not kept:
                    del requests[request]
            if not requests:
                del self._clients[client]


def _pop_first(of: dict[_K, _V]) -> tuple[_K, _V]:
    key = next(iter(of))
    return key, of.pop(key)
