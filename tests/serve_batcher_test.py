"""The queue and its batches: limits, deadlines, clients that go, faults, the end; the ledger."""

import concurrent.futures
import contextlib
import http.client
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import openai
import pytest
from absl.testing import absltest, parameterized

from moejax import Engine
from moejax.engine import STEPS_PER_CALL
from moejax.errors import MoejaxError
from moejax.experts.budget import Limits
from moejax.experts.gate_mass import TieredLedger
from moejax.experts.ledger import Ledger
from moejax.inference.generation import GenerationSettings
from moejax.serving import batcher as batcher_module
from moejax.serving.metrics import Metrics
from tests import slow
from tests.serving_case import (
    NAME,
    WAIT_S,
    Served,
    held_batches,
    served,
    slow_steps,
    tiny_chat_engine,
    wait_until,
)

ENGINE: Engine
OPEN = contextlib.ExitStack()
LONG = {"prompt": "the quick", "max_tokens": 200, "temperature": 0}


def setUpModule():
    global ENGINE
    directory = Path(OPEN.enter_context(tempfile.TemporaryDirectory()))
    ENGINE = OPEN.enter_context(tiny_chat_engine(directory))


def tearDownModule():
    OPEN.close()


def outcomes(server: Served, outcome: str) -> float:
    return server.value("moejax_requests_total", endpoint="completions", outcome=outcome)


