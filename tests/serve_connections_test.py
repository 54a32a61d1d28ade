"""Connections by raw sockets: limits, times, two lengths; who may ask, and from where."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from typing import Any

import openai
import pytest
from absl.testing import absltest, parameterized

from moejax import Engine
from moejax.serving.app import Access
from moejax.serving.server import _ConnectionLimits
from tests.serving_case import NAME, WAIT_S, Served, served, shared_engine, wait_until

ENGINE: Engine
SERVER: Served
OPEN = contextlib.ExitStack()
LIMITS = _ConnectionLimits(8, header_s=0.4, idle_s=5.0, write_s=0.5)
KEY = "sk-only-ours"
PAGE = "https://chat.example"
BODY = {"prompt": "a", "max_tokens": 1, "temperature": 0}


def setUpModule():
    global ENGINE, SERVER
    ENGINE = shared_engine()
    SERVER = OPEN.enter_context(served(ENGINE, limits=LIMITS))


def tearDownModule():
    OPEN.close()


def connect(server: Served, *sent: bytes) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    for part in sent:
        found.sendall(part)
    return found


def read(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and code of an answer that closes its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower(), answer
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def drip(connection: socket.socket, byte: bytes) -> None:
    """Sends a byte now and then until the server closes; raises TimeoutError if it does not."""
    end = time.monotonic() + WAIT_S
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < end:
            connection.sendall(byte)
            time.sleep(0.05)
        raise TimeoutError


class TimesTest(absltest.TestCase):
    def test_silent_ones_and_half_headers_end(self):
        started = time.monotonic()
        with connect(SERVER) as silent, connect(SERVER, b"GET /health HT") as half:
            self.assertEqual(read(silent), b"")
            self.assertEqual(error_of(read(half)), (408, "headers_too_slow"))
        self.assertGreater(time.monotonic() - started, 0.3)  # `read` waits for a while alone

    def test_a_byte_now_and_then_does_not_help(self):
        with connect(SERVER, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as slow:
            self.assertStartsWith(slow.recv(65536), b"HTTP/1.1 200")
            drip(slow, b"G")

    def test_a_body_that_goes_on_after_its_answer_ends(self):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000\r\n\r\n"
        with connect(SERVER, head) as slow:
            self.assertStartsWith(slow.recv(65536), b"HTTP/1.1 415")
            drip(slow, b" ")

    def test_a_stream_takes_longer_than_all_of_these_times(self):
        body = json.dumps({**BODY, "stream": True, "max_tokens": 40}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        runner = ENGINE._runner
        decode = runner.decode

        def late(*arguments: Any, **how: Any) -> Any:
            time.sleep(0.16)  # four tokens
            return decode(*arguments, **how)

        with absltest.mock.patch.object(runner, "decode", late), connect(SERVER, head, body) as one:
            self.assertIn(b"[DONE]", read(one))


class NumbersTest(absltest.TestCase):
    def test_the_longest_idle_one_makes_room(self):
        with contextlib.ExitStack() as stack:
            slow = _ConnectionLimits(8, header_s=60)
            server = stack.enter_context(served(ENGINE, limits=slow))
            silent = [stack.enter_context(connect(server)) for _ in range(20)]
            self.assertEqual(server.post("/v1/completions", BODY)[0], 200)
            self.assertEqual(read(silent[0]), b"")  # closed
            silent[-1].sendall(b"GET /health HTTP/1.0\r\n\r\n")
            self.assertStartsWith(read(silent[-1]), b"HTTP/1.1 200")

    def test_too_many_with_requests_are_told(self):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        head += b"Content-Type: application/json\r\n\r\n"
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(served(ENGINE, limits=LIMITS))
            busy = [stack.enter_context(connect(server, head)) for _ in range(8)]
            time.sleep(0.2)
            status, said, headers = server.post("/v1/completions", BODY)
            self.assertEqual((status, said["error"]["code"]), (503, "unavailable"))
            self.assertIn("retry-after", headers)
            with self.assertRaisesRegex(openai.InternalServerError, "too many connections"):
                server.client.completions.create(model=NAME, prompt="a")
            for one in busy:
                one.close()

            def is_free() -> bool:
                return server.post("/v1/completions", BODY)[0] == 200

            wait_until(is_free, "room again")

    @pytest.mark.slow
    def test_with_few_descriptors_new_clients_are_served(self):
        """A server that may open 1,024 files, and 2,000 connections that are silent."""
        program = (
            "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))\n"
            "from moejax.serving.server import _most_connections\n"
            "print(_most_connections(512), _most_connections(2000))"
        )
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        few, many = map(int, found.stdout.split())
        self.assertEqual((few, many), (512, 704))


class FramingTest(parameterized.TestCase):
    def test_two_lengths_are_refused_and_nothing_after_them_is_answered(self):
        hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        head += b"Content-Length: %d\r\n\r\n" % (5 + len(hidden))
        with connect(SERVER, head + b"0\r\n\r\n" + hidden) as one:
            answer = read(one)
        self.assertEqual(error_of(answer), (400, "invalid_http"))
        self.assertEqual(answer.count(b"HTTP/1.1"), 1)

    @parameterized.parameters(
        b"nonsense\r\n\r\n", b"\x00\xff\xfe\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 20_000,
    )  # fmt: skip
    def test_what_is_no_http_gets_an_error_in_json(self, sent):
        with connect(SERVER, sent) as one:
            self.assertEqual(error_of(read(one)), (400, "invalid_http"))


class BrowserTest(parameterized.TestCase):
    def ask(self, server: Served, **headers: str) -> tuple[int, Any]:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        status, said, _ = server.post("/v1/completions", BODY, **given)
        return status, said.get("error", {}).get("code")

    @parameterized.parameters(
        ("localhost", 200), ("localhost:8000", 200), ("127.0.0.1:1", 200), ("[::1]:80", 200),
        ("LOCALHOST", 200), ("app.localhost", 200),
        ("evil.example", 403), ("evil.example:8000", 403), ("localhost.evil.example", 403),
        ("10.1.2.3", 403), ("evil-localhost", 403), ("[::2]", 403), ("0.0.0.0", 403),
    )  # fmt: skip
    def test_hosts(self, host, status):
        code = None if status == 200 else "host_not_allowed"
        self.assertEqual(self.ask(SERVER, Host=host), (status, code))

    @parameterized.parameters("text/plain", "", "application/x-www-form-urlencoded", "text/json")
    def test_other_types_than_json(self, kind):
        status, said, _ = SERVER.post("/v1/completions", BODY, **{"Content-Type": kind})
        self.assertEqual((status, said["error"]["code"]), (415, "unsupported_media_type"))
        self.assertIn("curl takes -H 'Content-Type: application/json'", said["error"]["message"])

    def test_pages_of_other_origins(self):
        own = f"http://127.0.0.1:{SERVER.port}"
        self.assertEqual(self.ask(SERVER, Origin=own)[0], 200)
        for origin in (PAGE, "null", "http://127.0.0.1:1"):
            self.assertEqual(self.ask(SERVER, Origin=origin), (403, "origin_not_allowed"))
        status, _ = options(SERVER, PAGE)
        self.assertEqual(status, 403)

    def test_cors_by_a_setting(self):
        access = Access("127.0.0.1", ("gpu.example",), (PAGE,), KEY)
        with served(ENGINE, access=access) as server:
            status, headers = options(server, PAGE)
            self.assertEqual((status, headers["access-control-allow-origin"]), (200, PAGE))
            self.assertIn("authorization", headers["access-control-allow-headers"])
            status, headers = options(server, "https://evil.example")
            self.assertEqual(status, 400)
            self.assertNotIn("access-control-allow-origin", headers)
            own = {"Origin": PAGE, "Authorization": f"Bearer {KEY}", "Host": "gpu.example:8000"}
            status, _, headers = server.post("/v1/completions", BODY, **own)
            self.assertEqual((status, headers["access-control-allow-origin"]), (200, PAGE))
            status, said, headers = server.post("/v1/completions", BODY, Origin=PAGE)
            self.assertEqual((status, said["error"]["code"]), (401, "invalid_api_key"))
            self.assertEqual(headers["access-control-allow-origin"], PAGE)  # so a page can read it

    def test_any_host_and_any_origin(self):
        with served(ENGINE, access=Access("127.0.0.1", ("*",), ("*",))) as server:
            self.assertEqual(self.ask(server, Host="a.example", Origin=PAGE)[0], 200)

    def test_all_addresses_of_a_server_that_listens_on_all(self):
        with served(ENGINE, access=Access("0.0.0.0")) as server:
            self.assertEqual(self.ask(server, Host="10.1.2.3:80")[0], 200)
            self.assertEqual(self.ask(server, Host="[fe80::1]")[0], 200)
            self.assertEqual(self.ask(server, Host="evil.example")[0], 403)

    def test_json_with_a_charset(self):
        kind = "Application/JSON; charset=utf-8"
        self.assertEqual(self.ask(SERVER, Content_Type=kind)[0], 200)


class KeyTest(absltest.TestCase):
    def test_the_key_opens_to_other_names_and_origins(self):
        given = {"Authorization": f"Bearer {KEY}"}
        wrong = {"Authorization": f"Bearer {KEY}x"}
        for bound_to in ("127.0.0.1", "0.0.0.0"):
            with served(ENGINE, access=Access(bound_to, key=KEY)) as server:
                for asked in ({"Host": "my-desktop.lan:8000"}, {"Origin": "app://obsidian.md"}):
                    status, said, _ = server.post("/v1/completions", BODY, **asked, **given)
                    self.assertEqual(status, 200, said)
                    for headers in ({}, wrong):
                        status, said, _ = server.post("/v1/completions", BODY, **asked, **headers)
                        self.assertEqual(status, 403)
                        self.assertIn(", the API key opens to all", said["error"]["message"])
                lengths = {"Content-Length": "2", "Transfer-Encoding": "chunked"}
                self.assertEqual(server.post("/v1/completions", b"", **lengths, **given)[0], 400)
        with served(ENGINE) as server:  # without a key none opens
            for token in ("", "x"):
                asked = {"Host": "my-desktop.lan", "Authorization": f"Bearer {token}"}
                status, said, _ = server.post("/v1/completions", BODY, **asked)
                self.assertEqual(status, 403)
                self.assertNotIn("API key", said["error"]["message"])

    def test_a_key(self):
        with served(ENGINE, access=Access("127.0.0.1", key=KEY)) as server:
            client = server.client
            for method in (client.models.list, lambda: client.completions.create(**asked())):
                with self.assertRaises(openai.AuthenticationError) as caught:
                    method()
                self.assertEqual(caught.exception.code, "invalid_api_key")
                self.assertEqual(caught.exception.response.headers["www-authenticate"], "Bearer")
            client.api_key = KEY
            self.assertLen(client.models.list().data, 1)
            self.assertLen(client.completions.create(**asked()).choices, 1)
            for wrong in (f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer", "Bearer \xff"):
                status, _, _ = server.post("/v1/completions", BODY, Authorization=wrong)
                self.assertEqual(status, 401, wrong)
            self.assertEqual(server.get("/health")[0], 200)
            self.assertEqual(server.get("/metrics")[0], 401)
            self.assertEqual(server.get("/metrics", Authorization=f"Bearer {KEY}")[0], 200)


def asked() -> dict[str, Any]:
    return {"model": NAME, "prompt": "a", "max_tokens": 1}


def options(server: Served, origin: str) -> tuple[int, dict[str, str]]:
    """Answers the question that a browser asks before a page's request."""
    asked = {
        "Origin": origin, "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }  # fmt: skip
    status, _, headers = server.ask("OPTIONS", "/v1/completions", None, asked)
    return status, {name.lower(): value for name, value in headers.items()}
