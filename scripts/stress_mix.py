"""Short and long prompts and answers on one server, for `scripts.stress_server --mix`.

Clients ask again as soon as they have their answers: three prompts in four have 16 to 64 tokens and
the others 500 to 1,000, three answers in four 8 to 32 and the others 200 to 500; half of them
stream. Then 500-token answers run in all lanes but one, while a client streams short ones, one
after the other: their TTFT counts in decode calls, whose time is that of `CALL_STEPS` tokens of the
long answers. Last, a prompt of `HISTORY` tokens is streamed, and one that continues it.
"""

import itertools
import random
import statistics
import threading
import time
from typing import NamedTuple

from moejax import Engine
from scripts.stress_cases import Case, Choice
from scripts.stress_clients import Client, Tally
from scripts.stress_process import Server, percentile

NUM_CASES = 96  # asked for in turn: when one comes again, no lane of the server holds it
LONG_TOKENS = 500
NUM_SHORT = 40  # short answers beside the long ones
HISTORY = 1800  # tokens of the first turn
CALL_STEPS = 4  # decode steps of a call while answers stream
Figures = dict[str, tuple[float, str]]


class Mix(NamedTuple):
    """Requests that are asked, and answers alone."""

    cases: list[Case]
    short: Case
    long: Case
    turns: list[Case]


def make_mix(engine: Engine) -> Mix:
    """Bodies of requests with the texts of their answers."""
    rng = random.Random(0)
    cases = []
    for i in range(NUM_CASES):
        length = rng.randint(500, 1000) if i % 4 == 1 else rng.randint(16, 64)
        num_new = rng.randint(200, 500) if i // 4 % 4 == i % 4 else rng.randint(8, 32)
        prompt = [rng.randrange(3, engine.config.vocab_size) for _ in range(length)]
        cases.append(_case_of(engine, prompt, num_new))
    prompt = [7, 8, 9, 10, 11, 12, 13, 14]
    history = [3 + i * i % 997 for i in range(HISTORY)]
    return Mix(
        cases, _case_of(engine, prompt, 8), _case_of(engine, prompt[::-1], LONG_TOKENS),
        [_case_of(engine, [*history, *[5] * more], 4) for more in (0, 20)],
    )  # fmt: skip


def _case_of(engine: Engine, prompt: list[int], num_new: int) -> Case:
    [answer] = engine.generate([prompt], max_new_tokens=num_new, ignore_eos=True, temperature=0.0)
    body = {"prompt": prompt, "max_tokens": num_new, "ignore_eos": True, "temperature": 0}
    choice = Choice(answer.text or "", "length")
    return Case("/v1/completions", body, (choice,), len(answer.tokens))


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
    name, started = "moejax_generated_tokens_total", time.monotonic()
    before = server.metric(name)
    time.sleep(max(0.0, until - time.monotonic()))
    rate = (server.metric(name) - before) / (time.monotonic() - started)
    with tally.lock:  # when some answers are still on their way
        num_answers, first_s = tally.outcomes["answered"], [*tally.first_seconds]
    for thread in threads:
        thread.join()
    return {
        "throughput": (rate, "tokens/s"),
        "requests answered": (num_answers, "requests"),
        "TTFT of streams p50": (percentile(first_s, 50), "s"),
        "TTFT of streams p95": (percentile(first_s, 95), "s"),
    }


def run_short(server: Server, tally: Tally, mix: Mix, lanes: int) -> Figures:
    """Streams short answers while long ones run in all lanes but one, then two turns alone."""
    enough, beside, talk = threading.Event(), Tally(), Tally()

    def keep_busy() -> None:
        while not enough.is_set():
            Client(server.port, [mix.long], beside, 0).ask(mix.long, stream=True)

    threads = [threading.Thread(target=keep_busy) for _ in range(lanes - 1)]
    for number, thread in enumerate(threads):
        thread.start()
        time.sleep(0.3 + 0.2 * (number == 0))
    for _ in range(NUM_SHORT):
        Client(server.port, [mix.short], tally, 0).ask(mix.short, stream=True)
        time.sleep(0.3 * random.random())
    enough.set()
    for thread in threads:
        thread.join()
    for turn in mix.turns:
        Client(server.port, mix.turns, talk, 0).ask(turn, stream=True)
    tally.faults += [*beside.faults, *talk.faults]
    call_ms = 1e3 * statistics.median(beside.seconds) / LONG_TOKENS * CALL_STEPS
    ttft, (first_s, next_s) = tally.first_seconds, talk.first_seconds
    return {
        f"a decode call of {CALL_STEPS} steps beside long answers": (call_ms, "ms"),
        "TTFT of a short answer beside long ones p50": (1e3 * percentile(ttft, 50), "ms"),
        "TTFT of a short answer beside long ones p95": (1e3 * percentile(ttft, 95), "ms"),
        f"TTFT of a prompt of {HISTORY} tokens": (1e3 * first_s, "ms"),
        "TTFT of the turn after it": (1e3 * next_s, "ms"),
    }
