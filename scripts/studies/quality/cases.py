"""Cases of a study of quality, their rows, and bars that are written down before them.

A row keeps the nats a token of every window. So any two rows of the same windows are compared
window by window, and a verdict says by how many standard errors it stands.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MET, NOT_MET, NOT_SHOWN, NOT_MEASURED = "met", "not met", "not shown", "not measured"
SURE = 2.0  # standard errors by which a verdict has to stand


@dataclasses.dataclass(frozen=True)
class Point:
    """One figure: `series` is a curve of a plot, `x` its place on it.

    The figure is a perplexity unless `unit` says something else; `nats` are those a token of each
    window, () where there are none; `found` beside the exact model is not in the row.
    """

    text: str
    series: str
    x: float
    figure: float
    nats: tuple[float, ...] = ()
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    unit: str = "perplexity"
    found: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """Text, series and place, as rows name them."""
        return f"{self.text} | {self.series} | {self.x:g}"

    @property
    def beside(self) -> dict[str, Any]:
        """Values beside the figure."""
        if not self.nats:
            return self.more
        error = standard_error(np.array(self.nats))
        return {"nats": [round(one, 5) for one in self.nats], "standard error": error, **self.more}


class Case(NamedTuple):
    """Some rows that are measured together; a run that goes on measures none of them again."""

    name: str
    measure: Callable[[], Iterable[Point]]


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean; 0 of a single value, which says nothing about it."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


class Comparison(NamedTuple):
    """A sum of rows' nats a token that must be at most a margin."""

    # factor and row, `SECTION | TEXT | SERIES | X` of one model
    terms: tuple[tuple[float, str], ...]
    margin: float = 0.0  # in nats a token


def fewer(own: str, null: str, margin: float = 0.0) -> Comparison:
    """Whether a row has fewer nats than another, or at most a margin more."""
    return Comparison(((1.0, own), (-1.0, null)), margin)


def share_of_loss(share: float, own: str, null: str, exact: str) -> Comparison:
    """Whether a row loses at most a share of what another loses, both against a third."""
    return Comparison(((1.0, own), (-share, null), (share - 1, exact)))


@dataclasses.dataclass(frozen=True)
class Claim:
    """A paper's claim, and the bar that we set for it before the rows were measured."""

    paper: str  # its name
    said: str  # by the paper
    where: str  # its section, table or figure
    bar: str  # ours, in words; with the paper's number where it has one
    tests: tuple[Comparison, ...]  # all of which must hold


class Outcome(NamedTuple):
    """Mean of a test's sum over windows, its standard error, and the verdict."""

    mean: float
    error: float
    verdict: str


def judge(test: Comparison, nats: Mapping[str, Sequence[float]]) -> Outcome | None:
    """Judges one test by rows; None where one is missing or of other windows."""
    parts = [(factor, nats.get(row)) for factor, row in test.terms]
    if any(part is None for _, part in parts) or len({len(part or ()) for _, part in parts}) > 1:
        return None
    total = np.sum([factor * np.array(part) for factor, part in parts], axis=0)
    if len(total) < 2:  # one window says nothing of the spread
        return Outcome(float(total.mean()), float("nan"), NOT_SHOWN)
    mean, error = float(total.mean()), standard_error(total)
    if mean + SURE * error < test.margin:  # a tie shows nothing
        return Outcome(mean, error, MET)
    return Outcome(mean, error, NOT_MET if mean - SURE * error > test.margin else NOT_SHOWN)


def verdict(claim: Claim, nats: Mapping[str, Sequence[float]]) -> tuple[str, list[Outcome]]:
    """Verdict of a claim: met by all tests, not met by one, else not shown."""
    found = [judge(test, nats) for test in claim.tests]
    known = [one for one in found if one is not None]
    if len(known) < len(found) or not found:
        return NOT_MEASURED, known
    of = [one.verdict for one in known]
    return next((one for one in (NOT_MET, NOT_SHOWN) if one in of), MET), known


def describe(bars: Sequence[Claim], nats: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """A line for each claim, and one for each of its tests."""
    for bar in bars:
        found, outcomes = verdict(bar, nats)
        yield f"{found}: {bar.paper}, {bar.said} ({bar.where}); bar: {bar.bar}"
        for one in outcomes:
            yield f"    {one.mean:+.5f} +- {one.error:.5f} nats a token: {one.verdict}"


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Rows that a run has written so far."""
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def nats_of(rows: Iterable[Mapping[str, Any]], model: str) -> dict[str, Sequence[float]]:
    """Nats of the windows of each row of a model, by the row's name without the model."""
    found = {}
    for row in rows:
        name, _, rest = row["what"].partition(" | ")
        if name == model and "nats" in row["baseline"]:
            found[rest] = row["baseline"]["nats"]
    return found
