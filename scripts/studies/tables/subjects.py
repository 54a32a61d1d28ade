"""Claims of a paper by the study model's rows, under bars written before, and all its rows.

The study model is the third that was made. The fourth, fifth and sixth have the tasks, the first
and the sixth the quantizers' rows. What the third lacks is of the fourth, the first of the fifth.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scripts.studies.quality import cases
from scripts.studies.quality.cases import NOT_MEASURED, NOT_SHOWN, Claim, verdict
from scripts.studies.quality.task_cases import TASKS, wrong_of
from scripts.studies.tables.paper import Runs, markdown_table
from scripts.studies.tables.rows import Found, Results

STUDY, FIRST, DEMO = "study3", "study", "demo"
FOURTH, FIFTH, SIXTH = OF_TASKS = "study4", "study5", "study6"
NAMES = {
    STUDY: "the study model", FOURTH: "the fourth study model", FIFTH: "the fifth study model",
    SIXTH: "the sixth study model", FIRST: "the first study model", DEMO: "the demo model",
}  # fmt: skip
_INSTEAD = {STUDY: FOURTH, FIRST: FIFTH}  # whose rows stand in for those that a model lacks


class Measured(NamedTuple):
    """Values of windows or documents that a claim compares, and the rows that they are of."""

    values: Sequence[float]
    rows: tuple[Found, ...]
    label: str  # of the model


def by_window(results: Results, label: str = STUDY, end: str = "") -> dict[str, Measured]:
    """Nats of a model's windows, by the rows' names without the model and `end`."""
    return {
        match[1]: Measured(one.more["nats"], (one,), of)
        for of in (_INSTEAD.get(label, label), label)
        for match, one in results.every(rf"{of} \| (.*){re.escape(end)}")
        if "nats" in one.more
    }


def by_document(results: Results, label: str) -> dict[str, Measured]:
    """Wrong answers of a model, by task and method."""
    rows = [one for _, one in results.every(rf"tasks \| .* \| {label}")]
    wrong = wrong_of([dataclasses.asdict(one.row) for one in rows], label)

    def of(method: str) -> tuple[Found, ...]:
        return tuple(one for one in rows if one.row.what.split(" | ")[2] == method)

    return {
        name: Measured(values, of(name.split(" | ")[1]), label) for name, values in wrong.items()
    }


def claims(
    models: Sequence[Mapping[str, Measured]], runs: Runs, bars: Sequence[Claim], unit: str,
    doubts: Mapping[str, tuple[str, str]],
) -> tuple[list[list[str]], list[str]]:  # fmt: skip
    """Rows of a table of claims, and the bars that lack rows, in words with what is known.

    Args:
      models: those that have all rows of a bar; the worst verdict counts, all stand there.
      unit: of what is compared, such as "Nats a token".
      doubts: a verdict of tests, and why it shows nothing, by what their claim says.
    """
    judged, missing = [], []
    for bar in bars:
        whole = [of for of in models if all(_model(of, test) for test in bar.tests)]
        if whole:
            judged.append(_judged(whole, runs, bar, unit, doubts.get(bar.said, ("", ""))))
        else:
            found = models[0]
            tests = [test for test in bar.tests if _model(found, test)]
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
    models: Sequence[Mapping[str, Measured]], runs: Runs, bar: Claim, unit: str,
    doubt: tuple[str, str],
) -> list[str]:  # fmt: skip
    judged = [verdict(bar, {name: one.values for name, one in of.items()}) for of in models]
    usual, found = _model(models[0], bar.tests[0]), [one for one, _ in judged]
    of = next((one for one in (cases.NOT_MET, NOT_SHOWN) if one in found), cases.MET)
    tests = [
        _told(found, test, one, usual)
        for found, (_, own) in zip(models, judged, strict=True)
        for test, one in zip(bar.tests, own, strict=True)
    ]
    terms = [name for test in bar.tests for _, name in test.terms]
    rows = [row for found in models for name in terms for row in found[name].rows]
    said = f"{usual}; {bar.bar}. {unit} above it, ± a standard error: "
    said += f"{'; '.join(tests)} {runs.cite(*rows)}"
    doubted, why = doubt
    if doubted in [one.verdict for _, own in judged for one in own]:
        said, of = f"{said}; {why}", NOT_SHOWN if of == doubted else of
    return [bar.said, bar.where, said, of]


def tasks(results: Results, runs: Runs) -> str:
    """Scores of tasks under policies, percent, by model and method."""
    of: dict[tuple[str, str], dict[str, Found]] = {}
    for label in OF_TASKS:
        for match, one in results.every(rf"tasks \| (.*) \| (.*) \| {label}"):
            of.setdefault((label, match[2]), {})[match[1]] = one
    rows = []
    for (label, method), found in of.items():
        cells = [
            f"{100 * found[task].figure:.1f} ± {100 * found[task].more['standard error']:.1f}"
            if task in found else "" for task in TASKS
        ]  # fmt: skip
        mean = 100 * sum(one.figure for one in found.values()) / len(found)
        error = 100 * math.hypot(*(one.more["standard error"] for one in found.values()))
        mean_cell = f"{mean:.1f} ± {error / len(found):.1f}"
        rows.append([NAMES[label], method, *cells, mean_cell, runs.cite(*found.values())])
    head = ["model", "method", *TASKS, "mean", ""]
    return markdown_table(head, rows) if rows else f"{NOT_MEASURED}."


def _cell(one: Found) -> str:
    """A figure and its standard error, which rows of perplexity and of KL have in nats."""
    scale = {"perplexity": one.figure, "nats in 1,000": 1e3}.get(one.row.unit, 1.0)
    error = one.more.get("standard error", one.more.get("standard_error"))
    return f"{one.figure:.2f}" + ("" if error is None else f" ± {scale * error:.2f}")


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
            [series, *(_cell(curve[x]) if x in curve else "" for x in ordered)]
            for series, curve in curves.items()
        ]
        cited = runs.cite(*(one for curve in curves.values() for one in curve.values()))
        head = [f"{', '.join(filter(None, of))} {cited}", *ordered]
        made.append(markdown_table(head, cells))
    return "\n\n".join(made) or f"{NOT_MEASURED}."
