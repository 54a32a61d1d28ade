"""Experts in host memory: real shapes, random weights, routing replayed from a trace.

    python -m scripts.bench_memory_gpu --model=Qwen3-30B-A3B --slots=8 --slots=24 --slots=48
    XLA_CLIENT_MEM_FRACTION=0.115 python -m scripts.bench_memory_gpu --model=Mixtral-8x7B --gib=16

With `--slots`, a measurement for each number of slots a layer, after one of the resident model.
With `--gib`, the rows of DyMoE's Table 3 under a budget of that size, whose slots `moejax.experts`
chooses: load on demand, cache, cache and prefetch; XLA_CLIENT_MEM_FRACTION makes JAX keep to it.
TTFT of a prompt; TPOT in calls of several steps and of one; the hit rate of the ledger beside the
trace's own; bytes over the link; the peak of the device beside the budget.

Qwen3's trace is synthetic, with LRU hit rates of 37, 74, 89 and 96 % at 8, 24, 48 and 80 slots;
other shapes take a flat one. With `--trace=FILE` also what a small model decoded
(`--config.record_trace`), scaled to the shape; with `--gib` also one that always hits. The
sequences of a batch are at different places of the trace. What a layer is expected to need is
replayed too: each of its experts with the probability `--recall`, else another one. `--turn=FILE`
makes processes that were started together measure one at a time, and compile at once. Where packed
weights run on another kernel than they should (`--expect`), the script ends before it measures.
`--model=tiny --device=cpu` tries the script.
"""

import dataclasses
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from moejax.benchmarking.expected_kernels import EXPECTATIONS, require_kernels
from moejax.benchmarking.random_weights import Packing, random_weights
from moejax.benchmarking.synthetic_rows import SyntheticRows
from moejax.benchmarking.synthetic_traces import (
    HIT_RATES,
    expectations,
    logits_of,
    lru_hit_rate,
    lru_trace,
    scaled_trace,
)
from moejax.devices import choose_device, enable_compilation_cache
from moejax.experts.allocator import limits_on
from moejax.experts.budget import BOTH, PREFILL, Limits, Tier, make_budget
from moejax.experts.expert_memory import ExpertMemory
from moejax.experts.expert_pool import PoolSpec
from moejax.experts.residency import CacheSpec
from moejax.inference.chunking import longest_chunk
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner
from moejax.inference.session import Session
from moejax.models.config import ModelConfig
from moejax.models.shapes import CONFIGS, with_layers
from moejax.routing.trace import read_trace, replay_of_trace
from scripts.bench_report import Report, turn
from scripts.model_profile import launches, session_without_prefill

