"""Measures experts multiplied by the host's cores beside those that a step fetches.

python -m scripts.studies.host_experts.probe --output=rows.jsonl
python -m scripts.studies.host_experts.probe --host_only --rows=96
"""

import contextlib
import dataclasses
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moejax.experts.host_worker import Library, Workers, cores
from pallas_kernels.packed import dequantize
from scripts.studies.host_experts import mechanisms, steps
from scripts.studies.measuring import Report

SLOTS_OF_GIB = {3: 13, 7: 46, 12: 89}  # of 128 a layer, `moejax.plan`
PEER = 56.0  # tokens/s of llama.cpp by 32 threads, 1.84 GiB on the device
BARS = (1.3 * PEER, 1.5, 1.5, 0.01)  # tokens/s, times the fetch alone, p99 over median, difference
PREDICTED = "85 to 105 tokens/s at 3 GiB, 46 without the host"
TOKENS = 8  # stacked; those of a timing
LONG_RUN = 300  # tokens waited for one by one
A = steps.WIDTH

_OUTPUT = flags.DEFINE_string("output", "", "file of rows to append to")
_ROWS = flags.DEFINE_integer("rows", 1152, "experts in host memory, 2.65 MB each")
_THREADS = flags.DEFINE_list("threads", ["4", "8", "12", "15"], "numbers of threads to try")
_RESIDENT_MS = flags.DEFINE_float("resident_ms", 2.1, "time a token of the resident model")
_HOST_ONLY = flags.DEFINE_bool("host_only", False, "measure cores and memory alone, without a GPU")


@dataclasses.dataclass(repr=False)
class Bench:
    """Settings and operands that all parts share."""

    report: Report
    library: Library
    store: steps.Store
    rows: int
    threads: list[int]
    resident_ms: float
    rng: np.random.Generator = dataclasses.field(default_factory=lambda: np.random.default_rng(1))

    @contextlib.contextmanager
    def serving(self, count: int) -> Iterator[Workers]:
        """Has threads serve the mailbox: they spin, so nothing is to be compiled meanwhile."""
        workers = self.store.start(self.library, count)
        try:
            yield workers
        finally:
            workers.stop()

    def jobs(self, jobs: int, experts: int) -> np.ndarray:
        """int32[jobs, experts], rows that differ within a job."""
        drawn = [self.rng.choice(self.rows, experts, replace=False) for _ in range(jobs)]
        return np.array(drawn, np.int32).reshape(jobs, experts)

    def tokens(self, num_hosted: Sequence[int], hit_rate: float, **how: Any) -> steps.Token:
        """Draws stacked tokens, see `steps.make_token`."""
        drawn = [
            steps.make_token(self.rng, self.rows, num_hosted, hit_rate, **how)
            for _ in range(TOKENS)
        ]
        return steps.Token(*(jnp.asarray(np.stack(parts)) for parts in zip(*drawn, strict=True)))


def host_rates(report: Report, bench: Bench) -> None:
    """Memory read, and jobs that the host posts, by number of threads."""
    check_worker(bench)
    largest = bench.store.views[0]
    for count in bench.threads:
        read = max(largest.nbytes / bench.library.read_bytes(largest, count) for _ in range(2))
        report.add(f"host memory read, {count} threads", read / 1e9, "GB/s")
        with bench.serving(count) as workers:
            workers.run_jobs(bench.jobs(20, 4))
            for experts, jobs in ((0, 2000), (1, 100), (2, 60), (4, 40), (8, 20)):
                seconds = workers.run_jobs(bench.jobs(jobs, experts)) / jobs
                rate = experts * steps.EXPERT_BYTES / seconds / 1e9
                what = f"a job of {experts} experts by {count} threads"
                report.add(what, seconds * 1e6, "us", gb_s=rate)


