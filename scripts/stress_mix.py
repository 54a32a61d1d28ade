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

import http.client
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from moejax import Engine
from scripts.stress_clients import events
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
TIMEOUT_S = 600.0
NUM_CASES = 96  # asked for in turn: when one comes again, no lane of the server holds it
LONG_TOKENS = 500

Case = tuple[dict[str, Any], str]  # a request's body, and the text of its answer


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
    """A request's body, and the text of its answer."""
    [answer] = engine.generate([prompt], max_new_tokens=num_new, ignore_eos=True, temperature=0.0)
    body = {"prompt": prompt, "max_tokens": num_new, "ignore_eos": True, "temperature": 0}
    return body, answer.text or ""


class Load:
    """Results of clients; guarded by `lock`."""

    def __init__(self, port: int):
        self.port = port
        self.lock = threading.Lock()
        self.first_s: list[float] = []  # of streams, to the first event with a text
        self.num_asked = self.num_answers = 0
        self.faults: list[str] = []

    def ask(self, body: dict[str, Any], expected: str, stream: bool, until: float) -> float:
        """Seconds to the whole answer, which is compared; nothing is counted after `until`."""
        started = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        text, first_s = "", 0.0
        try:
            sent, kind = json.dumps({**body, "stream": stream}), "application/json"
            connection.request("POST", "/v1/completions", sent, {"Content-Type": kind})
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"status {response.status}: {response.read()[:200]!r}")
            if stream:
                for chunk in events(response):
                    if chunk is None:
                        break
                    said = chunk["choices"][0]["text"] if chunk["choices"] else ""
                    first_s = first_s or (time.monotonic() - started if said else 0.0)
                    text += said
            else:
                text = json.loads(response.read())["choices"][0]["text"]
            if text != expected:
                raise ValueError(f"{text[:80]!r} in place of {expected[:80]!r}")
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            with self.lock:
                self.faults.append(f"{type(error).__name__}: {error}")
        finally:
            connection.close()
        if time.monotonic() < until:
            with self.lock:
                self.num_answers += 1
                self.first_s += [first_s] * stream
        return time.monotonic() - started

    def mix(self, cases: list[Case], until: float) -> None:
        """One client: a request after the other."""
        while time.monotonic() < until:
            with self.lock:
                number = self.num_asked
                self.num_asked += 1
            self.ask(*cases[number % len(cases)], number % 2 == 0, until)


def run_mix(load: Load, cases: list[Case], seconds: float, server: Server) -> float:
    """Runs all clients; tokens per second that the server generated in that time."""
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=load.mix, args=(cases, until)) for _ in range(_CLIENTS.value)
    ]
    for thread in threads:
        thread.start()
    name, started = "moejax_generated_tokens_total", time.monotonic()
    before = server.metric(name)
    time.sleep(max(0.0, until - time.monotonic()))
    rate = (server.metric(name) - before) / (time.monotonic() - started)
    for thread in threads:
        thread.join()
    return rate


def run_short(load: Load, short: Case, long: Case) -> float:
    """Short streams, while long answers run in all lanes but one; seconds of a long one's token."""
    never, enough = float("inf"), threading.Event()
    seconds: list[float] = []

    def keep_busy() -> None:
        while not enough.is_set():
            seconds.append(load.ask(*long, True, 0.0))

    threads = [threading.Thread(target=keep_busy) for _ in range(_MAX_BATCH.value - 1)]
    for number, thread in enumerate(threads):
        thread.start()
        time.sleep(0.3 + 0.2 * (number == 0))
    for _ in range(_SHORT.value):
        load.ask(*short, True, never)
        time.sleep(0.3 * random.random())
    enough.set()
    for thread in threads:
        thread.join()
    return statistics.median(seconds) / LONG_TOKENS


def run_turns(load: Load, turns: list[Case]) -> list[float]:
    """Seconds to the first token of each turn, alone on the server."""
    for turn in turns:
        load.ask(*turn, True, float("inf"))
    return load.first_s


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
            run_mix(Load(server.port), cases, _WARM_UP.value, server)
        mixed, beside = Load(server.port), Load(server.port)
        compiled = server.metric("moejax_programs")
        with sampled_rss(server.process.pid, mib):
            rate = run_mix(mixed, cases, _SECONDS.value, server)
        token_s = run_short(beside, short, long)
        talk = Load(server.port)
        first_s = run_turns(talk, turns)
        compiled = server.metric("moejax_programs") - compiled
    load = f"{_CLIENTS.value} clients, {_SECONDS.value:.0f} s, {_CHECKPOINT.value}, float32"
    load += f", batches up to {_MAX_BATCH.value}"
    report = Report(device, "", _RESULTS.value, ("jax", "uvicorn", "starlette"))
    faults = [*mixed.faults, *beside.faults, *talk.faults]
    call_ms, ttft = 1e3 * token_s * _CALL_STEPS.value, beside.first_s
    rows = (
        ("throughput", rate, "tokens/s"),
        ("requests answered", mixed.num_answers, "requests"),
        ("TTFT of streams p50", percentile(mixed.first_s, 50), "s"),
        ("TTFT of streams p95", percentile(mixed.first_s, 95), "s"),
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
