"""64 clients with short and long prompts and answers on one server: throughput, TTFT, memory.

    python -m scripts.stress_mix                     # the demo on the CPU, minutes
    python -m scripts.stress_mix --seconds=20 --clients=8 --results=

A server of its own process. Clients ask again as soon as they have their answers: three prompts in
four have 16 to 64 tokens and the others 500 to 1,000, three answers in four 8 to 32 and the others
200 to 500; half of them stream. Then 500-token answers run in all lanes but one, while a client
streams short ones, one after the other: their TTFT counts in decode calls, whose time is that of
`--call_steps` tokens of the long answers. Last, a prompt of --history tokens is streamed, and one
that continues it. Every answer is compared with what the engine gives to its prompt alone, in this
process. Status 1 where one is lost or another's.
"""

import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from moejax import Engine
from scripts.stress_cases import Case, Choice
from scripts.stress_clients import Client, Tally
from scripts.stress_process import Server, growth_percent, percentile, running_server, sampled_rss
from scripts.studies.measuring import Report

_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "as moejax.serve takes it")
_SECONDS = flags.DEFINE_float("seconds", 120.0, "of the mix that is measured", lower_bound=1)
_WARM_UP = flags.DEFINE_float("warm_up", 20.0, "seconds of the mix before it", lower_bound=0)
_CLIENTS = flags.DEFINE_integer("clients", 64, "at once", lower_bound=1)
_MAX_BATCH = flags.DEFINE_integer("max_batch", 16, "of the server", lower_bound=2)
_SHORT = flags.DEFINE_integer("short", 40, "short answers beside the long ones", lower_bound=1)
_HISTORY = flags.DEFINE_integer("history", 1800, "tokens of the first turn", lower_bound=1)
_CALL_STEPS = flags.DEFINE_integer("call_steps", 4, "decode steps of a call while answers stream")
_RESULTS = flags.DEFINE_string(
    "results", "scripts/studies/server/server.jsonl", "rows go here; '': none"
)
NUM_CASES = 96  # asked for in turn: when one comes again, no lane of the server holds it
LONG_TOKENS = 500


def make_cases(engine: Engine) -> list[Case]:
    """Bodies of requests with the texts of their answers."""
    rng = random.Random(0)
    cases = []
    for i in range(NUM_CASES):
        length = rng.randint(500, 1000) if i % 4 == 1 else rng.randint(16, 64)
        num_new = rng.randint(200, 500) if i // 4 % 4 == i % 4 else rng.randint(8, 32)
        prompt = [rng.randrange(3, engine.config.vocab_size) for _ in range(length)]
        cases.append(case_of(engine, prompt, num_new))
    return cases


def case_of(engine: Engine, prompt: list[int], num_new: int) -> Case:
    """A request with the text of its answer."""
    [answer] = engine.generate([prompt], max_new_tokens=num_new, ignore_eos=True, temperature=0.0)
    body = {"prompt": prompt, "max_tokens": num_new, "ignore_eos": True, "temperature": 0}
    choice = Choice(answer.text or "", "length")
    return Case("/v1/completions", body, (choice,), len(answer.tokens))


class Mix(NamedTuple):
    """Counts of the mix at its end, when some answers are still on their way."""

    tokens_per_s: float  # that the server generated
    num_answers: int
    first_seconds: list[float]  # of streams, to the first text


def run_mix(server: Server, tally: Tally, cases: list[Case], seconds: float) -> Mix:
    """Runs all clients for so many seconds, until each has its last answer."""
    until, number = time.monotonic() + seconds, itertools.count()

    def ask_in_turn() -> None:
        client = Client(server.port, cases, tally, 0)
        while time.monotonic() < until:
            place = next(number)
            client.ask(cases[place % len(cases)], stream=place % 2 == 0)

    threads = [threading.Thread(target=ask_in_turn) for _ in range(_CLIENTS.value)]
    for thread in threads:
        thread.start()
    name, started = "moejax_generated_tokens_total", time.monotonic()
    before = server.metric(name)
    time.sleep(max(0.0, until - time.monotonic()))
    rate = (server.metric(name) - before) / (time.monotonic() - started)
    with tally.lock:
        found = Mix(rate, tally.outcomes["answered"], [*tally.first_seconds])
    for thread in threads:
        thread.join()
    return found


