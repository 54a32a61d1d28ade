"""Measures a configuration: every batch under every budget."""

import dataclasses
import gc
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moejax.benchmarking import requests
from moejax.benchmarking.bandwidth import Bandwidth, bandwidth_of
from moejax.benchmarking.expected_kernels import refuse_dequantized
from moejax.benchmarking.measuring import BatchTimes, Bench, Measurement, floor_bytes
from moejax.benchmarking.models import CheckpointModels, Models, models_of
from moejax.benchmarking.requests import PromptFile, TokenizedPrompts
from moejax.config.benchmark import PROMPT_TOKENS, BenchmarkConfig
from moejax.config.options import options
from moejax.devices import device_nbytes, plain_memory_errors
from moejax.engine import STEPS_PER_CALL
from moejax.errors import MoejaxError, print_stderr
from moejax.evaluation import fidelity
from moejax.experts.bits import bits_of
from moejax.experts.budget import BudgetError
from moejax.inference import report
from moejax.inference.chunking import MIN_KV_LENGTH, length_bucket
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.quantization.pipeline.calibration import shipped_text

_NO_MEMORY = "is out of memory"  # of `devices.plain_memory_errors`


@dataclasses.dataclass(frozen=True)
class _Figure:
    """A value, and what it spread over where there were several runs."""

    value: float  # the median over the runs, or the only one there is
    unit: str  # "ms", "tokens/s", "MB"
    low: float | None = None  # of the runs the least; None where runs do not differ
    high: float | None = None  # the largest

    @property
    def spread(self) -> dict[str, float]:
        """Least and largest run by name; {} where runs do not differ."""
        if self.low is None or self.high is None:
            return {}
        return {"lowest_run": self.low, "highest_run": self.high}


Figures = dict[str, _Figure]


@dataclasses.dataclass(frozen=True)
class Point:
    """One batch size under one budget."""

    batch: int  # sequences at once
    gib: float  # limit of the device; 0: none
    refusal: str = ""  # why it could not run; "" where it did
    figures: Figures = dataclasses.field(default_factory=dict)  # by name; {} where it was refused
    requests: str = ""  # what was asked, for people
    context: int = 0  # slots of the KV cache
    routing: str = ""  # where the experts of decode steps are from
    placement: tuple[str, ...] = ()  # where the experts are, lines
    # the device's peak is that of an earlier measurement: this one's is not above
    peak_is_older: bool = False
    measured: Measurement | None = None  # the runs; None where it was refused
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)  # what served each product
    # what `fidelity` compares with the exact model; None once it is, or for nothing
    predicted: np.ndarray | None = None

    @property
    def name(self) -> str:
        """Such as "batch 4, 12 GiB"."""
        return f"batch {self.batch}" + (f", {self.gib:g} GiB" if self.gib else "")


@dataclasses.dataclass(frozen=True)
class BenchmarkResult:
    """All that was measured of a model, in the order of `BenchmarkConfig.points`."""

    points: list[Point]
    about: str  # the model
    device: Any
    bandwidth: Bandwidth
    steps_per_call: int


def run(
    config: BenchmarkConfig, file: PromptFile | None, known: Callable[[BenchmarkResult], None]
) -> BenchmarkResult:
    """Measures all points; what a budget or the device refuses is a point that says so.

    Args:
      file: of prompts; None: prompts of a length.
      known: told all points so far after each.
    """
    models = models_of(config)
    bandwidth = bandwidth_of(models.device)
    per_call = config.steps_per_call or STEPS_PER_CALL
    asked = {batch: _requests(config, models, file, batch) for batch in config.batches}
    if config.fidelity_share:
        for of in asked.values():
            fidelity.sample_prompts(
                of.prompts, config.fidelity_share
            )  # an error comes before the runs
    points: list[Point] = []
    about = models.about + _settings_text(config)
    outcome = BenchmarkResult(points, about, models.device, bandwidth, per_call)
    for batch, gib in config.points():
        print_stderr(f"measuring batch {batch}, {gib or 'no'} GiB")
        try:
            points.append(_measured(config, models, asked[batch], batch, gib, bandwidth, per_call))
        except MoejaxError as error:
            if not isinstance(error, BudgetError) and _NO_MEMORY not in str(error):
                raise
            points.append(Point(batch, gib, refusal=str(error)))
        gc.collect()  # engines hold themselves: what they had on the device goes now
        known(outcome)
    if isinstance(models, CheckpointModels) and config.fidelity_share:
        _compare(config, models, asked, outcome)
        known(outcome)
    return outcome


