"""Many clients on one server: no answer lost or mixed, and memory that stays flat.

    python -m scripts.stress_server                # 32 clients, five minutes, the demo on the CPU
    python -m scripts.stress_server --clients=200 --fuzzers=8
    python -m scripts.stress_server --seconds=20 --clients=8 --results=
    python -m scripts.stress_server --mix --clients=64 --max_batch=16 --queue_limit=64 --cases=128

A server of its own process, with its default warm-up. Clients stream or do not, on both endpoints,
with settings of all kinds; two cases in seven ask for two choices, three for log-probabilities; one
request in eight is left early, one in twelve is nonsense. Fuzzers beside them send broken HTTP and
JSON, fields of wrong kinds, and hang. Each choice is compared with what the engine gives to its
prompt and seed alone, in this process; log-probabilities, within 1e-3 nats, with those of a prefill
of the answer. Status 1 where an answer was lost or another's, a refusal was not one of those that
are meant, a program was compiled while clients waited, or the server's resident memory (median of
the last third of the time over that of the first) grew by more than --growth percent. With --mix
clients send short and long requests instead (`stress_mix.py`), to any checkpoint on any platform;
what follows `--` goes to the server.
"""

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from absl import app, flags

from moejax import Engine
from moejax.inference.continuous import CALL_STEPS
from scripts.stress_cases import Case, make_cases
from scripts.stress_clients import Client, Tally
from scripts.stress_fuzz import Fuzzer
from scripts.stress_mix import Figures, make_mix, run_mix, run_short
from scripts.stress_process import Server, growth_percent, percentile, running_server, sampled_rss
from scripts.studies.measuring import Report
from scripts.studies.peers.running import device_name

_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "as moejax.serve takes it")
_SECONDS = flags.DEFINE_float("seconds", 300.0, "of the load that is measured", lower_bound=1)
_WARM_UP = flags.DEFINE_float("warm_up", 30.0, "seconds of the load before it", lower_bound=0)
_CLIENTS = flags.DEFINE_integer("clients", 32, "at once", lower_bound=1)
_MIX = flags.DEFINE_bool("mix", False, "short and long requests, their throughput and TTFT")
_DTYPE = flags.DEFINE_string("dtype", "float32", "of the server; else --mix compares no texts")
_PLATFORM = flags.DEFINE_string("platform", "cpu", "of the server")
_TREE = flags.DEFINE_string("tree", "", "of --mix: folder with another source, of a commit's name")
_SHORT = flags.DEFINE_integer("short", 40, "of --mix: short answers beside long ones")
_HISTORY = flags.DEFINE_integer("history", 1800, "of --mix: tokens of the first turn")
_CALL_STEPS = flags.DEFINE_integer("call_steps", CALL_STEPS, "of --mix: decode steps of a call")
_FUZZERS = flags.DEFINE_integer("fuzzers", 0, "clients beside them that send what is broken")
_CASES = flags.DEFINE_integer("cases", 48, "different requests", lower_bound=1)
_MAX_BATCH = flags.DEFINE_integer("max_batch", 8, "of the server")
_QUEUE_LIMIT = flags.DEFINE_integer(
    "queue_limit", 20, "of the server; less than clients: some wait"
)
_GROWTH = flags.DEFINE_float("growth", 3.0, "percent that resident memory may grow by")
_SEED = flags.DEFINE_integer("seed", 0, "of cases and clients")
_RESULTS = flags.DEFINE_string(
    "results", "scripts/studies/server/server.jsonl", "rows go here; '': none"
)

PROGRAMS = "programs compiled meanwhile"


