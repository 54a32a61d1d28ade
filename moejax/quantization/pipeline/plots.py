"""Pictures of a quantized model: error by layer and class, weight histograms."""

import io
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.files.whole import write_whole
from moejax.quantization.pipeline.manifest import RESUME
from moejax.weights.qtensor import QTensor

REPORT_FOLDER = "quantization_report"
_BINS = 120
MOST_WEIGHTS = 2**25  # a larger matrix gives no histogram
_MOST_PANELS = 6
_MARKERS = "osD^vx"
_NO_MATPLOTLIB = "no plots: matplotlib is not installed (pip install '.[evaluation]' in a clone)"


def histogram(weights: np.ndarray, matrix: QTensor) -> dict[str, Any]:
    """Counts weights float32[N, K] and their quantized values, over four deviations."""
    width = 4 * float(weights.std()) or 1.0
    values = np.asarray(jax.device_put(matrix).dequantize())
    counts = [
        np.histogram(np.clip(part, -width, width), _BINS, (-width, width))[0].tolist()
        for part in (weights, values)
    ]
    return {"width": width, "weights": counts[0], "quantized": counts[1]}


def draw_report(
    output: Path, records: Mapping[str, Mapping[str, Any]], histograms: Mapping[str, Any]
) -> str | None:
    """Draws the pictures beside the manifest; returns what is missing, if anything."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which is the process's own
    except ImportError:
        return _NO_MATPLOTLIB
    folder = output / REPORT_FOLDER
    folder.mkdir(exist_ok=True)
    figures = {"errors.png": _draw_errors(Figure, records)}
    if histograms:
        figures["histograms.png"] = _draw_histograms(Figure, histograms)
    for name, figure in figures.items():
        buffer = io.BytesIO()
        # Without the library's version, so that equal results give equal files.
        figure.savefig(buffer, dpi=110, format="png", metadata={"Software": None})
        write_whole(folder / name, buffer.getvalue(), RESUME)
    return None


def _draw_errors(new_figure: Any, records: Mapping[str, Mapping[str, Any]]) -> Any:
    """Draws the relative error of every quantized matrix, and each layer's median as a line."""
    by_class: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records.values():
        if "bits" in record:
            layer = record.get("layer", -1)  # embedding and head stand before the first
            by_class[record["class"]][layer].append(record["relative_error"])
    figure = new_figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    greys = np.linspace(0.0, 0.6, max(1, len(by_class)))
    for i, (kind, layers) in enumerate(sorted(by_class.items())):
        places = sorted(layers)
        color, marker = str(greys[i]), _MARKERS[i % len(_MARKERS)]
        medians = [float(np.median(layers[layer])) for layer in places]
        axes.plot(places, medians, color=color, marker=marker, label=f"{kind}, median")
        x = [layer for layer in places for _ in layers[layer]]
        y = [error for layer in places for error in layers[layer]]
        axes.scatter(x, y, color=color, marker=marker, s=6, alpha=0.3, linewidths=0)
    axes.set(
        xlabel="layer",
        ylabel="relative error |W - W'| / |W|",
        title="Error of each quantized matrix",
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure


def _draw_histograms(new_figure: Any, histograms: Mapping[str, Any]) -> Any:
    """Draws weights as a filled outline, their quantized values as a line."""
    names = sorted(histograms)
    chosen = [
        names[i]
        for i in np.linspace(0, len(names) - 1, min(_MOST_PANELS, len(names))).round().astype(int)
    ]
    columns = min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = new_figure(figsize=(4 * columns, 2.8 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, name in zip(grid.flat, chosen, strict=False):
        counts = histograms[name]
        edges = np.linspace(-counts["width"], counts["width"], _BINS + 1)
        axes.stairs(counts["weights"], edges, fill=True, color="0.8", label="weights")
        axes.stairs(counts["quantized"], edges, color="0.1", linewidth=0.8, label="quantized")
        axes.set_title(name.removesuffix(".weight").removeprefix("model."), fontsize=7)
        axes.set(xlabel="weight", ylabel="count", yscale="symlog")
    for axes in grid.flat[len(chosen) :]:
        axes.set_visible(False)
    grid.flat[0].legend(fontsize=7)
    return figure
