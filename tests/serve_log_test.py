"""Ids of requests, their lines in the log, their times, and the routes that count tokens."""

import contextlib
import io
import json
from typing import Any

import tokenizers
from absl.testing import absltest, parameterized

from moejax import Engine
from moejax.serving.app import Access
from tests.serving_case import NAME, TEMPLATE, Served, served, shared_engine, wait_until
from tests.tiny_engine import tokenizer_json

ENGINE: Engine
SERVER: Served
OPEN = contextlib.ExitStack()
BODY: dict[str, Any] = {"prompt": "the fox", "max_tokens": 8, "temperature": 0}


def setUpModule():
    global ENGINE, SERVER
    ENGINE = shared_engine()
    SERVER = OPEN.enter_context(served(ENGINE))


def tearDownModule():
    OPEN.close()


class IdTest(parameterized.TestCase):
    def test_an_answer_its_header_and_its_chunks_have_one_id(self):
        _, said, headers = SERVER.post("/v1/completions", BODY)
        self.assertRegex(headers["x-request-id"], "^[0-9a-f]{24}$")
        self.assertEqual(said["id"], f"cmpl-{headers['x-request-id']}")
        found = SERVER.client.completions.create(model=NAME, prompt="a", max_tokens=2)
        self.assertEqual(found.id, f"cmpl-{found._request_id}")
        ask = SERVER.client.chat.completions.with_streaming_response.create
        messages: Any = [{"role": "user", "content": "a"}]
        with ask(model=NAME, messages=messages, max_tokens=4, stream=True) as answer:
            given = answer.headers["x-request-id"]
            # The role, the first token, those of a call, the end.
            self.assertEqual(answer.read().count(f'"id": "chatcmpl-{given}"'.encode()), 4)

    @parameterized.parameters("abc-1", "x" * 128)
    def test_a_client_s_own_id_is_kept(self, given):
        _, said, headers = SERVER.post("/v1/completions", BODY, **{"X-Request-Id": given})
        self.assertEqual((headers["x-request-id"], said["id"]), (given, f"cmpl-{given}"))

    @parameterized.parameters("a b", "x" * 129, "\xe4", "")
    def test_an_id_that_may_not_be_is_replaced(self, given):
        _, _, headers = SERVER.post("/v1/completions", BODY, **{"X-Request-Id": given})
        self.assertRegex(headers["x-request-id"], "^[0-9a-f]{24}$")

    def test_what_is_refused_has_one_too(self):
        key = {"Authorization": "Bearer no", "X-Request-Id": "a1"}
        with served(ENGINE, Access("127.0.0.1", key="sk-1")) as server:
            for more, expected in ((key, 401), ({**key, "Host": "evil.example"}, 403)):
                status, _, headers = server.post("/v1/completions", BODY, **more)
                self.assertEqual((status, headers["x-request-id"]), (expected, "a1"))
        for body, expected in ((b"{", 400), (b" " * 100_001, 413)):
            status, _, headers = SERVER.post("/v1/completions", body, **{"X-Request-Id": "a2"})
            self.assertEqual((status, headers["x-request-id"]), (expected, "a2"))


class LogTest(absltest.TestCase):
    def test_a_line_for_each_request_but_those_of_machines(self):
        log = io.StringIO()
        with contextlib.redirect_stderr(log), served(ENGINE, logs_requests=True) as server:
            ids = ("one", "two", "three", "four")
            bodies = (BODY, {**BODY, "stream": True}, {**BODY, "prompt": ""})
            for request_id, body in zip(ids, bodies, strict=False):
                headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
                server.ask("POST", "/v1/completions", json.dumps(body).encode(), headers)
            server.get("/nothing%0Ahere%1B", **{"X-Request-Id": "four"})
            server.get("/health")
            server.get("/metrics")
            wait_until(lambda: "four" in log.getvalue(), "the last line")
        one, two, three, four, _ = log.getvalue().splitlines()  # last, that it stops
        num_prompt = len(ENGINE.tokenizer.encode("the fox"))
        for line, name in ((one, "one"), (two, "two")):
            self.assertRegex(
                line,
                rf"^{name}: POST /v1/completions: 200, ok, [\d.]+ s, {num_prompt} \+ 8 tokens, "
                r"the first after [\d.]+ s, [\d.]+ tokens/s$",
            )
        self.assertRegex(three, r"^three: POST /v1/completions: 400, invalid, [\d.]+ s$")
        self.assertRegex(four, r"^four: GET /nothing\\nhere\\x1b: 404, [\d.]+ s$")


class TimingsTest(absltest.TestCase):
    def test_what_the_cache_held_is_told_and_is_no_part_of_the_pace(self):
        body = {"prompt": [5 + i * i % 83 for i in range(195)], "max_tokens": 1}
        first, again = (SERVER.post("/v1/completions", body)[1] for _ in range(2))
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.assertEqual(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertEqual(cached, 194)  # the last token is run
        self.assertEqual((again["timings"]["cache_n"], again["timings"]["prompt_n"]), (cached, 1))

    def test_a_whole_answer_of_one_token(self):
        _, said, _ = SERVER.post("/v1/completions", {**BODY, "max_tokens": 1})
        self.assertEqual(said["timings"]["predicted_n"], 1)
        self.assertEqual(said["timings"]["predicted_per_second"], 0)
        self.assertGreater(said["timings"]["prompt_per_second"], 0)


class TokenizeTest(parameterized.TestCase):
    def setUp(self):
        self.library = tokenizers.Tokenizer.from_buffer(tokenizer_json())

    def test_tokens_are_those_of_the_library_and_come_back(self):
        text = "the quick brown fox, twice"
        for body in ({"prompt": text, "model": NAME}, {"content": text}):
            status, said, _ = SERVER.post("/tokenize", body)
            expected = self.library.encode(text).ids
            self.assertEqual((status, said["tokens"]), (200, expected))
            self.assertEqual((said["count"], said["max_model_len"]), (len(expected), 256))
        status, said, _ = SERVER.post("/detokenize", {"tokens": expected, "model": NAME})
        self.assertEqual((status, said), (200, {"prompt": text, "content": text}))
        self.assertEqual(SERVER.post("/detokenize", {"tokens": []})[1]["content"], "")
        self.assertEqual(SERVER.post("/tokenize", {"content": ""})[1]["tokens"], [])

    def test_a_conversation_s_tokens_are_those_of_its_prompt(self):
        body = {"messages": [{"role": "user", "content": "the fox"}], "enable_thinking": False}
        tokens = SERVER.post("/tokenize", body)[1]["tokens"]
        self.assertIn("think={{ enable_thinking }}", TEMPLATE)
        self.assertEqual(tokens, self.library.encode("user: the fox think=False bot:").ids)
        chat = SERVER.post("/v1/chat/completions", {**body, "max_tokens": 1})[1]
        self.assertLen(tokens, chat["usage"]["prompt_tokens"])

    @parameterized.parameters(
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, "with_pieces"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a", "temperature": 0}, "temperature"),
        ("/tokenize", {"prompt": "x" * 90_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [0, 10**30]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    )
    def test_what_is_refused(self, path, body, param):
        status, said, _ = SERVER.post(path, body)
        self.assertEqual(status, 404 if param == "model" else 400)
        self.assertEqual(said["error"]["param"], param)