def run_clients(server: Server, cases: list[Case], tally: Tally, seconds: float, seed: int) -> None:
    """Runs all clients for so many seconds, until each has its last answer."""
    until = time.monotonic() + seconds
    seeds = range(1000 * seed, 1000 * seed + _CLIENTS.value + _FUZZERS.value)
    kinds = [Client] * _CLIENTS.value + [Fuzzer] * _FUZZERS.value
    everyone = [
        kind(server.port, cases, tally, one) for kind, one in zip(kinds, seeds, strict=True)
    ]
    threads = [threading.Thread(target=one.run, args=(until,)) for one in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_load(server: Server, cases: list[Case], tally: Tally, mib: list[float]) -> Figures:
    """Warms up and measures clients of all kinds."""
    if _WARM_UP.value > 0:
        run_clients(server, cases, Tally(), _WARM_UP.value, _SEED.value + 1)
    names = ("moejax_programs", "moejax_batch_size_sum", "moejax_batch_size_count")
    before = [server.metric(name) for name in names]
    started = time.monotonic()
    with sampled_rss(server.process.pid, mib):
        run_clients(server, cases, tally, _SECONDS.value, _SEED.value)
    elapsed = time.monotonic() - started
    compiled, rows, batches = (
        server.metric(name) - was for name, was in zip(names, before, strict=True)
    )
    time.sleep(1.0)
    left = server.metric("moejax_running") + server.metric("moejax_queue_length")
    cancelled = server.metric("moejax_requests_total", outcome="cancelled")
    if left:
        tally.faults.append(f"{left:.0f} answers are still there after all clients have gone")
    told = tally.outcomes["with log-probabilities"]
    fuzzed = sum(count for of, count in tally.outcomes.items() if of.startswith("fuzz"))
    return {
        "requests answered": (tally.outcomes["answered"], "requests"),
        "requests of two choices answered": (tally.outcomes["of several choices"], "requests"),
        "requests with log-probabilities answered": (told, "requests"),
        "log-probabilities, largest difference": (tally.gap, "nats"),
        "answers lost or mixed": (tally.outcomes["lost"] + tally.outcomes["mixed"], "requests"),
        "throughput": (tally.num_tokens / elapsed, "tokens/s"),
        "latency p50": (percentile(tally.seconds, 50), "s"),
        "latency p99": (percentile(tally.seconds, 99), "s"),
        "TTFT of streams p50": (percentile(tally.first_seconds, 50), "s"),
        "TTFT of streams p99": (percentile(tally.first_seconds, 99), "s"),
        "clients that left early": (tally.outcomes["left early"], "requests"),
        "cancelled by the server, warm-up included": (cancelled, "requests"),
        "fuzzed": (fuzzed, "requests"),
        "malformed bodies": (tally.outcomes["malformed, told so"], "requests"),
        "refused, the queue being full": (tally.outcomes["queue full"], "requests"),
        "mean batch": (rows / max(1, batches), "rows"),
        PROGRAMS: (compiled, "programs"),
        "resident memory": (statistics.median(mib), "MiB"),
    }


def run_lengths(server: Server, tally: Tally, mib: list[float]) -> Figures:
    """Asks each request alone, warms up and measures short and long ones."""
    mix = make_mix(server, _CASES.value, _HISTORY.value, is_exact=_DTYPE.value == "float32")
    if _WARM_UP.value > 0:
        run_mix(server, Tally(), mix.cases, _CLIENTS.value, _WARM_UP.value)
    compiled, beside = server.metric("moejax_programs"), Tally()
    with sampled_rss(server.process.pid, mib):
        figures = run_mix(server, tally, mix.cases, _CLIENTS.value, _SECONDS.value)
    figures |= run_short(
        server, beside, mix, lanes=_MAX_BATCH.value, num_short=_SHORT.value,
        call_steps=_CALL_STEPS.value,
    )  # fmt: skip
    for of in (tally, beside):
        of.faults += ["refused, the queue being full"] * of.outcomes["queue full"]
    tally.faults += beside.faults
    figures["answers lost or mixed"] = len(tally.faults), "requests"
    figures[PROGRAMS] = server.metric("moejax_programs") - compiled, "programs"
    return figures


def main(argv: list[str]) -> None:
    """Warms up, measures, prints, appends rows."""
    print("starting the server", flush=True)
    tally, mib = Tally(), list[float]()
    settings = (
        f"--config.checkpoint={_CHECKPOINT.value}", f"--config.max_batch={_MAX_BATCH.value}",
        f"--config.queue_limit={_QUEUE_LIMIT.value}", f"--config.dtype={_DTYPE.value}",
        f"--config.platform={_PLATFORM.value}", *argv[1:],
    )  # fmt: skip
    place = tempfile.TemporaryDirectory()
    with (
        place as folder,
        running_server(Path(folder) / "log", *settings, tree=_TREE.value) as server,
    ):
        if _MIX.value:
            figures = run_lengths(server, tally, mib)
        else:
            with Engine.from_pretrained(
                _CHECKPOINT.value, dtype="float32", platform="cpu", progress=False
            ) as engine:
                cases = make_cases(engine, _CASES.value, _SEED.value)
            figures = run_load(server, cases, tally, mib)
    growth = growth_percent(mib)
    figures["resident memory, growth"] = growth, "%"
    fuzz = f" and {_FUZZERS.value} fuzzers" if _FUZZERS.value else ""
    of = f"{Path(_CHECKPOINT.value).name}, {_DTYPE.value}"
    load = f"{_CLIENTS.value} clients{fuzz}, {_SECONDS.value:.0f} s, {of}"
    tree = f"commit {Path(_TREE.value).name}, " if _TREE.value else ""
    mix = f"mix, {tree}" if _MIX.value else ""
    report = Report(
        device_name(_PLATFORM.value), "", _RESULTS.value, ("jax", "uvicorn", "starlette")
    )
    for name, (figure, unit) in figures.items():
        what = f"server, {mix}{name}: {load}, batches up to {_MAX_BATCH.value}"
        report.add(what, float(f"{figure:.6g}"), unit)
    faults = [*tally.faults]
    if growth > _GROWTH.value:
        faults.append(f"memory grew by {growth:.1f} %, over {_GROWTH.value} %")
    if compiled := figures[PROGRAMS][0]:
        faults.append(f"{compiled:.0f} programs were compiled while clients waited")
    if not tally.outcomes["answered"]:
        faults.append("nothing was answered")
    for line in faults[:20]:
        print(f"FAULT {line}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    app.run(main)
