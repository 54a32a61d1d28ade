"""A tiny model behind a server in this process, and what its tests ask with."""

import contextlib
import dataclasses
import functools
import http.client
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import openai

from moejax import Engine
from moejax.inference.continuous import ContinuousBatch
from moejax.inference.generation import GenerationSettings
from moejax.serving.app import Access, Api
from moejax.serving.batcher import Batcher
from moejax.serving.metrics import Metrics
from moejax.serving.server import _bind, _ConnectionLimits, _Connections, _Server, _uvicorn_config
from moejax.text.tokenizer import Tokenizer
from tests.tiny_engine import load_tiny_engine

WAIT_S = 30.0
NAME = "tiny"
# Every role and the answer's beginning, and a word for `enable_thinking`.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    "{% if enable_thinking is defined %}think={{ enable_thinking }} {% endif %}"
    "{% if reasoning_effort in ['low'] %}effort={{ reasoning_effort }} {% endif %}bot:"
)


def tiny_chat_engine(directory: Path, **how: Any) -> Engine:
    """The tiny engine with a chat template, which the directory keeps."""
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    engine = load_tiny_engine(directory, **how)
    engine.tokenizer = Tokenizer.from_directory(directory)
    return engine


@functools.cache
def shared_engine() -> Engine:
    """The tiny chat engine that all files of a process serve: most of the time is compiling."""
    with tempfile.TemporaryDirectory() as directory:
        return tiny_chat_engine(Path(directory))


@dataclasses.dataclass
class Served:
    """A server that is up."""

    port: int
    batcher: Batcher
    metrics: Metrics

    @property
    def client(self) -> openai.OpenAI:
        """Makes a client of OpenAI's package that does not repeat requests after an error."""
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WAIT_S)

    def ask(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, str, dict[str, str]]:
        """Status, text and headers of a request, a stream's too."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), dict(answer.headers)

    def post(
        self, path: str, body: bytes | dict[str, Any], **more: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON and headers of a request; `more` are headers of its own."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **more}
        status, text, headers = self.ask("POST", path, sent, given)
        return status, json.loads(text), headers

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and text."""
        return self.ask("GET", path, None, headers)[:2]

    def value(self, name: str, **labels: str) -> float:
        """Value of a metric; 0 if it was never counted."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.contextmanager
def served(
    engine: Engine,
    access: Access = Access("127.0.0.1"),  # noqa: B008, frozen
    limits: _ConnectionLimits = _ConnectionLimits(100),  # noqa: B008
    max_body_bytes: int = 100_000,
    model_name: str = NAME,
    logs_requests: bool = False,
    **how: Any,
) -> Iterator[Served]:
    """A server of an engine, which outlives it; `how` replaces settings of the batcher."""
    settings = {"max_batch": 8, "queue_limit": 16, "deadline_s": 0.0, "warms_up": False, **how}
    metrics, ready = Metrics(), threading.Event()
    batcher = Batcher(lambda: engine, metrics, on_loaded=ready.set, **settings)
    api = Api(
        batcher, metrics, model_name=model_name,
        defaults=lambda _: GenerationSettings(max_new_tokens=12),
        max_body_bytes=max_body_bytes, most_answers=settings["queue_limit"], access=access,
        logs_requests=logs_requests,
    )  # fmt: skip
    with contextlib.closing(_bind("127.0.0.1", 0)) as listening:
        connections = _Connections(limits)
        server = _Server(
            _uvicorn_config(api.application(), connections), batcher, connections, WAIT_S
        )
        thread = threading.Thread(target=server.run, args=([listening],))
        batcher.start()
        thread.start()
        try:
            assert ready.wait(WAIT_S * (10 if settings["warms_up"] else 1))
            yield Served(listening.getsockname()[1], batcher, metrics)
        finally:
            batcher.cut()
            server.should_exit = True
            thread.join(WAIT_S)
            assert batcher.join(WAIT_S)


@contextlib.contextmanager
def held_steps() -> Iterator[threading.Event]:
    """No step of a running batch begins before the event is set; rows that come later wait."""
    gate, begin = threading.Event(), ContinuousBatch.step

    def step(batch: ContinuousBatch) -> Any:
        assert gate.wait(WAIT_S)
        return begin(batch)

    with mock.patch.object(ContinuousBatch, "step", step):
        try:
            yield gate
        finally:
            gate.set()


@contextlib.contextmanager
def slow_steps(engine: Engine, seconds: float) -> Iterator[None]:
    """Every call of decode takes so long at least."""
    decode = engine._runner.decode

    def late(*arguments: Any, **how: Any) -> Any:
        time.sleep(seconds)
        return decode(*arguments, **how)

    with mock.patch.object(engine._runner, "decode", late):
        yield


def wait_until(condition: Any, said: str) -> None:
    """Raises AssertionError unless it comes true in time."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"in vain: {said}")
        time.sleep(0.01)
