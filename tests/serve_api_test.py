"""The server's answers, asked for by the `openai` package, beside those of the engine."""

import concurrent.futures
import contextlib
import functools
import json
import logging
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import openai
import pytest
from absl.testing import absltest, parameterized

from moejax import Engine
from tests.serving_case import NAME, Served, held_steps, served, tiny_chat_engine, wait_until

ENGINE: Engine
SERVER: Served
OPEN = contextlib.ExitStack()
PROMPT = "the quick brown fox"
EOS = 40  # a token that the tiny model takes now and then


def setUpModule():
    """One engine and one server for the file: most of the time is compiling."""
    global ENGINE, SERVER
    directory = Path(OPEN.enter_context(tempfile.TemporaryDirectory()))
    ENGINE = OPEN.enter_context(tiny_chat_engine(directory, eos_ids=(EOS,)))
    SERVER = OPEN.enter_context(served(ENGINE))


def tearDownModule():
    OPEN.close()


def alone(prompt: str, **settings: Any) -> Any:
    """Answers a text by the engine, without a server."""
    return ENGINE.generate([prompt], **{"max_new_tokens": 12, **settings})[0]


@functools.cache
def seed_that_ends() -> int:
    """A seed with which an answer meets an end of sequence."""
    return next(
        seed for seed in range(60)
        if alone(PROMPT, temperature=1.0, seed=seed).finish_reason == "eos"
    )  # fmt: skip


