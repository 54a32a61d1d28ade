"""The process: a socket, the application on uvicorn, the batcher's thread, and their end."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn

from moejax.engine import Engine
from moejax.errors import MoejaxError
from moejax.generation import GenerationSettings
from moejax.serve_config import ServeConfig
from moejax.serving.app import Api
from moejax.serving.batcher import Batcher, warm_up
from moejax.serving.metrics import Metrics

_BACKLOG = 2048
_LATE_S = 2.0  # after the grace, to tell the clients


class _Server(uvicorn.Server):
    """Ends the batcher with itself: what runs may finish, but not for ever."""

    def __init__(self, config: uvicorn.Config, batcher: Batcher, grace_s: float):
        super().__init__(config)
        self._batcher = batcher
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        self._batcher.drain()
        late = asyncio.get_running_loop().call_later(self._grace_s, self._batcher.cut)
        await super().shutdown(sockets)
        late.cancel()
        self._batcher.cut()


def serve(config: ServeConfig, load: Callable[[], Engine]) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
      config: of the run.
      load: gives the engine; called in a thread while the server already answers /health.

    Raises:
      MoejaxError: the port is taken, or the model cannot be loaded or has no tokenizer.
    """
    listening = bind(config.host, config.port)
    metrics, defaults = Metrics(), GenerationSettings.of(**config.request())
    server: _Server | None = None

    def checked_load() -> Engine:
        engine = load()
        if engine.tokenizer is None:
            raise MoejaxError(f"{config.checkpoint} has no tokenizer.json, so it takes no text")
        if config.warm_up:
            warm_up(engine, defaults, config.max_batch)
        return engine

    def loaded() -> None:
        if batcher.load_error is not None:
            assert server is not None
            server.should_exit = True
        else:
            print(f"ready: {_model_name(config)} at {url}", file=sys.stderr, flush=True)

    batcher = Batcher(
        checked_load, metrics, max_batch=config.max_batch, queue_limit=config.queue_limit,
        deadline_s=config.deadline_s, on_loaded=loaded,
    )  # fmt: skip
    api = Api(
        batcher, metrics, model_name=_model_name(config),
        defaults=defaults, max_body_bytes=config.max_body_bytes,
        queue_limit=config.queue_limit,
    )  # fmt: skip
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"listening at {url}", file=sys.stderr, flush=True)
    settings = uvicorn.Config(
        api.application(), log_level="warning", access_log=False, lifespan="off", ws="none",
        timeout_graceful_shutdown=int(config.grace_s + _LATE_S) + 1, backlog=_BACKLOG,
        server_header=False,
    )  # fmt: skip
    server = _Server(settings, batcher, config.grace_s)

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


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
      MoejaxError: there is no such address, or the port is taken.
    """
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise MoejaxError(f"host={host}: {error}") from error
    listening = socket.socket(kind[0], kind[1])
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(kind[4])
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        said = f"cannot listen on {host}:{port}: {error.strerror}"
        raise MoejaxError(f"{said}; choose another with --config.port, 0 for any") from error
    return listening


def _model_name(config: ServeConfig) -> str:
    """As clients call the model: a hub's name as it is, of a directory the last part."""
    if config.model_name:
        return config.model_name
    path = Path(config.checkpoint).expanduser()
    return path.resolve().name if path.is_dir() else config.checkpoint
