"""Long bodies: what is read on the side, one at a time, and what is refused before it is read."""

import asyncio
import concurrent.futures
import contextlib
import threading
from typing import Any
from unittest import mock

from absl.testing import absltest
from starlette.requests import Request as HttpRequest

from moejax import Engine
from moejax.serving import app, requests
from moejax.serving.app import LARGE_BYTES, MOST_BODIES, _Bodies
from moejax.serving.errors import ApiError
from tests.serving_case import WAIT_S, served, shared_engine, wait_until

ENGINE: Engine


def setUpModule():
    global ENGINE
    ENGINE = shared_engine()


class LargeTest(absltest.TestCase):
    def test_large_bodies_are_read_one_at_a_time_and_nobody_waits_for_them(self):
        gate, lock, running, most = threading.Event(), threading.Lock(), [0], [0]
        encode = type(ENGINE.tokenizer).encode

        def slow(tokenizer: Any, text: str, **how: Any) -> list[int]:
            if len(text) > 1000:
                with lock:
                    running[0] += 1
                    most[0] = max(most[0], running[0])
                assert gate.wait(WAIT_S)
                with lock:
                    running[0] -= 1
            return encode(tokenizer, text, **how)

        long = {"prompt": "a " * LARGE_BYTES, "max_tokens": 1}
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(type(ENGINE.tokenizer), "encode", slow))
            stack.enter_context(mock.patch.object(requests, "EARLY_CHARACTERS", 2**30))
            server = stack.enter_context(served(ENGINE, max_body_bytes=2**20))
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(3))
            posts = [pool.submit(server.post, "/v1/completions", long) for _ in range(3)]
            wait_until(lambda: running[0] == 1, "one is read")
            short = {"prompt": "a", "max_tokens": 1}
            self.assertEqual(server.post("/v1/completions", short)[0], 200)
            self.assertEqual(server.get("/health")[0], 200)
            gate.set()
            for post in posts:
                status, said, _ = post.result()
                self.assertEqual((status, said["error"]["code"]), (400, "context_length_exceeded"))
        self.assertEqual(most[0], 1)

    def test_a_text_that_is_far_too_long_is_not_read_whole(self):
        encoded: list[int] = []
        encode = type(ENGINE.tokenizer).encode

        def counted(tokenizer: Any, text: str, **how: Any) -> list[int]:
            encoded.append(len(text))
            return encode(tokenizer, text, **how)

        counting = mock.patch.object(type(ENGINE.tokenizer), "encode", counted)
        with counting, served(ENGINE, max_body_bytes=2**22) as server:
            body = {"prompt": "a " * 10**6, "max_tokens": 1}
            status, said, _ = server.post("/v1/completions", body)
            self.assertEqual((status, said["error"]["code"]), (400, "context_length_exceeded"))
            self.assertIn("there is room for 255", said["error"]["message"])
            messages = [{"role": "user", "content": body["prompt"]}]
            status, said, _ = server.post("/v1/chat/completions", {"messages": messages})
            self.assertEqual((status, said["error"]["param"]), (400, "messages"))
        self.assertNotEmpty(encoded)
        self.assertLess(sum(encoded), 10_000)

    def test_a_text_is_refused_by_its_bytes_alone(self):
        bound = mock.patch.object(
            type(ENGINE.tokenizer), "most_token_bytes", new_callable=mock.PropertyMock
        )
        never = mock.patch.object(type(ENGINE.tokenizer), "encode", side_effect=AssertionError)
        with bound as most, never, served(ENGINE) as server:
            most.return_value = 4
            status, said, _ = server.post("/v1/completions", {"prompt": "é" * 600})
        self.assertEqual((status, said["error"]["code"]), (400, "context_length_exceeded"))
        self.assertIn("1200 bytes is 300 tokens at least", said["error"]["message"])


class RoomTest(absltest.TestCase):
    def test_bodies_in_memory_are_bounded_and_give_back_what_they_took(self):
        async def run() -> list[object]:
            all_bodies = _Bodies(LARGE_BYTES * 2)
            room = all_bodies._room
            found: list[object] = []
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(MOST_BODIES):
                    await stack.enter_async_context(all_bodies.received(post(LARGE_BYTES * 2)))
                try:
                    async with all_bodies.received(post(LARGE_BYTES + 1)):
                        found.append("taken")
                except ApiError as error:
                    found.append(error.status)
                async with all_bodies.received(post(1000)) as small:  # always has room
                    found.append(len(small))
            for count in (LARGE_BYTES * 2 + 1,):
                with contextlib.suppress(ApiError):
                    async with all_bodies.received(post(count)):
                        found.append("taken")
            found.append(all_bodies._room - room)
            return found

        self.assertEqual(asyncio.run(run()), [503, 1000, 0])

    def test_a_slow_body(self):
        async def run() -> int:
            waits = asyncio.Event()
            with mock.patch.object(app, "BODY_SECONDS", 0.05):
                try:
                    async with _Bodies(1000).received(post(10, waits)):
                        return 0
                except ApiError as error:
                    return error.status

        self.assertEqual(asyncio.run(run()), 408)


def post(size: int, waits: asyncio.Event | None = None) -> HttpRequest:
    """A request with a body of so many bytes, which `waits` holds back."""

    async def receive() -> dict[str, Any]:
        if waits is not None:
            await waits.wait()
        return {"type": "http.request", "body": b" " * size, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return HttpRequest({"type": "http", "method": "POST", "headers": headers}, receive)
