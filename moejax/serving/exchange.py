"""One request on the event loop: its rows go to the batcher, their parts come back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from moejax.serving.batcher import Batcher
from moejax.serving.errors import ApiError
from moejax.serving.requests import Request
from moejax.serving.rows import AnswerPart, Row


class ClientGone(Exception):
    """The client has closed its connection: nobody reads an answer any more."""


class Exchange:
    """The parts of a request's answers; leaving its context cancels what still runs."""

    def __init__(self, request: Request, batcher: Batcher, receive: Any, client: str):
        """Submits nothing yet.

        Args:
          receive: ASGI's, after the body was read; it reports when the client leaves.
        """
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[AnswerPart | None] = asyncio.Queue()  # None: the client is gone
        self._batcher = batcher
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._rows = [
            Row(
                i, prompt, settings, request.top_logprobs is not None, request.stream, self._tell,
                client,
            )
            for i, (prompt, settings) in enumerate(
                zip(request.prompts, request.settings, strict=True)
            )
        ]  # fmt: skip

    async def __aenter__(self) -> "Exchange":
        """Puts the rows in the queue; raises an ApiError where there is no room."""
        self._batcher.submit(self._rows)
        self._watch = asyncio.create_task(self._wait_for_disconnect())
        return self

    async def __aexit__(self, *exception: object) -> None:
        for row in self._rows:
            row.cancelled = True
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch

    async def parts(self) -> AsyncIterator[AnswerPart]:
        """Yields parts as they come, up to the last of each row.

        Raises:
          ClientGone: nobody reads them.
          ApiError: a row has no answer; the others are cancelled.
        """
        left = {row.index for row in self._rows}
        while left:
            part = await self._parts.get()
            if part is None:
                raise ClientGone
            if part.row not in left:  # it has ended; what came after it is for others of its batch
                continue
            if part.error is not None:
                raise part.error
            if part.finish_reason:
                left.discard(part.row)
            yield part

    async def answers(self) -> list[AnswerPart]:
        """The last part of each row, in order; raises as `parts`."""
        found = [part async for part in self.parts() if part.finish_reason]
        return sorted(found, key=lambda part: part.row)

    def _tell(self, part: AnswerPart) -> None:
        """Receives a part in the batcher's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there
            self._loop.call_soon_threadsafe(self._parts.put_nowait, part)

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._parts.put_nowait(None)


def outcome_of(error: BaseException | None) -> str:
    """Names a request's outcome in one word, for the metrics."""
    if error is None:
        return "ok"
    if isinstance(error, ClientGone | asyncio.CancelledError):
        return "cancelled"
    if not isinstance(error, ApiError):
        return "error"
    words = {429: "rejected", 503: "unavailable", 504: "deadline"}
    return words.get(error.status, "invalid" if error.status < 500 else "error")
