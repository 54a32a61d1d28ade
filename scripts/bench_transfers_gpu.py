"""What experts on their way cost running steps: bulk transfers beside decode of real shapes.

    python -m scripts.bench_transfers_gpu --model=Qwen3-30B-A3B --slots=24 --rate=1 --rate=4

Random weights, experts in host memory, a pool of `--slots` a layer. Between the calls of a decode
loop so many experts a step are asked for (`moejax.experts.transfers`), as a policy asks for
promotions; a call is dispatched before the last one is waited for, and a call's time is that from
one end to the next. The median and the 99th percentile beside those of the same loop without
requests, and what was moved. Each step takes the same experts (`--routing=resting`: nothing but
requests crosses the link) or those of a trace (`trace`: misses share it). `--model=tiny
--device=cpu` tries the script.
"""

import dataclasses
import time

import jax
import numpy as np
from absl import app, flags

from moejax.benchmarking.random_weights import Packing, random_weights
from moejax.benchmarking.synthetic_rows import SyntheticRows
from moejax.benchmarking.synthetic_traces import HIT_RATES, lru_trace
from moejax.devices import choose_device, enable_compilation_cache
from moejax.experts.expert_memory import ExpertMemory
from moejax.experts.expert_pool import PoolSpec
from moejax.experts.host_store import HeldRows
from moejax.experts.residency import CacheSpec
from moejax.experts.transfers import TransferCounters, Transfers
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner
from moejax.inference.session import Session
from moejax.models.config import ModelConfig
from moejax.models.shapes import CONFIGS, with_layers
from scripts.bench_report import Report
from scripts.model_profile import session_without_prefill

_MODEL = flags.DEFINE_enum("model", "Qwen3-30B-A3B", sorted(CONFIGS), "which shape")
_DEPTH = flags.DEFINE_integer("depth", 0, "fewer layers than the real ones; 0: all")
_SLOTS = flags.DEFINE_integer("slots", 24, "of a layer")
_RATE = flags.DEFINE_multi_float("rate", [1, 4], "experts a step that are asked for")
_ROUTING = flags.DEFINE_multi_enum("routing", ["resting"], ["resting", "trace"], "of the steps")
_PER_CALL = flags.DEFINE_multi_integer("per_call", [1, 8], "decode steps of a call")
_STEPS = flags.DEFINE_integer("steps", 512, "decode steps a measurement, after an eighth of them")
_IN_FLIGHT = flags.DEFINE_integer("in_flight", 16, "experts between their row and their slot")
_CONTEXT = flags.DEFINE_integer("context", 1024, "cache length")
_WHERE = flags.DEFINE_string("device", "gpu", "gpu; cpu only tries the script")
_FILE = flags.DEFINE_string("out", "", "JSON Lines file that rows are appended to")
_PROGRAMS = flags.DEFINE_string("programs", "", "persistent compilation cache")
PROMPT = 300  # beyond the shortest bucket of the cache, so that no other is compiled on the way
TRACE_STEPS = 256


def make_runner(config: ModelConfig, packing: Packing, device: jax.Device) -> Runner:
    """A model whose experts lie in host memory, with transfers."""
    weights = random_weights(config, packing, device, experts=False)
    start = time.perf_counter()
    rows = SyntheticRows(config, packing, device)
    spent = time.perf_counter() - start
    print(f"host store of {rows.nbytes / 2**30:.1f} GiB ready in {spent:.1f} s", flush=True)
    cache = CacheSpec(
        num_layers=len(config.moe_layers), num_experts=config.num_experts, slots=_SLOTS.value,
        transient=config.experts_per_token,
    )  # fmt: skip
    memory = ExpertMemory.of_rows(PoolSpec(cache), *rows.stacks, rows.row_of, device)
    supply = HeldRows(rows.row_of, rows.store.rows)
    memory.transfers = Transfers(cache, memory.pool, supply, device, in_flight=_IN_FLIGHT.value)
    return Runner(config, weights, device, memory=memory)


