"""Requests of `scripts.stress_server` with the answers that they must get, and the comparison."""

import dataclasses
import random
from typing import Any

import numpy as np

from moejax import Engine
from moejax.inference.generation import NUM_SEEDS, GenerationSettings
from moejax.serving.answers import TokenTexts
from moejax.text.tokenizer import token_ids_of

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
TEXTS = (
    "The history of", "def fibonacci(n):", "Once upon a time there was a", "In the year 1789",
    "The capital of France is", "import numpy as np\n\n", "Water boils at",
    "She opened the door and",
)  # fmt: skip
HOW: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 24},
    {"temperature": 0.8, "top_k": 40, "max_tokens": 40},
    {"temperature": 1.0, "top_p": 0.9, "max_tokens": 16},
    {"temperature": 0.7, "stop": [" the", "\n"], "max_tokens": 48},
    {"temperature": 1.0, "min_p": 0.05, "max_tokens": 32},
)
NUM_TOP = 2  # likeliest tokens asked for beside each token
# Choices of a request, and whether it asks for log-probabilities; no length is shared with others.
SHAPES = ((1, False), (2, False), (1, True), (1, False), (2, True), (1, False), (1, True))
# Nats between a log-probability that the server tells, from a decode step of some batch, and that
# of one prefill of the same tokens alone; float32, sums in another order.
TOLERANCE = 1e-3
BEGINNING = 4  # letters of an answer that rounding seldom changes


@dataclasses.dataclass(frozen=True)
class Token:
    """A reported token: text, logarithm of its probability, likeliest alternatives."""

    text: str
    logprob: float
    top: dict[str, float]


