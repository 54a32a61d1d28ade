"""Clients of `scripts.stress_server`: what they ask, and what they find when they look at it."""

import collections
import dataclasses
import http.client
import json
import random
import threading
import time
from typing import Any

from moejax import Engine
from moejax.generation import GenerationSettings

TIMEOUT_S = 120.0  # no answer within it is a lost one
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
TEXTS = (
    "The history of", "def fibonacci(n):", "Once upon a time there was a", "In the year 1789",
    "The capital of France is", "import numpy as np\n\n", "Water boils at",
    "She opened the door and",
)  # fmt: skip
HOW: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 24},
    {"temperature": 0.8, "top_k": 40, "max_tokens": 40},
    {"temperature": 1.0, "top_p": 0.9, "max_tokens": 16},
    {"temperature": 0.7, "stop": [" the", "\n"], "max_tokens": 48},
    {"temperature": 1.0, "min_p": 0.05, "max_tokens": 32},
)
MALFORMED: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": 1}',
    b'{"prompt": "a", "temperature": "b"}',
    b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "tools": [{}]}', b'{"prompt": [-1]}',
    b'{"prompt": "a", "no_such_field": 1}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "n": 1e999}',
    b'{"prompt": "' + b"a b " * 20_000 + b'"}', b"[" * 100_000, b'{"prompt": NaN}',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A request, and the answer that its prompt and seed get alone."""

    path: str
    body: dict[str, Any]
    text: str
    finish_reason: str
    num_tokens: int


@dataclasses.dataclass
class Tally:
    """What all clients found; guarded by `lock`."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: list[float] = dataclasses.field(default_factory=list)  # of whole answers
    first_seconds: list[float] = dataclasses.field(default_factory=list)  # to a stream's first text
    num_tokens: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)

    def count(self, outcome: str) -> None:
        """Adds one."""
        with self.lock:
            self.outcomes[outcome] += 1

    def fault(self, kind: str, said: str) -> None:
        """Something that must not be."""
        with self.lock:
            self.outcomes[kind] += 1
            self.faults.append(f"{kind}: {said}")


def make_cases(engine: Engine, count: int, seed: int) -> list[Case]:
    """Requests of both endpoints with the answers that the engine gives to each alone."""
    assert engine.tokenizer is not None
    cases, rng = [], random.Random(seed)
    for i in range(count):
        how, text = HOW[i % len(HOW)], TEXTS[i % len(TEXTS)]
        is_chat = i % 3 == 2 and engine.tokenizer.chat_template is not None
        body: dict[str, Any] = {**how, "seed": rng.randrange(2**32)}
        prompt = text
        if is_chat:
            body["messages"] = [{"role": "user", "content": text}]
            prompt = engine.tokenizer.apply_chat_template(body["messages"])
        else:
            body["prompt"] = text
        asked = {name: value for name, value in body.items() if name not in ("prompt", "messages")}
        asked["max_new_tokens"] = asked.pop("max_tokens")
        settings = GenerationSettings.of(add_special_tokens=not is_chat, **asked)
        [answer] = engine.generate([prompt], **dataclasses.asdict(settings))
        assert answer.text is not None
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        reason = FINISH[answer.finish_reason]
        cases.append(Case(path, body, answer.text, reason, len(answer.tokens)))
    return cases