class Requests:
    """Asks for random experts at a rate; each loop draws its own."""

    def __init__(self, transfers: Transfers, config: ModelConfig, rate: float, loop: int):
        """`rate` experts a step."""
        self._transfers, self._rate, self._owed = transfers, rate, 0.0
        self._rng = np.random.default_rng(loop)
        self._size = (len(config.moe_layers), config.num_experts)

    def ask(self, num_steps: int) -> None:
        """What so many steps owe."""
        self._owed += self._rate * num_steps
        while self._owed >= 1:
            self._owed -= 1
            layer, expert = (int(self._rng.integers(n)) for n in self._size)
            self._transfers.request(layer, [expert])


def call_times(runner: Runner, session: Session, per_call: int, requests: Requests) -> np.ndarray:
    """Seconds a step of each call; those that warm up are left out."""
    num_calls = _STEPS.value // per_call
    warm = max(2, num_calls // 8)
    ends = []
    pending = runner.decode(session, per_call, per_call)
    for _ in range(num_calls + warm):
        requests.ask(per_call)
        following = runner.decode(session, per_call, per_call)
        jax.block_until_ready(pending)
        ends.append(time.perf_counter())
        pending = following
    jax.block_until_ready((pending, session.state))
    return np.diff(ends)[warm - 1 :] / per_call


def measure(report: Report, runner: Runner, routing: str, per_call: int) -> None:
    """A loop without requests, then one of each rate."""
    assert runner.memory is not None
    transfers = runner.memory.transfers
    assert transfers is not None
    baseline: dict[str, float] = {}
    for rate in (0.0, *_RATE.value):
        context = max(_CONTEXT.value, PROMPT + 2 * _STEPS.value)
        settings = GenerationSettings.of()
        session = session_without_prefill(runner, 1, PROMPT, context, settings)
        before = dataclasses.replace(transfers.counters)
        started = time.perf_counter()
        requests = Requests(transfers, runner.config, rate, transfers.counters.requested)
        times = call_times(runner, session, per_call, requests)
        spent = time.perf_counter() - started
        moved = since(before, transfers.counters)
        median, slowest = (1e3 * float(np.quantile(times, q)) for q in (0.5, 0.99))
        nbytes = runner.memory.ledger.expert_bytes
        label = f"{routing}, {_SLOTS.value} slots, calls of {per_call}"
        label += f", {rate:g} experts a step asked for" if rate else ", no requests"
        report.add(f"{label}, median step", median, "ms", **baseline)
        report.add(
            f"{label}, 99th percentile", slowest, "ms", **baseline,
            over_none=slowest / baseline.get("none_p99_ms", slowest),
            moved_per_s=moved.moved / spent, landed_per_s=moved.landed / spent,
            gib_per_s=moved.moved * nbytes / spent / 2**30, needless=moved.needless,
            dropped=moved.dropped, refused=moved.refused,
        )  # fmt: skip
        if not rate:
            baseline = {"none_median_ms": median, "none_p99_ms": slowest}
        while transfers.num_pending:  # the next loop begins with none on the way
            runner.decode(session, 1, per_call)


def since(before: TransferCounters, after: TransferCounters) -> TransferCounters:
    """What was counted in between."""
    names = [field.name for field in dataclasses.fields(TransferCounters)]
    return TransferCounters(**{n: getattr(after, n) - getattr(before, n) for n in names})


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    device = choose_device(_WHERE.value)
    enable_compilation_cache(_PROGRAMS.value)
    config = with_layers(CONFIGS[_MODEL.value], _DEPTH.value)
    packing = Packing(bits=4, attention_bits=4)
    about = f"{_MODEL.value}, {config.num_layers} layers, {packing.describe()}, bulk transfers"
    report = Report(device, about, _FILE.value)
    runner = make_runner(config, packing, device)
    assert runner.memory is not None
    trace = lru_trace(
        HIT_RATES.get(_MODEL.value, {}), num_steps=TRACE_STEPS,
        num_layers=len(config.moe_layers), num_experts=config.num_experts,
        width=config.experts_per_token,
    )  # fmt: skip
    for routing in _ROUTING.value:
        taken = trace[:1] if routing == "resting" else trace
        replay = jax.device_put(taken[:, :, None], device)
        runner.memory.store = dataclasses.replace(runner.memory.store, replay=replay)
        for per_call in _PER_CALL.value:
            measure(report, runner, routing, per_call)
    runner.memory.close()


if __name__ == "__main__":
    app.run(main)
