"""Pictures that are read without colour: lines by marker and dash."""

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
DPI = 72
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