_MODEL = flags.DEFINE_enum("model", "Qwen3-30B-A3B", sorted(CONFIGS), "which shape")
_DEPTH = flags.DEFINE_integer("depth", 0, "fewer layers than the real ones; 0: all")
_WIDTH = flags.DEFINE_enum("expert_bits", "4", ["2", "3", "4", "8", "16"], "of experts, attention")
_SLOTS = flags.DEFINE_multi_integer("slots", [], "of a layer, each a measurement")
_GIB = flags.DEFINE_float("gib", 0, "of device memory; the rows of DyMoE's Table 3")
_AHEAD = flags.DEFINE_integer("prefetch", 0, "experts of the next layer that are brought ahead")
_RECALL = flags.DEFINE_float("recall", 0.85, "share of the needed experts that are expected")
_TRACE = flags.DEFINE_string("trace", "", "of decoded tokens, to be scaled; empty: synthetic")
_BATCH = flags.DEFINE_multi_integer("batch", [1], "sequences, each a measurement")
_HOST = flags.DEFINE_float("host_gib", 0, "of rows, shared by experts where they are more; 0: all")
_TRANSIENT = flags.DEFINE_integer("transient", 0, "slots for what passes; 0: what a step takes")
_PROMPT = flags.DEFINE_integer("prompt", 512, "tokens of the prompt")
_CONTEXT = flags.DEFINE_integer("context", 1024, "cache length")
_STEPS = flags.DEFINE_integer("steps", 64, "decode steps a measurement, after as many others")
_PER_CALL = flags.DEFINE_integer("per_call", 8, "decode steps of a call")
_TTFT = flags.DEFINE_bool("ttft", True, "else no prefill is compiled: the cache is random")
_EXPECT = flags.DEFINE_enum("expect", "auto", EXPECTATIONS, "what must serve packed weights")
_SINGLE = flags.DEFINE_bool("single", True, "calls of one step too")
_RESIDENT = flags.DEFINE_bool("resident", True, "with --slots: the resident model first")
_WHERE = flags.DEFINE_string("device", "gpu", "gpu; cpu only tries the script")
_TURN = flags.DEFINE_string("turn", "", "a file that processes lock while they measure")
_FILE = flags.DEFINE_string("out", "", "JSON Lines file that rows are appended to")
_SHOW = flags.DEFINE_bool("show_kernels", False, "print the kernels of a call and their time")
_PROGRAMS = flags.DEFINE_string("programs", "", "persistent compilation cache")
_ONLY = flags.DEFINE_multi_string("only", [], "with --gib: rows of these names; []: all")
_LIMIT = flags.DEFINE_float("time_limit_s", 0, "no measurement is begun later; 0: none")
SINGLE_STEPS = 16
REPLAYED = 4  # measurements long, what is replayed
RESTING = "the same experts in every step"


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds."""

    ttft: float
    tpot: float  # the median of calls of several steps
    slowest: float  # the 99th percentile
    dispatch: float  # of the host, a step, in calls of several
    single: float  # a step that is a call of its own; 0: not measured


class Model:
    """A shape with random weights, its experts in host memory where it is asked to move them."""

    def __init__(self, config: ModelConfig, packing: Packing, device: jax.Device):
        self.config, self.packing, self.device = config, packing, device
        with turn(_TURN.value):
            self.dense = random_weights(config, packing, device, experts=False)
            jax.block_until_ready(self.dense)
        self._rows: SyntheticRows | None = None
        num_layers, num_experts = len(config.moe_layers), config.num_experts
        made = lru_trace(
            HIT_RATES.get(_MODEL.value, {}), num_steps=REPLAYED * _STEPS.value,
            num_layers=num_layers, num_experts=num_experts, width=config.experts_per_token,
        )  # fmt: skip
        self.traces = {"": made}
        if _GIB.value:
            self.traces[RESTING] = made[:1].repeat(len(made), axis=0)
        if _TRACE.value:
            small = read_trace(Path(_TRACE.value))
            self.traces["the demo model's routing"] = scaled_trace(
                replay_of_trace(small), small.num_experts, num_layers=num_layers,
                of_experts=num_experts, width=config.experts_per_token,
            )  # fmt: skip

    @property
    def rows(self) -> SyntheticRows:
        """Of the host; made once, which is timed and printed."""
        if self._rows is None:
            start = time.perf_counter()
            self._rows = SyntheticRows(self.config, self.packing, self.device, host_gib=_HOST.value)
            spent, gib = time.perf_counter() - start, self._rows.nbytes / 2**30
            print(f"host store of {gib:.1f} GiB ready in {spent:.1f} s", flush=True)
        return self._rows

    def memory(self, spec: PoolSpec, batch: int) -> ExpertMemory:
        """A pool whose decode steps take the experts of the made-up trace."""
        gate_up, down = self.rows.stacks
        memory = ExpertMemory.of_rows(spec, gate_up, down, self.rows.row_of, self.device)
        self.replay(memory, self.traces[""], batch)
        return memory

    def replay(self, memory: ExpertMemory, trace: np.ndarray, batch: int) -> None:
        """From now on decode steps take the experts of this trace, repeated to a fixed length."""
        length, width = REPLAYED * _STEPS.value, max(1, memory.spec.prefetch)
        trace = np.resize(trace, (length, *trace.shape[1:]))
        expected = expectations(trace, self.config.num_experts, width, _RECALL.value)
        places = [np.roll(trace, -place * length // batch, axis=0) for place in range(batch)]
        ahead = expected if memory.spec.prefetch and batch == 1 else None
        said = logits_of(np.stack(places, axis=2), self.config.num_experts)
        put = jax.device_put((said, ahead), self.device)
        memory.store = dataclasses.replace(memory.store, replay=put[0], replay_ahead=put[1])

    def spec(self, slots: int, transient: int, prefetch: int) -> PoolSpec:
        """Of a pool for this shape."""
        prefetch = min(prefetch, slots)
        cache = CacheSpec(
            num_layers=len(self.config.moe_layers), num_experts=self.config.num_experts,
            slots=slots, transient=transient, banks=2 if prefetch else 1,
        )  # fmt: skip
        return PoolSpec(cache, prefetch)

    def budget_spec(self, slots: int, prefetch: int, batch: int) -> tuple[PoolSpec, int]:
        """What `moejax.experts` makes of --gib, and the bytes that it plans."""
        sizes = {name: leaf.nbytes for name, leaf in self.dense.items()}
        limits = Limits(device_gib=_GIB.value, slots=slots, prefetch=prefetch)
        budget = make_budget(
            self.config, sizes, Tier(name="experts", expert_nbytes=self.rows.row_nbytes),
            batch=batch, context=_CONTEXT.value,
            chunk=longest_chunk(self.config, batch, _CONTEXT.value),
            limits=limits_on(self.device, limits, planned_nbytes=sum(sizes.values())),
            platform="gpu",
        )  # fmt: skip
        if not budget.pooled:
            raise SystemExit(f"--gib={_GIB.value:g} holds the whole model")
        return self.spec(budget.slots, budget.transient, prefetch), budget.total_device


class Loop:
    """Times of one model; what it compiles, it compiles before its turn."""

    def __init__(self, runner: Runner, batch: int):
        """Compiles, where what serves the products is what is expected."""
        require_kernels(
            runner, batch, _EXPECT.value, shape=_MODEL.value, context=_CONTEXT.value,
            prompt=_PROMPT.value if _TTFT.value else 0,
        )  # fmt: skip
        self.runner, self._batch = runner, batch
        rng = np.random.default_rng(0)
        prompt = rng.integers(0, runner.config.vocab_size, _PROMPT.value).tolist()
        self._prompts = [prompt] * batch
        session, _ = self._prefill()
        self._decode(session, _PER_CALL.value)
        if _SINGLE.value:
            self._decode(session, 1)

    def times(self) -> Times:
        """Of two prompts, and of decoding after the last one; the ledger is of its second half."""
        with turn(_TURN.value):
            firsts = []
            for _ in range(2):
                session, first = self._prefill()
                firsts.append(first)
            return dataclasses.replace(self.decode_times(session), ttft=min(firsts))

    def decode_times(self, session: Session | None = None) -> Times:
        """Without a prompt's, from a session or one of no prompt."""
        memory, per_call = self.runner.memory, _PER_CALL.value
        if session is None:
            session = self._without_prefill()
        num_calls = _STEPS.value // per_call
        for _ in range(num_calls):
            self._decode(session, per_call)
        if memory is not None:
            memory.settle()
            memory.ledger = dataclasses.replace(memory.ledger, layers=[], gate_mass={})
        calls = np.asarray([self._decode(session, per_call) for _ in range(num_calls)]) / per_call
        if memory is not None:
            memory.settle()
        single = 0.0
        if _SINGLE.value:
            single = statistics.median(self._decode(session, 1)[1] for _ in range(SINGLE_STEPS))
        if _SHOW.value:
            show_kernels(self.runner, session)
        return Times(
            0.0, float(np.median(calls[:, 1])), float(np.quantile(calls[:, 1], 0.99)),
            float(np.median(calls[:, 0])), single,
        )  # fmt: skip

    def _prefill(self) -> tuple[Session, float]:
        if not _TTFT.value:
            return self._without_prefill(), 0.0
        start = time.perf_counter()
        settings = GenerationSettings.of(max_new_tokens=1)
        session = self.runner.prefill(self._prompts, _CONTEXT.value, settings, ())
        jax.block_until_ready((session.first_tokens, session.state))
        return session, time.perf_counter() - start

    def _without_prefill(self) -> Session:
        settings = GenerationSettings.of(max_new_tokens=1)
        found = session_without_prefill(
            self.runner, self._batch, _PROMPT.value, _CONTEXT.value, settings
        )
        jax.block_until_ready(found.state)
        return found

    def _decode(self, session: Session, num_steps: int) -> tuple[float, float]:
        start = time.perf_counter()
        emitted = self.runner.decode(session, num_steps, num_steps)
        dispatched = time.perf_counter()
        jax.block_until_ready((emitted, session.state))
        return dispatched - start, time.perf_counter() - start