def _settings_text(config: BenchmarkConfig) -> str:
    """Describes settings of policy and memory that are not the defaults.

    Such as ", policy dymoe (int4/int2, retention=0.75), memory slots=24". Budgets, paths, and what
    a shape's routing says are left out.
    """
    found, policy = "", config.policy
    if policy.name:
        tiers = "/".join(tier.partition("=")[0] for tier in policy.tiers)
        slots = f"slots {'/'.join(policy.slots)}" if policy.slots else ""
        planes = f"planes {config.planes}" if config.planes else ""
        parts = (tiers, planes, slots, policy.settings, "emulated" * policy.emulate)
        said = ", ".join(filter(None, parts))
        found = f", policy {policy.name}" + (f" ({said})" if said else "")
    left_out = ("device_gib", "disk_path", *(["host_gib"] if config.shape else []))
    pairs = zip(options(config.memory), options(type(config.memory)()), strict=True)
    changed = [
        f"{own.name}={own.default}"
        for own, default in pairs
        if own.default != default.default and own.name not in left_out
    ]
    return found + (f", memory {', '.join(changed)}" if changed else "")


def _compare(
    config: BenchmarkConfig,
    models: CheckpointModels,
    asked: dict[int, TokenizedPrompts],
    outcome: BenchmarkResult,
) -> None:
    """Adds the KL of the exact model: last, so that the exact model is in no peak of memory."""
    contexts = [point.context for point in outcome.points if point.predicted is not None]
    if not contexts:
        return
    exact: dict[int, np.ndarray] = {}
    try:
        with models.exact(max(contexts)) as engine:
            for batch, requests_ in asked.items():
                samples = fidelity.sample_prompts(requests_.prompts, config.fidelity_share)
                exact[batch] = fidelity.predictions_of(engine._runner.logits, samples)
    except MoejaxError as error:
        _print_unmeasured(error)
    for place, point in enumerate(outcome.points):
        if point.predicted is not None and point.batch in exact:
            both = (of.astype(np.float64) for of in (exact[point.batch], point.predicted))
            found = fidelity.compare(*both)
            more = {
                "KL of the exact model": _Figure(found.mean_kl, "nats a token"),
                "largest KL of the exact model": _Figure(found.largest_kl, "nats"),
                "same likeliest token": _Figure(
                    100 * found.same_choice, f"% of {found.num_tokens} tokens"
                ),
            }
            point = dataclasses.replace(point, figures=point.figures | more)
        outcome.points[place] = dataclasses.replace(point, predicted=None)


def _requests(
    config: BenchmarkConfig, models: Models, file: PromptFile | None, batch: int
) -> TokenizedPrompts:
    """Requests in batches of so many."""
    room = (config.context or models.config.context_limit) - config.new_tokens
    length = config.prompt_tokens or PROMPT_TOKENS
    if room < 1 or (file is None and length > room):
        raise MoejaxError(
            f"{length} prompt tokens and new_tokens={config.new_tokens} do not fit a context of "
            f"{config.context or models.config.context_limit}"
        )
    if file is not None:
        if models.tokenizer is None:
            raise MoejaxError(f"{models.about} has no tokenizer.json for prompts")
        longest = min(config.prompt_tokens or room, room)
        return requests.of_file(
            file, models.tokenizer, num_prompts=config.num_prompts, longest=longest
        )
    count = config.num_prompts or batch
    if models.tokenizer is None:
        return requests.at_random(
            models.config.vocab_size, num_prompts=count, length=length, seed=config.seed
        )
    return requests.of_text(
        shipped_text(), models.tokenizer, num_prompts=count, length=length,
        name="the calibration text that ships",
    )  # fmt: skip