class Client:
    """One of many: asks, goes away early, sends nonsense; compares what comes with its case."""

    def __init__(self, port: int, cases: list[Case], tally: Tally, seed: int):
        """Connects with each request anew.

        Args:
          port: of the server on this machine.
          cases: what may be asked.
          tally: what was found.
          seed: of what is asked when.
        """
        self._port = port
        self._cases = cases
        self._tally = tally
        self._rng = random.Random(seed)

    def run(self, until: float) -> None:
        """Goes on until `time.monotonic()` says so."""
        while time.monotonic() < until:
            case, draw = self._rng.choice(self._cases), self._rng.random()
            try:
                if draw < 0.08:
                    self._send_nonsense()
                elif draw < 0.2:
                    self._leave_early(case)
                elif draw < 0.65:
                    self._ask_stream(case)
                else:
                    self._ask(case)
            except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
                self._tally.fault("lost", f"{type(error).__name__}: {error}")

    def _post(
        self, path: str, body: bytes
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def _refused(self, response: http.client.HTTPResponse) -> bool:
        """Whether the queue was full, which is no fault: come again later."""
        if response.status != 429:
            if response.status != 200:
                said = f"status {response.status}: {response.read()[:200]!r}"
                self._tally.fault("refused", said)
            return response.status != 200
        self._tally.count("queue full")
        if int(response.headers["Retry-After"]) < 1:
            self._tally.fault("refused", "429 without Retry-After")
        time.sleep(0.2 + 0.3 * self._rng.random())
        return True

    def _ask(self, case: Case) -> None:
        started = time.monotonic()
        connection, response = self._post(case.path, json.dumps(case.body).encode())
        try:
            if self._refused(response):
                return
            answer = json.loads(response.read())
        finally:
            connection.close()
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "messages" in case.body else choice["text"]
        self._compare(case, text, choice["finish_reason"], answer["usage"], started)

    def _ask_stream(self, case: Case) -> None:
        started = time.monotonic()
        body = {**case.body, "stream": True, "stream_options": {"include_usage": True}}
        connection, response = self._post(case.path, json.dumps(body).encode())
        text, reason, usage, ended = "", None, {}, False
        try:
            if self._refused(response):
                return
            for chunk in events(response):
                if chunk is None:
                    ended = True
                    break
                usage = chunk["usage"] or usage
                for choice in chunk["choices"]:
                    if not text:
                        with self._tally.lock:
                            self._tally.first_seconds.append(time.monotonic() - started)
                    delta = choice.get("delta", {}).get("content", "")
                    text += delta or choice.get("text", "")
                    reason = choice["finish_reason"] or reason
        finally:
            connection.close()
        if not ended:
            self._tally.fault("lost", f"a stream ended after {text!r}")
            return
        self._compare(case, text, reason, usage, started)

    def _compare(
        self, case: Case, text: str, reason: str | None, usage: dict[str, int], started: float
    ) -> None:
        seconds = time.monotonic() - started
        found = (text, reason, usage["completion_tokens"])
        expected = (case.text, case.finish_reason, case.num_tokens)
        if found != expected:
            self._tally.fault("mixed", f"{case.body}: {found} in place of {expected}")
            return
        with self._tally.lock:
            self._tally.outcomes["answered"] += 1
            self._tally.seconds.append(seconds)
            self._tally.num_tokens += case.num_tokens

    def _leave_early(self, case: Case) -> None:
        """Goes after some chunks of a stream, or after a while without an answer."""
        streams = self._rng.random() < 0.6
        body = json.dumps({**case.body, "stream": streams}).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", case.path, body, {"Content-Type": "application/json"})
            if streams:
                response = connection.getresponse()
                if not self._refused(response):
                    chunks = events(response)
                    for _ in range(self._rng.randrange(1, 6)):
                        next(chunks, None)
                    self._tally.count("left early")
            else:
                time.sleep(0.3 * self._rng.random())
                self._tally.count("left early")
        finally:
            connection.close()

    def _send_nonsense(self) -> None:
        path = self._rng.choice(("/v1/completions", "/v1/chat/completions"))
        connection, response = self._post(path, self._rng.choice(MALFORMED))
        try:
            said = json.loads(response.read())
        finally:
            connection.close()
        if not 400 <= response.status < 500 or "message" not in said["error"]:
            self._tally.fault("refused", f"nonsense got {response.status}: {said}")
        else:
            self._tally.count("malformed, told so")


def events(response: http.client.HTTPResponse) -> Any:
    """The JSON objects of a stream of events; None for its end."""
    for line in response:
        if line.startswith(b"data: "):
            said = line.removeprefix(b"data: ").strip()
            if said == b"[DONE]":
                yield None
                return
            yield json.loads(said)
