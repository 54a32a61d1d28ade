"""`python -m moejax.serve` as a process: its start, its end, its errors; the stress, shortened."""

import argparse
import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax import Engine, serve
from moejax.config.serve import ServeConfig
from moejax.errors import MoejaxError
from moejax.experts.ledger import Ledger, TierLedger
from moejax.serving import foreign_fields
from moejax.serving.metrics import Metrics
from tests import commands, slow
from tests.serving_case import served, shared_engine, tiny_chat_engine

ROOT = Path(__file__).parents[1]
DIRECTORY: Path
OPEN = contextlib.ExitStack()


def setUpModule():
    global DIRECTORY
    DIRECTORY = Path(OPEN.enter_context(tempfile.TemporaryDirectory()))
    tiny_chat_engine(DIRECTORY).close()


def tearDownModule():
    OPEN.close()


@contextlib.contextmanager
def process(*words: str, how: str = "-m") -> Iterator[subprocess.Popen[str]]:
    """A Python that runs a module, or a program where `how` is "-c"; its stderr is a pipe."""
    cache = jax.config.values["jax_compilation_cache_dir"]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }  # fmt: skip
    command = [sys.executable, how, *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stderr=pipe, stdout=pipe, text=True, env=environment) as found:
        try:
            yield found
        finally:
            if found.poll() is None:
                found.kill()


def serving(*more: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    where = f"--config.checkpoint={DIRECTORY}"
    return process("moejax.serve", where, "--config.platform=cpu", "--config.port=0", *more)


def asked(port: int, **more: object) -> http.client.HTTPConnection:
    """A request on its way."""
    body = {"prompt": "the quick", "max_tokens": 200, "temperature": 0, **more}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    kind = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), kind)
    return connection


