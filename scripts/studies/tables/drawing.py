"""Pictures that are read without colour: lines by marker and dash, bars by hatch, maps in grey."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STYLES: tuple[dict[str, Any], ...] = (
    {"marker": "o", "linestyle": "-", "color": "black"},
    {"marker": "s", "linestyle": "--", "color": "0.45"},
    {"marker": "^", "linestyle": "-.", "color": "0.3"},
    {"marker": "D", "linestyle": ":", "color": "0.15"},
    {"marker": "x", "linestyle": "-", "color": "0.6"},
    {"marker": "v", "linestyle": "--", "color": "0.2"},
    {"marker": "P", "linestyle": "-.", "color": "0.5"},
    {"marker": "*", "linestyle": ":", "color": "0.35"},
    {"marker": "<", "linestyle": "-", "color": "0.7"},
)
BARS: tuple[dict[str, Any], ...] = (
    {"facecolor": "0.25", "edgecolor": "black"},
    {"facecolor": "0.85", "edgecolor": "black", "hatch": "///"},
    {"facecolor": "0.6", "edgecolor": "black", "hatch": "..."},
    {"facecolor": "white", "edgecolor": "black", "hatch": "xxx"},
    {"facecolor": "0.75", "edgecolor": "black"},
)
DPI = 72
LEGEND_LINE = 0.08  # of a panel's height
PANEL = (4.2, 3.1)  # inches


class Canvas:
    """A figure of a grid of panels."""

    def __init__(self, figure: Any):
        """Wraps a matplotlib figure."""
        self.figure = figure

    @staticmethod
    def save(draw: Callable[["Canvas"], None], path: Path) -> Path:
        """Draws and writes a PNG file, which names no version, so that it changes with its data."""
        importlib.import_module("matplotlib").use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure = pyplot.figure(layout="constrained")
        try:
            draw(Canvas(figure))
            figure.savefig(path, dpi=DPI, metadata={"Software": None})
        finally:
            pyplot.close(figure)
        return path

    def panels(self, rows: int, columns: int, **options: Any) -> list[Any]:
        """Axes of the figure, row by row; sized by their number."""
        width, height = options.pop("size", PANEL)
        self.figure.set_size_inches(width * columns, height * rows)
        return list(self.figure.subplots(rows, columns, squeeze=False, **options).flat)


def lines(
    panel: Any, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], **labels: Any
) -> None:
    """Curves of x and y by name; `labels` as of `Axes.set`."""
    for (name, (x, y)), style in zip(series.items(), STYLES, strict=False):
        panel.plot(x, y, label=name, markersize=4, **style)
    panel.set(**labels)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)


def bars(
    panel: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]], **labels: Any
) -> None:
    """Bars of each series beside each other in each group."""
    width = 0.8 / len(series)
    for i, ((name, values), style) in enumerate(zip(series.items(), BARS, strict=False)):
        places = [j + (i + 0.5) * width - 0.4 for j in range(len(groups))]
        panel.bar(places, values, width, label=name, linewidth=0.5, **style)
    panel.set_xticks(range(len(groups)), groups)
    panel.set(**labels)
    if len(series) > 1:  # no bar reaches up to the legend
        highest = max(value for values in series.values() for value in values if value == value)
        panel.set_ylim(top=highest * (1.1 + LEGEND_LINE * len(series)))
        panel.legend(fontsize=7, loc="upper right")


def heat(canvas: Canvas, panel: Any, values: Any, unit: str, **labels: Any) -> None:
    """A map in grey, dark for much."""
    image = panel.imshow(values, aspect="auto", cmap="Greys", interpolation="nearest")
    canvas.figure.colorbar(image, ax=panel, label=unit)
    panel.set(**labels)
