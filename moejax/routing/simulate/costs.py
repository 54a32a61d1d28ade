"""Time of a replay: a link, a compute time, and their overlap."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moejax.errors import MoejaxError
from moejax.files.result_rows import read_rows

GIB = 2**30
# Parts of a row's name that differ within one run.
_BUDGET = re.compile(r"\d+ slots of \d+|, [\d.]+ GiB(?=,|$)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Model of a decode step, in milliseconds."""

    base_ms: float  # a step without misses
    link_gib_per_s: float  # from host to device; 1 GiB is 2^30 bytes
    fetch_ms: float = 0.0  # overhead of each fetching launch, beside its bytes
    # share of a layer's own time that can hide a prefetch: 0 where the engine copies between its
    # launches, 1 where a copy engine works beside them
    overlap: float = 0.0

    def _link_ms(self, num_bytes: np.ndarray | float) -> np.ndarray:
        """Milliseconds to move so many bytes over the link."""
        return np.asarray(num_bytes, np.float64) / (self.link_gib_per_s * GIB) * 1e3


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Traffic of one setting in one phase, summed over steps and layers; T tiers."""

    num_layers: int
    steps: int
    fetches: int  # times that a layer fetched misses
    misses: np.ndarray  # int[T]
    ahead: np.ndarray  # int[n, T], how often a layer prefetched 0, 1, ... experts.
    bulk: np.ndarray  # int[T], experts transferred between steps
    expert_bytes: np.ndarray  # int[T]

    @property
    def bytes_by_cause(self) -> dict[str, float]:
        """Bytes per step over the link, by cause as in `moejax.experts.ledger`."""
        brought = np.arange(len(self.ahead)) @ self.ahead
        found = {"demand": self.misses, "prefetch": brought, "bulk": self.bulk}
        return {
            cause: float(count @ self.expert_bytes) / max(1, self.steps)
            for cause, count in found.items()
        }


def step_ms(machine: Machine, traffic: Traffic) -> float:
    """Milliseconds per decode step: compute, then waiting.

    A layer waits for its misses, and for the part of its prefetch that exceeds `overlap` of its own
    time. Bulk transfers share the link; a step waits for them if the link has no time left.
    """
    if not traffic.steps:
        return float("nan")
    steps, layer_ms = traffic.steps, machine.base_ms / traffic.num_layers
    demand = traffic.fetches * machine.fetch_ms
    demand += float(machine._link_ms(traffic.misses @ traffic.expert_bytes))
    many = np.arange(len(traffic.ahead))[:, None]
    each = machine._link_ms(many * traffic.expert_bytes) + np.where(many > 0, machine.fetch_ms, 0.0)
    waited = float((traffic.ahead * np.maximum(0.0, each - machine.overlap * layer_ms)).sum())
    total = machine.base_ms + (demand + waited) / steps
    carried = float(machine._link_ms(sum(traffic.bytes_by_cause.values())))
    return max(total, carried)


def bandwidth_bound_ms(machine: Machine, num_bytes: float) -> float:
    """Lower bound of a step: the longer of compute and the bytes' time on the link."""
    return max(machine.base_ms, float(machine._link_ms(num_bytes)))


class _MeasuredRun(NamedTuple):
    """A measured setting: time of a decode step, and its bytes over the link."""

    tpot_ms: float
    num_bytes: float


def calibrate(
    measured: Sequence[_MeasuredRun], overlap: float = 0.0, fetch_ms: float = 0.0
) -> Machine:
    """Fits a machine to measured steps: least squares of relative errors, none negative.

        tpot = base_ms + bytes / link

    Args:
      measured: settings of different traffic, without look-ahead.
      overlap: the machine's; it cannot be fitted to these.
      fetch_ms: the machine's; it cannot be fitted either.

    Raises:
      MoejaxError: they do not determine the speed of the link.
    """
    times = np.array([m.tpot_ms for m in measured])
    gibs = np.array([m.num_bytes / GIB for m in measured])
    if len(measured) < 2 or np.ptp(gibs) == 0:
        raise MoejaxError("a calibration needs two settings or more that move different bytes")
    if np.cov(times, gibs)[0, 1] <= 0:
        raise MoejaxError("the measured settings do not take longer for more bytes")
    columns = np.stack([1 / times, gibs / times], axis=1)
    (base, each), *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
    if base < 0:
        base, each = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    return Machine(
        base_ms=float(base), link_gib_per_s=float(1e3 / each), fetch_ms=fetch_ms, overlap=overlap
    )


def measured_rows(path: Path) -> list[_MeasuredRun]:
    """Reads rows of one model, device and batch size under several budgets.

    They come from `moejax.benchmark` with `--config.budgets`, without prefetch.

    Raises:
      MoejaxError: the file is missing, or holds other rows, or rows of several models.
    """
    times: dict[tuple[str, str], float] = {}
    moved: dict[tuple[str, str], float] = {}
    try:
        for row in read_rows(path):
            if re.search(r"slots of \d+, ahead 0, TPOT", row.what):
                times[row.device, row.what] = row.figure
                moved[row.device, row.what] = float(row.baseline["megabytes_a_token"])
            for name, figures in (("TPOT median", times), ("link bytes of a decode step", moved)):
                if row.what.startswith(f"{name}, "):
                    figures[row.device, row.what.removeprefix(f"{name}, ")] = row.figure
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MoejaxError(f"calibration {path} cannot be read: {error}") from error
    found: dict[tuple[str, str], list[_MeasuredRun]] = {}
    for key, tpot_ms in times.items():
        if key in moved:
            run = (key[0], _BUDGET.sub("", key[1]))
            found.setdefault(run, []).append(_MeasuredRun(tpot_ms, 1e6 * moved[key]))
    several = [f"{what} on {device}" for (device, what), rows in found.items() if len(rows) > 1]
    if len(several) > 1:
        raise MoejaxError(
            f"calibration {path} has rows of {len(several)} runs, and is to have those of one: "
            f"{'; '.join(several[:2])}"
        )
    return max(found.values(), key=len, default=[])
