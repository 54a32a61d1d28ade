"""Ids of requests, in a header and in the log."""

import dataclasses
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moejax.errors import print_stderr, printable

HEADER = "x-request-id"
QUIET_PATHS = ("/health", "/metrics")  # machines read them every few seconds; not logged
_MOST_PATH = 100  # characters of a path that a line shows


@dataclasses.dataclass
class _LoggedRequest:
    """One request, whose line is printed when it has ended."""

    id: str  # its client's, or a random one
    outcome: str = ""  # the word that the metrics count it by
    usage: str = ""  # tokens and their pace


class RequestLog:
    """Gives each request an id, which its answer carries, and prints a line about its end.

    A client's own `X-Request-Id` is kept if it is 1 to 128 signs of ASCII without spaces. Routes
    find the request as `state.log`.
    """

    def __init__(self, app: ASGIApp, *, is_printed: bool):
        """Wraps an application, the guards too; `is_printed`: whether stderr gets lines."""
        self._app = app
        self._is_printed = is_printed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands the request on with its id, and prints its line."""
        given = Headers(scope=scope).get(HEADER, "")
        is_valid = re.fullmatch("[!-~]{1,128}", given)
        log = _LoggedRequest(given if is_valid else secrets.token_hex(12))
        scope.setdefault("state", {})["log"] = log
        started, status = time.monotonic(), "no answer"

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = log.id
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._is_printed and scope["path"] not in QUIET_PATHS:
                took = f"{time.monotonic() - started:.3f} s"
                said = [one for one in (status, log.outcome, took, log.usage) if one]
                path = scope["path"][:_MOST_PATH].replace("\n", "\\n")
                print_stderr(printable(f"{log.id}: {scope['method']} {path}: {', '.join(said)}"))
