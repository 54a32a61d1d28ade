"""Figures with units from times and ledgers; docs/benchmark.md defines each."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from moejax.benchmarking.bandwidth import Bandwidth
from moejax.benchmarking.measuring import BatchTimes, Measurement
from moejax.benchmarking.step_cost import floor_bytes
from moejax.devices import device_nbytes
from moejax.experts.bits import BitsPerWeight
from moejax.inference.runner import Runner
from moejax.models.leaf_kinds import EXPERT_LEAVES


@dataclasses.dataclass(frozen=True)
class Figure:
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


Figures = dict[str, Figure]


def of_times(measured: Measurement) -> Figures:
    """Latencies and throughputs, each a run's, of which the median stands."""
    runs = [_of_run(run) for run in measured.runs]
    found = {}
    for name, (_, unit) in runs[0].items():
        values = [run[name][0] for run in runs]
        if not any(map(math.isnan, values)):  # as are those of decode without a second token
            found[name] = Figure(statistics.median(values), unit, min(values), max(values))
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


def of_ledgers(measured: Measurement) -> Figures:
    """Hit rates, bytes over the link, gate mass by tier; nothing where no expert moves."""
    if not measured.ledgers:
        return {}
    prefill, decode = measured.ledgers["prefill"], measured.ledgers["decode"]
    every = [batch for run in measured.runs for batch in run]
    steps, decode_s = sum(b.steps for b in every), sum(b.until_end_s for b in every)
    num_prompts = sum(len(b.prompt_tokens) for b in every)
    found = {
        "hit rate of prefill": Figure(100 * prefill.hit_rate, "%"),
        "link bytes of a prompt": Figure(prefill.link_bytes / num_prompts / 1e6, "MB"),
    }
    if steps:
        tokens = sum(b.num_decoded for b in every)
        found |= {
            "hit rate of decode": Figure(100 * decode.hit_rate, "%"),
            "link bytes of a decode step": Figure(decode.link_bytes / steps / 1e6, "MB"),
            "link bytes of a decoded token": Figure(decode.link_bytes / tokens / 1e6, "MB"),
            "link rate of decode": Figure(decode.link_bytes / decode_s / 2**30, "GiB/s"),
        }
    found["link bytes of a run"] = Figure(
        (prefill.link_bytes + decode.link_bytes) / len(measured.runs) / 1e6, "MB"
    )
    for phase, ledger in measured.ledgers.items():
        for name, share in ledger.shares.items():
            if not math.isnan(share):
                found[f"gate mass of {phase}, {name}"] = Figure(100 * share, "%")
    return {name: figure for name, figure in found.items() if not math.isnan(figure.value)}


def of_floor(measured: Measurement, runner: Runner, bandwidth: Bandwidth) -> Figures:
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
    tpot_ms = of_times(measured)["TPOT median"].value
    return {
        "experts of a layer that a decode step reads": Figure(distinct, "experts"),
        "byte floor of a decode step": Figure(least / 1e6, "MB"),
        "time of the byte floor": Figure(floor_ms, "ms"),
        "share of the byte floor": Figure(100 * floor_ms / tpot_ms, "%"),
    }


def _positions(batch: BatchTimes, window: int | None = None) -> float:
    """Mean positions of the cache that a decode step reads, summed over the sequences.

    Step i of a sequence (from 1 on) reads the prompt and the i tokens after it, at most `window`.
    """
    total = 0
    for length, new in zip(batch.prompt_tokens, batch.new_tokens, strict=True):
        total += sum(min(length + i, window or length + i) for i in range(1, new))
    return total / batch.steps


def of_cost(
    measured: Measurement, *, load_s: float, device_peak: int | None, host_peak: int
) -> Figures:
    """Memory peaks of the process so far, in bytes, and seconds that are in no other figure."""
    found = {"host memory peak": Figure(host_peak / 2**30, "GiB")}
    if device_peak is not None:
        found["device memory peak"] = Figure(device_peak / 2**30, "GiB")
    return found | {
        "load": Figure(load_s, "s"),
        "compile": Figure(measured.compile_s, "s"),
        "warm-up": Figure(measured.warmup_s, "s"),
    }


def of_bits(bits: BitsPerWeight) -> Figures:
    """Bits a weight overall, of the experts in each tier, and of the rest."""
    found = {"bits a weight": Figure(bits.overall, "bits")}
    return found | {f"bits a weight, {n}": Figure(of, "bits") for n, of in bits.parts.items()}


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else math.nan