@dataclasses.dataclass
class Choice:
    """One answer of a request; `tokens` is None where log-probabilities are not told."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[Token] | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """A request, and the answers that its prompt gets alone with the seed of each choice."""

    path: str
    body: dict[str, Any]
    choices: tuple[Choice, ...]
    num_tokens: int  # of all choices, as the usage counts them
    is_exact: bool = True  # whether texts must be those; else rounding may change them

    @property
    def is_chat(self) -> bool:
        """Whether the request is for the chat endpoint."""
        return "messages" in self.body

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return "logprobs" in self.body

    def largest_gap(self, found: dict[int, Choice], num_tokens: int) -> float:
        """Nats by which log-probabilities differ at most, 0 where none are told.

        Raises:
          ValueError: an answer is not the one that is expected; it says which.
        """
        if sorted(found) != list(range(len(self.choices))):
            raise ValueError(f"choices {sorted(found)} of {len(self.choices)}")
        if num_tokens != self.num_tokens:
            raise ValueError(f"{num_tokens} tokens in place of {self.num_tokens}")
        gaps = [0.0]
        for index, expected in enumerate(self.choices):
            told, wanted = found[index], (expected.text, expected.finish_reason)
            if told.finish_reason != wanted[1] or (self.is_exact and told.text != wanted[0]):
                said = f"{(told.text, told.finish_reason)} in place of {wanted}"
                raise ValueError(f"choice {index}: {said}")
            if expected.tokens is not None:
                gaps.append(_largest_gap(told.tokens or [], expected.tokens, index))
            elif told.tokens is not None:
                raise ValueError(f"choice {index}: log-probabilities that nobody asked for")
        return max(gaps)

    def begins_alike(self, found: dict[int, Choice]) -> bool:
        """Whether all choices begin with the first letters of those that are expected."""
        return all(
            found[index].text[:BEGINNING] == expected.text[:BEGINNING]
            for index, expected in enumerate(self.choices)
        )


def _largest_gap(found: list[Token], expected: list[Token], index: int) -> float:
    """Largest log-probability gap of a choice; tokens within rounding may change places."""
    texts = [[token.text for token in tokens] for tokens in (found, expected)]
    if texts[0] != texts[1]:
        raise ValueError(f"choice {index}: tokens {texts[0]} in place of {texts[1]}")
    gaps = [0.0]
    for told, wanted in zip(found, expected, strict=True):
        ranked = sorted(wanted.top.values(), reverse=True)
        if len(told.top) != NUM_TOP or not told.top.keys() <= wanted.top.keys():
            raise ValueError(f"choice {index}: {told.top}, not the first two of {wanted.top}")
        gaps.append(abs(told.logprob - wanted.logprob))
        gaps += [abs(told.top[text] - wanted.top[text]) for text in told.top]
        in_order = sorted(told.top.values(), reverse=True)
        gaps += [abs(a - b) for a, b in zip(in_order, ranked, strict=False)]
    if max(gaps) > TOLERANCE:
        raise ValueError(f"choice {index}: log-probabilities differ by {max(gaps)} nats")
    return max(gaps)


def make_cases(engine: Engine, count: int, seed: int) -> list[Case]:
    """Requests of both endpoints with the answers that the engine gives to each choice alone."""
    assert engine.tokenizer is not None
    cases, rng, texts = [], random.Random(seed), TokenTexts(engine.tokenizer)
    for i in range(count):
        how, text = HOW[i % len(HOW)], TEXTS[i % len(TEXTS)]
        is_chat = i % 3 == 2 and engine.tokenizer.chat_template is not None
        num_choices, wants_logprobs = SHAPES[i % len(SHAPES)]
        body: dict[str, Any] = {**how, "seed": rng.randrange(NUM_SEEDS)}
        asked = {"max_new_tokens" if name == "max_tokens" else name: body[name] for name in body}
        prompt = text
        if is_chat:
            body["messages"] = [{"role": "user", "content": text}]
            prompt = engine.tokenizer.apply_chat_template(body["messages"])
        else:
            body["prompt"] = text
        if num_choices > 1:
            body["n"] = num_choices
        if wants_logprobs:
            body |= (
                {"logprobs": True, "top_logprobs": NUM_TOP} if is_chat else {"logprobs": NUM_TOP}
            )
        choices, num_tokens = [], 0
        for number in range(num_choices):
            asked["seed"] = (body["seed"] + number) % NUM_SEEDS  # as docs/server.md says of `n`
            settings = GenerationSettings.of(add_special_tokens=not is_chat, **asked)
            [answer] = engine.generate([prompt], **dataclasses.asdict(settings))
            assert answer.text is not None
            choice = Choice(answer.text, FINISH[answer.finish_reason])
            if wants_logprobs:
                ids = token_ids_of(
                    prompt, engine.tokenizer, engine.config.vocab_size,
                    add_special_tokens=not is_chat,
                )  # fmt: skip
                choice.tokens = _expected_tokens(engine, texts, ids, answer.tokens)
            choices.append(choice)
            num_tokens += len(answer.tokens)
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        cases.append(Case(path, body, tuple(choices), num_tokens))
    return cases


def _expected_tokens(
    engine: Engine, texts: TokenTexts, prompt: list[int], answer: list[int]
) -> list[Token]:
    """Expected tokens by one prefill and float64 numpy, with more candidates."""
    logits = engine.logits([prompt + answer])[0, len(prompt) - 1 : -1].astype(np.float64)
    logprobs = logits - logits.max(axis=-1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(axis=-1, keepdims=True))
    found = []
    for token, row in zip(answer, logprobs, strict=True):
        if token not in engine.eos_ids:
            likeliest = np.argsort(-row)[: 4 * NUM_TOP]
            top = {texts.of(int(one)): float(row[one]) for one in reversed(likeliest)}
            found.append(Token(texts.of(token), float(row[token]), top))
    return found


def add_answer(choices: dict[int, Choice], told: dict[str, Any], case: Case) -> None:
    """Adds a choice of an answer, or of a chunk of a stream, to what its index had before.

    Raises:
      ValueError: the offsets of a completion's tokens are not those of their texts.
    """
    choice = choices.setdefault(told["index"], Choice())
    said = told.get("message") or told.get("delta") or {}
    choice.text += said.get("content") or told.get("text") or ""
    choice.finish_reason = told["finish_reason"] or choice.finish_reason
    if (logprobs := told["logprobs"]) is None:
        # A stream's last chunk has none, nor has the first one, of the role.
        return
    choice.tokens = choice.tokens or []
    if case.is_chat:
        for one in logprobs["content"]:
            top = {other["token"]: other["logprob"] for other in one["top_logprobs"]}
            choice.tokens.append(Token(one["token"], one["logprob"], top))
        return
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for *fields, offset in zip(*columns, logprobs["text_offset"], strict=True):
        before = sum(len(token.text) for token in choice.tokens)
        if offset != before:
            raise ValueError(f"a token after {before} characters has the offset {offset}")
        choice.tokens.append(Token(*fields))