def show_kernels(runner: Runner, session: Session) -> None:
    """Prints what ran in one call."""
    per_call = _PER_CALL.value
    with tempfile.TemporaryDirectory() as trace:
        with jax.profiler.trace(trace):
            jax.block_until_ready((runner.decode(session, per_call, per_call), session.state))
        counted = launches(Path(trace))
    print(f"  {sum(n for n, _ in counted.values()) / per_call:.1f} launches a token")
    for name, (count, spent) in sorted(counted.items(), key=lambda item: -item[1][1])[:24]:
        print(f"    {count / per_call:8.1f} launches {spent / per_call:8.1f} us  {name[:80]}")


def report_pool(
    report: Report, label: str, model: Model, spec: PoolSpec, batch: int,
    baseline: dict[str, float], planned: int = 0,
) -> Times:  # fmt: skip
    """Measures a pool on each of the traces and writes its rows; the times of the first one."""
    memory = model.memory(spec, batch)
    loop = Loop(Runner(model.config, model.dense, model.device, memory=memory), batch)
    found = loop.times()
    report_decode(report, label, model, memory, batch, found, model.traces[""], baseline)
    if _TTFT.value:
        report.add(f"{label}, prompt of {_PROMPT.value}, TTFT", 1e3 * found.ttft, "ms")
    stats = model.device.memory_stats() or {}
    if planned and stats:
        peak, gib = stats["peak_bytes_in_use"], 2**30
        report.add(f"{label}, peak of the device", peak / gib, "GiB", planned_gib=planned / gib,
                   limit_gib=_GIB.value, allocator_gib=stats["bytes_limit"] / gib)  # fmt: skip
    for name, trace in model.traces.items():
        if name and (spec.cache.slots or name != RESTING):
            model.replay(memory, trace, batch)
            times = loop.decode_times()
            report_decode(report, f"{label}, {name}", model, memory, batch, times, trace, baseline)
    return found