def expected_logprobs(prompt: str, tokens: list[int]) -> np.ndarray:
    """float64[n, V] of the model at each new token, by the logits of all positions."""
    assert ENGINE.tokenizer is not None
    ids = ENGINE.tokenizer.encode(prompt)
    logits = ENGINE.logits([ids + tokens])[0, len(ids) - 1 : -1].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class CompletionsTest(parameterized.TestCase):
    @parameterized.parameters(
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 1.0, "seed": 8, "top_p": 0.7},
        {"temperature": 1.0, "seed": 9, "top_k": 5},
        {"temperature": 0.5, "seed": 1, "repetition_penalty": 1.5, "min_p": 0.01},
    )
    def test_equals_the_engine(self, **how):
        expected = alone(PROMPT, **how)
        more = {k: how.pop(k) for k in ("top_k", "repetition_penalty", "min_p") if k in how}
        given: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, **how, "extra_body": more}
        found = SERVER.client.completions.create(**given)
        self.assertEqual(found.choices[0].text, expected.text)
        reason = {"eos": "stop", "length": "length"}[expected.finish_reason]
        self.assertEqual(found.choices[0].finish_reason, reason)
        self.assertEqual(found.usage.completion_tokens, len(expected.tokens))
        self.assertEqual(found.usage.prompt_tokens, expected.num_prompt_tokens)
        self.assertEqual(found.usage.total_tokens, len(expected.tokens) + found.usage.prompt_tokens)
        stream = SERVER.client.completions.create(**given, stream=True)
        chunks = [chunk.choices[0] for chunk in stream]
        self.assertEqual("".join(chunk.text for chunk in chunks), expected.text)
        self.assertGreater(len(chunks), 1)
        self.assertEqual([c.finish_reason for c in chunks], [None] * (len(chunks) - 1) + [reason])

    def test_goes_on_after_an_end_of_sequence_where_that_is_ignored(self):
        seed = seed_that_ends()
        how: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0}
        with held_steps() as gate, concurrent.futures.ThreadPoolExecutor(3) as pool:
            ask = SERVER.client.completions.create
            first = pool.submit(ask, model=NAME, prompt="a", max_tokens=1)
            wait_until(lambda: SERVER.value("moejax_running") == 1, "a row")
            asked = [
                pool.submit(ask, **how, seed=seed, extra_body={"ignore_eos": ignores})
                for ignores in (True, False)
            ]
            wait_until(lambda: SERVER.batcher.num_waiting == 2, "both wait")
            gate.set()
            goes_on, ends = [one.result() for one in asked]
            first.result()
        expected = alone(PROMPT, temperature=1.0, seed=seed, ignore_eos=True)
        self.assertEqual(goes_on.choices[0].text, expected.text)
        self.assertEqual(goes_on.usage.completion_tokens, 12)
        self.assertEqual(ends.choices[0].text, alone(PROMPT, temperature=1.0, seed=seed).text)
        self.assertLess(ends.usage.completion_tokens, 12)

    def test_usage_in_each_chunk(self):
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream: Any = SERVER.client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, stream=True,
            extra_body={"stream_options": options, "n": 2},
        )  # fmt: skip
        counts = [chunk.usage.completion_tokens for chunk in stream]
        self.assertEqual(counts, sorted(counts))
        self.assertEqual((counts[0] > 0, counts[-1]), (True, 24))

    @pytest.mark.slow
    def test_ends_at_an_end_of_sequence(self):
        seed = seed_that_ends()
        found = SERVER.client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=12, seed=seed, logprobs=1, temperature=1.0
        )
        self.assertEqual(found.choices[0].finish_reason, "stop")
        self.assertEqual(found.choices[0].text, alone(PROMPT, temperature=1.0, seed=seed).text)
        self.assertLess(found.usage.completion_tokens, 12)
        told = found.choices[0].logprobs
        self.assertLen(told.tokens, found.usage.completion_tokens - 1)

    def test_several_prompts_and_choices(self):
        found = SERVER.client.completions.create(
            model=NAME, prompt=["one", "two"], n=2, max_tokens=8, seed=5, temperature=0.8, echo=True
        )
        for i, choice in enumerate(found.choices):
            prompt = "one" if i < 2 else "two"
            answer = alone(prompt, seed=5 + i, temperature=0.8, max_new_tokens=8)
            self.assertEqual(choice.index, i)
            self.assertEqual(choice.text, prompt + answer.text)
        self.assertEqual(found.usage.prompt_tokens, sum(len(ids(text)) for text in ("one", "two")))

    def test_token_ids(self):
        by_ids = SERVER.client.completions.create(model=NAME, prompt=ids("one"), temperature=0)
        by_text = SERVER.client.completions.create(model=NAME, prompt="one", temperature=0)
        self.assertEqual(by_ids.choices[0].text, by_text.choices[0].text)

    @parameterized.parameters(False, True)
    def test_logprobs_are_those_of_the_logits(self, stream):
        how: Any = {"max_tokens": 10, "temperature": 0.8, "seed": 2, "logprobs": 3}
        found: Any = SERVER.client.completions.create(
            model=NAME, prompt=PROMPT, stream=stream, extra_body={"repetition_penalty": 1.3}, **how
        )
        choices = [chunk.choices[0] for chunk in found] if stream else [found.choices[0]]
        told = [choice.logprobs for choice in choices if choice.logprobs]
        values = [value for one in told for value in one.token_logprobs]
        answer = alone(PROMPT, temperature=0.8, seed=2, max_new_tokens=10, repetition_penalty=1.3)
        expected = expected_logprobs(PROMPT, answer.tokens)
        chosen = expected[np.arange(len(answer.tokens)), answer.tokens]
        np.testing.assert_allclose(values, chosen, atol=2e-5)
        tops = [[*one.values()] for part in told for one in part.top_logprobs]
        np.testing.assert_allclose(tops, -np.sort(-expected, axis=-1)[:, :3], atol=2e-5)
        self.assertEqual("".join(t for one in told for t in one.tokens), answer.text)
        offsets = [offset for one in told for offset in one.text_offset]
        self.assertEqual(offsets[0], 0)
        self.assertEqual(offsets, sorted(offsets))

    def test_nothing_is_compiled_twice(self):
        """Logprobs are other programs, and requests without them go on with their own."""

        def ask(**how: Any) -> int:
            SERVER.client.completions.create(model=NAME, prompt=PROMPT, temperature=0, **how)
            return ENGINE.num_traces

        first, again = ask(), ask()
        self.assertEqual(first, again)
        told = ask(logprobs=1)
        self.assertEqual(ask(), told)
        self.assertEqual(ask(logprobs=5), told)