def patched(change: str, *more: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """A server some of whose code is changed by a line of Python."""
    program = f"import time, jax; from moejax import cli, serve; {change}; cli.run(serve.COMMAND)"
    where = f"--config.checkpoint={DIRECTORY}"
    return process(program, where, "--config.platform=cpu", "--config.port=0", *more, how="-c")


def ready_port(server: subprocess.Popen[str]) -> int:
    """Where it listens, once it is ready."""
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if match := re.match(r"ready: .* at http://127\.0\.0\.1:(\d+)$", line):
            return int(match[1])
    raise AssertionError("".join(said))


def got(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def health(port: int) -> tuple[int, dict[str, Any]]:
    status, said = got(port, "/health")
    return status, json.loads(said)


class ProcessTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_a_stream_that_runs_at_sigterm_is_finished_and_the_status_is_0(self):
        with serving("--config.grace_s=100", "--config.warm_up=False") as server:
            port = ready_port(server)
            self.assertEqual(health(port)[1]["model"], DIRECTORY.name)
            # Compiles all steps: a server that stops does not wait for a compiler.
            with contextlib.closing(asked(port, stream=False)) as connection:
                self.assertEqual(connection.getresponse().status, 200)
            assert server.stderr is not None
            self.assertIn(": 200, ok, ", server.stderr.readline())
            connection = asked(port, stream=True)
            answer = connection.getresponse()
            first = answer.readline()
            server.send_signal(signal.SIGTERM)
            rest = answer.read()
            connection.close()
            self.assertEqual(server.stderr.readline(), "stopping: answers may go on for 100 s\n")
            self.assertStartsWith(first.decode(), "data: {")
            self.assertIn(b'"finish_reason": "length"', rest)
            self.assertEndsWith(rest, b"data: [DONE]\n\n")
            self.assertEqual(server.wait(timeout=30), 0)
            with self.assertRaises(OSError):
                health(port)

    @pytest.mark.slow
    def test_a_stream_that_sigterm_cuts_ends_with_an_error_event(self):
        slow = (
            "from moejax.inference.runner import Runner; decode = Runner.decode; "
            "Runner.decode = lambda *a: (time.sleep(0.05), decode(*a))[1]"
        )
        with patched(
            slow, "--config.warm_up=False", "--config.log_requests=False", "--config.grace_s=0"
        ) as server:
            port = ready_port(server)
            connection = asked(port, stream=True)
            answer = connection.getresponse()
            self.assertStartsWith(answer.readline().decode(), "data: {")
            with socket.create_connection(("127.0.0.1", port), timeout=30):  # silent
                server.send_signal(signal.SIGTERM)
                *_, last = answer.read().strip().split(b"\n\n")
                connection.close()
                error = json.loads(last.removeprefix(b"data: "))["error"]
                self.assertEqual(error["code"], "unavailable")
                _, said = server.communicate(timeout=30)
            self.assertEqual(server.returncode, 0)
            self.assertRegex(said, "^stopping: [^\n]*\n$")

    @pytest.mark.slow
    def test_sigterm_while_a_program_compiles_tells_all_and_ends(self):
        """The compiler is one that takes a minute; a body that does not come is not waited for."""
        with patched(
            "jax.stages.Lowered.compile = lambda self: time.sleep(60)", "--config.warm_up=False"
        ) as server:
            port = ready_port(server)
            runs = asked(port)
            while "moejax_running 1.0" not in got(port, "/metrics")[1]:
                time.sleep(0.01)
            waits = [asked(port), asked(port, stream=True)]
            with socket.create_connection(("127.0.0.1", port), timeout=30) as half:
                head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
                half.sendall(head + b"Content-Type: application/json\r\n\r\n{")
                while health(port)[1]["waiting"] < 2:
                    time.sleep(0.01)
                started = time.monotonic()
                server.send_signal(signal.SIGTERM)
                for one in (runs, *waits):
                    answer = one.getresponse()
                    self.assertEqual(answer.status, 503)
                    self.assertIn("shutting down", json.loads(answer.read())["error"]["message"])
                    one.close()
                self.assertLess(time.monotonic() - started, 30)
                self.assertIn(b'"code": "unavailable"', half.recv(1000))
            _, said = server.communicate(timeout=30)
            self.assertLess(time.monotonic() - started, 30)  # not for the compiler
            self.assertEqual(server.returncode, 0)
            self.assertNotIn("Traceback", said)

    @pytest.mark.slow
    def test_it_listens_safely_by_default(self):
        """Only this machine's own programs may ask, and not before all programs are compiled."""
        late = (
            "import sys; from moejax.inference.continuous import ContinuousBatch as C; "
            "C.warm_up = lambda *_: (print('warms up', file=sys.stderr), time.sleep(60))"
        )
        with patched(late) as server:
            assert server.stderr is not None
            listening = server.stderr.readline()
            self.assertRegex(listening, r"^listening at http://127\.0\.0\.1:\d+\n$")
            port = int(listening.rpartition(":")[2])
            first = next(line for line in server.stderr if line.startswith(("warms", "ready")))
            self.assertEqual(first, "warms up\n")
            self.assertIs(health(port)[1]["ready"], False)
            for header in ({"Origin": "https://a.example"}, {"Host": "a.example"}):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                with contextlib.closing(connection):
                    connection.request("GET", "/v1/models", headers=header)
                    answer = connection.getresponse()
                    self.assertEqual(answer.status, 403)
                    self.assertNotIn("access-control-allow-origin", answer.headers)

    @pytest.mark.slow
    def test_the_stress_finds_nothing(self):
        words = (
            f"--checkpoint={DIRECTORY}", "--seconds=3", "--clients=6", "--fuzzers=2", "--warm_up=0",
            "--cases=10",
            "--max_batch=4", "--queue_limit=4", "--results=", "--growth=200",
        )  # fmt: skip
        with process("scripts.stress_server", *words) as stress:
            found, said = stress.communicate(timeout=120)
        self.assertEqual(stress.returncode, 0, found + said)
        self.assertRegex(found, r"answers lost or mixed: .* 0 requests")
        answered = re.search(r"server, requests answered: .* (\d+) requests", found)
        assert answered is not None
        self.assertGreater(int(answered[1]), 0)


class ConfigTest(parameterized.TestCase):
    @parameterized.parameters(
        ("--config.port=70000", "port=70000"),
        ("--config.deadline_s=-1", "deadline_s=-1"),
        ("--config.host=", "host=''"),
        ("--config.api_key=two words", "api_key must be letters"),
        ("--config.cors_origins=('',)", "cors_origins holds an empty text"),
        ("--config.record_trace=x.trace", "record_trace"),
        ("--config.max_answers=0", "max_answers=0"),
        ("--config.allowed_hosts=('',)", "allowed_hosts holds an empty text"),
        ("--config.trace_dir=x", "trace_dir is not for a server"),
        ("--config.api_key_file=no/such", "api_key_file="),
        ("--config.host=no.such.invalid", "host=no.such.invalid: "),
        ("--config.warm_up=perhaps", "warm_up='perhaps' must be true or false"),
        ("--config.hots=a", "did you mean 'host'"),
    )
    def test_what_the_configuration_forbids(self, flag, said):
        """The command ends with one line before it loads a model."""
        with absltest.mock.patch("moejax.serving.server.Batcher", side_effect=AssertionError):
            status, out, err = commands.run(serve.COMMAND, flag)
        self.assertIn(status, (1, 2))
        self.assertEqual(out, "")
        self.assertRegex(err, rf"\Aerror: [^\n]*{re.escape(said)}[^\n]*\n\Z")

    def test_a_key_in_a_file(self):
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "key"
            path.write_text("sk-one\n")
            config = ServeConfig(api_key_file=str(path))
            self.assertEqual(serve._read_key(config), "sk-one")
            self.assertEqual(serve._read_key(ServeConfig(api_key="sk-two")), "sk-two")
            for text, said in (("\n", "is empty"), ("a b", "must be letters")):
                path.write_text(text)
                with self.assertRaisesRegex(MoejaxError, f"{re.escape(str(path))} {said}"):
                    serve._read_key(config)
            path.unlink()
            with self.assertRaisesRegex(MoejaxError, "api_key_file"):
                serve._read_key(config)
        with self.assertRaisesRegex(MoejaxError, "exclude each other"):
            ServeConfig(api_key="a", api_key_file="b").check()


class DocsTest(parameterized.TestCase):
    @slow.where(lambda checkpoint: checkpoint == "demo")
    @parameterized.parameters("tiny", "demo")
    def test_a_server_takes_every_curl(self, checkpoint):
        """Commands of README, the pages and the docstring are valid requests, sent like curl."""
        pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "moejax/serve.py")
        asked = [
            (page.name, shlex.split(line.replace("\\\n", " "), comments=True))
            for page in pages
            for line in re.findall(r"^ *(curl (?:.*\\\n)*.*)$", page.read_text(), re.MULTILINE)
            if ":8000/" in line and "/health" not in line
        ]
        self.assertGreater(len(asked), 4)
        engine = shared_engine()
        if checkpoint == "demo":
            engine = Engine.from_pretrained("demo", platform="cpu", progress=False)
            self.addCleanup(engine.close)
        with served(engine, model_name="demo") as server:
            for place, words in asked:
                read = argparse.ArgumentParser()
                read.add_argument("url")
                read.add_argument("-N", action="store_true")
                read.add_argument("-H", action="append", default=[])
                read.add_argument("-d", default="")
                given = read.parse_args(words[1:])
                kind = {"Content-Type": "application/x-www-form-urlencoded"}  # curl's own
                headers = {**kind, **dict(header.split(": ", 1) for header in given.H)}
                path = "/" + given.url.split("/", 3)[3]
                status, said, _ = server.ask("POST", path, given.d.encode(), headers)
                self.assertEqual(status, 200, (place, words, said))
                self.assertNotIn("error", said)

    def test_names(self):
        text = (ROOT / "docs/server.md").read_text()
        metrics = Metrics()
        ledger = Ledger({"high": TierLedger(10)})
        ledger.add(np.ones((1, 4)) * [1, 0, 0, 1])
        metrics.ledger(ledger)
        names = {family.name for family in metrics.registry.collect()}
        self.assertGreater(len(names), 10)
        for name in names:
            self.assertIn(f"`{name}", text)
        for name in re.findall(r"moejax_\w+", text):
            self.assertIn(name.removesuffix("_total"), names)
        tools = {"function_call", "tool_choice", "parallel_tool_calls", "service_tier"}
        for name in {*foreign_fields.NEUTRAL, *foreign_fields.IGNORED} - tools:
            self.assertIn(f"`{name}`", text)