def single(found: Times) -> dict[str, float]:
    """Of a step that is a call of its own, where that was measured."""
    return {"single_step_ms": 1e3 * found.single} if found.single else {}


def report_decode(
    report: Report, label: str, model: Model, memory: ExpertMemory, batch: int, found: Times,
    trace: np.ndarray, baseline: dict[str, float],
) -> None:  # fmt: skip
    """The row of a decode loop."""
    ledger, cache = memory.ledger, memory.spec.cache
    totals = ledger.as_dict()["totals"]
    moved = ledger.link_bytes / _STEPS.value
    report.add(
        f"{label}, {cache.slots} slots of {cache.num_experts}, ahead {memory.spec.prefetch}, TPOT",
        1e3 * found.tpot, "ms", tokens_per_s=batch / found.tpot, **baseline,
        slowest_ms=1e3 * found.slowest, **single(found),
        dispatch_ms=1e3 * found.dispatch, hit_rate=ledger.hit_rate,
        trace_hit_rate=lru_hit_rate(trace, cache.slots, cache.num_experts) if cache.slots else 0,
        megabytes_a_token=moved / 1e6, link_gib_per_s=moved / found.tpot / 2**30,
        link_ms_at_50_gib_per_s=1e3 * moved / (50 * 2**30),
        prefetched=totals["prefetched"], prefetch_hits=totals["prefetch_hits"],
        prefetch_waste=totals["prefetch_waste"], misses=totals["misses"],
    )  # fmt: skip


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    started = time.perf_counter()
    device = choose_device(_WHERE.value)
    enable_compilation_cache(_PROGRAMS.value)
    config = with_layers(CONFIGS[_MODEL.value], _DEPTH.value)
    bits = int(_WIDTH.value)
    packing = Packing(bits=bits, attention_bits=bits)
    about = f"{_MODEL.value}, {config.num_layers} layers, {packing.describe()}"
    if _GIB.value:
        about += f", {_GIB.value:g} GiB"
    reports = {b: Report(device, f"{about}, batch {b}", _FILE.value) for b in _BATCH.value}
    resident: dict[int, dict[str, float]] = {b: {} for b in reports}
    if _SLOTS.value and _RESIDENT.value:
        with turn(_TURN.value):
            weights = jax.block_until_ready(random_weights(config, packing, device))
        runner = Runner(config, weights, device)
        resident = {b: report_resident(report, runner, b) for b, report in reports.items()}
        del weights, runner
    model = Model(config, packing, device)
    for slots, batch in itertools.product(_SLOTS.value, reports):
        if _LIMIT.value and time.perf_counter() - started > _LIMIT.value:
            print(f"left out: {slots} slots, batch {batch}")
            continue
        transient = min(config.num_experts, batch * config.experts_per_token)
        spec = model.spec(slots, min(transient, _TRANSIENT.value or transient), _AHEAD.value)
        report_pool(reports[batch], "pool", model, spec, batch, resident[batch])
    if _GIB.value:
        for batch, report in reports.items():
            table_3(report, model, batch)


