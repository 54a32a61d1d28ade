"""What a replay costs in time: a link, a compute time, and how much of the one hides the other."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moejax.errors import MoejaxError
from moejax.results import read_rows

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A model of a decode step, in milliseconds.

    Attributes:
      base_ms: a step whose experts are all there.
      link_gib_per_s: from host to device; 1 GiB is 2^30 bytes.
      fetch_ms: what each launch that fetches takes beside its bytes.
      overlap: share of a layer's own time behind which experts that are brought ahead can hide: 0
        where the engine copies between its launches, 1 where a copy engine works beside them.
    """

    base_ms: float
    link_gib_per_s: float
    fetch_ms: float = 0.0
    overlap: float = 0.0

    def __post_init__(self) -> None:
        """Raises MoejaxError naming the number that cannot be."""
        for name in ("base_ms", "fetch_ms"):
            if not 0 <= getattr(self, name) < np.inf:
                raise MoejaxError(f"{name}={getattr(self, name)} must be 0 or more milliseconds")
        if not self.link_gib_per_s > 0:
            raise MoejaxError(f"link_gib_per_s={self.link_gib_per_s} must be above 0")
        if not 0 <= self.overlap <= 1:
            raise MoejaxError(f"overlap={self.overlap} must be from 0 to 1")

    def link_ms(self, num_bytes: np.ndarray | float) -> np.ndarray:
        """Of so many bytes."""
        return np.asarray(num_bytes, np.float64) / (self.link_gib_per_s * GIB) * 1e3


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Of one setting in one phase, summed over steps and layers; T tiers.

    Attributes:
      num_layers: M.
      steps: of the model.
      fetches: times that a layer fetched what it needed.
      misses: int[T].
      ahead: int[n, T], how often a layer brought 0, 1, ... experts ahead.
      bulk: int[T], experts brought between steps.
      expert_bytes: int[T].
    """

    num_layers: int
    steps: int
    fetches: int
    misses: np.ndarray
    ahead: np.ndarray
    bulk: np.ndarray
    expert_bytes: np.ndarray

    @property
    def bytes_by_cause(self) -> dict[str, float]:
        """Bytes a step that crossed the link, names as in `moejax.ledger`."""
        brought = np.arange(len(self.ahead)) @ self.ahead
        found = {"demand": self.misses, "prefetch": brought, "bulk": self.bulk}
        return {
            cause: float(count @ self.expert_bytes) / max(1, self.steps)
            for cause, count in found.items()
        }


def step_ms(machine: Machine, traffic: Traffic) -> float:
    """Milliseconds a step: compute, then what is waited for.

    A layer waits for all that it needs and lacks; for what it brings ahead beyond `overlap` of its
    own time. Bulk transfers share the link and are waited for where it has no time left.

    Args:
      machine: the model.
      traffic: of decode; of prefill with that phase's base.
    """
    if not traffic.steps:
        return float("nan")
    steps, layer_ms = traffic.steps, machine.base_ms / traffic.num_layers
    demand = traffic.fetches * machine.fetch_ms
    demand += float(machine.link_ms(traffic.misses @ traffic.expert_bytes))
    many = np.arange(len(traffic.ahead))[:, None]
    each = machine.link_ms(many * traffic.expert_bytes) + np.where(many > 0, machine.fetch_ms, 0.0)
    waited = float((traffic.ahead * np.maximum(0.0, each - machine.overlap * layer_ms)).sum())
    total = machine.base_ms + (demand + waited) / steps
    carried = float(machine.link_ms(sum(traffic.bytes_by_cause.values())))
    return max(total, carried)


def bandwidth_bound_ms(machine: Machine, num_bytes: float) -> float:
    """What no overlap beats: the longer of compute and of so many bytes a step over the link."""
    return max(machine.base_ms, float(machine.link_ms(num_bytes)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured setting, a step of decode: time, bytes over the link, layers that fetched."""

    tpot_ms: float
    num_bytes: float
    fetches: float = 0.0


def calibrate(measured: Sequence[Measured], overlap: float = 0.0) -> Machine:
    """The machine that explains measured steps: least squares of relative errors, none negative.

        tpot = base_ms + fetch_ms x fetches + bytes / link

    Args:
      measured: settings of different traffic, on demand or LRU, without prefetch.
      overlap: of the machine; it cannot be told from these.

    Raises:
      MoejaxError: they do not tell the speed of the link.
    """
    times = np.array([m.tpot_ms for m in measured])
    columns = np.array([[1.0, m.fetches, m.num_bytes / GIB] for m in measured])
    if len(measured) < 2 or np.ptp(columns[:, 2]) == 0:
        raise MoejaxError("a calibration needs two settings or more that move different bytes")
    if np.cov(times, columns[:, 2])[0, 1] <= 0:
        raise MoejaxError("the measured settings do not take longer for more bytes")
    best, least = {2: 0.0}, np.inf
    for used in itertools.product((True, False), repeat=3):
        chosen = np.flatnonzero(used)
        if 2 not in chosen:
            continue
        part = columns[:, chosen]
        found, *_ = np.linalg.lstsq(part / times[:, None], np.ones(len(times)), rcond=None)
        error = float((((part @ found) / times - 1) ** 2).sum())
        if (found >= 0).all() and found[-1] > 0 and error < least - 1e-12:
            best, least = dict(zip(chosen.tolist(), found.tolist(), strict=True)), error
    return Machine(
        base_ms=best.get(0, 0.0),
        fetch_ms=best.get(1, 0.0),
        link_gib_per_s=1e3 / best[2],
        overlap=overlap,
    )


def measured_rows(path: Path) -> list[Measured]:
    """Rows of `scripts/bench_memory_gpu.py` without prefetch, as `calibrate` takes them.

    Raises:
      MoejaxError: there is no such file, or it holds other rows.
    """
    try:
        return [
            Measured(
                tpot_ms=row.figure,
                num_bytes=row.baseline["megabytes_a_token"] * 1e6,
                fetches=row.baseline.get("fetches_a_token", 0.0),
            )
            for row in read_rows(path)
            if re.search(r"slots of \d+, ahead 0, TPOT", row.what)
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MoejaxError(f"calibration {path} cannot be read: {error}") from error
