"""Plots of `scripts/policy_quality.py`: perplexity against what a section varies."""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.quality_sections import Point

COLUMNS = 4
AXES = {
    "dynaexq": "share of the experts in low precision",
    "dymoe": "retention r",
    "buddymoe": "cache rate c",
    "domains": "cache rate c",
    "foresight": "experts of a layer that are named",
    "stand_ins": "cache rate c",
}


def draw(folder: Path, section: str, points: Sequence[Point]) -> Iterator[Path]:
    """Draws a section's plot; yields the files that it has written."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    if section == "shift":
        yield _shift(pyplot, folder, points)
        return
    if section == "compose":
        yield _compose(pyplot, folder, points)
        return
    panels: dict[tuple[str, ...], dict[str, list[Point]]] = {}
    for point in points:
        of_figure_3 = ("figure 3",) if point.series.startswith("figure 3") else ()
        curves = panels.setdefault((point.section, point.text, *of_figure_3), {})
        curves.setdefault(point.series, []).append(point)
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.2 * columns, 4.2 * lines), squeeze=False, layout="constrained"
    )
    for axis, (panel, curves) in zip(axes.flat, panels.items(), strict=False):
        for name, found in curves.items():
            ordered = sorted(found, key=lambda point: point.x)
            x, y = [p.x for p in ordered], [p.perplexity for p in ordered]
            axis.plot(x, y, "o-" if len(x) > 1 else "o", label=name, markersize=4)
        values = [point.perplexity for found in curves.values() for point in found]
        unit = next(point.unit for found in curves.values() for point in found)
        wide = unit == "perplexity" and max(values) > 4 * min(values)
        scale = "log" if wide else "linear"
        what = "layer" if panel[0].endswith("layers") else AXES.get(section, "")
        axis.set(title=", ".join(panel), xlabel=what, ylabel=unit, yscale=scale)
        axis.legend(fontsize=6)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    path = folder / f"quality_{section}.png"
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    yield path


def _shift(pyplot: Any, folder: Path, points: Sequence[Point]) -> Path:
    """Perplexity by segment, and how hot the experts of the last layer were."""
    segments = list(dict.fromkeys(point.text for point in points))
    series = list(dict.fromkeys(point.series for point in points))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    for i, name in enumerate(series):
        found = {point.text: point.perplexity for point in points if point.series == name}
        at = np.arange(len(segments)) + 0.8 * i / len(series)
        left.bar(at, [found[s] for s in segments], 0.8 / len(series), label=name)
    left.set_xticks(np.arange(len(segments)) + 0.4, segments)
    left.set(ylabel="perplexity", title="by segment", yscale="log")
    left.legend(fontsize=7)
    first = next(point.series for point in points if "last layer's hotness" in point.more)
    heat = [
        row
        for point in points
        if point.series == first
        for row in point.more["last layer's hotness"]
    ]
    image = right.imshow(np.asarray(heat).T, aspect="auto", cmap="magma")
    right.set(xlabel="window", ylabel="expert", title=f"hotness, last layer: {first}")
    figure.colorbar(image, ax=right)
    path = folder / "quality_shift.png"
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return path


def _compose(pyplot: Any, folder: Path, points: Sequence[Point]) -> Path:
    """KL against time, a panel a memory; the front is a line, its points are filled."""
    panels = list(dict.fromkeys(point.section for point in points))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6.5 * len(panels), 4.8), squeeze=False, layout="constrained"
    )
    series = list(dict.fromkeys(point.series.split(",")[0] for point in points))
    for axis, panel in zip(axes.flat, panels, strict=True):
        mine = [point for point in points if point.section == panel]
        for point in mine:
            name = point.series.split(",")[0]
            color = f"C{series.index(name)}"
            style: dict[str, Any] = {} if point.more["on the front"] else {"facecolors": "none"}
            axis.scatter(point.x, point.perplexity, edgecolors=color, **({"color": color} | style))
        best = sorted((p.x, p.perplexity) for p in mine if p.more["on the front"])
        axis.plot(*zip(*best, strict=True), color="0.6", linewidth=0.8)
        for name in dict.fromkeys(point.series.split(",")[0] for point in mine):
            axis.scatter([], [], color=f"C{series.index(name)}", label=name)
        axis.set(title=panel, xlabel="TPOT, ms, by the bytes over the link", yscale="log")
        axis.set_ylabel("KL of the exact model, nats a token")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    path = folder / "quality_compose.png"
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return path
