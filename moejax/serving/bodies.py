"""Bodies on their way to requests: bounded in bytes, read in few threads, never on the loop."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from moejax.serving.errors import ApiError, unavailable

_T = TypeVar("_T")

JSON = "application/json"
BODY_SECONDS = 30.0  # a client may take to send its body
MOST_BODIES = 16  # as long as they may be, in memory at a time
LARGE_BYTES = 2**16  # larger ones are read one after the other, beside the small ones


class Bodies:
    """Receives request bodies and parses them.

    JSON, templates and tokenizers take seconds for some texts of megabytes, and gigabytes of memory
    for several at a time: large bodies have one thread, which small ones do not wait for.
    """

    def __init__(self, most_bytes: int):
        """Refuses bodies longer than `most_bytes`."""
        self._most_bytes = most_bytes
        self._room = MOST_BODIES * most_bytes
        self._small = concurrent.futures.ThreadPoolExecutor(2, "bodies")
        self._large = concurrent.futures.ThreadPoolExecutor(1, "large-bodies")

    @contextlib.asynccontextmanager
    async def received(self, http: HttpRequest) -> AsyncIterator[bytes]:
        """The body of a request, which counts as in memory until the block ends.

        Raises:
          ApiError: it is no JSON by its type, too long or too slow, or there are too many.
        """
        given = http.headers.get("content-type", "")
        if given.partition(";")[0].strip().lower() != JSON:
            # A page of another site may send other types without asking this server first.
            said = f"the Content-Type must be {JSON}, not {given[:100]!r}: curl takes "
            said += f"-H 'Content-Type: {JSON}'"
            raise ApiError(said, status=415, code="unsupported_media_type")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._receive(http, body)
        except TimeoutError:
            self._give_back(body)
            said = f"the body did not come within {BODY_SECONDS:g} s"
            raise ApiError(said, status=408, code="body_too_slow") from None
        except BaseException:
            self._give_back(body)
            raise
        try:
            yield bytes(body)
        finally:
            self._give_back(body)

    async def _receive(self, http: HttpRequest, body: bytearray) -> None:
        limit = self._most_bytes
        said = f"the body is longer than {limit} bytes"
        too_long = ApiError(said, status=413, code="body_too_large")
        length = http.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise too_long
        async for chunk in http.stream():
            before = _counted(len(body))
            body += chunk
            self._room -= _counted(len(body)) - before
            if len(body) > limit:
                raise too_long
            if _counted(len(body)) and self._room < 0:
                raise unavailable("too many long bodies are being read")

    def _give_back(self, body: bytearray) -> None:
        self._room += _counted(len(body))

    async def parse(self, body: bytes, read: Callable[[bytes], _T]) -> _T:
        """Reads a body with `read`, in a thread."""
        threads = self._large if len(body) > LARGE_BYTES else self._small
        return await asyncio.get_running_loop().run_in_executor(threads, read, body)


def _counted(num_bytes: int) -> int:
    """Bytes that count: small bodies are bounded by the number of connections."""
    return num_bytes if num_bytes > LARGE_BYTES else 0
