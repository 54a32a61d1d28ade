"""Prefill and decode of real shapes with random weights, bf16 or packed, made on the device.

    python -m scripts.studies.speed.bench_model --shape=Qwen3-30B-A3B --bits=4 --batch=1 --batch=16
    python -m scripts.studies.speed.bench_model --shape=Mixtral-8x7B --bits=3 --prompt=2048 \
        --prefill_only

Prints TTFT, TPOT, the bytes that a token must read (dense weights, chosen experts, cache), what
share of the measured read bandwidth that is, launches a token counted in a profile, and the time
to compile without and with the persistent cache; with `--prefill_only` and `--decode_only` also the
memory of the largest program by XLA's plan. JSON rows are written as they come. No quantizer runs:
codes are random, scales such that activations stay as wide as with bf16. With random weights the
routing is near uniform; the distinct experts of a step are counted from its routing.

What serves each product is printed, and stands in the rows. Where packed weights do not run on the
kernel that the device should have (`--expect`, `--expect_prefill`), the benchmark ends with an
error before it measures.

A configuration is a batch and a prompt length. With `--time_limit_s` none is begun after so many
seconds: the rest takes another call, with the same `--cache`. `--shape=tiny --platform=cpu` tries
the script.
"""

import collections
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moejax.benchmarking.bandwidth import read_bandwidth
from moejax.benchmarking.expected_kernels import EXPECTATIONS, allowed, wrong_kernels
from moejax.benchmarking.random_weights import Packing, random_weights
from moejax.benchmarking.step_cost import bytes_per_step, distinct_experts
from moejax.devices import choose_device, enable_compilation_cache
from moejax.engine import STEPS_PER_CALL
from moejax.inference.batch import Batch
from moejax.inference.chunking import kv_bucket, length_bucket, longest_chunk, prefill_chunks
from moejax.inference.generation import GenerationSettings, Timing
from moejax.inference.runner import Runner, Session, settings_by_row
from moejax.models.config import ModelConfig
from moejax.models.leaf_kinds import leaves_of
from moejax.models.shapes import CONFIGS, with_layers
from moejax.models.transformer import ChunkSpec
from moejax.weights import linear as ops
from pallas_kernels import layout
from pallas_kernels.target import target_of
from scripts.studies.measuring import Report
from scripts.studies.measuring import turn as report_turn
from scripts.studies.speed.model_profile import (
    graph_launches,
    held_gib,
    largest_memory,
    launches,
    programs_used,
    session_without_prefill,
)

WIDTHS = [str(bits) for bits in (*layout.BITS, 16)]
MIN_CONTEXT = 2048

_SHAPE = flags.DEFINE_enum("shape", "Qwen3-30B-A3B", sorted(CONFIGS), "which shape")
_LAYERS = flags.DEFINE_integer("layers", 0, "fewer layers than the real ones; 0: all")
_BITS = flags.DEFINE_enum("bits", "16", WIDTHS, "of the experts; 16: bf16")
_GROUP = flags.DEFINE_integer("group_size", 64, "of what is packed")
_ZEROS = flags.DEFINE_enum("zeros", "float", ("float", "integer", "symmetric"), "zero points")
_ATTENTION = flags.DEFINE_bool("pack_attention", True, "attention is packed as the experts are")
_SHARED = flags.DEFINE_enum("shared_bits", "16", WIDTHS, "of experts that every token takes")
_HEAD = flags.DEFINE_enum("head_bits", "16", WIDTHS, "of the head; embeddings stay bf16")
_BATCH = flags.DEFINE_multi_integer("batch", [1], "sequences decoded together")
_PROMPT = flags.DEFINE_multi_integer("prompt", [512], "tokens of each prompt")
_CONTEXT = flags.DEFINE_integer("context", 0, "cache length; 0: 2048, or what is needed")
_DECODE_ONLY = flags.DEFINE_bool("decode_only", False, "no prefill: the cache is random")
_NEW = flags.DEFINE_integer("new_tokens", 65, "tokens generated a run")
_CALLS = flags.DEFINE_multi_integer("steps_per_call", [STEPS_PER_CALL, 1], "decode steps of a call")
_PREFILL_ONLY = flags.DEFINE_bool("prefill_only", False, "no decode step is compiled or timed")
_COUNT = flags.DEFINE_bool("count_experts", True, "one more program; else as of uniform routing")
_PROFILE = flags.DEFINE_bool("profile", True, "count launches in a profile")
_REPEATS = flags.DEFINE_integer("repeats", 3, "timed runs; the median is reported")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file that rows are appended to")
_CACHE = flags.DEFINE_string("cache", "", "persistent compilation cache")
_TURN = flags.DEFINE_string("turn", "", "a file that processes lock while they measure")
_LIMIT = flags.DEFINE_float("time_limit_s", 0, "no configuration is begun later; 0: none")
_PLATFORM = flags.DEFINE_string("platform", "gpu", "gpu; cpu only tries the script")
_KERNEL = flags.DEFINE_string("implementation", "", "force one of pallas_kernels; empty: choose")
_VIA = flags.DEFINE_string("expert_impl", "", "force a form of the experts; empty: choose")
_CACHED = flags.DEFINE_enum("decode_impl", None, ["xla", "kernel"], "force attention of decode")
_EXPECT = flags.DEFINE_enum("expect", "auto", EXPECTATIONS, "what must serve decode")
_EXPECT_PREFILL = flags.DEFINE_enum("expect_prefill", "auto", EXPECTATIONS, "the same of prefill")