def report_resident(report: Report, runner: Runner, batch: int) -> dict[str, float]:
    """The rows of a model with all its experts; its time, to stand beside others."""
    found = Loop(runner, batch).times()
    report.add("all resident, TPOT", 1e3 * found.tpot, "ms",
               **single(found), dispatch_ms=1e3 * found.dispatch)  # fmt: skip
    if _TTFT.value:
        report.add(f"all resident, prompt of {_PROMPT.value}, TTFT", 1e3 * found.ttft, "ms")
    return {"resident_ms": 1e3 * found.tpot}


def table_3(report: Report, model: Model, batch: int) -> None:
    """Load on demand, cache, cache and prefetch, each under the budget.

    At last prefetch of prompts alone, which is no row of the paper's.
    """
    rows: dict[str, Times] = {}
    width = _AHEAD.value or model.config.experts_per_token
    for label, slots, ahead, where in (
        ("load on demand", 0, 0, BOTH),
        ("cache", -1, 0, BOTH),
        ("cache and prefetch", -1, width, BOTH),
        ("cache and prefetch in prompts", -1, width, PREFILL),
    ):
        if _ONLY.value and label not in _ONLY.value:
            continue
        spec, planned = model.budget_spec(slots, ahead, batch)
        spec = dataclasses.replace(spec, prefetch_in=where)
        baseline = {
            f"{name.replace(' ', '_')}_{part}_ratio": getattr(times, part)
            for name, times in rows.items()
            for part in (("tpot", "ttft") if _TTFT.value else ("tpot",))
        }
        found = report_pool(report, label, model, spec, batch, {}, planned)
        for name, value in baseline.items():
            part = name.split("_")[-2]
            report.add(f"{label}: {name}", value / getattr(found, part), "x")
        rows[label] = found


if __name__ == "__main__":
    app.run(main)
