"""Plots and a Markdown table from the rows of `scripts/demo_quantization.py`.

    python -m scripts.plot_quantization --rows=scripts/results/demo_quantization.jsonl \
        --output=scripts/results/plots

Draws error by iteration (MiLo's Figure 10), memory against perplexity by rank (Figure 11), and time
against perplexity of every quantizer (Figure 8); prints the tables. Of a row that was measured
twice the later one counts.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

from absl import app, flags

from moejax.files.result_rows import read_rows

_ROWS = flags.DEFINE_string("rows", "scripts/results/demo_quantization.jsonl", "JSON Lines file")
_OUTPUT = flags.DEFINE_string("output", "", "folder of the plots; '': only the tables")

COLUMNS = {
    "bits per weight": ("bits a weight", "{:.3f}"),
    "model bits per weight": ("of the model", "{:.3f}"),
    "perplexity": ("perplexity", "{:.3f}"),
    "bits per byte": ("bits a byte", "{:.4f}"),
    "relative error attention": ("error, attention", "{:.4f}"),
    "relative error experts": ("error, experts", "{:.4f}"),
    "quantizing": ("seconds", "{:.2f}"),
}
# Told apart by marker and line as well, for paper without colour.
STYLES = (
    {"marker": "o", "linestyle": "-", "color": "black"},
    {"marker": "s", "linestyle": "--", "color": "0.35"},
    {"marker": "^", "linestyle": "-.", "color": "0.55"},
    {"marker": "D", "linestyle": ":", "color": "0.2"},
)
FULL, HQQ, INT4 = "unquantized", "INT3 hqq", "INT4 rtn, integer zero"

Figures = dict[str, float]  # figure by quantity
Sections = dict[str, dict[str, Figures]]  # by section and label, in the order of measuring


def read_sections(path: Path) -> Sections:
    """The rows by section, label and quantity."""
    found: Sections = defaultdict(lambda: defaultdict(dict))
    for row in read_rows(path):
        section, label, quantity = row.what.split(" | ")
        found[section][label][quantity] = row.figure
    return found


def markdown(rows: dict[str, Figures], table: dict[str, Figures]) -> str:
    """A table; `table` holds the rows that shares of HQQ's loss are counted from."""
    lines = [
        "| | " + " | ".join(name for name, _ in COLUMNS.values()) + " | of HQQ's loss recovered |",
        "| --- |" + " ---: |" * (len(COLUMNS) + 1),
    ]
    for label, figures in rows.items():
        cells = [
            form.format(figures[key]) if key in figures else ""
            for key, (_, form) in COLUMNS.items()
        ]
        if FULL in table and HQQ in table and label != FULL:
            hqq, full = table[HQQ]["perplexity"], table[FULL]["perplexity"]
            cells.append(f"{100 * (hqq - figures['perplexity']) / (hqq - full):.1f} %")
        else:
            cells.append("")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_curve(curves: dict[str, Figures], path: Path) -> None:
    """Error by iteration, one panel a kind of matrix."""
    figure, panels = _figure(len(curves))
    for panel, (label, points) in zip(panels, curves.items(), strict=True):
        panel.plot(range(1, len(points) + 1), list(points.values()), **STYLES[0])
        panel.set(title=label, xlabel="iteration", ylabel="mean of |W - UV - W'|_F / |W|_F")
    _save(figure, path)


def draw_ranks(rows: dict[str, Figures], table: dict[str, Figures], path: Path) -> None:
    """Memory against perplexity by rank, a line a kind of factors."""
    figure, (panel,) = _figure(1)
    lines: dict[str, list[tuple[str, Figures]]] = defaultdict(list)
    for label, figures in rows.items():
        *parts, policy, factors = label.split(", ")
        lines[", ".join([*parts, factors])].append((policy.removeprefix("Uniform-"), figures))
    for (name, points), style in zip(lines.items(), STYLES, strict=False):
        xs = [figures["bits per weight"] for _, figures in points]
        ys = [figures["perplexity"] for _, figures in points]
        panel.plot(xs, ys, label=name, **style)
        for (rank, _), x, y in zip(points, xs, ys, strict=True):
            panel.annotate(rank, (x, y), textcoords="offset points", xytext=(3, 4), fontsize=8)
    groups = [figures for label, figures in table.items() if label.startswith(HQQ)]
    panel.plot(
        [figures["bits per weight"] for figures in groups],
        [figures["perplexity"] for figures in groups],
        label="HQQ, groups of 64, 32, 16",
        marker="x",
        linestyle="-",
        color="0.7",
    )
    for label, line in ((INT4, "--"), (FULL, ":")):
        if label in table:
            panel.axhline(table[label]["perplexity"], color="0.5", linestyle=line, linewidth=0.8)
            panel.annotate(
                label,
                (0.99, table[label]["perplexity"]),
                fontsize=8,
                ha="right",
                va="bottom",
                xycoords=("axes fraction", "data"),
            )
    panel.set(xlabel="bits a weight, everything counted", ylabel="perplexity, WikiText-2 test")
    panel.legend(fontsize=8)
    _save(figure, path)


def draw_times(table: dict[str, Figures], path: Path) -> None:
    """Seconds of quantizing against perplexity in groups of 64; each method's best is named."""
    figure, (panel,) = _figure(1)
    table = {name: figures for name, figures in table.items() if ", group " not in name}
    for label, figures in table.items():
        if label == FULL or "quantizing" not in figures:
            continue
        x, y = figures["quantizing"], figures["perplexity"]
        method = label.split(",")[0]
        is_best = y <= min(
            f["perplexity"] for name, f in table.items() if name.split(",")[0] == method
        )
        panel.plot(x, y, **STYLES[0] if is_best else STYLES[2])
        if is_best:
            panel.annotate(method, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
    panel.margins(x=0.15)
    panel.set(xscale="log", xlabel="seconds of quantizing, without compiling and calibration")
    panel.set(ylabel="perplexity, WikiText-2 test")
    _save(figure, path)


def _figure(num_panels: int) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, num_panels, figsize=(6.5 if num_panels == 1 else 9, 4), constrained_layout=True
    )
    return figure, [panels] if num_panels == 1 else list(panels)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} KB")


def main(argv: list[str]) -> None:
    """Prints the tables, draws the plots."""
    del argv
    sections = read_sections(Path(_ROWS.value))
    table = sections.get("table", {})
    for name, rows in sections.items():
        if name != "curve":
            print(f"\n### {name}\n\n{markdown(rows, table)}")
    if not _OUTPUT.value:
        return
    folder = Path(_OUTPUT.value)
    if "curve" in sections:
        draw_curve(sections["curve"], folder / "demo_curve.png")
    if "ranks" in sections:
        draw_ranks(sections["ranks"], table, folder / "demo_ranks.png")
    if table:
        draw_times(table, folder / "demo_times.png")


if __name__ == "__main__":
    app.run(main)
