"""Cases of the server's stress: what a server answers is found right, and what is altered wrong."""

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
from absl.testing import parameterized

from scripts.stress_cases import NUM_TOP, TOLERANCE, Case, Choice, add_answer, make_cases
from tests.serving_case import Served, served, tiny_chat_engine

pytestmark = pytest.mark.slow  # what a server answers is asked of it in `serve_api_test`

OPEN = contextlib.ExitStack()
with_fields = dataclasses.replace
SERVER: Served
CASES: list[Case]


def setUpModule():
    global SERVER, CASES
    directory = Path(OPEN.enter_context(tempfile.TemporaryDirectory()))
    engine = OPEN.enter_context(tiny_chat_engine(directory))
    CASES = make_cases(engine, 21, seed=3)
    SERVER = OPEN.enter_context(served(engine))


def tearDownModule():
    OPEN.close()


def ask(case: Case, stream: bool) -> tuple[dict[int, Choice], int]:
    """Sends a case to the server; returns its answers, and the tokens that it counts."""
    client, found = SERVER.client, dict[int, Choice]()
    create = client.chat.completions.create if case.is_chat else client.completions.create
    # Fields that OpenAI's API does not have.
    own = {name: case.body[name] for name in ("top_k", "min_p") if name in case.body}
    body: dict[str, Any] = {name: case.body[name] for name in case.body.keys() - own.keys()}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = create(model="tiny", extra_body=own, **body)
    usage = None
    for part in answer if stream else [answer]:
        told = part.to_dict()
        usage = told.get("usage") or usage
        for choice in told["choices"]:
            add_answer(found, choice, case)
    assert usage is not None
    return found, usage["completion_tokens"]


class StressCasesTest(parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_the_server_answers_them(self, stream: bool):
        for case in CASES:
            gap = case.largest_gap(*ask(case, stream))
            self.assertEqual(gap > 0, case.wants_logprobs and case.choices[0].text != "", case.body)

    def test_altered_answers_are_found(self):
        [case, *_] = [c for c in CASES if len(c.choices) == 2 and c.wants_logprobs]
        found, num_tokens = ask(case, stream=True)
        case.largest_gap(found, num_tokens)
        first, second = found[0], found[1]
        assert first.tokens is not None
        token, *rest = first.tokens
        self.assertLen(token.top, NUM_TOP)
        tops = {text: logprob - 2 * TOLERANCE for text, logprob in token.top.items()}
        for said, altered in {
            "tokens": [*first.tokens, token],
            "differ by": [with_fields(token, logprob=token.logprob + 2 * TOLERANCE), *rest],
            "differ by 0.00": [with_fields(token, top=tops), *rest],
            "not the first two": [with_fields(token, top={}), *rest],
        }.items():
            with self.subTest(said), self.assertRaisesRegex(ValueError, f"choice 0.*{said}"):
                told = {0: with_fields(first, tokens=altered), 1: second}
                case.largest_gap(told, num_tokens)
        for said, choices in {
            "choices": {0: first},
            "choice 0": {0: second, 1: first},
            "choice 1": {0: first, 1: with_fields(second, text=second.text + "a")},
            "None": {0: with_fields(first, finish_reason=None), 1: second},
        }.items():
            with self.subTest(said), self.assertRaisesRegex(ValueError, said):
                case.largest_gap(choices, num_tokens)
        with self.assertRaisesRegex(ValueError, "tokens in place of"):
            case.largest_gap(found, num_tokens + 1)