def check_worker(bench: Bench) -> None:
    """A job beside float64 on the same codes; raises ValueError beyond 1 %."""
    x = np.random.default_rng(2).standard_normal(steps.MODEL_DIM).astype(np.float32)
    weights, rows = np.linspace(0.1, 0.5, 3).astype(np.float32), bench.jobs(1, 3)
    bench.store.put_input(x, weights)
    with bench.serving(bench.threads[0]) as workers:
        workers.run_jobs(rows)
    found = bench.store.reply().astype(np.float64)
    with jax.default_device(jax.devices("cpu")[0]):
        packed = steps.packed([view[rows[0]] for view in bench.store.views])
        every = jnp.arange(3)
        gate_up, down = (np.asarray(dequantize(m, every), np.float64) for m in packed)
    gate, up = np.split(gate_up @ x.astype(np.float64), 2, axis=1)
    products = np.einsum("edf,ef->ed", down, gate / (1 + np.exp(-gate)) * up)
    expected = weights.astype(np.float64) @ products
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    bench.report.add("a job beside float64, relative length of the difference", error, "")
    if error > BARS[3]:
        raise ValueError(f"the worker's sum differs by {error:.3g}")


def token_ms(runner: steps.Runner, tokens: steps.Token) -> float:
    """Milliseconds a token, the median of three rounds after one."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(TOKENS):
            runner.run(tokens)
        runner.wait()
        times.append((time.perf_counter() - start) / TOKENS * 1e3)
    return statistics.median(times[1:])


def check_step(bench: Bench, shared: list[steps.Carry]) -> None:
    """One layer's output with experts on the host beside that with all fetched."""
    plain, split = (steps.Runner(bench.store, shared, 1, posts) for posts in (False, True))

    def output(runner: steps.Runner, hosted: int) -> np.ndarray:
        bench.rng = np.random.default_rng(3)  # the same routing each time
        tokens = bench.tokens([hosted] * (A + 1), 0.0, layers=1)
        runner.restart()
        runner.run(tokens)
        return np.asarray(runner.wait().x).astype(np.float64)

    expected = output(plain, 0)
    for hosted in (0, 3, A):  # the first compiles
        with bench.serving(bench.threads[-1]) if hosted else contextlib.nullcontext():
            found = output(split, hosted)
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        bench.report.add(f"a layer with {hosted} of 8 on the host, difference", error, "")
        if error > BARS[3]:
            raise ValueError(f"bar 4 MISSED: a layer's output differs by {error:.3g}")


def device_rates(report: Report, bench: Bench) -> None:
    """The step with and without the host: latency, contention, splits, budgets, verdict."""
    shared = [steps.first_carry(steps.make_pools(bench.store))]
    check_step(bench, shared)
    plain, split = (steps.Runner(bench.store, shared, posts=posts) for posts in (False, True))
    none, most = [0] * (A + 1), bench.threads[-1]
    hit_ms = token_ms(plain, bench.tokens(none, 1.0))
    miss_ms = token_ms(plain, bench.tokens(none, 0.0))
    fetched = steps.LAYERS * A * steps.EXPERT_BYTES / 1e6
    report.add(f"step of {steps.LAYERS} layers, all hit", hit_ms, "ms")
    report.add("step, all fetched", miss_ms, "ms", gb_s=fetched / (miss_ms - hit_ms))
    idle_ms = token_ms(split, bench.tokens(none, 1.0))
    report.add("step, all hit, with kernels that post nothing", idle_ms, "ms")
    base = {gib: token_ms(plain, bench.tokens(none, n / 128)) for gib, n in SLOTS_OF_GIB.items()}
    few = max(1, min(most, cores() - 3))
    with bench.serving(few) as workers:
        ms, rate = contention(bench, plain, workers)
    report.add(f"step, all fetched, while {few} threads multiply", ms, "ms", host_gb_s=rate,
               gb_s=fetched / (ms - hit_ms))  # fmt: skip
    best = (miss_ms, 0, most)
    for count in bench.threads[-3:]:
        with bench.serving(count):
            for hosted in range(1, A + 1):
                ms = token_ms(split, bench.tokens([hosted] * (A + 1), 0.0))
                report.add(f"step, {hosted} of 8 on the host, {count} threads", ms, "ms")
                best = min(best, (ms, hosted, count))
    with bench.serving(best[2]):
        verdict(bench, split, base, hit_ms, best)


