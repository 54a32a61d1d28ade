"""The queue and the running batch: limits, deadlines, who leaves, faults, the end; the ledger."""

import concurrent.futures
import contextlib
import functools
import http.client
import itertools
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
from moejax.errors import MoejaxError
from moejax.experts.budget import Limits
from moejax.experts.ledger import Ledger, TierLedger
from moejax.inference import chunking
from moejax.inference.continuous import ContinuousBatch
from moejax.inference.generation import GenerationSettings
from moejax.models.config import Pages
from moejax.serving import batcher as batcher_module
from moejax.serving.metrics import Metrics
from tests.serving_case import (
    NAME,
    WAIT_S,
    Served,
    held_steps,
    served,
    shared_engine,
    slow_steps,
    tiny_chat_engine,
    wait_until,
)

ENGINE: Engine
LONG = {"prompt": "the quick", "max_tokens": 200, "temperature": 0}


def setUpModule():
    global ENGINE
    ENGINE = shared_engine()
    with served(ENGINE) as server:  # compiles, so that deadlines are of decoding
        assert server.post("/v1/completions", {**LONG, "stream": False})[0] == 200


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
        with served(ENGINE, max_batch=2, queue_limit=3) as server, held_steps() as gate:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                body = {"prompt": "a", "max_tokens": 2}
                first = pool.submit(server.post, "/v1/completions", body)
                wait_until(lambda: server.value("moejax_running") == 1, "a batch")
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
            self.assertBetween(server.value("moejax_batch_size_sum"), 1, 4)

    def test_a_short_request_has_its_turn_beside_a_long_one(self):
        """16 rows of 100 tokens, 4 at once, then one of 2 tokens: it has the first free lane."""
        with served(ENGINE, max_batch=4, queue_limit=64) as server, held_steps() as gate:
            many = begin(server, n=16, max_tokens=100)
            wait_until(lambda: server.value("moejax_running") == 4, "the first rows")
            short = begin(server, max_tokens=2)
            wait_until(lambda: server.batcher.num_waiting == 13, "all wait")
            gate.set()
            self.assertEqual(short.getresponse().status, 200)
            self.assertLess(server.value("moejax_generated_tokens_total"), 4 * 100 + 3 * 100)
            said = json.loads(many.getresponse().read())
            self.assertLen(said["choices"], 16)
            many.close()
            short.close()

    def test_a_client_that_fills_the_queue_leaves_room_for_another(self):
        with served(ENGINE, max_batch=1, queue_limit=4) as server, held_steps() as gate:
            first = begin(server, max_tokens=1)
            wait_until(lambda: server.value("moejax_running") == 1, "a batch")
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
    def test_a_row_of_a_batch_is_freed_and_the_others_are_not_touched(self):
        expected = ENGINE.generate(["the quick"], max_new_tokens=100)[0]
        runner = ENGINE._runner
        spy = mock.patch.object(runner, "end_rows", wraps=runner.end_rows)
        slowly, hold = slow_steps(ENGINE, 0.01), held_steps()
        with served(ENGINE) as server, slowly, hold as gate, spy as end_rows:
            first = begin(server, max_tokens=1)
            wait_until(lambda: server.value("moejax_running") == 1, "the first")
            left = begin(server, stream=True)
            wait_until(lambda: server.batcher.num_waiting == 1, "it waits")
            stays = begin(server, stream=False, max_tokens=100)
            wait_until(lambda: server.batcher.num_waiting == 2, "two wait")
            gate.set()
            first.getresponse().read()
            left.getresponse().readline()
            left.close()
            wait_until(lambda: outcomes(server, "cancelled") == 1, "it is counted")
            wait_until(lambda: server.value("moejax_running") == 1, "one row is free")
            said = json.loads(stays.getresponse().read())
            self.assertEqual(said["choices"][0]["text"], expected.text)
            self.assertLess(server.value("moejax_generated_tokens_total"), 1 + 100 + 100)
            ended = [call.args[1].tolist() for call in end_rows.call_args_list]
            self.assertLen(ended, 1)  # the device knows when the others end
            self.assertEqual(sum(ended[0]), 1)
            first.close()
            stays.close()

    def test_who_leaves_the_queue_frees_a_place(self):
        with served(ENGINE, queue_limit=1) as server, held_steps() as gate:
            first = begin(server, max_tokens=2)
            wait_until(lambda: server.value("moejax_running") == 1, "a batch")
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
            self.assertEqual(server.value("moejax_generated_tokens_total"), 4)


class FaultTest(absltest.TestCase):
    def test_a_call_that_fails_is_told_and_the_next_one_runs(self):
        with served(ENGINE) as server:
            failing = mock.patch.object(ContinuousBatch, "step", side_effect=MoejaxError("no disk"))
            with failing, self.assertRaisesRegex(openai.InternalServerError, "no disk"):
                server.client.completions.create(model=NAME, prompt="a")
            bug = mock.patch.object(ContinuousBatch, "step", side_effect=ValueError("secret"))
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


class CutTest(absltest.TestCase):
    def test_it_does_not_wait_for_the_thread(self):
        """The thread may be in a compiler; those that run and those that wait are told at once."""
        with served(ENGINE) as server, held_steps() as gate:
            asked = [begin(server, stream=True)]
            wait_until(lambda: server.value("moejax_running") == 1, "one runs")
            asked += [begin(server), begin(server, stream=True)]
            wait_until(lambda: server.batcher.num_waiting == 2, "two wait")
            server.batcher.cut()
            for one in asked:
                answer = one.getresponse()
                self.assertEqual(answer.status, 503)
                self.assertEqual(json.loads(answer.read())["error"]["code"], "unavailable")
                one.close()
            self.assertEqual(server.batcher.num_waiting, 0)
            gate.set()
            self.assertTrue(server.batcher.join(WAIT_S))

    def test_a_stream_ends_with_an_error_event(self):
        with served(ENGINE) as server, slow_steps(ENGINE, 0.02):
            stream = server.client.completions.create(model=NAME, stream=True, **LONG)
            next(iter(stream))
            server.batcher.cut()
            with self.assertRaisesRegex(openai.APIError, "shutting down"):
                for _ in stream:
                    pass


