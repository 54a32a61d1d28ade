"""Claims of a paper by the study model's rows, under bars written before, and all its rows."""

import re
from collections.abc import Mapping, Sequence

from scripts.studies.quality.cases import MET, NOT_MEASURED, NOT_SHOWN, Claim, verdict
from scripts.studies.tables.paper import Runs, markdown_table
from scripts.studies.tables.rows import Found, Results

STUDY, DEMO = "study", "demo"
NAMES = {STUDY: "the study model", DEMO: "the demo model"}  # the first one that has rows counts


def claims(
    results: Results, runs: Runs, bars: Sequence[Claim], doubts: Mapping[str, str]
) -> tuple[list[list[str]], str]:
    """Rows of a table of claims, and the bars without rows, in words.

    Args:
      doubts: why tests that are met show nothing, by what their claim says.
    """
    found, missing = [], []
    for bar in bars:
        names = [f"{STUDY} | {row}" for test in bar.tests for _, row in test.terms]
        rows = [one for name in names if (one := results.get(name))]
        if len(rows) == len(names):
            found.append(_judged(runs, bar, rows, doubts.get(bar.said, "")))
        else:
            missing.append(f"{bar.said} ({bar.bar})")
    said = "; ".join(missing) or "none"
    return found, f" {len(missing)} of {len(bars)} bars, {NOT_MEASURED}: {said}."


def _judged(runs: Runs, bar: Claim, rows: Sequence[Found], doubt: str) -> list[str]:
    nats = {one.row.what.partition(" | ")[2]: one.more["nats"] for one in rows}
    found, outcomes = verdict(bar, nats)
    tests = []
    for test, one in zip(bar.tests, outcomes, strict=True):
        name = test.terms[0][1].partition(" | ")[2].replace(" | ", ", ")
        margin = f" (at most {test.margin:g})" if test.margin else ""
        tests.append(f"{name} {one.mean:+.3f} ± {one.error:.3f}{margin}, {one.verdict}")
    above = f"Nats a token above it, ± a standard error: {'; '.join(tests)}"
    said = f"{NAMES[STUDY]}; {bar.bar}. {above} {runs.cite(*rows)}"
    if doubt and MET in [one.verdict for one in outcomes]:
        said, found = f"{said}; {doubt}", NOT_SHOWN if found == MET else found
    return [bar.said, bar.where, said, found]


def tables(results: Results, runs: Runs, sections: Sequence[str]) -> str:
    """Tables of the rows of sections, one a text: series, and a column for each x or quantity."""
    rows: dict[tuple[str, str], dict[str, dict[str, Found]]] = {}
    for match, one in results.every(
        rf"{STUDY} \| ({'|'.join(sections)}) \| (?:((?!calibration)[^|]*) \| )?([^|]*) \| ([^|]*)"
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
