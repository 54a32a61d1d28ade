"""Plots and Markdown tables from the rows of `bench_kernels.py`.

    python -m scripts.studies.kernels.tables --rows=scripts/studies/kernels/kernels_h200.jsonl \
        --output=plots

One figure a shape and form: microseconds against rows of x or tokens, a line an implementation,
with what the bytes and the operations allow drawn in. Prints the table of times, and the bars and
moonshots of `data.py` beside our best. Of a row that was measured twice the later one
counts.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import app, flags

from moejax.files.result_rows import ResultRow, read_rows

_ROWS = flags.DEFINE_string("rows", "scripts/studies/kernels/kernels_h200.jsonl", "JSON Lines file")
_OUTPUT = flags.DEFINE_string("output", "", "folder of the plots; '': only the tables")

OURS = ("mosaic", "triton")
# Told apart by marker and line as well, for paper without colour; ours in black.
STYLES: dict[str, dict[str, str]] = {
    "mosaic": {"marker": "o", "linestyle": "-", "color": "black"},
    "triton": {"marker": "s", "linestyle": "--", "color": "black"},
    "cublas": {"marker": "^", "linestyle": "-", "color": "0.5"},
    "unpack": {"marker": "v", "linestyle": ":", "color": "0.5"},
    "humming": {"marker": "D", "linestyle": "-.", "color": "0.4"},
    "torch": {"marker": "x", "linestyle": ":", "color": "0.3"},
    "gemlite": {"marker": "+", "linestyle": ":", "color": "0.3"},
    "marlin": {"marker": "<", "linestyle": "--", "color": "0.4"},
    "expert_mlp": {"marker": "^", "linestyle": "--", "color": "0.5"},
    "torch_grouped": {"marker": "v", "linestyle": "-.", "color": "0.5"},
}
OTHER_STYLE = {"marker": ".", "linestyle": "-", "color": "0.7"}

Rows = dict[str, ResultRow]  # by implementation
Curves = dict[str, dict[int, Rows]]  # by "section | shape and form", then by rows of x or tokens


def latest_rows(path: Path) -> list[ResultRow]:
    """Of a file; of a row that was measured twice the later one."""
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
    """The same, with the bf16 product of the shape by cuBLAS beside every packed form of it."""
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


def stem(name: str) -> str:
    """Of the file of a curve's plot."""
    return re.sub(r"[^a-z0-9]+", "_", f"kernels {name}".lower())


def draw(name: str, sizes: Mapping[int, Rows], path: Path) -> None:
    """Time against size, both logarithmic, with the bounds of the packed form."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6.5, 4.5), constrained_layout=True)
    section, case = name.split(" | ")
    names = dict.fromkeys(key for rows in sizes.values() for key in rows)
    for key in names:
        points = [(size, rows[key].figure) for size, rows in sizes.items() if key in rows]
        style: Any = STYLES.get(key, OTHER_STYLE)
        panel.plot(*zip(*points, strict=True), label=key, markersize=5, **style)
    packed = {size: fewest_bytes(rows) for size, rows in sizes.items()}
    for index, label in enumerate(("bytes / read bandwidth", "operations / cuBLAS rate")):
        bounds = [_bounds(row)[index] for row in packed.values()]
        line: Any = (":", "-")[index]
        panel.plot([*packed], bounds, color="0.8", linewidth=3, linestyle=line, label=label)
    panel.set(xscale="log", yscale="log", title=case, ylabel="microseconds a call")
    panel.set_xlabel("rows of x" if section == "dense" else "tokens")
    panel.set_xticks([*sizes], labels=[str(size) for size in sizes])
    panel.minorticks_off()
    least = min(_bounds(row)[0] for row in packed.values())
    panel.set_ylim(bottom=least / 2)
    panel.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"Software": None}
    figure.savefig(path, dpi=100, metadata=about)
    pyplot.close(figure)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} KB")


def main(argv: list[str]) -> None:
    """Prints the tables, draws the plots."""
    del argv
    rows = latest_rows(Path(_ROWS.value))
    curves = beside_cublas(read_curves(rows))
    for name, sizes in curves.items():
        print(f"\n### {name}\n\n{times_table(sizes)}")
        if _OUTPUT.value:
            draw(name, sizes, Path(_OUTPUT.value) / f"{stem(name)}.png")
    if table := bars_table(rows):
        print(f"\n### Bars and moonshots\n\n{table}")
    others = [row for row in rows if row.unit in ("launches", "TB/s", "TFLOP/s")]
    if others:
        print("\n### Launches and ceilings\n")
    for row in others:
        print(f"- {row.what}: {row.figure:.4g} {row.unit} ({row.device}, {row.date})")


if __name__ == "__main__":
    app.run(main)
