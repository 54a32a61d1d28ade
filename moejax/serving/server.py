"""The process: a socket, the application on uvicorn, the batcher's thread, and their end."""

import asyncio
import contextlib
import functools
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from moejax.config.serve import ServeConfig
from moejax.engine import Engine
from moejax.errors import MoejaxError, print_stderr
from moejax.inference.generation import describe_defaults
from moejax.serving.app import Access, Api
from moejax.serving.batcher import ENDING, Batcher
from moejax.serving.connections import (
    BACKLOG,
    ConnectionLimits,
    Connections,
    LimitedProtocol,
    LimitedServer,
    most_connections,
)
from moejax.serving.errors import unavailable
from moejax.serving.metrics import Metrics

_LATE_S = 2.0  # after the grace, to tell the clients
_COMPILES_S = 1.0  # as long as a program may compile before those that wait for it are told


class _Server(LimitedServer):
    """The server; at its end running answers get a grace to finish."""

    def __init__(
        self, config: uvicorn.Config, batcher: Batcher, connections: Connections, grace_s: float
    ):
        super().__init__(config, connections)
        self._batcher = batcher
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets answers go on for the grace, then cuts them; uvicorn calls it."""
        if self._batcher.load_error is None:
            said = f"stopping: answers may go on for {self._grace_s:g} s"
            print_stderr(said)
        self._batcher.drain()
        late = asyncio.create_task(self._end_late())
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


def serve(config: ServeConfig, load: Callable[[], Engine], key: str = "") -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
      load: gives the engine; called in a thread while the server already answers /health.

    Raises:
      MoejaxError: the port is taken, or the model cannot be loaded or has no tokenizer.
    """
    listening = _bind(config.host, config.port)
    metrics = Metrics()
    server: _Server | None = None

    def checked_load() -> Engine:
        engine = load()
        if engine.tokenizer is None:
            raise MoejaxError(f"{config.checkpoint} has no tokenizer.json, so it takes no text")
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


def _count_connections(most: int, metrics: Metrics) -> Connections:
    """Counts connections up to so many, or to what the process may open."""
    if (may := most_connections(most)) < most:
        said = f"max_connections={most} is {may} here, by the limit of open files (ulimit -n)"
        print_stderr(said)
    found = Connections(ConnectionLimits(may))
    metrics.connections.set_function(lambda: len(found))
    metrics.connections_refused.set_function(lambda: found.num_refused)
    return found


def _uvicorn_config(application: ASGIApp, connections: Connections) -> uvicorn.Config:
    """Settings of uvicorn; the same whatever loops and parsers are installed beside it."""
    limits = connections.limits
    protocol: Any = functools.partial(LimitedProtocol, all_connections=connections)
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
