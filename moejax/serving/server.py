"""The process: a socket, the application on uvicorn, the batcher's thread, and their end.

uvicorn has a time limit between requests alone. A client that connects and is silent, sends half a
header, goes on with a body after its answer, or does not read, would keep its connection for ever.
Nor does it stop accepting, so that many clients at once would take all open files. Connections are
limited here: their number, and the time for headers, between requests and to read.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from moejax.config.serve import ServeConfig
from moejax.engine import Engine
from moejax.errors import MoejaxError, print_stderr
from moejax.inference.generation import describe_defaults
from moejax.serving.app import Access, Api
from moejax.serving.batcher import ENDING, Batcher
from moejax.serving.errors import ApiError, raw_error, unavailable
from moejax.serving.metrics import Metrics

BACKLOG = 1024  # connections that the kernel keeps until they are accepted
MOST_REFUSED = 64  # connections over the limit that are told so; further ones wait in the kernel
REFUSED_S = 1.0  # a refused client may take to send its request and read the answer
NO_FILES_S = 0.1  # until a connection is accepted once more where no file could be opened
OTHER_FILES = 256  # descriptors that checkpoints, logs and the event loop may take


@dataclasses.dataclass(frozen=True)
class _ConnectionLimits:
    """Limits of one server."""

    most: int  # open connections
    # seconds for the headers of a request, from connecting or from their first byte
    header_s: float = 10.0
    idle_s: float = 20.0  # seconds between two requests of a connection
    write_s: float = 60.0  # seconds for which a client may not read what it was sent


class _Connections:
    """Open connections of one server; the longest idle one makes room for a new one."""

    def __init__(self, limits: _ConnectionLimits):
        self.limits = limits  # see `_ConnectionLimits`
        self.num_refused = 0  # connections that were over the limit so far
        self._open: set[_LimitedProtocol] = set()
        self._idle: dict[_LimitedProtocol, None] = {}  # without a request, the longest first
        self._refused: set[_LimitedProtocol] = set()
        self._has_room = asyncio.Event()  # whether one more may be accepted
        self._has_room.set()

    def __len__(self) -> int:
        return len(self._open)

    def protocol(self, *arguments: Any, **how: Any) -> asyncio.Protocol:
        """Makes the protocol of one connection; uvicorn calls it."""
        return _LimitedProtocol(self, *arguments, **how)

    def _admit(self, one: "_LimitedProtocol") -> bool:
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

    def _refuse(self, one: "_LimitedProtocol") -> None:
        """Counts a connection over the limit until it is closed."""
        self._refused.add(one)
        if len(self._refused) >= MOST_REFUSED:
            self._has_room.clear()

    async def _room(self) -> None:
        """Waits while as many are refused as may be."""
        await self._has_room.wait()

    def _set_idle(self, one: "_LimitedProtocol", is_idle: bool) -> None:
        """Sets whether a connection is idle, without a request."""
        if not is_idle:
            self._idle.pop(one, None)
        elif one in self._open:
            self._idle.setdefault(one)

    def _forget(self, one: "_LimitedProtocol") -> None:
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


class _LimitedProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn over one connection, within the limits of a server."""

    def __init__(self, all_connections: _Connections, *arguments: Any, **how: Any):
        super().__init__(*arguments, **how)
        self._all = all_connections
        self._limits = all_connections.limits
        self._is_refused = False
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts a connection; asyncio calls it."""
        super().connection_made(transport)
        if self._all._admit(self):
            self._watch()
            return
        self._is_refused = True
        self._all._refuse(self)
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


_LATE_S = 2.0  # after the grace, to tell the clients
_COMPILES_S = 1.0  # as long as a program may compile before those that wait for it are told


class _Server(uvicorn.Server):
    """Accepts a connection when it is sure to have a descriptor for it.

    At the end running answers get a grace to finish.
    """

    def __init__(
        self, config: uvicorn.Config, batcher: Batcher, connections: _Connections, grace_s: float
    ):
        super().__init__(config)
        self._batcher, self._connections, self._grace_s = batcher, connections, grace_s
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept; uvicorn calls it."""
        await super().startup(sockets=[])
        self._accepting = [asyncio.create_task(self._accept(one)) for one in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more, lets answers go on for the grace, then cuts them; uvicorn calls it."""
        if self._batcher.load_error is None:
            print_stderr(f"stopping: answers may go on for {self._grace_s:g} s")
        self._batcher.drain()
        late = asyncio.create_task(self._end_late())
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)
        late.cancel()
        self._batcher.cut()

    async def _end_late(self) -> None:
        """Ends requests after the grace, or when one program has compiled for a while."""
        loop, was_compiling = asyncio.get_running_loop(), False
        until = loop.time() + self._grace_s
        while (left := until - loop.time()) > 0:
            is_compiling = self._batcher.is_compiling
            if is_compiling and was_compiling:
                break
            was_compiling = is_compiling
            await asyncio.sleep(min(left, _COMPILES_S))
        self._batcher.cut()
        await asyncio.sleep(_LATE_S)
        self._connections.end(unavailable(ENDING))  # whose bodies do not come, or are not read

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            await self._connections._room()
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


def _most_connections(wanted: int) -> int:
    """_Connections that the process's limit of open files allows, raised where that may be."""
    others = MOST_REFUSED + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + others:
        may = hard if hard != resource.RLIM_INFINITY else wanted + others
        soft = max(soft, min(may, wanted + others))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - others))