def begin(server: Served, address: str = "127.0.0.1", **more: Any) -> http.client.HTTPConnection:
    """A request that is on its way from an address; its answer is not read."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.port, timeout=WAIT_S, source_address=(address, 0)
    )
    body, kind = json.dumps({**LONG, **more}), {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", body, kind)
    return connection


class QueueTest(absltest.TestCase):
    def test_a_full_queue_refuses_and_says_when_to_come_again(self):
        with served(ENGINE, max_batch=2, queue_limit=3) as server, held_batches(ENGINE) as gate:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                body = {"prompt": "a", "max_tokens": 2}
                first = pool.submit(server.post, "/v1/completions", body)
                wait_until(lambda: server.value("moejax_batch_size_count") == 1, "a batch")
                asked = [pool.submit(server.post, "/v1/completions", body) for _ in range(3)]
                wait_until(lambda: server.batcher.num_waiting == 3, "three wait")
                self.assertIn("moejax_queue_length 3.0", server.get("/metrics")[1])
                status, said, headers = server.post("/v1/completions", body)
                self.assertEqual((status, said["error"]["code"]), (429, "queue_full"))
                self.assertGreaterEqual(int(headers["retry-after"]), 1)
                with self.assertRaises(openai.RateLimitError):
                    server.client.completions.create(model=NAME, prompt="a")
                gate.set()
                self.assertEqual([one.result()[0] for one in (first, *asked)], [200] * 4)
            self.assertEqual(outcomes(server, "rejected"), 2)
            self.assertEqual(outcomes(server, "ok"), 4)
            # The first alone, then the two that fit, then the last.
            self.assertEqual(server.value("moejax_batch_size_count"), 3)

    def test_a_short_request_has_its_turn_beside_a_long_one(self):
        """16 rows of 100 tokens in batches of 4, then one of 2 tokens: it is in the next batch."""
        with served(ENGINE, max_batch=4, queue_limit=64) as server, held_batches(ENGINE) as gate:
            many = begin(server, n=16, max_tokens=100)
            wait_until(lambda: server.value("moejax_batch_size_count") == 1, "the first batch")
            short = begin(server, max_tokens=2)
            wait_until(lambda: server.batcher.num_waiting == 13, "all wait")
            gate.set()
            self.assertEqual(short.getresponse().status, 200)
            self.assertLessEqual(server.value("moejax_batch_size_count"), 3)
            said = json.loads(many.getresponse().read())
            self.assertLen(said["choices"], 16)
            many.close()
            short.close()

    def test_a_client_that_fills_the_queue_leaves_room_for_another(self):
        with served(ENGINE, max_batch=1, queue_limit=4) as server, held_batches(ENGINE) as gate:
            first = begin(server, max_tokens=1)
            wait_until(lambda: server.value("moejax_batch_size_count") == 1, "a batch")
            waits = begin(server, n=4, max_tokens=1)
            wait_until(lambda: server.batcher.num_waiting == 4, "the queue is full")
            self.assertEqual(server.post("/v1/completions", LONG)[0], 429)
            other = begin(server, "127.0.0.2", max_tokens=1)
            wait_until(lambda: server.batcher.num_waiting == 5, "the other waits, too")
            self.assertEqual(server.post("/v1/completions", LONG)[0], 429)
            gate.set()
            for one in (first, waits, other):
                self.assertEqual(one.getresponse().status, 200)
                one.close()

    def test_a_deadline_ends_what_waits_and_what_runs(self):
        with served(ENGINE, max_batch=1, deadline_s=0.6) as server, slow_steps(ENGINE, 0.05):
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                posts = [pool.submit(server.post, "/v1/completions", LONG) for _ in range(2)]
                found = [post.result() for post in posts]
            for status, said, _ in found:
                self.assertEqual((status, said["error"]["code"]), (504, "deadline_exceeded"))
            self.assertEqual(outcomes(server, "deadline"), 2)
            self.assertLess(server.value("moejax_generated_tokens_total"), 200)

    def test_a_deadline_within_a_stream_is_its_last_event(self):
        with served(ENGINE, deadline_s=0.6) as server, slow_steps(ENGINE, 0.05):
            stream = server.client.completions.create(model=NAME, stream=True, **LONG)
            chunks = []
            with self.assertRaisesRegex(openai.APIError, "deadline of 0.6 s"):
                for chunk in stream:
                    chunks.append(chunk)  # noqa: PERF402, they come before the error
            self.assertNotEmpty(chunks)


class CancelTest(absltest.TestCase):
    def test_a_stream_that_is_left_ends_and_its_neighbour_goes_on(self):
        expected = ENGINE.generate(["the quick"], max_new_tokens=60)[0]
        with served(ENGINE) as server, slow_steps(ENGINE, 0.01), held_batches(ENGINE) as gate:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                neighbour = pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 60})
                wait_until(lambda: server.value("moejax_batch_size_count") == 1, "the first")
                gate.set()
                left = begin(server, stream=True)
                answer = left.getresponse()
                self.assertStartsWith(answer.readline().decode(), "data: {")
                answer.close()
                left.close()
                wait_until(lambda: outcomes(server, "cancelled") == 1, "it is counted")
                status, said, _ = neighbour.result()
            wait_until(lambda: server.value("moejax_running") == 0, "nothing runs")
            self.assertEqual((status, said["choices"][0]["text"]), (200, expected.text))
            self.assertLess(server.value("moejax_generated_tokens_total"), 60 + 150)

    def test_a_row_of_a_batch_is_freed_and_the_others_are_not_touched(self):
        expected = ENGINE.generate(["the quick"], max_new_tokens=100)[0]
        runner = ENGINE._runner
        spy = mock.patch.object(runner, "end_rows", wraps=runner.end_rows)
        slowly, hold = slow_steps(ENGINE, 0.01), held_batches(ENGINE)
        with served(ENGINE) as server, slowly, hold as gate, spy as end_rows:
            first = begin(server, max_tokens=1)
            wait_until(lambda: server.value("moejax_batch_size_count") == 1, "the first")
            left = begin(server, stream=True)
            wait_until(lambda: server.batcher.num_waiting == 1, "it waits")  # and has row 0
            stays = begin(server, stream=False, max_tokens=100)
            wait_until(lambda: server.batcher.num_waiting == 2, "two wait")
            gate.set()
            first.getresponse().read()
            left.getresponse().readline()
            left.close()
            wait_until(lambda: server.value("moejax_running") == 1, "one row is free")
            said = json.loads(stays.getresponse().read())
            self.assertEqual(said["choices"][0]["text"], expected.text)
            self.assertLess(server.value("moejax_generated_tokens_total"), 1 + 100 + 100)
            self.assertEqual([call.args[1].tolist() for call in end_rows.call_args_list], [[1, 0]])
            first.close()
            stays.close()

    def test_who_leaves_the_queue_frees_a_place(self):
        with served(ENGINE, queue_limit=1) as server, held_batches(ENGINE) as gate:
            first = begin(server, max_tokens=2)
            wait_until(lambda: server.value("moejax_batch_size_count") == 1, "a batch")
            waits = begin(server)
            wait_until(lambda: server.batcher.num_waiting == 1, "one waits")
            self.assertEqual(server.post("/v1/completions", LONG)[0], 429)
            waits.close()
            wait_until(lambda: outcomes(server, "cancelled") == 1, "it is counted")
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                after = pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 2})
                wait_until(lambda: server.batcher.num_waiting == 1, "it has the place")
                gate.set()
                self.assertEqual(after.result()[0], 200)
            self.assertEqual(first.getresponse().status, 200)
            first.close()
            # An abandoned request was not run.
            self.assertEqual(server.value("moejax_batch_size_sum"), 2)


class FaultTest(absltest.TestCase):
    def test_a_batch_that_fails_is_told_and_the_next_one_runs(self):
        with served(ENGINE) as server:
            failing = mock.patch.object(ENGINE, "live_batch", side_effect=MoejaxError("no disk"))
            with failing, self.assertRaisesRegex(openai.InternalServerError, "no disk"):
                server.client.completions.create(model=NAME, prompt="a")
            bug = mock.patch.object(ENGINE, "live_batch", side_effect=ValueError("secret"))
            with bug, self.assertLogs(batcher_module.__name__, "ERROR"):
                with self.assertRaisesRegex(openai.InternalServerError, "log says why") as caught:
                    server.client.completions.create(model=NAME, prompt="a", stream=True)
                self.assertNotIn("secret", str(caught.exception))
            self.assertEqual(server.post("/v1/completions", {"prompt": "a"})[0], 200)
            self.assertEqual(outcomes(server, "error"), 2)

    def test_who_is_there_at_the_end_is_told(self):
        with served(ENGINE) as server, slow_steps(ENGINE, 0.02):
            runs = begin(server)
            wait_until(lambda: server.value("moejax_running") == 1, "it runs")
            server.batcher.drain()
            status, said, headers = server.post("/v1/completions", LONG)
            self.assertEqual((status, said["error"]["code"]), (503, "unavailable"))
            self.assertIn("retry-after", headers)
            self.assertEqual(json.loads(server.get("/health")[1])["ready"], False)
            server.batcher.cut()
            self.assertEqual(runs.getresponse().status, 503)
            runs.close()
            self.assertTrue(server.batcher.join(WAIT_S))


class WarmUpTest(parameterized.TestCase):
    @slow.where(lambda like_a_gpu: like_a_gpu)  # more programs, warmed up by the same calls
    @parameterized.named_parameters(("cpu", False), ("programs_of_a_gpu", True))
    def test_requests_after_it_trace_nothing(self, like_a_gpu: bool):
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engine = stack.enter_context(tiny_chat_engine(directory))
            if like_a_gpu:  # loops of 16 steps, and none where a batch streams
                engine._runner._whole_calls = True
                stack.enter_context(mock.patch.object(batcher_module, "_most_steps", steps_of_gpu))
            defaults = GenerationSettings(max_new_tokens=17)
            batcher_module.warm_up(engine, defaults, max_batch=4)
            traced = engine.num_traces
            server = stack.enter_context(served(engine, max_batch=4))
            for count in (1, 2, 3):
                for more in ({}, {"stream": True}, {"logprobs": 2}):
                    body = {"prompt": "a", "max_tokens": 17, "n": count, "temperature": 0, **more}
                    completion = server.client.completions.create(model=NAME, **body)
                    texts = {}
                    for part in completion if "stream" in more else [completion]:
                        for choice in part.choices:
                            texts[choice.index] = texts.get(choice.index, "") + choice.text
                            if "logprobs" in more:
                                self.assertLen(choice.logprobs.token_logprobs, 17)
                    self.assertLen(texts, count)
                    self.assertLen(set(texts.values()), 1)  # greedy
                    said = engine._runner.programs.history[traced:]
                    self.assertEqual(engine.num_traces, traced, f"{body}: {said}")
            # One row of a batch ends before the other.
            with held_batches(engine) as gate, concurrent.futures.ThreadPoolExecutor(3) as pool:
                asked = []
                for number, length in enumerate((17, 17, 3)):
                    body = {**LONG, "max_tokens": length}
                    asked.append(pool.submit(streamed_text, server, body))
                    wait_until(lambda: server.value("moejax_batch_size_count") == 10, "a batch")
                    wait_until(lambda n=number: server.batcher.num_waiting == n, "it waits")
                gate.set()
                lengths = [len(one.result()) for one in asked]
            self.assertGreater(lengths[1], lengths[2])
            self.assertEqual(engine.num_traces, traced, engine._runner.programs.history[traced:])
            # Uncovered programs are compiled, so that the count above means something.
            body = {"prompt": "a", "max_tokens": 17, "temperature": 0.9}
            self.assertEqual(server.post("/v1/completions", body)[0], 200)
            self.assertGreater(engine.num_traces, traced)


def steps_of_gpu(engine: Engine, streams: bool) -> int:
    del engine
    return 1 if streams else STEPS_PER_CALL


def streamed_text(server: Served, body: dict[str, Any]) -> str:
    stream = server.client.completions.create(model=NAME, stream=True, **body)
    return "".join(chunk.choices[0].text for chunk in stream)


class LedgerTest(absltest.TestCase):
    @pytest.mark.slow
    def test_metrics_tell_the_ledger(self):
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            limits = Limits(slots=4)
            engine = stack.enter_context(tiny_chat_engine(directory, limits=limits, batch=2))
            server = stack.enter_context(served(engine, max_batch=2))
            [expected] = ENGINE.generate(["the quick"], max_new_tokens=5, temperature=0.9, seed=3)
            body = {"prompt": "the quick", "max_tokens": 5, "temperature": 0.9, "seed": 3}
            said = server.post("/v1/completions", body)[1]
            self.assertEqual(said["choices"][0]["text"], expected.text)
            name = "moejax_expert_events_total"
            wait_until(lambda: server.value(name, tier="resident", event="steps"), "the ledger")
            ledger = engine.ledger
            for event in ("needed", "hits", "misses", "evictions"):
                self.assertEqual(
                    server.value(name, tier="resident", event=event), ledger.total(event), event
                )
            self.assertGreater(ledger.total("misses"), 0)
            moved = server.value("moejax_expert_bytes_total", tier="resident", cause="demand")
            self.assertEqual(moved, ledger.bytes_by_cause["demand"])
            self.assertGreater(moved, 0)

            # Rows that only fill a batch are not counted.
            prompt, needed = [5, 6, 7], []
            for size in (1, 2, 2):
                before = engine.ledger.total("needed")
                live = engine.live_batch(
                    [prompt], [GenerationSettings(max_new_tokens=4)], size=size
                )
                pieces = [rows[0] for rows in live.run()]
                self.assertEqual(sum(len(piece.tokens) for piece in pieces), 4)
                needed.append(engine.ledger.total("needed") - before)
            self.assertEqual(needed, [needed[0]] * 3)
            # Nor rows that were ended, but for the calls that had set out.
            many, needed = GenerationSettings(max_new_tokens=40), []
            for ends in (False, True):
                before = engine.ledger.total("needed")
                live = engine.live_batch([prompt, [9, 8]], [many] * 2)
                for number, rows in enumerate(live.run()):
                    self.assertIsNotNone(rows[0])
                    if ends and number == 0:
                        live.end(1)
                    elif ends:
                        self.assertIsNone(rows[1])
                needed.append(engine.ledger.total("needed") - before)
            self.assertLess(needed[1], 0.7 * needed[0])

    def test_gate_mass_by_tier(self):
        ledger = TieredLedger({"high": Ledger(10), "low": Ledger(4)})
        ledger.add(np.asarray([[3.0, 1.0, 0.5, 0.25, 4.5], [2.0, 2.0, 0.0, 0.0, 4.0]]))
        metrics = Metrics()
        metrics.ledger(ledger)
        expected = {"high": 5, "low": 3, "skipped": 0.5, "substituted": 0.25, "total": 8.5}
        for tier, mass in expected.items():
            found = metrics.registry.get_sample_value("moejax_gate_mass_total", {"tier": tier})
            self.assertEqual(found, mass, tier)
        self.assertIn('moejax_gate_mass_total{tier="low"} 3.0', metrics.text().decode())


if __name__ == "__main__":
    absltest.main()