class ChatTest(parameterized.TestCase):
    MESSAGES: Any = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"})
    PROMPT = "system: be kind user: hi bot:"

    @parameterized.parameters(
        ({}, PROMPT),
        ({"enable_thinking": False}, "system: be kind user: hi think=False bot:"),
        ({"reasoning_effort": "none"}, "system: be kind user: hi think=False bot:"),
        ({"reasoning_effort": "low"}, "system: be kind user: hi effort=low bot:"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            "system: be kind user: hi think=True bot:",
        ),
    )
    def test_equals_the_engine(self, more, prompt):
        expected = alone(prompt, temperature=0.7, seed=4, add_special_tokens=False)
        given: Any = {
            "model": NAME, "messages": self.MESSAGES, "max_completion_tokens": 12, "seed": 4,
            "temperature": 0.7, "extra_body": more,
        }  # fmt: skip
        found = SERVER.client.chat.completions.create(**given)
        self.assertEqual(found.choices[0].message.content, expected.text)
        self.assertEqual(found.choices[0].message.role, "assistant")
        self.assertEqual(found.usage.prompt_tokens, len(ids(prompt)))
        chunks = [*SERVER.client.chat.completions.create(
            **given, stream=True, stream_options={"include_usage": True}
        )]  # fmt: skip
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
        self.assertEqual("".join(texts), expected.text)
        self.assertEqual(chunks[-1].usage, found.usage)
        self.assertEmpty(chunks[-1].choices)

    def test_logprobs(self):
        found = SERVER.client.chat.completions.create(
            model=NAME, messages=self.MESSAGES, max_tokens=6, temperature=0, logprobs=True,
            top_logprobs=2,
        )  # fmt: skip
        told = found.choices[0].logprobs.content
        answer = alone(self.PROMPT, max_new_tokens=6)
        expected = expected_logprobs(self.PROMPT, answer.tokens)
        np.testing.assert_allclose([one.logprob for one in told], expected.max(-1), atol=2e-5)
        for one in told:  # greedy: the likeliest is the one that was taken
            self.assertEqual(one.top_logprobs[0].token, one.token)
            self.assertEqual(bytes(one.bytes).decode(), one.token)
            self.assertLen(one.top_logprobs, 2)


class TogetherTest(absltest.TestCase):
    def test_requests_of_all_kinds_in_one_batch_are_answered_as_alone(self):
        how: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.8, "seed": 11, "stream": True},
            {"temperature": 1.3, "seed": 12, "top_p": 0.8, "logprobs": 2},
            {"temperature": 0.6, "seed": 13, "stop": ["e"], "stream": True},
            {"temperature": 1.0, "seed": 14, "extra_body": {"top_k": 3}},
            {"temperature": 0.9, "seed": 15, "extra_body": {"repetition_penalty": 1.4}},
        ]

        def ask(i: int) -> str:
            given: Any = {
                "model": NAME,
                "prompt": f"{PROMPT} {i}" * (i + 1),
                "max_tokens": 8 + 3 * i,
            }
            found: Any = SERVER.client.completions.create(**given, **how[i])
            if not how[i].get("stream"):
                return found.choices[0].text
            return "".join(chunk.choices[0].text for chunk in found)

        with held_steps() as gate, concurrent.futures.ThreadPoolExecutor(7) as pool:
            first = pool.submit(SERVER.client.completions.create, model=NAME, prompt="a")
            wait_until(lambda: SERVER.value("moejax_running") == 1, "the first")
            asked = [pool.submit(ask, i) for i in range(len(how))]
            wait_until(lambda: SERVER.batcher.num_waiting == len(how), "all wait")
            gate.set()
            texts = [one.result() for one in asked]
            first.result()
        for i, (text, settings) in enumerate(zip(texts, how, strict=True)):
            own = {
                k: v for k, v in settings.items() if k not in ("stream", "logprobs", "extra_body")
            }
            own |= settings.get("extra_body", {})
            expected = alone(f"{PROMPT} {i}" * (i + 1), max_new_tokens=8 + 3 * i, **own)
            self.assertEqual(text, expected.text, i)


class ErrorsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("{{ 'a' * 10**10 }}", "the chat template failed: it takes more than 512 MiB"),
        ("{{ raise_exception('no') }}", "the chat template failed: no"),
    )
    def test_a_chat_template_that_fails(self, template, said):
        body = {"messages": [{"role": "user", "content": "hi"}]}
        tokenizer = ENGINE.tokenizer
        with mock.patch.object(tokenizer, "chat_template", template):
            status, answer, _ = SERVER.post("/v1/chat/completions", body)
        self.assertEqual((status, answer["error"]["message"]), (400, said))

    @parameterized.parameters(
        (b"", None), (b"{", None), (b"[]", None), (b"\xff", None), (b'{"prompt": NaN}', None),
        (b"[" * 90_000, None),
        ({}, "prompt"), ({"prompt": 3}, "prompt"), ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"), ({"prompt": [9999]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"), ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, -(2**70)]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"), ({"prompt": "a", "stop": "\udc00"}, "stop"),
        ({"prompt": "a", "stop": [""]}, "stop"), ({"prompt": "a", "stop": {"a": 1}}, "stop"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "top_p": 1.5}, "top_p"), ({"prompt": "a", "top_k": 0.5}, "top_k"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"), ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 17}, "n"),  # over the queue's limit
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": ["a"] * 4000, "n": 128}, "n"),
        ({"prompt": "a", "seed": 2**70}, "seed"), ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "a", "logit_bias": {"1": 2}}, "logit_bias"),
        ({"prompt": "a", "min_tokens": 1}, "min_tokens"),
        ({"prompt": "a", "grammar": "x"}, "grammar"),
        ({"prompt": "a", "guided_json": {"type": "object"}}, "guided_json"),
        ({"prompt": "a", "best_of": 4}, "best_of"), ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "temprature": 1}, "temprature"), ({"prompt": "a", "model": 1}, "model"),
        ({"prompt": "a", "\ud800": 1}, "\ud800"),
    )  # fmt: skip
    def test_a_completion_is_refused(self, body, param):
        status, said, _ = SERVER.post("/v1/completions", body)
        self.assertEqual(status, 400, said)
        self.assertEqual(said["error"]["type"], "invalid_request_error")
        self.assertEqual(said["error"]["param"], param)
        self.assertNotIn("\n", said["error"]["message"])

    @parameterized.parameters(
        ({}, "messages"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"reasoning_effort": 3}, "reasoning_effort"), ({"echo": True}, "echo"),
        ({"chat_template": "{{ 'a' * 10**10 }}"}, "chat_template"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"messages": [{"role": "user", "content": ""}] * 2049}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2049}]},
         "messages"),
    )  # fmt: skip
    def test_a_chat_is_refused(self, body, param):
        if "messages" not in body and param != "messages":
            body = {"messages": [{"role": "user", "content": "a"}], **body}
        status, said, _ = SERVER.post("/v1/chat/completions", body)
        self.assertEqual((status, said["error"]["param"]), (400, param), said)
        self.assertNotIn("\n", said["error"]["message"])

    def test_what_asks_for_nothing_is_taken(self):
        body = {"prompt": "a", "max_tokens": 1, "presence_penalty": 0, "logit_bias": {}, "n": None}
        body |= {"user": "me", "best_of": 1, "stream": False, "model": NAME, "top_p": 0}
        self.assertEqual(SERVER.post("/v1/completions", body)[0], 200)
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        chat = {"messages": [{"role": "developer", "content": parts}], "max_tokens": 1, "tools": []}
        self.assertEqual(SERVER.post("/v1/chat/completions", chat)[0], 200)

    def test_who_asks_for_no_shared_prefix_is_refused(self):
        for field, value in (("cache_prompt", False), ("cache_salt", "mine")):
            status, said, _ = SERVER.post("/v1/completions", {"prompt": "a", field: value})
            self.assertEqual((status, said["error"]["param"]), (400, field), said)

    def test_what_other_servers_take_is_taken_or_logged_once(self):
        body = {"prompt": "a", "max_tokens": 1, "ignore_eos": False, "min_tokens": 0}
        body |= {"skip_special_tokens": True, "stop_token_ids": [], "use_beam_search": False}
        body |= {"reasoning_effort": "low", "stream_options": {}, "cache_prompt": True}
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "priority": 0}
        chat |= {"skip_special_tokens": True, "add_generation_prompt": True, "echo": False}
        with self.assertLogs("moejax.serving.app", "WARNING") as log:
            logging.getLogger("moejax.serving.app").warning("so that there is a line")
            for _ in range(2):
                for path, sent in (("completions", body), ("chat/completions", chat)):
                    status, said, _ = SERVER.post(f"/v1/{path}", sent)
                    self.assertEqual(status, 200, said)
        named = sorted(line.split("field ")[1].split()[0] for line in log.output[1:])
        expected = ["priority", "reasoning_effort", "skip_special_tokens"]
        self.assertEqual(named, expected)

    def test_neutral_settings_of_a_text_client(self):
        """SillyTavern's with every method off, as it sends them to servers of completions."""
        body = {
            "prompt": "the fox", "max_tokens": 4, "max_new_tokens": 4, "temperature": 0,
            "top_p": 1, "typical_p": 1, "typical": 1, "sampler_seed": 5, "seed": 5, "min_p": 0,
            "repetition_penalty": 1, "rep_pen": 1, "frequency_penalty": 0, "presence_penalty": 0,
            "top_k": 0, "skew": 0, "min_tokens": 0, "min_length": 0, "num_beams": 1,
            "length_penalty": 1, "early_stopping": False, "add_bos_token": True,
            "smoothing_factor": 0, "smoothing_curve": 1, "dry_allowed_length": 2,
            "dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": "[\"\\n\"]",
            "dry_penalty_last_n": 0, "max_tokens_second": 0, "stopping_strings": ["zzz"],
            "stop": ["zzz"], "truncation_length": 200, "ban_eos_token": False,
            "top_a": 0, "tfs": 1,
            "epsilon_cutoff": 0, "eta_cutoff": 0, "mirostat_mode": 0, "mirostat_tau": 5,
            "mirostat_eta": 0.1, "custom_token_bans": "", "banned_strings": [], "nsigma": 0,
            "top_n_sigma": 0, "min_keep": 0, "xtc_threshold": 0.1, "xtc_probability": 0,
            "grammar_string": "", "json_schema": None, "guidance_scale": 1, "negative_prompt": "",
            "n_predict": 4, "num_predict": -1, "num_ctx": 200, "repeat_penalty": 1, "tfs_z": 1,
            "repeat_last_n": 64, "repetition_penalty_range": 0, "mirostat": 0,
            "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "penalty_alpha": 0,
            "dynamic_temperature": False, "dynatemp_range": 0, "dynatemp_exponent": 1,
            "samplers": [], "truncate_prompt_tokens": -1, "logit_bias": [],
        }  # fmt: skip
        status, said, _ = SERVER.post("/v1/completions", body)
        self.assertEqual(status, 200, said)
        expected = alone("the fox", max_new_tokens=4, temperature=0)
        self.assertEqual(said["choices"][0]["text"], expected.text)

    @parameterized.parameters(
        {"top_a": 0.1}, {"tfs_z": 0.9}, {"repeat_penalty": 1.1}, {"mirostat": 2}, {"num_ctx": 8},
        {"truncate_prompt_tokens": 1}, {"truncation_length": 2}, {"n_predict": 5},
        {"sampler_seed": 6}, {"stopping_strings": ["a"]}, {"xtc_probability": 0.5},
        {"dry_multiplier": 0.8}, {"num_ctx": "8"}, {"add_bos_token": False},
        {"samplers": ["top_k"]},
        {"repetition_penalty": 1.2, "repeat_last_n": 64}, {"typ_p": 0.5}, {"guided_regex": "a+"},
        {"smoothing_factor": 0.2}, {"ban_eos_token": True}, {"n_probs": 3},
        {"logit_bias": [[1, 2]]},
    )  # fmt: skip
    def test_settings_that_would_change_the_answer_are_refused_by_name(self, **more):
        body = {"prompt": "the fox", "max_tokens": 4, "temperature": 0, "seed": 5, **more}
        chat = {"messages": [{"role": "user", "content": "the fox"}], **body}
        del chat["prompt"]
        for path, sent in (("completions", body), ("chat/completions", chat)):
            status, said, _ = SERVER.post(f"/v1/{path}", sent)
            self.assertEqual((status, said["error"]["param"]), (400, list(more)[-1]), said)

    def test_by_the_client(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            SERVER.client.completions.create(model="gpt-4", prompt="a")
        self.assertEqual(caught.exception.code, "model_not_found")
        with self.assertRaises(openai.BadRequestError) as refused:
            SERVER.client.completions.create(model=NAME, prompt="x" * 300)
        self.assertEqual(refused.exception.code, "context_length_exceeded")
        self.assertIn("a prompt of 300", str(refused.exception))
        self.assertIn("context of 256", str(refused.exception))

    def test_long_bodies(self):
        status, said, _ = SERVER.post("/v1/completions", b" " * 100_001)
        self.assertEqual((status, said["error"]["code"]), (413, "body_too_large"))

    def test_other_routes(self):
        for path, expected in (("/", 404), ("/v1/completions", 405), ("/v1/models/other", 404)):
            status, text = SERVER.get(path)
            self.assertEqual(status, expected, path)
            self.assertIn("message", json.loads(text)["error"])


class OthersTest(absltest.TestCase):
    def test_models_and_health(self):
        self.assertEqual([model.id for model in SERVER.client.models.list()], [NAME])
        self.assertEqual(SERVER.client.models.retrieve(NAME).id, NAME)
        status, text = SERVER.get("/health")
        body = json.loads(text)
        self.assertEqual(
            (status, body["alive"], body["ready"], body["model"]), (200, True, True, NAME)
        )
        self.assertEqual(body["device"], str(ENGINE.device))

    def test_metrics_count_what_happens(self):
        names = ("moejax_generated_tokens_total", "moejax_prompt_tokens_total",
                 "moejax_ttft_seconds_count", "moejax_tpot_seconds_count")  # fmt: skip

        def counts() -> dict[str, float]:
            found = {name: SERVER.value(name) for name in names}
            for outcome in ("ok", "invalid"):
                labels = {"endpoint": "completions", "outcome": outcome}
                found[outcome] = SERVER.value("moejax_requests_total", **labels)
            return found

        before = counts()
        answer = SERVER.client.completions.create(model=NAME, prompt=PROMPT, temperature=0)
        SERVER.post("/v1/completions", b"{")
        after = {name: now - before[name] for name, now in counts().items()}
        tokens = answer.usage.completion_tokens, answer.usage.prompt_tokens
        self.assertEqual(after, dict(zip(before, (*tokens, 1, 1, 1, 1), strict=True)))
        self.assertIn("moejax_requests_total", SERVER.get("/metrics")[1])


def ids(text: str) -> list[int]:
    """Encodes a text by the tiny tokenizer."""
    assert ENGINE.tokenizer is not None
    return ENGINE.tokenizer.encode(text)
