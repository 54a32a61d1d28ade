"""The recorder of the kernel benchmark: rows as they come, the clock, what is a fault."""

import dataclasses
import time
import traceback
from collections.abc import Callable, Collection

from pallas_kernels.packed import PLAIN_BITS
from pallas_kernels.target import Choice, Target
from scripts.studies.kernels.timing import Chain, Timing, chain_for
from scripts.studies.measuring import Report

OWN = ("mosaic", "triton")  # kernels of ours that read packed weights, by `implementation=`
IMPLEMENTATIONS = (*OWN, "reference", "cublas", "unpack")
FASTEST = 0.9  # of the bounds, below which a time is no time; ceilings vary by some percent
SMOKE_CHAIN = Chain(2, 4, 2)


class OutOfTime(Exception):
    """The time limit does not allow another figure."""


@dataclasses.dataclass(kw_only=True)
class Bench:
    """State that all sections share."""

    report: Report  # where rows go
    target: Target  # what kernels are chosen for
    implementations: Collection[str]  # those asked for
    expect: str = "auto"  # the implementation that `choose` should give; "auto" for the target's
    repetitions: int = 11  # pairs of queues a figure
    deadline: float  # `time.monotonic` at which to have stopped
    smoke: bool = False  # tiny shapes on a CPU
    bandwidth: float = 1.0  # bytes a second of a plain sum
    rate: float = 1.0  # operations a second of a large product by cuBLAS
    problems: list[str] = dataclasses.field(default_factory=list)  # what makes the run a failure
    figures: dict[str, float] = dataclasses.field(default_factory=dict)  # microseconds by row
    longest: float = 15.0  # seconds that a figure has taken, with its compilation

    def wants(self, implementation: str) -> bool:
        """Whether it was asked for."""
        return implementation in self.implementations

    def problem(self, text: str) -> None:
        """Prints and keeps what makes the run fail."""
        self.problems.append(text)
        print(f"  PROBLEM {text}", flush=True)

    def attempt(self, what: str, part: Callable[[], None], *, ours: bool) -> None:
        """Runs a part; a failure of ours is a problem.

        Raises:
          OutOfTime: before the part, where none like the longest so far would end in time.
        """
        left = self.deadline - time.monotonic()
        if left < self.longest:
            raise OutOfTime(f"{left:.0f} s left, the longest figure took {self.longest:.0f} s")
        start = time.monotonic()
        try:
            part()
        except OutOfTime:
            raise
        except Exception as error:
            traceback.print_exc()
            text = f"{what}: {type(error).__name__}: {error!s:.300}"
            if ours:
                self.problem(text)
            else:
                print(f"  FAILED {text}", flush=True)
        took = time.monotonic() - start
        if not self.smoke:
            self.longest = max(self.longest, took)

    def chain(self, slot_bytes: int, num_bytes: float, operations: float) -> Chain:
        """For calls near twice their bounds."""
        if self.smoke:
            return SMOKE_CHAIN
        guess = max(2e-6 + 2 * num_bytes / self.bandwidth, 1.5 * operations / self.rate)
        return chain_for(slot_bytes, guess)

    def check_choice(self, what: str, choice: Choice, bits: int) -> None:
        """Keeps a problem unless `choose` gave what the target should have."""
        expected: tuple[str, ...] = (self.expect,)
        if self.expect == "auto":
            expected = expected_implementations(self.target, bits)
        if choice.implementation not in expected:
            wanted = " or ".join(expected)
            self.problem(f"{what} runs on {choice.describe()} and not on {wanted}")

    def record(
        self,
        what: str,
        timing: Timing,
        errors: Collection[float],
        limit: float,
        num_bytes: float,
        operations: float,
    ) -> None:
        """Keeps a time, unless the values are wrong: that is a problem and no row."""
        error = max(errors)
        if not error <= limit:
            self.problem(f"{what}: relative error {error:.3g}, above {limit:.2g}; no figure")
            return
        bounds = (1e6 * num_bytes / self.bandwidth, 1e6 * operations / self.rate)
        if timing.microseconds < FASTEST * max(bounds):
            # Noise of a busy CPU; on a GPU calls that were dropped, or weights from the L2.
            text = f"{what}: {timing.microseconds:.3g} us, faster than its bounds {bounds}"
            if not self.smoke:
                self.problem(f"{text}; no figure")
            else:
                print(f"  {text}; no figure", flush=True)
            return
        beside = {
            "relative_error": error,
            "spread_us": timing.spread,
            "bytes": float(num_bytes),
            "operations": float(operations),
            "bandwidth_bound_us": bounds[0],
            "compute_bound_us": bounds[1],
            "percent_of_bandwidth": 1e8 * num_bytes / self.bandwidth / timing.microseconds,
            "percent_of_compute": 1e8 * operations / self.rate / timing.microseconds,
        }
        self.add(what, timing.microseconds, "us", **beside)

    def compare(self, what: str, row: str, beside: str) -> None:
        """Adds by how many percent one row's time is above another's, where both have one."""
        if row in self.figures and beside in self.figures:
            self.add(what, 100 * (self.figures[row] / self.figures[beside] - 1), "%")

    def add(self, what: str, figure: float, unit: str, **beside: float) -> None:
        """Keeps, prints and writes one row."""
        self.figures[what] = figure
        self.report.add(what, figure, unit, **beside)


def expected_implementations(target: Target, bits: int) -> tuple[str, ...]:
    """Implementations that should run: Mosaic on Hopper, else Triton or the reference."""
    if target.platform != "gpu":
        return ("reference",)
    if target.capability != (9, 0):
        return ("triton",)
    return ("mosaic", "triton") if bits == PLAIN_BITS else ("mosaic",)
