"""Claims of a paper by the study model's rows, under bars written before, and all its rows.

The study model is the third that was made; of the first one are the quantizers' rows, and of the
fourth one the tasks and what the third one lacks.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scripts.studies.quality import cases
from scripts.studies.quality.cases import NOT_MEASURED, NOT_SHOWN, Claim, verdict
from scripts.studies.quality.task_cases import TASKS, wrong_of
from scripts.studies.tables.paper import Runs, markdown_table
from scripts.studies.tables.rows import Found, Results

STUDY, AGAIN, FIRST, DEMO = "study3", "study4", "study", "demo"
# The first one that has rows counts.
NAMES = {
    STUDY: "the study model", AGAIN: "the study model made again", FIRST: "the first study model",
    DEMO: "the demo model",
}  # fmt: skip


class Measured(NamedTuple):
    """Values of windows or documents that a claim compares, and the rows that they are of."""

    values: Sequence[float]
    rows: tuple[Found, ...]
    label: str  # of the model


def by_window(results: Results, label: str = STUDY, end: str = "") -> dict[str, Measured]:
    """Nats of a model's windows, by the rows' names without the model and `end`.

    What the study model lacks is of the one made again.
    """
    labels = (AGAIN, STUDY) if label == STUDY else (label,)
    return {
        match[1]: Measured(one.more["nats"], (one,), of)
        for of in labels
        for match, one in results.every(rf"{of} \| (.*){re.escape(end)}")
        if "nats" in one.more
    }


def by_document(results: Results) -> dict[str, Measured]:
    """Wrong answers of the study model made again, by task and method."""
    rows = [one for _, one in results.every(rf"tasks \| .* \| {AGAIN}")]
    wrong = wrong_of([dataclasses.asdict(one.row) for one in rows], AGAIN)

    def of(method: str) -> tuple[Found, ...]:
        return tuple(one for one in rows if one.row.what.split(" | ")[2] == method)

    return {
        name: Measured(values, of(name.split(" | ")[1]), AGAIN) for name, values in wrong.items()
    }


def claims(
    found: Mapping[str, Measured], runs: Runs, bars: Sequence[Claim], unit: str,
    doubts: Mapping[str, tuple[str, str]],
) -> tuple[list[list[str]], list[str]]:  # fmt: skip
    """Rows of a table of claims, and the bars that lack rows, in words with what is known.

    Args:
      unit: of what is compared, such as "Nats a token".
      doubts: a verdict of tests, and why it shows nothing, by what their claim says.
    """
    judged, missing = [], []
    for bar in bars:
        tests = [test for test in bar.tests if _model(found, test)]
        if len(tests) == len(bar.tests):
            judged.append(_judged(found, runs, bar, unit, doubts.get(bar.said, ("", ""))))
        else:
            values = {name: one.values for name, one in found.items()}
            known = [(test, one) for test in tests if (one := cases.judge(test, values))]
            rows = [row for test, _ in known for _, name in test.terms for row in found[name].rows]
            told = "; ".join(_told(found, *one, "") for one in known)
            so_far = f"; so far {told} {runs.cite(*rows)}" if known else ""
            missing.append(f"{bar.said} ({bar.bar}{so_far})")
    return judged, missing


def _model(found: Mapping[str, Measured], test: cases.Comparison) -> str:
    """Names the model whose rows a comparison has; "" where it lacks some."""
    labels = {found[name].label if name in found else "" for _, name in test.terms}
    return NAMES.get(labels.pop(), "") if len(labels) == 1 else ""


def _told(
    found: Mapping[str, Measured], test: cases.Comparison, one: cases.Outcome, usual: str
) -> str:
    """A comparison's outcome, with its model unless that is the usual one."""
    name = test.terms[0][1].partition(" | ")[2].replace(" | ", ", ")
    margin = f" (at most {test.margin:g})" if test.margin else ""
    of = f" of {model}" if (model := _model(found, test)) != usual else ""
    return f"{name}{of} {one.mean:+.3f} ± {one.error:.3f}{margin}, {one.verdict}"


def _judged(
    found: Mapping[str, Measured], runs: Runs, bar: Claim, unit: str, doubt: tuple[str, str]
) -> list[str]:
    of, outcomes = verdict(bar, {name: one.values for name, one in found.items()})
    usual = _model(found, bar.tests[0])
    tests = [_told(found, test, one, usual) for test, one in zip(bar.tests, outcomes, strict=True)]
    rows = [row for test in bar.tests for _, name in test.terms for row in found[name].rows]
    said = f"{usual}; {bar.bar}. {unit} above it, ± a standard error: "
    said += f"{'; '.join(tests)} {runs.cite(*rows)}"
    doubted, why = doubt
    if doubted in [one.verdict for one in outcomes]:
        said, of = f"{said}; {why}", NOT_SHOWN if of == doubted else of
    return [bar.said, bar.where, said, of]


def tasks(results: Results, runs: Runs) -> str:
    """Scores of tasks under policies, percent, by method."""
    of: dict[str, dict[str, Found]] = {}
    for match, one in results.every(rf"tasks \| (.*) \| (.*) \| {AGAIN}"):
        of.setdefault(match[2], {})[match[1]] = one
    rows = []
    for method, found in of.items():
        cells = [
            f"{100 * found[task].figure:.1f} ± {100 * found[task].more['standard error']:.1f}"
            if task in found else "" for task in TASKS
        ]  # fmt: skip
        mean = sum(one.figure for one in found.values()) / len(found)
        rows.append([method, *cells, f"{100 * mean:.1f}", runs.cite(*found.values())])
    head = ["method", *TASKS, "mean", ""]
    return markdown_table(head, rows) if rows else f"{NOT_MEASURED}."


def tables(results: Results, runs: Runs, sections: Sequence[str], label: str = STUDY) -> str:
    """Tables of a model's rows of sections, one a text: series, a column for each x or quantity."""
    rows: dict[tuple[str, str], dict[str, dict[str, Found]]] = {}
    for match, one in results.every(
        rf"{label} \| ({'|'.join(sections)}) \| (?:((?!calibration)[^|]*) \| )?([^|]*) \| ([^|]*)"
    ):
        section, text, series, x = match.groups()
        rows.setdefault((section, text), {}).setdefault(series, {})[x] = one
    made = []
    for of, curves in rows.items():
        places = dict.fromkeys(x for curve in curves.values() for x in curve)
        ordered = sorted(places, key=lambda x: float(x) if re.fullmatch(r"[\d.]+", x) else 0.0)
        cells = [
            [series, *(f"{curve[x].figure:.2f}" if x in curve else "" for x in ordered)]
            for series, curve in curves.items()
        ]
        cited = runs.cite(*(one for curve in curves.values() for one in curve.values()))
        head = [f"{', '.join(filter(None, of))} {cited}", *ordered]
        made.append(markdown_table(head, cells))
    return "\n\n".join(made) or f"{NOT_MEASURED}."
