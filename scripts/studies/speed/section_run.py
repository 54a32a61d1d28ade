"""Options, workloads, rows and time of the sections of `bench_policies.py`."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moejax.benchmarking.routing import EXPONENTS, Workload, make_workload
from moejax.benchmarking.shape_memory import Memory, release
from moejax.policies.buddy_lists import BuddyLists, buddy_lists, conditional_coactivation
from scripts.studies.measuring import Report
from scripts.studies.speed.lab import Lab
from scripts.studies.speed.timing import Measured

# Of the profiles in `scripts/studies/quality/sections.py`.
CFT_ALPHA, MOST_BUDDIES, SMOOTHING = 0.95, 31, 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line, where they are described."""

    batches: Sequence[int]
    bits: int
    tiers: Sequence[int]
    gibs: Sequence[float]
    cache_rates: Sequence[float]
    n_hot: int
    period: int
    bulk: int
    requests: int
    shift_every: int
    shift_share: float
    exponent: float | None
    recall: float
    retention: float
    split: str
    ttft: bool
    limit_s: float
    only: Sequence[str] = ()


class Run:
    """A section that runs."""

    def __init__(self, lab: Lab, report: Report, options: Options):
        """Nothing is measured yet."""
        self.lab, self.report, self.options = lab, report, options
        self.failed: list[str] = []
        self._started = time.perf_counter()
        self._workloads: dict[tuple[int, bool], Workload] = {}

    def workload(self, batch: int = 1, *, shifts: bool = False) -> Workload:
        """Workload of so many sequences; made once."""
        key = (batch, shifts)
        if key not in self._workloads:
            o, shape = self.options, self.lab.shape
            exponent = EXPONENTS.get(shape, 0.0) if o.exponent is None else o.exponent
            asked = "asked for" if o.exponent is not None else f"of {shape or 'the shape'}"
            made = make_workload(
                self.lab.config, num_steps=self.lab.sizes.num_replayed, batch=batch,
                exponent=exponent, shift_every=o.shift_every if shifts else 0,
                shift_share=o.shift_share, recall=o.recall,
            )  # fmt: skip
            facts = ", ".join(f"{name} {value:.3g}" for name, value in describe(made).items())
            print(f"workload of batch {batch}: skew {exponent:g} ({asked}), {facts}", flush=True)
            self._workloads[key] = made
        return self._workloads[key]

    def buddies(
        self, workload: Workload, alpha: float = CFT_ALPHA, most: int = MOST_BUDDIES
    ) -> BuddyLists:
        """Lists by a workload's own co-activations."""
        shares = conditional_coactivation(workload.coactivations(), SMOOTHING)
        return buddy_lists(shares, alpha, most)

    def attempt(self, what: str, part: Callable[[], Any]) -> Any:
        """The part's value; None where it failed, is not asked for, or time is up."""
        if self.options.only and not any(part in what for part in self.options.only):
            return None
        if self.options.limit_s and time.perf_counter() - self._started > self.options.limit_s:
            print(f"left out: {what}", flush=True)
            return None
        start = time.perf_counter()

        def named(_: Report) -> Any:
            return part()

        found = self.report.attempt(named)
        if found is None:
            self.failed.append(what)
        print(f"  ({what}: {time.perf_counter() - start:.1f} s)", flush=True)
        return found

    def measured(
        self, what: str, make: Callable[[], Memory], workload: Workload, batch: int = 1, **how: Any
    ) -> Measured | None:
        """Measures a memory that is made for it and released; see `Lab.measure`, and `attempt`."""

        def part() -> Measured:
            memory = make()
            try:
                return self.lab.measure(memory, workload, batch, **how)
            finally:
                release(memory)

        return self.attempt(what, part)

    def tpot(self, what: str, found: Measured, batch: int = 1, **baseline: float) -> None:
        """The row of a decode loop."""
        self.report.add(
            f"{what}, TPOT", 1e3 * found.tpot, "ms", tokens_per_s=batch / found.tpot, **baseline,
            **found.beside(),
        )  # fmt: skip
        if found.ttft:
            self.report.add(f"{what}, TTFT", 1e3 * found.ttft, "ms")

    def peak(self, what: str, planned: int = 0, gib: float = 0.0) -> None:
        """The device's peak so far, beside the plan if there is one; nothing on a CPU."""
        stats = self.lab.device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            beside = {"planned_gib": planned / 2**30, "limit_gib": gib} if planned else {}
            self.report.add(
                f"{what}, peak of the device so far", stats["peak_bytes_in_use"] / 2**30, "GiB",
                **beside, allocator_gib=stats.get("bytes_limit", 0) / 2**30,
            )  # fmt: skip


def describe(workload: Workload) -> dict[str, Any]:
    """Facts of a workload, to be printed beside what was measured on it."""
    top = np.take_along_axis(workload.probabilities, workload.ids, axis=-1)
    weights = top / top.sum(axis=-1, keepdims=True)
    return {
        "distinct_experts": workload.distinct,
        "top_weight": float(weights[..., 0].mean()),
        "chosen_mass": float(top.sum(axis=-1).mean()),
        "shifts": workload.num_shifts,
    }
