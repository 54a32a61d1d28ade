"""The ASGI application: routes of OpenAI's API, health, metrics."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from moejax.engine import Engine
from moejax.inference.generation import GenerationSettings
from moejax.serving.answers import AnswerWriter, Timings, TokenTexts
from moejax.serving.batcher import Batcher
from moejax.serving.errors import ApiError, error_response, json_response, unavailable
from moejax.serving.fields import read_object
from moejax.serving.guards import AccessGuard, HostGuard
from moejax.serving.metrics import Metrics
from moejax.serving.request_log import HEADER, RequestLog
from moejax.serving.requests import (
    ModelFacts,
    Request,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from moejax.serving.rows import AnswerPart, Row
from moejax.text.chat_template import ChatSettings

_T = TypeVar("_T")

JSON = "application/json"
BODY_SECONDS = 30.0  # a client may take to send its body
MOST_BODIES = 16  # as long as they may be, in memory at a time
LARGE_BYTES = 2**16  # larger ones are read one after the other, beside the small ones


class _Bodies:
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
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    await self._receive(http, body)
            except TimeoutError:
                said = f"the body did not come within {BODY_SECONDS:g} s"
                raise ApiError(said, status=408, code="body_too_slow") from None
            yield bytes(body)
        finally:
            self._room += _counted(len(body))

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

    async def parse(self, body: bytes, read: Callable[[bytes], _T]) -> _T:
        """Reads a body with `read`, in a thread."""
        threads = self._large if len(body) > LARGE_BYTES else self._small
        return await asyncio.get_running_loop().run_in_executor(threads, read, body)


def _counted(num_bytes: int) -> int:
    """Bytes that count: small bodies are bounded by the number of connections."""
    return num_bytes if num_bytes > LARGE_BYTES else 0


_LOG = logging.getLogger(__name__)
Reader = Callable[[Mapping[str, Any], ModelFacts], _T]  # of a body's object


@dataclasses.dataclass(frozen=True)
class Access:
    """Conditions on the clients that may send requests."""

    bound_to: str  # the address or name that the server listens on
    hosts: tuple[str, ...] = ()  # further names by which it is called; `*` is any
    origins: tuple[str, ...] = ()  # origins of browser pages that may send requests; `*` is any
    key: str = ""  # API key that all clients give; "" for none

    def _middleware(self) -> list[Middleware]:
        """Guards around the routes, the outermost first."""
        guards = [Middleware(HostGuard, bound_to=self.bound_to, allowed=self.hosts, key=self.key)]
        if self.origins:
            cors = Middleware(
                CORSMiddleware, allow_origins=self.origins, allow_methods=("GET", "POST"),
                allow_headers=("*",), expose_headers=(HEADER,),
            )  # fmt: skip
            guards.append(cors)
        return [*guards, Middleware(AccessGuard, key=self.key, origins=self.origins)]


class _ClientGone(Exception):
    """The client has closed its connection: nobody reads an answer any more."""


class _Exchange:
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
        self._ended_at: float | None = None  # of `time.monotonic`, when all rows have ended
        self._rows = [
            Row(
                i, prompt, settings, request.top_logprobs is not None, request.stream, self._tell,
                client, request.is_chat,
            )
            for i, (prompt, settings) in enumerate(
                zip(request.prompts, request.settings, strict=True)
            )
        ]  # fmt: skip

    async def __aenter__(self) -> "_Exchange":
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
          _ClientGone: nobody reads them.
          ApiError: a row has no answer; the others are cancelled.
        """
        left = {row.index for row in self._rows}
        while left:
            part = await self._parts.get()
            if part is None:
                raise _ClientGone
            if part.row not in left:  # it has ended; what came after it is for others of its batch
                continue
            if part.error is not None:
                raise part.error
            if part.finish_reason:
                left.discard(part.row)
            if not left:
                self._ended_at = time.monotonic()
            yield part

    def timings(self) -> Timings:
        """Seconds of the request, once all of its rows have ended."""
        assert self._ended_at is not None
        arrived = min(row.arrived for row in self._rows)
        told = [row.first_token_at for row in self._rows if row.first_token_at is not None]
        first = min(told, default=self._ended_at)
        shared: dict[tuple[int, ...], int] = {}  # of answers to one prompt, that of the first
        for row in self._rows:
            prompt = tuple(row.prompt)
            shared[prompt] = min(row.num_shared, shared.get(prompt, row.num_shared))
        return Timings(first - arrived, self._ended_at - first, sum(shared.values()))

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