class Benchmark:
    """One model on a device, measured a configuration at a time."""

    def __init__(self, config: ModelConfig, packing: Packing, device: jax.Device, cache: str):
        """Makes the weights; `cache` says what programs come from, for the rows."""
        self.config, self.device, self.cache = config, device, cache
        start = time.perf_counter()
        with report_turn(_TURN.value):
            weights = jax.block_until_ready(random_weights(config, packing, device))
        stats = device.memory_stats() or {}
        self.drawn_gib = stats.get("peak_bytes_in_use", 0) / 2**30  # drawing takes some, too
        num_bytes = sum(leaf.nbytes for leaf in weights.values())
        print(
            f"{_SHAPE.value}, {config.num_layers} layers, {packing.describe()}: {len(weights)} "
            f"leaves, {num_bytes / 2**30:.1f} GiB made in {time.perf_counter() - start:.1f} s"
        )
        with report_turn(_TURN.value):
            self.bandwidth = read_bandwidth(device)
        print(f"read bandwidth of a plain sum: {self.bandwidth / 1e12:.2f} TB/s", flush=True)
        self.kernels = ops.Kernels(target_of(device), _KERNEL.value or None)
        self.runner = Runner(
            config, weights, device, kernels=self.kernels, expert_impl=_VIA.value or None,
            decode_impl=_CACHED.value,
        )  # fmt: skip
        self.about = f"{_SHAPE.value}, {config.num_layers} layers, {packing.describe()}"
        self.rng = np.random.default_rng(0)

    def run(self, batch: int, prompt: int) -> None:
        """Checks what serves a configuration, and measures it."""
        needed = length_bucket(prompt + _NEW.value, MIN_CONTEXT, self.config.context_limit)
        context = _CONTEXT.value or needed
        by = self._check(batch, prompt, context)
        report = Report(self.device, f"{self.about}, {by}", _OUTPUT.value)
        label = f"batch {batch} prompt {prompt}"
        vocabulary = self.config.vocab_size
        prompts = [self.rng.integers(0, vocabulary, prompt).tolist() for _ in range(batch)]
        if _PREFILL_ONLY.value:
            self._prefill(report, label, prompts, context)
            return
        if _DECODE_ONLY.value:
            self._decode(report, label, batch, prompt, context)
            return
        tpots = {
            steps: self._generate(report, label, prompts, context, steps) for steps in _CALLS.value
        }
        self._dispatches(report, label, prompts, context)
        distinct = self._distinct(prompts, context)
        weights, positions = self.runner.weights, prompt + _NEW.value // 2
        least = bytes_per_step(self.config, weights, batch, positions, distinct)
        report.add(f"{label} experts a layer that a step reads", distinct, "experts")
        report.add(f"{label} bytes a step at least", least / 1e9, "GB")
        for steps, tpot in tpots.items():
            report.add(
                f"{label} share of bandwidth, calls of {steps}",
                100 * least / tpot / self.bandwidth,
                "%",
                plain_sum_tb_per_s=self.bandwidth / 1e12,
            )

    def _check(self, batch: int, prompt: int, context: int) -> str:
        """Describes what runs decode and prefill; ends the process where it is unexpected."""
        longest = longest_chunk(self.config, batch, context)
        chunks = {size for _, size in prefill_chunks(prompt, context, longest)}
        phases = [("prefill", batch * size, _EXPECT_PREFILL.value) for size in sorted(chunks)]
        if not _PREFILL_ONLY.value:
            phases.append(("decode", batch, _EXPECT.value))
        wrong, by = [], {}
        for phase, num_tokens, wanted in phases:
            products = self.runner.kernel_choices(num_tokens, batch)
            for name, of in products.items():
                print(f"  {phase} of {num_tokens} tokens, {name}: {of.describe()}")
            may = allowed(wanted, self.kernels, _SHAPE.value)
            wrong += [f"{phase} {line}" for line in wrong_kernels(products, may)]
            attention = next(
                products[leaf].implementation for leaf in leaves_of("attention") if leaf in products
            )
            by[phase] = f"{phase} by {products['experts'].implementation} and {attention}"
        if wrong:
            raise SystemExit("not the expected kernel: " + "; ".join(wrong))
        return ", ".join(by.values())

    def _prefill(self, report: Report, label: str, prompts: list[list[int]], context: int) -> None:
        settings = GenerationSettings.of(max_new_tokens=1)
        times, num_programs = [], self.runner.programs.num_traces
        for timing in self._timings(prompts, context, settings, 1):
            if timing is None:
                self._compiled(report, f"{label} compile of prefill", num_programs)
            else:
                times.append(timing.ttft_s)
        self._first(report, label, prompts, statistics.median(times))
        with programs_used(self.runner) as used:
            session = self.runner.prefill(prompts, context, settings, ())
            jax.block_until_ready(session.state)
        self._memory(report, label, "prefill", used, session)

    def _memory(
        self,
        report: Report,
        label: str,
        phase: str,
        used: list[jax.stages.Compiled],
        session: Session,
    ) -> None:
        """Memory under the largest program, by XLA's plan; the allocator's peak so far.

        The peak may be of the time when weights were drawn: `drawn_gib` stands beside it.
        """
        weights, cache = held_gib(self.runner.weights), held_gib(session.state.cache)
        if parts := largest_memory(used, weights + cache):
            total = parts.pop("total")
            beside = {f"{part}_gib": gib for part, gib in parts.items()}
            report.add(
                f"{label} memory of {phase} by XLA's plan", total, "GiB", weights_gib=weights,
                cache_gib=cache, **beside,
            )  # fmt: skip
        if stats := self.device.memory_stats():
            report.add(
                f"{label} peak of the device so far", stats["peak_bytes_in_use"] / 2**30, "GiB",
                weights_gib=weights, drawn_gib=self.drawn_gib,
            )  # fmt: skip

    def _generate(
        self, report: Report, label: str, prompts: list[list[int]], context: int, steps: int
    ) -> float:
        """TPOT in seconds."""
        settings = GenerationSettings.of(max_new_tokens=_NEW.value)
        timings, num_programs = [], self.runner.programs.num_traces
        for timing in self._timings(prompts, context, settings, steps):
            if timing is None:
                self._compiled(report, f"{label} compile, calls of {steps}", num_programs)
            else:
                timings.append(timing)
        if steps == _CALLS.value[0]:
            self._first(report, label, prompts, statistics.median(t.ttft_s for t in timings))
        tpot = statistics.median(t.tpot_s for t in timings)
        report.add(f"{label} TPOT, calls of {steps}", tpot * 1e3, "ms")
        return tpot

    def _decode(self, report: Report, label: str, batch: int, prompt: int, context: int) -> None:
        """TPOT of decode calls that follow each other, after a prompt that was not run."""
        steps, num_calls = max(_CALLS.value), _NEW.value // max(_CALLS.value)
        settings, num_programs = GenerationSettings.of(), self.runner.programs.num_traces
        times = []
        for repeat in range(_REPEATS.value + 1):
            with report_turn(_TURN.value if repeat else ""):
                session = session_without_prefill(self.runner, batch, prompt, context, settings)
                with programs_used(self.runner) as used:
                    jax.block_until_ready((self.runner.decode(session, 1, steps), session.state))
                start = time.perf_counter()
                emitted = [self.runner.decode(session, steps, steps) for _ in range(num_calls)]
                jax.block_until_ready((emitted, session.state))
                times.append((time.perf_counter() - start) / (steps * num_calls))
            if not repeat:
                self._compiled(report, f"{label} compile of decode", num_programs)
        tpot, weights = statistics.median(times[1:]), self.runner.weights
        report.add(f"{label} TPOT, random cache, calls of {steps}", tpot * 1e3, "ms")
        chosen, num_experts = self.config.experts_per_token, self.config.num_experts
        distinct = num_experts * (1 - (1 - chosen / num_experts) ** batch)
        least = bytes_per_step(self.config, weights, batch, prompt + _NEW.value // 2, distinct)
        share = 100 * least / tpot / self.bandwidth
        report.add(f"{label} share of bandwidth, random cache", share, "%", gb=least / 1e9)
        self._memory(report, label, "decode", used, session)
        if _PROFILE.value:
            self._launches(report, label, session)

    def _timings(
        self, prompts: list[list[int]], context: int, settings: GenerationSettings, steps: int
    ) -> Iterator[Timing | None]:
        """None after a run that compiles, then a timing a run, in this process' turn."""

        def run() -> Timing:
            rows = settings_by_row(settings, len(prompts))
            batch = Batch(self.runner, None, prompts, rows, context, (), steps_per_call=steps)
            collections.deque(batch.steps(), maxlen=0)
            return batch.timing

        run()
        yield None
        with report_turn(_TURN.value):
            for _ in range(_REPEATS.value):
                yield run()

    def _compiled(self, report: Report, what: str, num_programs: int) -> None:
        spent = self.runner.programs.history[num_programs:]
        seconds: dict[str, float] = {}
        for name, part in spent:
            seconds[name] = seconds.get(name, 0.0) + part
        report.add(f"{what}, {self.cache}", sum(seconds.values()), "s", **seconds)

    def _first(self, report: Report, label: str, prompts: list[list[int]], ttft_s: float) -> None:
        report.add(f"{label} TTFT", ttft_s * 1e3, "ms")
        report.add(f"{label} prefill", sum(map(len, prompts)) / ttft_s, "tokens/s")

    def _dispatches(
        self, report: Report, label: str, prompts: list[list[int]], context: int
    ) -> None:
        """The host's time for a step, and launches a token in a profile."""
        runner, settings = self.runner, GenerationSettings.of(max_new_tokens=_NEW.value)
        session = runner.prefill(prompts, context, settings, ())
        if not jnp.isfinite(session.state.cache.keys).all():
            raise RuntimeError("activations are not finite: nothing measured here means anything")
        if 1 in _CALLS.value:
            step = runner.decode(session, 1, 1)
            jax.block_until_ready((session.state, step))
            num_programs = runner.programs.num_traces
            start = time.perf_counter()
            num_dispatches = 20
            for _ in range(num_dispatches):
                runner.decode(session, 1, 1)
            dispatch = (time.perf_counter() - start) / num_dispatches
            if runner.programs.num_traces != num_programs:
                raise RuntimeError("a program was compiled inside the timed loop: change --prompt")
            jax.block_until_ready(session.state)
            report.add(f"{label} dispatch of one step call", dispatch * 1e3, "ms")
        if _PROFILE.value:
            self._launches(report, label, session)

    def _launches(self, report: Report, label: str, session: Session) -> None:
        """Launches a token, and the kernels that take most of it, in a profile of a call."""
        most = max(_CALLS.value)
        with tempfile.TemporaryDirectory() as trace:
            with jax.profiler.trace(trace):
                step = self.runner.decode(session, most, most)
                jax.block_until_ready((session.state, step))
            counted, graphs = launches(Path(trace)), graph_launches(Path(trace))
        num_launches = sum(count for count, _ in counted.values())
        report.add(
            f"{label} launches a token", num_launches / most, "launches", graphs=graphs / most
        )
        for name, (count, spent) in sorted(counted.items(), key=lambda item: -item[1][1])[:20]:
            print(f"      {count / most:8.1f} launches {spent / most:8.1f} us  {name[:80]}")

    def _distinct(self, prompts: list[list[int]], context: int) -> float:
        """Experts of a layer that a step reads: counted, or expected of uniform routing."""
        config, batch = self.config, len(prompts)
        if batch == 1:
            return config.experts_per_token
        if not _COUNT.value:
            share = 1 - (1 - config.experts_per_token / config.num_experts) ** batch
            return config.num_experts * share
        session = self.runner.prefill(prompts, context, GenerationSettings.of(), ())
        spec = ChunkSpec(
            kv_length=kv_bucket(session.next_position + 1, context),
            is_first=False,
            experts=self.runner.expert_impl(batch),
            attention="xla",
        )
        return distinct_experts(self.runner, session, spec)


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    started = time.perf_counter()
    device = choose_device(_PLATFORM.value)
    cache = enable_compilation_cache(_CACHE.value)
    compiled_from = "no cache"
    if cache is not None:
        compiled_from = "with a cache in use" if any(cache.iterdir()) else "into an empty cache"
    config = with_layers(CONFIGS[_SHAPE.value], _LAYERS.value)
    bits = int(_BITS.value)
    packing = Packing(
        bits=bits,
        group_size=_GROUP.value,
        zero_kind=_ZEROS.value,
        attention_bits=bits if _ATTENTION.value else 16,
        shared_bits=int(_SHARED.value),
        head_bits=int(_HEAD.value),
    )
    benchmark = Benchmark(config, packing, device, compiled_from)
    for prompt in _PROMPT.value:
        for batch in _BATCH.value:
            spent = time.perf_counter() - started
            if _LIMIT.value and spent > _LIMIT.value:
                print(f"left out after {spent:.0f} s: batch {batch} prompt {prompt}")
                continue
            benchmark.run(batch, prompt)


if __name__ == "__main__":
    app.run(main)
