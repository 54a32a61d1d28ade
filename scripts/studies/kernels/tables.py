"""Markdown tables of the rows of `bench_kernels.py`, which docs/kernels.md shows.

    python -m scripts.studies.kernels.tables --rows=scripts/studies/kernels/kernels_h200.jsonl

Prints a table of times a shape and form, with what the bytes and the operations allow, and the bars
and moonshots of `data.py` beside our best. Of a row that was measured twice the later one counts.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from absl import app, flags

from moejax.files.result_rows import ResultRow, read_rows

_ROWS = flags.DEFINE_string("rows", "scripts/studies/kernels/kernels_h200.jsonl", "JSON Lines file")

OURS = ("mosaic", "triton")
Rows = dict[str, ResultRow]  # by implementation
Curves = dict[str, dict[int, Rows]]  # by "section | shape and form", then by rows of x or tokens


def latest_rows(path: Path) -> list[ResultRow]:
    """Rows of a file; of a row that was measured twice the later one."""
    return list({row.what: row for row in read_rows(path)}.values())


def read_curves(rows: list[ResultRow]) -> Curves:
    """The times of products and layers."""
    found: Curves = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        parts = row.what.split(" | ")
        size = re.fullmatch(r"[MT] (\d+)", parts[2]) if len(parts) == 4 else None
        if row.unit == "us" and size:
            found[" | ".join(parts[:2])][int(size[1])][parts[3]] = row
    return found


def beside_cublas(curves: Curves) -> Curves:
    """Curves with the bf16 product of the shape by cuBLAS beside every packed form of it."""
    merged: Curves = {}
    for name, sizes in curves.items():
        plain = curves.get(f"{name.split()[0]} | {name.split()[2]} bfloat16", {})
        merged[name] = {}
        for size, rows in sorted(sizes.items()):
            given = plain.get(size, {})
            extra = {key: given[key] for key in ("cublas",) if key in given}
            merged[name][size] = {**extra, **rows}
    return merged


def times_table(sizes: Mapping[int, Rows]) -> str:
    """Microseconds by implementation and size, and what the bounds allow."""
    names = list(dict.fromkeys(name for rows in sizes.values() for name in rows))
    lines = [
        "| us | " + " | ".join(map(str, sizes)) + " |",
        "| --- |" + " ---: |" * len(sizes),
    ]
    for name in names:
        cells = [f"{rows[name].figure:.1f}" if name in rows else "" for rows in sizes.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    bounds = [f"{max(_bounds(fewest_bytes(rows))):.1f}" for rows in sizes.values()]
    lines.append("| bound by bytes or operations | " + " | ".join(bounds) + " |")
    return "\n".join(lines)


def bars_table(rows: list[ResultRow]) -> str:
    """Bars and moonshots, and the best of ours; "" where no row has a bar."""
    best: dict[str, ResultRow] = {}
    for row in rows:
        *case, name = row.what.split(" | ")
        if "bar" not in row.baseline or (row.unit != "x" and name not in OURS):
            continue
        key = " | ".join(case)
        smaller_wins = row.unit != "x"
        if key not in best or (row.figure < best[key].figure) == smaller_wins:
            best[key] = row
    if not best:
        return ""
    lines = [
        "| | measured | by | bar | moonshot | of the bandwidth | |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    for key, row in best.items():
        share = row.baseline.get("percent_of_bandwidth")
        lines.append(
            f"| {key} | {row.figure:.1f} {row.unit} | {row.what.split(' | ')[-1]} "
            f"| {row.baseline['bar']:g} | {_number(row.baseline['moonshot'])} "
            f"| {'' if share is None else f'{share:.0f} %'} | {verdict(row)} |"
        )
    return "\n".join(lines)


def verdict(row: ResultRow) -> str:
    """Which of the two marks a row reaches."""
    higher_is_better = row.unit == "x"
    for name in ("moonshot", "bar"):
        mark = row.baseline[name]
        if row.figure >= mark if higher_is_better else row.figure <= mark:
            return name
    return "missed"


def fewest_bytes(rows: Rows) -> ResultRow:
    """A row of the packed form: baselines beside it read more."""
    return min(rows.values(), key=lambda row: row.baseline["bandwidth_bound_us"])


def _number(value: float) -> str:
    return f"{value:.3g}" if value == value else "not measured"


def _bounds(row: ResultRow) -> tuple[float, float]:
    """Microseconds that the bytes and that the operations take."""
    return row.baseline["bandwidth_bound_us"], row.baseline["compute_bound_us"]


def main(argv: list[str]) -> None:
    """Prints the tables."""
    del argv
    rows = latest_rows(Path(_ROWS.value))
    curves = beside_cublas(read_curves(rows))
    for name, sizes in curves.items():
        print(f"\n### {name}\n\n{times_table(sizes)}")
    if table := bars_table(rows):
        print(f"\n### Bars and moonshots\n\n{table}")
    others = [row for row in rows if row.unit in ("launches", "TB/s", "TFLOP/s")]
    if others:
        print("\n### Launches and ceilings\n")
    for row in others:
        print(f"- {row.what}: {row.figure:.4g} {row.unit} ({row.device}, {row.date})")


if __name__ == "__main__":
    app.run(main)