def _measured(
    config: BenchmarkConfig, models: Models, asked: TokenizedPrompts, batch: int, gib: float,
    bandwidth: Bandwidth, per_call: int,
) -> Point:  # fmt: skip
    longest = max(map(len, asked.prompts))
    limit = models.config.context_limit
    context = config.context or length_bucket(longest + config.new_tokens, MIN_KV_LENGTH, limit)
    before = report.device_peak_bytes(models.device)
    loaded = models.load(batch, gib, context)
    try:
        refuse_dequantized(loaded.runner, batch, prompt=longest, context=context)
        with plain_memory_errors(models.device):
            bench = Bench(
                loaded.runner, context=context, steps_per_call=per_call,
                settings=GenerationSettings.of(max_new_tokens=config.new_tokens),
                eos_ids=() if config.ignore_eos else models.eos_ids,
            )  # fmt: skip
            measured = bench.measure(
                asked.batches(batch), runs=config.runs, count=config.count_experts
            )
        runner = loaded.runner
        bits = bits_of(models.config, runner.weights, runner.memory)
        peak = report.device_peak_bytes(models.device)
        found = _of_times(measured) | _of_ledgers(measured)
        found |= _of_floor(measured, runner, bandwidth)
        found["host memory peak"] = _Figure(report.host_peak_bytes() / 2**30, "GiB")
        if peak is not None:
            found["device memory peak"] = _Figure(peak / 2**30, "GiB")
        found |= {
            "load": _Figure(loaded.load_s, "s"),
            "compile": _Figure(measured.compile_s, "s"),
            "warm-up": _Figure(measured.warmup_s, "s"),
            "bits a weight": _Figure(bits.overall, "bits"),
            **{f"bits a weight, {n}": _Figure(of, "bits") for n, of in bits.parts.items()},
        }
        if loaded.budget is not None:
            planned = loaded.budget.total_device / 2**30
            found["planned device memory"] = _Figure(planned, "GiB")
            first = loaded.budget.tiers[0]
            share = 100 * first.total_slots / max(1, first.num_layers * first.num_experts)
            found["experts in slots"] = _Figure(share, "% of a layer's")
        return Point(
            batch, gib, figures=found, context=context, routing=loaded.routing,
            requests=asked.about + (f", {asked.num_cut} of them cut" if asked.num_cut else ""),
            placement=(f"weights: {bits.describe()}", *report.placement(loaded.budget)),
            peak_is_older=peak is not None and peak == before,
            measured=measured,
            kernels={
                f"{phase} {name}": of.describe()
                for phase, products in runner.products.items()
                for name, of in products.items()
            },
            predicted=_predicted(config, models, runner, asked) if config.fidelity_share else None,
        )  # fmt: skip
    finally:
        loaded.close()


def _predicted(
    config: BenchmarkConfig, models: Models, runner: Runner, asked: TokenizedPrompts
) -> np.ndarray | None:
    """Predictions that `fidelity` compares; None where there is no room for them."""
    samples = fidelity.sample_prompts(asked.prompts, config.fidelity_share)
    try:
        with plain_memory_errors(models.device):
            return fidelity.predictions_of(runner.logits, samples)
    except MoejaxError as error:
        _print_unmeasured(error)
        return None


def _print_unmeasured(error: MoejaxError) -> None:
    """Reports on stderr; the times stand without it."""
    print_stderr(f"the KL of the exact model was not measured: {error}")


def _of_times(measured: Measurement) -> Figures:
    """Latencies and throughputs, each a run's, of which the median stands."""
    runs = [_of_run(run) for run in measured.runs]
    found = {}
    for name, (_, unit) in runs[0].items():
        values = [run[name][0] for run in runs]
        if not any(map(math.isnan, values)):  # as are those of decode without a second token
            found[name] = _Figure(statistics.median(values), unit, min(values), max(values))
    return found


def _of_run(run: Sequence[BatchTimes]) -> dict[str, tuple[float, str]]:
    """Value and unit of a run's figures; a request has its batch's TTFT and mean step, TPOT."""
    total_s = sum(b.ttft_s + b.until_end_s for b in run)
    seconds = {
        "TTFT": [b.ttft_s for b in run for _ in b.prompt_tokens],
        "TPOT": [b.decode_s / b.steps for b in run if b.steps for _ in b.prompt_tokens],
        # Time of every step, the mean of its call.
        "ITL": [s / n for b in run for s, n in b.calls if n for _ in range(n)],
    }
    prefill_s, decode_s = sum(b.ttft_s for b in run), sum(b.until_end_s for b in run)
    num_prompt, num_decoded = (
        sum(sum(b.prompt_tokens) for b in run), sum(b.num_decoded for b in run)
    )  # fmt: skip
    return {
        f"{name} {which}": (1e3 * float(np.quantile(of, share)) if of else math.nan, "ms")
        for name, of in seconds.items()
        for which, share in (("median", 0.5), ("p99", 0.99))
    } | {
        "prefill throughput": (_rate(num_prompt, prefill_s), "tokens/s"),
        "decode throughput": (_rate(num_decoded, decode_s), "tokens/s"),
        "output throughput": (_rate(sum(sum(b.new_tokens) for b in run), total_s), "tokens/s"),
        "request throughput": (_rate(sum(len(b.new_tokens) for b in run), total_s), "requests/s"),
    }


