"""Limits on connections: their number, and the time for headers, between requests and to read.

uvicorn has a time limit between requests alone. A client that connects and is silent, sends half a
header, goes on with a body after its answer, or does not read, would keep its connection for ever.
Nor does it stop accepting, so that many clients at once would take all open files.
"""

import asyncio
import contextlib
import dataclasses
import resource
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from moejax.serving.errors import ApiError, raw_error, unavailable

BACKLOG = 1024  # connections that the kernel keeps until they are accepted
MOST_REFUSED = 64  # connections over the limit that are told so; further ones wait in the kernel
REFUSED_S = 1.0  # a refused client may take to send its request and read the answer
NO_FILES_S = 0.1  # until a connection is accepted once more where no file could be opened
OTHER_FILES = 256  # descriptors that checkpoints, logs and the event loop may take


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one server."""

    most: int  # open connections
    # seconds for the headers of a request, from connecting or from their first byte
    header_s: float = 10.0
    idle_s: float = 20.0  # seconds between two requests of a connection
    write_s: float = 60.0  # seconds for which a client may not read what it was sent


class Connections:
    """Open connections of one server; the longest idle one makes room for a new one."""

    def __init__(self, limits: ConnectionLimits):
        self.limits = limits  # see `ConnectionLimits`
        self.num_refused = 0  # connections that were over the limit so far
        self._open: set[LimitedProtocol] = set()
        self._idle: dict[LimitedProtocol, None] = {}  # without a request, the longest first
        self._refused: set[LimitedProtocol] = set()
        self._has_room = asyncio.Event()  # whether one more may be accepted
        self._has_room.set()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, one: "LimitedProtocol") -> bool:
        """Counts a new connection unless there are too many, all of them with a request."""
        if len(self._open) >= self.limits.most and self._idle:
            oldest = next(iter(self._idle))
            self._forget(oldest)
            oldest.transport.close()
        if len(self._open) >= self.limits.most:
            self.num_refused += 1
            return False
        self._open.add(one)
        return True

    def refuse(self, one: "LimitedProtocol") -> None:
        """Counts a connection over the limit until it is closed."""
        self._refused.add(one)
        if len(self._refused) >= MOST_REFUSED:
            self._has_room.clear()

    async def room(self) -> None:
        """Waits while as many are refused as may be."""
        await self._has_room.wait()

    def _set_idle(self, one: "LimitedProtocol", is_idle: bool) -> None:
        """Sets whether a connection is idle, without a request."""
        if not is_idle:
            self._idle.pop(one, None)
        elif one in self._open:
            self._idle.setdefault(one)

    def _forget(self, one: "LimitedProtocol") -> None:
        """Forgets a closed connection."""
        self._open.discard(one)
        self._idle.pop(one, None)
        self._refused.discard(one)
        if len(self._refused) < MOST_REFUSED:
            self._has_room.set()

    def end(self, error: ApiError) -> None:
        """Closes all connections; sends the error where no answer has begun."""
        for one in [*self._open, *self._refused]:
            if one.cycle is not None and not one.cycle.response_started:
                one.transport.write(raw_error(error))
            one.transport.abort()


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn over one connection, within the limits of a server."""

    def __init__(self, *arguments: Any, all_connections: Connections, **how: Any):
        super().__init__(*arguments, **how)
        self._all = all_connections
        self._limits = all_connections.limits
        self._is_refused = False
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts a connection; asyncio calls it."""
        super().connection_made(transport)
        if self._all.admit(self):
            self._watch()
            return
        self._is_refused = True
        self._all.refuse(self)
        self._start("refused", REFUSED_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Reads a part; asyncio calls it."""
        if not self._is_refused:
            super().data_received(data)
            self._watch()
        elif "told" not in self._timers:  # what still comes is not looked at
            self._start("told", REFUSED_S, self.transport.close)
            self.transport.write(raw_error(unavailable("there are too many connections")))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets a connection; asyncio calls it."""
        self._all._forget(self)
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Ends an answer; uvicorn calls it."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Stops writing; asyncio calls it."""
        super().pause_writing()
        self._start("write", self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Goes on writing; asyncio calls it."""
        self._stop("write")
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP with status 400, unless an answer has begun."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(raw_error(ApiError(msg, code="invalid_http")))
        self.transport.close()

    def _watch(self) -> None:
        """Starts or ends the time for headers, by whether there is a request."""
        is_idle = self.cycle is None or self.cycle.response_complete
        self._all._set_idle(self, is_idle)
        if not is_idle:
            self._stop("header")
        elif self.timeout_keep_alive_task is None and "header" not in self._timers:
            self._start("header", self._limits.header_s, self._end_idle)

    def _end_idle(self) -> None:
        if self.conn.trailing_data[0] and not self.transport.is_closing():
            said = f"the headers did not come within {self._limits.header_s:g} s"
            error = ApiError(said, status=408, code="headers_too_slow")
            self.transport.write(raw_error(error))
        self.transport.close()

    def _start(self, name: str, seconds: float, end: Any) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, end)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


class LimitedServer(uvicorn.Server):
    """Server of uvicorn that accepts a connection when it is sure to have a descriptor for it."""

    def __init__(self, config: uvicorn.Config, connections: Connections):
        super().__init__(config)
        self._connections = connections
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept; uvicorn calls it."""
        await super().startup(sockets=[])
        self._accepting = [asyncio.create_task(self._accept(one)) for one in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more, and lets requests end; uvicorn calls it."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            await self._connections.room()
            try:
                accepted, _ = await loop.sock_accept(listening)
            except ConnectionAbortedError:
                continue
            except OSError:  # the process, or the machine, has no more files
                await asyncio.sleep(NO_FILES_S)
                continue
            with contextlib.suppress(OSError):  # it is gone already
                await loop.connect_accepted_socket(self._protocol, accepted)

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        state, app_state = self.server_state, self.lifespan.state
        return make(config=self.config, server_state=state, app_state=app_state)


def most_connections(wanted: int) -> int:
    """Connections that the process's limit of open files allows, raised where that may be."""
    others = MOST_REFUSED + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + others:
        may = hard if hard != resource.RLIM_INFINITY else wanted + others
        soft = max(soft, min(may, wanted + others))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - others))
