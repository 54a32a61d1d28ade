"""Clients of `scripts.stress_server`: requests, checks of the answers."""

import collections
import contextlib
import dataclasses
import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from scripts.stress_cases import Case, Choice, add_answer

TIMEOUT_S = 600.0  # no answer within it is a lost one
MALFORMED: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": 1}',
    b'{"prompt": "a", "temperature": "b"}',
    b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "tools": [{}]}', b'{"prompt": [-1]}',
    b'{"prompt": "a", "no_such_field": 1}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "n": 1e999}',
    b'{"prompt": "' + b"a b " * 20_000 + b'"}', b"[" * 100_000, b'{"prompt": NaN}',
)  # fmt: skip


@dataclasses.dataclass
class Tally:
    """Results of all clients; guarded by `lock`."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: list[float] = dataclasses.field(default_factory=list)  # of whole answers
    first_seconds: list[float] = dataclasses.field(default_factory=list)  # to a stream's first text
    num_tokens: int = 0
    gap: float = 0.0  # nats, of log-probabilities at most
    faults: list[str] = dataclasses.field(default_factory=list)

    def count(self, outcome: str) -> None:
        """Counts an outcome."""
        with self.lock:
            self.outcomes[outcome] += 1

    def fault(self, kind: str, said: str) -> None:
        """Records a fault."""
        with self.lock:
            self.outcomes[kind] += 1
            self.faults.append(f"{kind}: {said}")


class Sender:
    """A sender of requests to a server of this machine, each on a connection of its own."""

    def __init__(self, port: int, cases: list[Case], tally: Tally, seed: int):
        """The seed is of what is sent when."""
        self._port, self._cases, self._tally = port, cases, tally
        self._rng = random.Random(seed)


class Client(Sender):
    """One client: sends requests, leaves early, and checks answers."""

    def run(self, until: float) -> None:
        """Sends requests until `time.monotonic()` reaches the given end."""
        while time.monotonic() < until:
            case, draw = self._rng.choice(self._cases), self._rng.random()
            if draw < 0.08:
                self._attempt(self._send_nonsense)
            elif draw < 0.2:
                self._attempt(self._leave_early, case)
            else:
                self.ask(case, stream=draw < 0.65)

    def ask(self, case: Case, *, stream: bool) -> None:
        """Asks one request and compares the answer."""
        self._attempt(self._ask_stream if stream else self._ask_whole, case)

    def _attempt(self, send: Callable[..., None], *case: Case) -> None:
        try:
            send(*case)
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
            self._tally.fault("lost", f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def _posted(self, path: str, body: bytes) -> Iterator[http.client.HTTPConnection]:
        """A connection on which a request was sent; it is closed afterwards."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            yield connection

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

    def _ask_whole(self, case: Case) -> None:
        started = time.monotonic()
        with self._posted(case.path, json.dumps(case.body).encode()) as connection:
            response = connection.getresponse()
            if self._refused(response):
                return
            answer = json.loads(response.read())
        choices: dict[int, Choice] = {}
        for told in answer["choices"]:
            add_answer(choices, told, case)
        self._compare(case, choices, answer["usage"], started)

    def _ask_stream(self, case: Case) -> None:
        started = time.monotonic()
        body = {**case.body, "stream": True, "stream_options": {"include_usage": True}}
        choices: dict[int, Choice] = {}
        usage: dict[str, int] = {}
        is_first, ended = True, False
        with self._posted(case.path, json.dumps(body).encode()) as connection:
            response = connection.getresponse()
            if self._refused(response):
                return
            for chunk in events(response):
                if chunk is None:
                    ended = True
                    break
                usage = chunk["usage"] or usage
                for told in chunk["choices"]:
                    add_answer(choices, told, case)
                    if is_first and choices[told["index"]].text:
                        with self._tally.lock:
                            self._tally.first_seconds.append(time.monotonic() - started)
                        is_first = False
        if not ended:
            self._tally.fault("lost", f"a stream ended after {choices}")
            return
        self._compare(case, choices, usage, started)

    def _compare(
        self, case: Case, choices: dict[int, Choice], usage: dict[str, int], started: float
    ) -> None:
        seconds = time.monotonic() - started
        try:
            gap = case.largest_gap(choices, usage["completion_tokens"])
        except ValueError as error:
            self._tally.fault("mixed", f"{case.body}: {error}")
            return
        with self._tally.lock:
            self._tally.outcomes["answered"] += 1
            self._tally.outcomes["begins as alone"] += case.begins_alike(choices)
            self._tally.outcomes["of several choices"] += len(case.choices) > 1
            self._tally.outcomes["with log-probabilities"] += case.wants_logprobs
            self._tally.gap = max(self._tally.gap, gap)
            self._tally.seconds.append(seconds)
            self._tally.num_tokens += case.num_tokens

    def _leave_early(self, case: Case) -> None:
        """Goes after some chunks of a stream, or after a while without an answer."""
        streams = self._rng.random() < 0.6
        body = json.dumps({**case.body, "stream": streams}).encode()
        with self._posted(case.path, body) as connection:
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

    def _send_nonsense(self) -> None:
        path = self._rng.choice(("/v1/completions", "/v1/chat/completions"))
        with self._posted(path, self._rng.choice(MALFORMED)) as connection:
            response = connection.getresponse()
            said = json.loads(response.read())
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
