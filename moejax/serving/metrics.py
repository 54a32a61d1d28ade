"""Prometheus metrics of the server."""

from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, Metric

from moejax.experts.ledger import Ledger
from moejax.experts.residency import EVENTS

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """A registry of its own, so that servers of one process do not share counts."""

    def __init__(self) -> None:
        self.registry = registry = prometheus_client.CollectorRegistry()
        self.requests = prometheus_client.Counter(
            "moejax_requests", "Requests that have ended.", ("endpoint", "outcome"),
            registry=registry,
        )  # fmt: skip
        self.queue_length = prometheus_client.Gauge(
            "moejax_queue_length", "Answers that wait for their turn.", registry=registry
        )
        self.running = prometheus_client.Gauge(
            "moejax_running", "Answers that are being computed.", registry=registry
        )
        self.batch_size = prometheus_client.Histogram(
            "moejax_batch_size", "Answers that a batch began with.", registry=registry,
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
        )  # fmt: skip
        self.ttft = prometheus_client.Histogram(
            "moejax_ttft_seconds", "From a request's arrival to its first token.",
            registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self.tpot = prometheus_client.Histogram(
            "moejax_tpot_seconds", "A token of an answer after the first.",
            registry=registry, buckets=_STEP_SECONDS,
        )  # fmt: skip
        self.prompt_tokens = prometheus_client.Counter(
            "moejax_prompt_tokens", "Tokens of prompts that were run.", registry=registry
        )
        self.generated_tokens = prometheus_client.Counter(
            "moejax_generated_tokens", "New tokens of answers.", registry=registry
        )
        self.connections = prometheus_client.Gauge(
            "moejax_connections", "Connections that are open.", registry=registry
        )
        self.connections_refused = prometheus_client.Gauge(
            "moejax_connections_refused", "Connections that were one too many, since the start.",
            registry=registry,
        )  # fmt: skip
        self._programs = prometheus_client.Gauge(
            "moejax_programs", "Programs compiled since the start.", registry=registry
        )
        self._compile_seconds = prometheus_client.Gauge(
            "moejax_compile_seconds", "Spent in compiling since the start.", registry=registry
        )
        self._ledger: list[Metric] = []
        registry.register(self)

    def programs(self, count: int, seconds: float) -> None:
        """Sets the number of programs compiled so far, and their seconds."""
        self._programs.set(count)
        self._compile_seconds.set(seconds)

    def ledger(self, ledger: Ledger | None) -> None:
        """Sets the ledger to report; None where all experts are among the weights."""
        self._ledger = list(ledger_metrics(ledger)) if ledger is not None else []

    def collect(self) -> Iterator[Metric]:
        """Yields the ledger's metrics as of the last batch; the registry calls it."""
        return iter(self._ledger)

    def describe(self) -> list[Metric]:
        """Describes nothing: the names depend on the model."""
        return []

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return prometheus_client.generate_latest(self.registry)


def ledger_metrics(ledger: Ledger) -> Iterator[Metric]:
    """Events (`moejax.experts.residency.EVENTS`), bytes and gate mass of each tier."""
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
