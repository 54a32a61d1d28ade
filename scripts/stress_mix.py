"""Short and long prompts and answers on one server, for `scripts.stress_server --mix`.

Each is asked alone first, which says what its answer is. Then clients ask again as soon as they
have their answers: three prompts in four have 16 to 64 tokens and the others 500 to 1,000, three
answers in four 8 to 32 and the others 200 to 500; half of them stream. Then 500-token answers run
in all lanes but one, while a client streams short ones, one after the other: their TTFT counts in
decode calls, whose time is that of some steps of the long answers. Last, long prompts are streamed,
each before one that continues it; their medians count.
"""

import itertools
import random
import statistics
import threading
import time
from typing import NamedTuple

from scripts.stress_cases import Case, Choice
from scripts.stress_clients import Client, Tally
from scripts.stress_process import Server, percentile
from scripts.studies.peers.servers import LEAST_ID, MOST_ID, complete

LONG_TOKENS = 500
NUM_FIRST = 8  # tokens of an answer alone where rounding changes what follows
NUM_TALKS = 9  # of two turns
Figures = dict[str, tuple[float, str]]


class Mix(NamedTuple):
    """Requests that are asked, and answers alone."""

    cases: list[Case]
    short: Case
    long: Case
    turns: list[Case]


def make_mix(server: Server, count: int, history: int, *, is_exact: bool) -> Mix:
    """Bodies of requests with the answers that a server gives to each alone.

    Args:
      count: requests, which clients ask for in turn; with many the server's cache has lost a prompt
        when it comes again.
      history: tokens of the first turn.
      is_exact: whether answers must be those ones; else rounding may change them.
    """
    rng = random.Random(0)

    def case_of(prompt: list[int], num_new: int) -> Case:
        body = {"prompt": prompt, "max_tokens": num_new, "ignore_eos": True, "temperature": 0}
        few = num_new if is_exact else min(num_new, NUM_FIRST)
        [told] = complete(server.port, {**body, "max_tokens": few})["choices"]
        choice = Choice(told["text"], told["finish_reason"])
        return Case("/v1/completions", body, (choice,), num_new, is_exact)

    cases = []
    for i in range(count):
        length = rng.randint(500, 1000) if i % 4 == 1 else rng.randint(16, 64)
        num_new = rng.randint(200, 500) if i // 4 % 4 == i % 4 else rng.randint(8, 32)
        cases.append(case_of([rng.randint(LEAST_ID, MOST_ID) for _ in range(length)], num_new))
    prompt = [7, 8, 9, 10, 11, 12, 13, 14]
    # Not asked here, since they must be new to the server: only their lengths are known.
    body = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
    turns = [
        Case("/v1/completions", {**body, "prompt": one}, (Choice("", "length"),), 4, is_exact=False)
        for turn in ([3 + (n + i * i) % 997 for i in range(history)] for n in range(NUM_TALKS))
        for one in (turn, [*turn, *[5] * 20])
    ]
    return Mix(cases, case_of(prompt, 8), case_of(prompt[::-1], LONG_TOKENS), turns)


def run_mix(
    server: Server, tally: Tally, cases: list[Case], clients: int, seconds: float
) -> Figures:
    """Runs all clients for so many seconds, until each has its last answer."""
    until, number = time.monotonic() + seconds, itertools.count()

    def ask_in_turn() -> None:
        client = Client(server.port, cases, tally, 0)
        while time.monotonic() < until:
            place = next(number)
            client.ask(cases[place % len(cases)], stream=place % 2 == 0)

    threads = [threading.Thread(target=ask_in_turn) for _ in range(clients)]
    for thread in threads:
        thread.start()
    names = [f"moejax_{of}_tokens_total" for of in ("generated", "prompt", "prefix")]
    before, started = [server.metric(name) for name in names], time.monotonic()
    time.sleep(max(0.0, until - time.monotonic()))
    new, asked, held = (server.metric(name) - was for name, was in zip(names, before, strict=True))
    rate = new / (time.monotonic() - started)
    with tally.lock:  # when some answers are still on their way
        num_answers, first_s = tally.outcomes["answered"], [*tally.first_seconds]
        alike = 100 * tally.outcomes["begins as alone"] / max(1, num_answers)
    for thread in threads:
        thread.join()
    return {
        "throughput": (rate, "tokens/s"),
        "tokens of prompts that the cache had": (100 * held / max(1, asked), "%"),
        "requests answered": (num_answers, "requests"),
        "answers that begin as they do alone": (alike, "%"),
        "TTFT of streams p50": (percentile(first_s, 50), "s"),
        "TTFT of streams p95": (percentile(first_s, 95), "s"),
    }


def run_short(
    server: Server, tally: Tally, mix: Mix, *, lanes: int, num_short: int, call_steps: int
) -> Figures:
    """Streams short answers while long ones run in all lanes but one, then talks of two turns."""
    enough, beside, talks = threading.Event(), Tally(), (Tally(), Tally())

    def keep_busy() -> None:
        while not enough.is_set():
            Client(server.port, [mix.long], beside, 0).ask(mix.long, stream=True)

    threads = [threading.Thread(target=keep_busy) for _ in range(lanes - 1)]
    for number, thread in enumerate(threads):
        thread.start()
        time.sleep(0.3 + 0.2 * (number == 0))
    for _ in range(num_short):
        Client(server.port, [mix.short], tally, 0).ask(mix.short, stream=True)
        time.sleep(0.3 * random.random())
    enough.set()
    for thread in threads:
        thread.join()
    for turn, talk in zip(mix.turns, itertools.cycle(talks), strict=False):
        Client(server.port, mix.turns, talk, 0).ask(turn, stream=True)
    tally.faults += [fault for of in (beside, *talks) for fault in of.faults]
    call_ms = 1e3 * statistics.median(beside.seconds) / LONG_TOKENS * call_steps
    ttft, history = tally.first_seconds, len(mix.turns[0].body["prompt"])
    first_s, next_s = (statistics.median(talk.first_seconds) for talk in talks)
    return {
        f"a decode call of {call_steps} steps beside long answers": (call_ms, "ms"),
        "TTFT of a short answer beside long ones p50": (1e3 * percentile(ttft, 50), "ms"),
        "TTFT of a short answer beside long ones p95": (1e3 * percentile(ttft, 95), "ms"),
        f"TTFT of a prompt of {history} tokens": (1e3 * first_s, "ms"),
        "TTFT of the turn after it": (1e3 * next_s, "ms"),
    }