class ProgramsTest(parameterized.TestCase):
    @parameterized.named_parameters(("cpu", False), ("programs_of_a_gpu", True))
    @pytest.mark.slow
    def test_requests_after_warm_up_compile_nothing(self, like_a_gpu: bool):
        """Whatever they ask for: lengths, settings, log-probabilities, streams, rows that end."""
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engine = stack.enter_context(tiny_chat_engine(directory))
            if like_a_gpu:  # calls run all their steps; several lengths of the cache are read
                engine._runner._whole_calls = True
                engine._runner._chooses_kv_length = False
                stack.enter_context(mock.patch.dict(chunking.RUNNING_KV_LENGTHS, cpu=(64,)))
            server = stack.enter_context(served(engine, max_batch=3, warms_up=True))
            traced = engine.num_traces
            self.assertEqual(server.value("moejax_programs"), traced)
            more: list[dict[str, Any]] = [
                {"temperature": 0}, {"stream": True}, {"logprobs": 2, "temperature": 0.5},
                {"repetition_penalty": 1.5, "n": 3, "min_p": 0.1}, {"top_k": 2, "n": 5},
                {"temperature": 0, "stream": True, "n": 2, "stop": ["a"]},
            ]  # fmt: skip
            sizes = ((1, 17), (30, 1), (60, 40), (129, 40), (250, 6), (250, 90))
            asks = itertools.product(sizes, more) if like_a_gpu else zip(sizes, more, strict=True)
            for (num_tokens, length), fields in asks:
                body = {"prompt": [5] * num_tokens, "max_tokens": length, **fields}
                connection = begin(server, **body)
                answer = connection.getresponse()
                said = answer.read()
                self.assertEqual(answer.status, 200, said)
                self.assertIn(b"finish_reason", said)
                connection.close()
                compiled = engine._runner.programs.history[traced:]
                self.assertEqual(engine.num_traces, traced, f"{body}: {compiled}")
            wait_until(lambda: server.value("moejax_pages", state="used") == 0, "pages are free")
            self.assertGreater(server.value("moejax_pages", state="kept"), 0)
            total = server.value("moejax_pages", state="total")
            self.assertEqual(total, 1 + 3 * Pages(0).of(engine.context))
            self.assertEqual(server.value("moejax_device_peak_bytes"), 0)  # a CPU does not count
            engine.logits([[5, 6, 7]])  # what no request asks for is counted
            self.assertGreater(engine.num_traces, traced)

    def test_who_left_the_queue_compiles_nothing(self):
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engine = stack.enter_context(tiny_chat_engine(directory))
            server = stack.enter_context(served(engine))
            gate = stack.enter_context(held_steps())
            first = begin(server, max_tokens=1)
            wait_until(lambda: server.value("moejax_running") == 1, "the first")
            waits = begin(server, n=3, temperature=0.7)
            wait_until(lambda: server.batcher.num_waiting == 3, "three rows of other programs")
            waits.close()
            wait_until(lambda: outcomes(server, "cancelled") == 1, "it is counted")
            gate.set()
            self.assertEqual(first.getresponse().status, 200)
            first.close()
            last = begin(server, max_tokens=1)  # behind whatever was left
            self.assertEqual(last.getresponse().status, 200)
            last.close()
            names = [name for name, _ in engine._runner.programs.history]
            self.assertEqual(names, ["empty_lanes", "prompt_chunk"])


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
            # A metric may be of before the last call until that is read.
            steps = functools.partial(server.value, name, tier="stored", event="steps")
            wait_until(lambda: steps() == engine.ledger.total("steps") > 0, "the ledger")
            ledger = engine.ledger
            for event in ("needed", "hits", "misses", "evictions"):
                self.assertEqual(
                    server.value(name, tier="stored", event=event), ledger.total(event), event
                )
            self.assertGreater(ledger.total("misses"), 0)
            moved = server.value("moejax_expert_bytes_total", tier="stored", cause="demand")
            self.assertEqual(moved, ledger.tiers["stored"].bytes_by_cause["demand"])
            self.assertGreater(moved, 0)

            # Lanes that are free are not counted.
            needed, settings = [], GenerationSettings(max_new_tokens=4)
            for num_lanes in (1, 2, 2):
                batch = engine.continuous_batch(num_lanes)
                before = engine.ledger.total("needed")
                batch.submit([5, 6, 7], settings)
                while batch.num_rows:
                    batch.step()
                needed.append(engine.ledger.total("needed") - before)
            self.assertEqual(needed, [needed[0]] * 3)

    def test_gate_mass_by_tier(self):
        ledger = Ledger({"high": TierLedger(10), "low": TierLedger(4)})
        ledger.add(np.asarray([[3.0, 1.0, 0.5, 0.25, 4.5], [2.0, 2.0, 0.0, 0.0, 4.0]]))
        metrics = Metrics()
        metrics.ledger(ledger)
        expected = {"high": 5, "low": 3, "skipped": 0.5, "substituted": 0.25, "total": 8.5}
        for tier, mass in expected.items():
            found = metrics.registry.get_sample_value("moejax_gate_mass_total", {"tier": tier})
            self.assertEqual(found, mass, tier)
        self.assertIn('moejax_gate_mass_total{tier="low"} 3.0', metrics.text().decode())
