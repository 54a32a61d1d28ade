"""Fuzzers of `scripts.stress_server`: broken HTTP, broken JSON, connections that hang."""

import json
import socket
import time
from typing import Any

from scripts.stress_clients import Sender

TIMEOUT_S = 40.0  # of an answer; the server ends what hangs before
# A body may be valid after all, so that it is answered or waits. No request may get another status
# (500 above all), or an answer that is no HTTP.
ALLOWED = (200, 400, 403, 404, 405, 408, 413, 415, 429, 503)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 1e308, 0.5, "", "a", "\x00", "\ud800",
    "é" * 500, [], [[]], [None], {}, {"a": {}}, [[1, 2], "a"], "[" * 999,
)  # fmt: skip
EXTRA = (
    "ignore_eos", "min_tokens", "n", "stop", "logprobs", "echo", "stream", "stream_options", "seed",
    "tools", "response_format", "user", "model", "max_tokens", "prompt", "messages", "temperature",
    "chat_template_kwargs", "reasoning_effort", "logit_bias", "top_k", "\x00", "__proto__",
)  # fmt: skip


class Fuzzer(Sender):
    """One of several: sends requests that no client should, again and again."""

    def run(self, until: float) -> None:
        """Sends requests until `time.monotonic()` reaches the given end."""
        attempts = (self._bytes, self._body, self._fields, self._hang)
        while time.monotonic() < until:
            [attempt] = self._rng.choices(attempts, weights=(30, 30, 35, 5))
            sent = attempt()
            try:
                self._send(sent)
            except ConnectionError:
                self._tally.count("fuzz, closed")  # before all was sent
            except TimeoutError:
                self._tally.fault("fuzz, hung", repr(sent[:300]))

    def _send(self, sent: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=TIMEOUT_S) as connection:
            connection.sendall(sent)
            if self._rng.random() < 0.2:  # gone before the answer
                self._tally.count("fuzz, left early")
                return
            answer = b""
            while part := connection.recv(65536):
                answer += part
                if self._rng.random() < 0.02:
                    break
        if not answer:
            self._tally.count("fuzz, closed")
            return
        words = answer[:40].split()
        status = int(words[1]) if answer.startswith(b"HTTP/1.1 ") and words[1].isdigit() else 0
        if status not in ALLOWED:
            self._tally.fault("fuzz", f"{sent[:300]!r} got {answer[:300]!r}")
        self._tally.count(f"fuzz, {status // 100}xx")

    def _bytes(self) -> bytes:
        """A request some bytes of which are changed, left out or doubled."""
        sent = bytearray(self._request(json.dumps(self._rng.choice(self._cases).body).encode()))
        for _ in range(self._rng.randrange(1, 12)):
            place = self._rng.randrange(len(sent))
            how = self._rng.random()
            if how < 0.5:
                sent[place] = self._rng.randrange(256)
            elif how < 0.75:
                del sent[place : place + self._rng.randrange(1, 9)]
            else:
                sent[place:place] = sent[place : place + self._rng.randrange(1, 200)]
        return bytes(sent)

    def _body(self) -> bytes:
        """Broken JSON, or JSON of another shape, in a right request."""
        body = bytearray(json.dumps(self._rng.choice(self._cases).body).encode())
        for _ in range(self._rng.randrange(1, 4)):
            body[self._rng.randrange(len(body))] = self._rng.randrange(256)
        how = self._rng.random()
        if how < 0.1:
            body = bytearray(b'{"prompt": "' + b"a b " * self._rng.randrange(2**20) + b'"}')
        elif how < 0.2:
            message = {"role": "user", "content": ""}
            body = bytearray(json.dumps({"messages": [message] * 50_000}).encode())
        return self._request(bytes(body))

    def _fields(self) -> bytes:
        """A right request in which fields have values of other kinds."""
        body = dict(self._rng.choice(self._cases).body)
        for _ in range(self._rng.randrange(1, 4)):
            name = self._rng.choice([*body, *EXTRA])
            body[name] = self._rng.choice(VALUES)
        body["max_tokens"] = body.get("max_tokens") if self._rng.random() < 0.2 else 2
        return self._request(json.dumps(body).encode())

    def _hang(self) -> bytes:
        """Half a request, or one of two lengths."""
        whole = self._request(json.dumps(self._rng.choice(self._cases).body).encode())
        if self._rng.random() < 0.3:
            return whole.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n", 1)
        return whole[: self._rng.randrange(len(whole))]

    def _request(self, body: bytes) -> bytes:
        path = self._rng.choice(("/v1/completions", "/v1/chat/completions", "/health", "/metrics"))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body