class Api:
    """The routes over one batcher."""

    def __init__(
        self,
        batcher: Batcher,
        metrics: Metrics,  # told how they end
        *,
        model_name: str,  # name by which clients call the model
        # gives the settings of fields that requests leave out
        defaults: Callable[[Engine], GenerationSettings],
        max_body_bytes: int,  # longer bodies are refused
        most_answers: int,  # requests of more answers are refused
        access: Access,  # conditions on clients
        # settings of conversations whose request leaves them out
        chat: ChatSettings = ChatSettings(),  # noqa: B008, frozen
        logs_requests: bool = False,  # whether stderr gets a line about each
    ):
        self._batcher = batcher
        self._metrics = metrics
        self._model_name = model_name
        self._defaults = defaults
        self._bodies = _Bodies(max_body_bytes)
        self._most_answers = most_answers
        self._told: set[str] = set()  # fields that were ignored so far
        self._access = access
        self._chat = chat
        self._logs_requests = logs_requests
        self._facts: ModelFacts | None = None  # once there is an engine
        self._texts: TokenTexts | None = None  # likewise
        self._started = int(time.time())

    def application(self) -> ASGIApp:
        """Returns the ASGI application."""
        handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _server_error}
        post = ["POST"]
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._tell_metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/v1/completions", self._answers("completions", read_completion), methods=post),
            Route("/v1/chat/completions", self._answers("chat", read_chat), methods=post),
            Route("/tokenize", self._counts("tokenize", read_tokenize), methods=post),
            Route("/detokenize", self._counts("detokenize", read_detokenize), methods=post),
        ]
        guards = self._access._middleware()
        inner = Starlette(routes=routes, exception_handlers=handlers, middleware=guards)
        return RequestLog(inner, is_printed=self._logs_requests)

    async def _health(self, request: HttpRequest) -> Response:
        engine = self._batcher.engine
        body = {
            "alive": True,
            "ready": self._batcher.is_ready,
            "model": self._model_name,
            "device": str(engine.device) if engine else None,
            "waiting": self._batcher.num_waiting,
        }
        return json_response(body, 200 if self._batcher.is_ready else 503)

    async def _tell_metrics(self, request: HttpRequest) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._metrics.text(), media_type=kind)

    async def _models(self, request: HttpRequest) -> Response:
        model = {
            "id": self._model_name, "object": "model", "created": self._started,
            "owned_by": "moejax",
        }  # fmt: skip
        name = request.path_params.get("name")
        if name is None:
            return json_response({"object": "list", "data": [model]})
        if name != self._model_name:
            said = f"the model {name[:100]!r} is not served here; {self._model_name!r} is"
            return error_response(ApiError(said, status=404, param="model", code="model_not_found"))
        return json_response(model)

    def _endpoint(self, name: str, answer: Callable[[HttpRequest], Any]) -> Any:
        """A route that counts how its requests end; a stream counts its own end."""

        async def answered(http: HttpRequest) -> Any:
            error: BaseException | None = None
            response: Any = None
            try:
                response = await answer(http)
            except ApiError as refused:
                error = refused
                response = error_response(refused)
            except (_ClientGone, ClientDisconnect):
                error = _ClientGone()
                response = Response(status_code=499)  # nobody reads it
            except BaseException as other:
                error = other
                raise
            finally:
                if not isinstance(response, _EventStream):
                    self._count(http, name, error)
            return response

        return answered

    def _answers(self, name: str, read: Reader[Request]) -> Any:
        async def answer(http: HttpRequest) -> Any:
            request, engine = await self._read(http, read)
            for field in set(request.ignored) - self._told:
                self._told.add(field)
                _LOG.warning("ignored: the field %s of a request; said once", field)
            if request.stream:
                return _EventStream(self._stream(request, engine, http, name))
            async with self._exchange(request, http) as exchange:
                parts = await exchange.answers()
            writer, timings = self._writer(request, engine, http), exchange.timings()
            found = writer.whole(parts, timings)
            http.state.log.usage = writer.log_line(timings)
            return json_response(found)

        return self._endpoint(name, answer)

    def _counts(self, name: str, read: Reader[dict[str, Any]]) -> Any:
        async def answer(http: HttpRequest) -> Response:
            found, _ = await self._read(http, read)
            return json_response(found)

        return self._endpoint(name, answer)

    async def _read(self, http: HttpRequest, read: Reader[_T]) -> tuple[_T, Engine]:
        """Reads and checks a request."""
        engine = self._batcher.engine
        async with self._bodies.received(http) as body:
            if engine is None or engine.tokenizer is None:
                raise unavailable("the model is being loaded")
            if self._facts is None:
                self._facts = ModelFacts(
                    self._model_name, engine.tokenizer, engine.config.vocab_size,
                    self._defaults(engine), engine.check_prompt, engine.longest_prompt,
                    self._most_answers, self._chat,
                )  # fmt: skip
            facts = self._facts
            request = await self._bodies.parse(body, lambda body: read(read_object(body), facts))
        return request, engine

    def _exchange(self, request: Request, http: HttpRequest) -> _Exchange:
        """Starts an exchange; its client is an address, as all share one key."""
        client = http.client.host if http.client else ""
        return _Exchange(request, self._batcher, http.receive, client)

    def _writer(self, request: Request, engine: Engine, http: HttpRequest) -> AnswerWriter:
        if self._texts is None:
            assert engine.tokenizer is not None
            self._texts = TokenTexts(engine.tokenizer)
        log = http.state.log
        return AnswerWriter(request, log.id, self._model_name, self._texts, engine.eos_ids)

    async def _stream(
        self, request: Request, engine: Engine, http: HttpRequest, name: str
    ) -> AsyncIterator[dict[str, Any]]:
        """Yields an answer's chunks; an error before the first chunk is raised."""
        writer, has_begun = self._writer(request, engine, http), False
        error: BaseException | None = None
        try:
            async with self._exchange(request, http) as exchange:
                async for part in exchange.parts():
                    for chunk in writer.chunks(part):
                        has_begun = True
                        yield chunk
            timings = exchange.timings()
            http.state.log.usage = writer.log_line(timings)
            if (last := writer.last_chunk(timings)) is not None:
                yield last
        except ApiError as refused:
            error = refused
            if not has_begun:
                raise
            yield refused.body()
        except BaseException as other:  # GeneratorExit, too: whoever sends has been cancelled
            error = _ClientGone() if isinstance(other, GeneratorExit) else other
            raise
        finally:
            self._count(http, name, error)

    def _count(self, http: HttpRequest, endpoint: str, error: BaseException | None) -> None:
        outcome = _outcome_of(error)
        self._metrics.requests.labels(endpoint, outcome).inc()
        http.state.log.outcome = outcome