def serve(config: ServeConfig, load: Callable[[], Engine], key: str = "") -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
      load: gives the engine; called in a thread while the server already answers /health.

    Raises:
      MoejaxError: the port is taken, or the model cannot be loaded.
    """
    listening = _bind(config.host, config.port)
    metrics = Metrics()
    server: _Server | None = None

    def checked_load() -> Engine:
        engine = load()
        assert engine.tokenizer is not None
        engine.tokenizer.most_token_bytes  # noqa: B018, found now, not while a client waits
        return engine

    def loaded() -> None:
        if batcher.load_error is not None:
            assert server is not None
            server.should_exit = True
        else:
            assert batcher.engine is not None
            said = describe_defaults(batcher.engine.defaults, config.request())
            print_stderr(f"ready: {_model_name(config)} at {url}{said and f'; {said}'}")

    batcher = Batcher(
        checked_load, metrics, max_batch=config.max_batch, queue_limit=config.queue_limit,
        deadline_s=config.deadline_s, warms_up=config.warm_up, on_loaded=loaded,
    )  # fmt: skip
    api = Api(
        batcher, metrics, model_name=_model_name(config),
        defaults=lambda engine: config.settings(engine.defaults),
        max_body_bytes=config.max_body_bytes,
        most_answers=min(config.max_answers, config.queue_limit),
        access=Access(config.host, config.allowed_hosts, config.cors_origins, key),
        chat=config.chat_settings(), logs_requests=config.log_requests,
    )  # fmt: skip
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print_stderr(f"listening at {url}")
    if not key and not _listens_here_alone(host):
        print_stderr(f"there is no api_key: whoever reaches {url} may use it")
    counted = _count_connections(config.max_connections, metrics)
    server = _Server(
        _uvicorn_config(api.application(), counted), batcher, counted, config.grace_s
    )  # fmt: skip

    def end(*_: object) -> None:
        server.should_exit = True

    # Before uvicorn has its own handler, and after: it raises what ended it once more.
    signal.signal(signal.SIGTERM, end)
    batcher.start()
    with contextlib.closing(listening):
        server.run(sockets=[listening])
    if batcher.load_error is not None:
        raise batcher.load_error
    if not batcher.join(_LATE_S):
        # It loads or compiles, which nothing can interrupt; threads of XLA do not survive the
        # interpreter's own end.
        sys.stderr.flush()
        os._exit(0)
    if batcher.engine is not None:
        batcher.engine.close()


def _count_connections(most: int, metrics: Metrics) -> _Connections:
    """Counts connections up to so many, or to what the process may open."""
    if (may := _most_connections(most)) < most:
        said = f"max_connections={most} is {may} here, by the limit of open files (ulimit -n)"
        print_stderr(said)
    found = _Connections(_ConnectionLimits(may))
    metrics.connections.set_function(lambda: len(found))
    metrics.connections_refused.set_function(lambda: found.num_refused)
    return found


def _uvicorn_config(application: ASGIApp, connections: _Connections) -> uvicorn.Config:
    """Settings of uvicorn; the same whatever loops and parsers are installed beside it."""
    limits = connections.limits
    protocol: Any = connections.protocol
    return uvicorn.Config(
        application, log_level="error", access_log=False, lifespan="off", ws="none",
        loop="asyncio", http=protocol, server_header=False,
        timeout_keep_alive=int(limits.idle_s),
    )  # fmt: skip


def _listens_here_alone(host: str) -> bool:
    """Whether an address is of the loopback, which other machines do not reach."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket."""
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise MoejaxError(f"host={host}: {error}") from error
    listening = socket.socket(kind[0], kind[1])
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(kind[4])
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        said = f"cannot listen on {host}:{port}: {error.strerror}"
        raise MoejaxError(f"{said}; choose another with --config.port, 0 for any") from error
    return listening


def _model_name(config: ServeConfig) -> str:
    """Name of the model for clients: a hub's name, or a directory's last part."""
    if config.model_name:
        return config.model_name
    path = Path(config.checkpoint).expanduser()
    return path.resolve().name if path.is_dir() else config.checkpoint