def contention(bench: Bench, plain: steps.Runner, workers: Workers) -> tuple[float, float]:
    """Milliseconds of a step that fetches all while the host multiplies; the host's GB/s."""
    tokens, jobs = bench.tokens([0] * (A + 1), 0.0), bench.jobs(20, 4)
    done, rates = threading.Event(), []

    def multiply() -> None:
        while not done.is_set():
            seconds = workers.run_jobs(jobs)
            rates.append(jobs.size * steps.EXPERT_BYTES / seconds / 1e9)

    thread = threading.Thread(target=multiply)
    thread.start()
    try:
        return token_ms(plain, tokens), statistics.median(rates)
    finally:
        done.set()
        thread.join()


def verdict(
    bench: Bench, split: steps.Runner, base: dict[int, float], hit_ms: float,
    best: tuple[float, int, int],
) -> None:  # fmt: skip
    """Budgets with the best split, each also one expert more or less, and the bars."""
    report, outside = bench.report, bench.resident_ms - hit_ms
    for gib, slots in SLOTS_OF_GIB.items():
        tried = {}
        for share in {max(best[1] + change, 1) / A for change in (-1, 0, 1)}:
            table = [round(share * misses) for misses in range(A + 1)]
            tried[share] = token_ms(split, bench.tokens(table, slots / 128)), table
        ms, table = min(tried.values())
        alone, both = 1e3 / (base[gib] + outside), 1e3 / (ms + outside)
        report.add(
            f"decode under {gib} GiB, even routing, the host beside the link", both, "tokens/s",
            fetch_alone=alone, threads=best[2], hosted=str(table),
        )  # fmt: skip
        if gib != 3:
            continue
        times = one_by_one(split, bench.tokens(table, slots / 128))
        median, late = statistics.median(times), float(np.percentile(times, 99))
        report.add("a token's 99th percentile over its median, 3 GiB", late / median, "")
        report.add("its longest over its median", max(times) / median, "")
        judged = [
            (both >= BARS[0], f"1. {both:.1f} tokens/s, bar {BARS[0]:.1f}"),
            (both >= BARS[1] * alone, f"2. {both / alone:.2f} times the fetch, bar {BARS[1]}"),
            (late <= BARS[2] * median, f"3. p99 {late / median:.2f} medians, bar {BARS[2]}"),
            (True, f"4. outputs within {BARS[3]}: no error was raised above"),
        ]
    for is_met, text in judged:
        print(f"  bar {text}: {'met' if is_met else 'MISSED'}")
    print("GO" if all(is_met for is_met, _ in judged) else "NO GO", flush=True)


def one_by_one(runner: steps.Runner, tokens: steps.Token) -> list[float]:
    """Seconds of each of many tokens, waited for."""
    times = []
    for _ in range(LONG_RUN):
        start = time.perf_counter()
        runner.run(tokens)
        runner.wait()
        times.append(time.perf_counter() - start)
    return times


def main(argv: Sequence[str]) -> None:
    """Runs the study."""
    del argv
    began, device = time.perf_counter(), jax.devices()[0]
    report = Report(device, "Qwen3-30B-A3B's experts in INT4 g64", _OUTPUT.value)
    threads = [int(n) for n in _THREADS.value]
    threads = sorted({min(n, max(1, cores() - 1)) for n in threads})
    print(f"{cores()} cores. Predicted: {PREDICTED}. Bars: at least {BARS[0]:.1f} tokens/s and")
    print(
        f"{BARS[1]} times the fetch alone, p99 at most {BARS[2]} medians, outputs within {BARS[3]}."
    )
    library, rows = Library(Path(tempfile.mkdtemp())), _ROWS.value
    report.add("compiling the worker", library.compile_s, "s")
    store = steps.make_store(device, rows)
    bench = Bench(report, library, store, rows, threads, _RESIDENT_MS.value)
    parts: list[tuple[Callable[..., Any], Any]] = [
        (host_rates, bench),
        (mechanisms.on_the_cpu, store),
    ]
    if not _HOST_ONLY.value:
        parts += [
            (device_rates, bench),
            (mechanisms.callbacks, store),
            (mechanisms.compute_on_host, store),
        ]
    for part, subject in parts:
        report.attempt(part, subject)
        print(f"  ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    app.run(main)
