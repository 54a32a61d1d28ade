"""Prometheus metrics of the server."""

import functools
from collections.abc import Iterator

import jax
import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moejax.experts.ledger import Ledger
from moejax.inference.continuous import BatchCounts, ContinuousBatch
from moejax.inference.report import device_peak_bytes
from pallas_kernels.cache_plan.operands import EVENTS

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """A registry of its own, so that servers of one process do not share counts."""

    def __init__(self) -> None:
        self.registry = registry = prometheus_client.CollectorRegistry()
        counter = functools.partial(prometheus_client.Counter, registry=registry)
        gauge = functools.partial(prometheus_client.Gauge, registry=registry)
        histogram = functools.partial(prometheus_client.Histogram, registry=registry)
        self.requests = counter(
            "moejax_requests", "Requests that have ended.", ("endpoint", "outcome")
        )
        self.queue_length = gauge("moejax_queue_length", "Answers that wait for their turn.")
        self.running = gauge("moejax_running", "Answers that are being computed.")
        self.batch_size = histogram(
            "moejax_batch_size", "Answers that a call of decode steps advanced.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
        )  # fmt: skip
        self.ttft = histogram(
            "moejax_ttft_seconds", "From a request's arrival to its first token.", buckets=_SECONDS
        )
        self.tpot = histogram(
            "moejax_tpot_seconds", "A token of an answer after the first.", buckets=_STEP_SECONDS
        )
        self.prompt_tokens = counter("moejax_prompt_tokens", "Tokens of prompts, reused ones too.")
        self.generated_tokens = counter("moejax_generated_tokens", "New tokens of answers.")
        self.connections = gauge("moejax_connections", "Connections that are open.")
        self.connections_refused = gauge(
            "moejax_connections_refused", "Connections that were one too many, since the start."
        )
        self._programs = gauge("moejax_programs", "Programs compiled since the start.")
        self._compile_seconds = gauge(
            "moejax_compile_seconds", "Spent in compiling since the start."
        )
        self._device_peak = gauge(
            "moejax_device_peak_bytes", "Most memory that JAX has held on the device; 0: no count."
        )
        self._ledger: list[Metric] = []
        self._batch: ContinuousBatch | None = None
        registry.register(self)

    def programs(self, count: int, seconds: float) -> None:
        """Sets the number of programs compiled so far, and their seconds."""
        self._programs.set(count)
        self._compile_seconds.set(seconds)

    def batch(self, batch: ContinuousBatch, device: jax.Device) -> None:
        """Sets the running batch whose counts and pages are to be reported, and its device."""
        self._batch = batch
        self._device_peak.set_function(lambda: device_peak_bytes(device) or 0)

    def ledger(self, ledger: Ledger | None) -> None:
        """Sets the ledger to report; None where all experts are among the weights."""
        self._ledger = list(_ledger_metrics(ledger)) if ledger is not None else []

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the running batch and of the ledger; the registry calls it."""
        counts = self._batch.counts if self._batch else BatchCounts()
        for name, what, count in (
            ("moejax_prompt_chunks", "Chunks of prompts that were run.", counts.chunks),
            (
                "moejax_prefix_hits", "Prompts whose beginning was in the cache already.",
                counts.prefix_hits,
            ),
            (
                "moejax_prefix_tokens", "Tokens of prompts that were not run again.",
                counts.prefix_tokens,
            ),
        ):  # fmt: skip
            yield CounterMetricFamily(name, what, value=count)
        pages = GaugeMetricFamily(
            "moejax_pages",
            "Pages of the cache: of answers that run (used), kept for prompts that begin as "
            "earlier ones did (kept), and in all (total).",
            labels=("state",),
        )
        if self._batch is not None:
            pool = self._batch.pool
            for state, number in (
                ("used", pool.num_used), ("kept", pool.num_kept), ("total", pool.number),
            ):  # fmt: skip
                pages.add_metric((state,), number)
        yield pages
        yield from self._ledger

    def describe(self) -> list[Metric]:
        """Describes nothing: the names depend on the model."""
        return []

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return prometheus_client.generate_latest(self.registry)


def _ledger_metrics(ledger: Ledger) -> Iterator[Metric]:
    """Events (`pallas_kernels.cache_plan.operands.EVENTS`), bytes and gate mass of each tier."""
    events = CounterMetricFamily(
        "moejax_expert_events", "Experts by what became of them.", labels=("tier", "event")
    )
    moved = CounterMetricFamily(
        "moejax_expert_bytes", "Bytes of experts that moved, by cause.", labels=("tier", "cause")
    )
    for name, tier in ledger.tiers.items():
        for event in EVENTS:
            events.add_metric((name, event), tier.total(event))
        for cause, amount in tier.bytes_by_cause.items():
            moved.add_metric((name, cause), amount)
    yield events
    yield moved
    if ledger.gate is not None:
        served = CounterMetricFamily(
            "moejax_gate_mass",
            "The router's gate mass by the tier that served it, left out (skipped), served by "
            "another expert (substituted; in its tier, too), and in all (total).",
            labels=("tier",),
        )
        names = (*ledger.tiers, "skipped", "substituted", "total")
        for name, mass in zip(names, ledger.gate.sum(axis=0).tolist(), strict=True):
            served.add_metric((name,), mass)
        yield served