def _of_ledgers(measured: Measurement) -> Figures:
    """Hit rates, bytes over the link, gate mass by tier; nothing where no expert moves."""
    if not measured.ledgers:
        return {}
    prefill, decode = measured.ledgers["prefill"], measured.ledgers["decode"]
    every = [batch for run in measured.runs for batch in run]
    steps, decode_s = sum(b.steps for b in every), sum(b.until_end_s for b in every)
    num_prompts = sum(len(b.prompt_tokens) for b in every)
    found = {
        "hit rate of prefill": _Figure(100 * prefill.hit_rate, "%"),
        "link bytes of a prompt": _Figure(prefill.link_bytes / num_prompts / 1e6, "MB"),
    }
    if steps:
        tokens = sum(b.num_decoded for b in every)
        found |= {
            "hit rate of decode": _Figure(100 * decode.hit_rate, "%"),
            "link bytes of a decode step": _Figure(decode.link_bytes / steps / 1e6, "MB"),
            "link bytes of a decoded token": _Figure(decode.link_bytes / tokens / 1e6, "MB"),
            "link rate of decode": _Figure(decode.link_bytes / decode_s / 2**30, "GiB/s"),
        }
    found["link bytes of a run"] = _Figure(
        (prefill.link_bytes + decode.link_bytes) / len(measured.runs) / 1e6, "MB"
    )
    for phase, ledger in measured.ledgers.items():
        for name, share in ledger.shares.items():
            if not math.isnan(share):
                found[f"gate mass of {phase}, {name}"] = _Figure(100 * share, "%")
    return {name: figure for name, figure in found.items() if not math.isnan(figure.value)}


def _of_floor(measured: Measurement, runner: Runner, bandwidth: Bandwidth) -> Figures:
    """The least bytes that a decode step reads, their time, and its share of the TPOT."""
    every = [batch for run in measured.runs for batch in run]
    steps = sum(b.steps for b in every)
    if not steps:
        return {}
    config = runner.config
    size = max(len(b.new_tokens) for b in every)
    full = [b for b in every if len(b.new_tokens) == size]
    if measured.ledgers:
        experts_nbytes = sum(
            ledger.total("needed") * ledger.expert_bytes
            for ledger in measured.ledgers["decode"].tiers.values()
        ) / steps  # fmt: skip
        if runner.mesh is not None and runner.mesh.handed_out is not None:  # of all devices
            experts_nbytes /= runner.mesh.size
        needed = measured.ledgers["decode"].total("needed")
        distinct = needed / steps / len(config.moe_layers)
    else:
        assert measured.distinct is not None
        distinct = measured.distinct
        whole = sum(device_nbytes(runner.weights[n]) for n in EXPERT_LEAVES if n in runner.weights)
        experts_nbytes = whole * distinct / config.num_experts
    least = floor_bytes(
        config, {name: device_nbytes(leaf) for name, leaf in runner.weights.items()},
        experts_nbytes=experts_nbytes,
        positions=statistics.mean(
            _positions(b, config.window_of(layer))
            for b in full if b.steps for layer in config.attention_layers
        ),
        itemsize=runner.dtype.itemsize, batch=size,
    )  # fmt: skip
    floor_ms = 1e3 * least / bandwidth.bytes_per_s
    tpot_ms = _of_times(measured)["TPOT median"].value
    return {
        "experts of a layer that a decode step reads": _Figure(distinct, "experts"),
        "byte floor of a decode step": _Figure(least / 1e6, "MB"),
        "time of the byte floor": _Figure(floor_ms, "ms"),
        "share of the byte floor": _Figure(100 * floor_ms / tpot_ms, "%"),
    }


def _positions(batch: BatchTimes, window: int | None = None) -> float:
    """Mean positions of the cache that a decode step reads, summed over the sequences.

    Step i of a sequence (from 1 on) reads the prompt and the i tokens after it, at most `window`.
    """
    total = 0
    for length, new in zip(batch.prompt_tokens, batch.new_tokens, strict=True):
        total += sum(min(length + i, window or length + i) for i in range(1, new))
    return total / batch.steps


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else math.nan