def _outcome_of(error: BaseException | None) -> str:
    """Names a request's outcome in one word, for the metrics."""
    if error is None:
        return "ok"
    if isinstance(error, _ClientGone | asyncio.CancelledError):
        return "cancelled"
    if not isinstance(error, ApiError):
        return "error"
    words = {429: "rejected", 503: "unavailable", 504: "deadline"}
    return words.get(error.status, "invalid" if error.status < 500 else "error")


class _EventStream:
    """Server-sent events, `data: JSON` each, `data: [DONE]` last, where no error was."""

    def __init__(self, chunks: AsyncIterator[dict[str, Any]]):
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the chunks; the first one decides the status."""
        chunks = self._chunks
        try:
            first = await anext(chunks)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        except _ClientGone:
            return
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        failed = False
        try:
            await send(_event(first))
            async for chunk in chunks:
                failed = "error" in chunk
                await send(_event(chunk))
        except (_ClientGone, OSError):
            return
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]
        end = b"" if failed else b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end})


def _event(chunk: Mapping[str, Any]) -> dict[str, Any]:
    body = b"data: " + json.dumps(chunk, allow_nan=False).encode() + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return json_response(
        ApiError(said, status=error.status_code).body(), error.status_code, error.headers
    )


async def _server_error(request: HttpRequest, error: Exception) -> Response:
    said = "the server made a mistake; its log says which"
    return error_response(ApiError(said, status=500, code="internal_error"))