def run_short(server: Server, tally: Tally, short: Case, long: Case) -> float:
    """Short streams, while long answers run in all lanes but one; seconds of a long one's token."""
    enough, beside = threading.Event(), Tally()

    def keep_busy() -> None:
        while not enough.is_set():
            Client(server.port, [long], beside, 0).ask(long, stream=True)

    threads = [threading.Thread(target=keep_busy) for _ in range(_MAX_BATCH.value - 1)]
    for number, thread in enumerate(threads):
        thread.start()
        time.sleep(0.3 + 0.2 * (number == 0))
    for _ in range(_SHORT.value):
        Client(server.port, [short], tally, 0).ask(short, stream=True)
        time.sleep(0.3 * random.random())
    enough.set()
    for thread in threads:
        thread.join()
    tally.faults += beside.faults
    return statistics.median(beside.seconds) / LONG_TOKENS


def main(argv: list[str]) -> None:
    """Measures, prints, appends rows."""
    del argv
    with Engine.from_pretrained(
        _CHECKPOINT.value, dtype="float32", platform="cpu", progress=False
    ) as engine:
        cases = make_cases(engine)
        prompt = [7, 8, 9, 10, 11, 12, 13, 14]
        short, long = case_of(engine, prompt, 8), case_of(engine, prompt[::-1], LONG_TOKENS)
        history = [3 + i * i % 997 for i in range(_HISTORY.value)]
        turns = [case_of(engine, [*history, *[5] * more], 4) for more in (0, 20)]
        device = engine.device
    settings = [f"--config.checkpoint={_CHECKPOINT.value}"]
    settings += [f"--config.max_batch={_MAX_BATCH.value}"]
    mib: list[float] = []
    place = tempfile.TemporaryDirectory()
    with place as folder, running_server(Path(folder) / "log", *settings) as server:
        if _WARM_UP.value:
            run_mix(server, Tally(), cases, _WARM_UP.value)
        mixed, beside, talk = Tally(), Tally(), Tally()
        compiled = server.metric("moejax_programs")
        with sampled_rss(server.process.pid, mib):
            mix = run_mix(server, mixed, cases, _SECONDS.value)
        token_s = run_short(server, beside, short, long)
        for turn in turns:  # alone on the server
            Client(server.port, turns, talk, 0).ask(turn, stream=True)
        compiled = server.metric("moejax_programs") - compiled
    load = f"{_CLIENTS.value} clients, {_SECONDS.value:.0f} s, {_CHECKPOINT.value}, float32"
    load += f", batches up to {_MAX_BATCH.value}"
    report = Report(device, "", _RESULTS.value, ("jax", "uvicorn", "starlette"))
    faults = [*mixed.faults, *beside.faults, *talk.faults]
    refused = sum(tally.outcomes["queue full"] for tally in (mixed, beside, talk))
    faults += ["refused, the queue being full"] * refused
    call_ms, ttft = 1e3 * token_s * _CALL_STEPS.value, beside.first_seconds
    first_s = talk.first_seconds
    rows = (
        ("throughput", mix.tokens_per_s, "tokens/s"),
        ("requests answered", mix.num_answers, "requests"),
        ("TTFT of streams p50", percentile(mix.first_seconds, 50), "s"),
        ("TTFT of streams p95", percentile(mix.first_seconds, 95), "s"),
        ("answers lost or mixed", len(faults), "requests"),
        ("resident memory, growth", growth_percent(mib), "%"),
        ("programs compiled meanwhile", compiled, "programs"),
        (f"a decode call of {_CALL_STEPS.value} steps beside long answers", call_ms, "ms"),
        ("TTFT of a short answer beside long ones p50", 1e3 * percentile(ttft, 50), "ms"),
        ("TTFT of a short answer beside long ones p95", 1e3 * percentile(ttft, 95), "ms"),
        (f"TTFT of a prompt of {_HISTORY.value} tokens", 1e3 * first_s[0], "ms"),
        ("TTFT of the turn after it", 1e3 * first_s[1], "ms"),
    )
    for name, figure, unit in rows:
        report.add(f"server, mix, {name}: {load}", float(f"{figure:.4g}"), unit)
    for line in faults[:20]:
        print(f"FAULT {line}")
    sys.exit(1 if faults or compiled else 0)


if __name__ == "__main__":
    app.run(main)
