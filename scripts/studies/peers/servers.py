"""One client for the servers of all: OpenAI's /v1/completions, prompts of token ids or words."""

import concurrent.futures
import contextlib
import http.client
import json
import random
import re
import socket
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from scripts.studies.peers.running import (
    Figure,
    NotRunError,
    OutOfTimeError,
    Place,
    decode,
    device_memory,
    last_words,
    prefill,
    start,
    stop,
)

SEQUENCES = (1, 4, 16)  # requests at once
NEW_TOKENS = 129
RUNS = 3
LEAST_ID, MOST_ID = 300, 511  # of prompts: in every vocabulary of the study
HOST = "127.0.0.1"
TIMEOUT_S = 300.0
JSON_HEADERS = {"Content-Type": "application/json"}
WORD = re.compile(r"Ġ[a-z]+")  # a token that stays one token, whatever stands beside it


class NotReadyError(ValueError):
    """A server that still loads its model."""


class Prompts:
    """Random prompts; no two begin alike, so that no server finds one in its cache.

    Args:
      tokens: of each.
      tokenizer: file of a server that takes texts alone, as Hugging Face has it; None: token ids.
    """

    def __init__(self, tokens: int, tokenizer: Path | None = None) -> None:
        self.tokens = tokens
        self._ids = list(range(LEAST_ID, MOST_ID))
        self._tokenizer = None
        if tokenizer is not None:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer))
            name = self._tokenizer.id_to_token
            self._ids = [one for one in self._ids if WORD.fullmatch(name(one) or "")]

    def __call__(self, seed: int) -> list[int] | str:
        """The prompt of a seed."""
        drawn = random.Random(seed)
        ids = [drawn.choice(self._ids) for _ in range(self.tokens)]
        return self._tokenizer.decode(ids) if self._tokenizer else ids


def measure(
    place: Place, words: Sequence[str], env: Mapping[str, str], prompts: Prompts
) -> list[Figure]:
    """Figures of a server that is started, asked and ended.

    Args:
      words: its command, in which "{port}" is replaced.
      env: added to the environment.
      prompts: what it is asked.

    Raises:
      NotRunError: it ends early, or refuses.
      OutOfTimeError: the place's end comes first.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = int(free.getsockname()[1])
    place.logs.mkdir(parents=True, exist_ok=True)
    log = place.logs / "server.txt"
    with device_memory() as memory, log.open("w") as file:
        process = start([word.replace("{port}", str(port)) for word in words], env, file, file)
        try:
            model = _wait(process, port, place, prompts)
            found = [
                figure
                for count in SEQUENCES
                for figure in _figures(port, model, prompts, count, place)
            ]
            own = _own_peak(port)
        except (OSError, http.client.HTTPException, ValueError) as error:
            said = last_words(log) if process.poll() is not None else f"{error}"
            raise NotRunError(said or type(error).__name__) from error
        finally:
            stop(process)
    peak: dict[str, float | str] = {} if memory.peak is None else {"peak_gib": memory.peak}
    peak |= {"own_peak_gib": own} if own else {}
    return [figure._replace(more=figure.more | peak) for figure in found]


def _wait(process: "subprocess.Popen[str]", port: int, place: Place, prompts: Prompts) -> str:
    """The model's name, once the server answers a prompt of the length that is measured."""
    until = time.monotonic() + place.each_s
    while process.poll() is None:
        if time.monotonic() > place.end:
            raise OutOfTimeError
        if time.monotonic() > until:
            raise NotRunError(f"was not ready after {place.each_s:.0f} s")
        errors = OSError, http.client.HTTPException, LookupError, NotReadyError
        with contextlib.suppress(*errors, json.JSONDecodeError):
            model = str(json.loads(_exchange(port, "/v1/models")[1])["data"][0]["id"])
            ask(port, model, prompts(0), prompts.tokens, 4)
            return model
        time.sleep(0.5)
    raise OSError("the server ended before it was ready")


def _exchange(port: int, path: str, body: str | None = None) -> tuple[int, bytes]:
    """Status and content of a server's answer: to a POST of JSON, or to a GET without a body."""
    kind = ("GET", path) if body is None else ("POST", path, body, JSON_HEADERS)
    timeout_s = 10 if body is None else TIMEOUT_S
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=timeout_s)) as of:
        of.request(*kind)
        response = of.getresponse()
        return response.status, response.read()


def _own_peak(port: int) -> float:
    """GiB of device memory that moejax has held; 0 of others."""
    _, said = _exchange(port, "/metrics")
    found = re.search(r"^moejax_device_peak_bytes (\S+)$", said.decode(), re.MULTILINE)
    return float(found[1]) / 2**30 if found else 0.0


def complete(port: int, body: Mapping[str, Any]) -> Any:
    """Answer of a server on this machine to a completion.

    Raises:
      ValueError: a status that is not 200; a `NotReadyError` if it is 503.
    """
    status, said = _exchange(port, "/v1/completions", json.dumps(body))
    if status != 200:
        error = NotReadyError if status == 503 else ValueError
        raise error(f"status {status}: {said[:200].decode(errors='replace')}")
    return json.loads(said)


def ask(port: int, model: str, prompt: list[int] | str, tokens: int, new_tokens: int) -> None:
    """Asks for one greedy answer of so many tokens to a prompt of `tokens`, and waits for it.

    Raises:
      ValueError: a status that is not 200, or another number of tokens.
    """
    usage = complete(
        port,
        {
            "model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0,
            "ignore_eos": True,
        },
    )["usage"]  # fmt: skip
    # FreeToken, which takes texts, counts one token of an answer less, whatever its length.
    least = new_tokens - isinstance(prompt, str)
    if usage["prompt_tokens"] != tokens or not least <= usage["completion_tokens"] <= new_tokens:
        raise ValueError(f"{tokens} tokens and {new_tokens} new ones were asked for: {usage}")


def _figures(port: int, model: str, prompts: Prompts, count: int, place: Place) -> list[Figure]:
    """Rates of `count` requests at once, by the medians of some runs.

    A chunk of a stream may hold one token or sixteen, so times are those of whole answers: of one
    token, T(1), and of N. Prompts are read at `count * tokens / T(1)` tokens a second, further
    tokens come at `count * (N - 1) / (T(N) - T(1))`.
    """
    tokens = prompts.tokens
    seconds: dict[int, list[float]] = {1: [], NEW_TOKENS: []}
    for run in range(RUNS):
        for new_tokens, found in seconds.items():
            if time.monotonic() > place.end:
                raise OutOfTimeError
            first = 1 + (2 * run + (new_tokens > 1)) * 1000 + count * 100_000
            began = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(count) as pool:
                asked = [
                    pool.submit(ask, port, model, prompts(seed), tokens, new_tokens)
                    for seed in range(first, first + count)
                ]
                for one in asked:
                    one.result()
            found.append(time.perf_counter() - began)
    short, long = (statistics.median(found) for found in seconds.values())
    if long <= short:
        raise NotRunError(f"{NEW_TOKENS} tokens took {long:.3g} s, one token {short:.3g} s")
    after = count * (NEW_TOKENS - 1) / (long - short)
    more: dict[str, float | str] = {"runs": float(RUNS), "one_s": short, "all_s": long}
    return [
        Figure(prefill(tokens, count), count * tokens / short, more),
        Figure(decode(tokens, count), after, more),
    ]
