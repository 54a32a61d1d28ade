"""Results of a sweep: the Pareto front, a table, a picture, rows."""

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.experts.budget import GIB, size_text
from moejax.files import result_rows as results
from moejax.files.whole import write_whole
from moejax.routing.simulate.costs import Machine
from moejax.routing.simulate.sweeping import SweepPoint

_NO_MATPLOTLIB = "no plot: matplotlib is not installed (pip install '.[evaluation]' in a clone)"
_MARKERS = "osD^vx"
# Metadata fields of each kind of picture that hold its date and creator.
_UNSAID: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
    ".svg": {"Date": None},
}


def pareto(figures: Sequence[Mapping[str, float]]) -> list[int]:
    """Settings that no other beats in time, in device memory and in fidelity at once.

    Fidelity is the gate mass of the first tier that is neither skipped nor substituted. The first
    of equal settings stays.
    """
    points = np.array([[f["tpot_ms"], f["device_gib"], -fidelity(f)] for f in figures])
    points = np.round(points, 9)
    kept = []
    for i, point in enumerate(points):
        no_worse = (points <= point).all(axis=1)
        better = no_worse & (points < point).any(axis=1)
        same_before = (points[:i] == point).all(axis=1)
        if not better.any() and not same_before.any():
            kept.append(i)
    return kept


def spread(figures: Sequence[Mapping[str, float]], chosen: Sequence[int], most: int) -> list[int]:
    """Picks at most `most` of the chosen settings, spread over their times, with both ends."""
    order = sorted(chosen, key=lambda i: figures[i]["tpot_ms"])
    if len(order) <= most:
        return order
    return [order[round(n * (len(order) - 1) / max(1, most - 1))] for n in range(most)]


def fidelity(figures: Mapping[str, float]) -> float:
    """Share of gate mass served in the first tier by the expert that the router chose."""
    first = next(share for name, share in figures.items() if name.startswith("gate_"))
    return first - figures["gate_substituted"]


def table(
    settings: Sequence[str], figures: Sequence[Mapping[str, float]], chosen: Sequence[int]
) -> list[str]:
    """Lines of a Markdown table of the chosen settings, the fastest first; "-": no ceiling."""
    gates = [name for name in figures[0] if name.startswith("gate_")]
    moved = [name for name in figures[0] if name.endswith("_mb")]
    heads = ["setting", "TPOT ms", "bound ms", "hits %", "best %", "device"]
    heads += [name.replace("_mb", " MB/token") for name in moved]
    heads += [name.replace("gate_", "") + " %" for name in gates]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for i in sorted(chosen, key=lambda i: figures[i]["tpot_ms"]):
        f = figures[i]
        cells = [
            settings[i],
            f"{f['tpot_ms']:.2f}",
            f"{f['bound_ms']:.2f}" if "bound_ms" in f else "-",
            f"{100 * f['hit_rate']:.1f}",
            f"{100 * f['best_hit_rate']:.1f}" if "best_hit_rate" in f else "-",
            size_text(f["device_gib"] * GIB),
            *(_megabytes(f[name]) for name in moved),
            *(f"{100 * f[name]:.1f}" for name in gates),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _megabytes(amount: float) -> str:
    """Formats megabytes with nonzero digits, even for small experts."""
    return f"{amount:.1f}" if amount >= 1 or not amount else f"{amount:.2g}"


def draw(path: Path, by_link: Mapping[float, Sequence[Mapping[str, float]]], title: str) -> str:
    """Draws time against device memory, a colour per link; returns what is missing, if anything.

    Filled: on the Pareto front; lines: the bandwidth bound under Belady's cache.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot, which is the process's own
    except ImportError:
        return _NO_MATPLOTLIB
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    greys = np.linspace(0.0, 0.65, len(by_link))
    for n, (link, figures) in enumerate(by_link.items()):
        color, marker = str(greys[n]), _MARKERS[n % len(_MARKERS)]
        best = set(pareto(figures))
        x = np.array([f["device_gib"] for f in figures])
        y = np.array([f["tpot_ms"] for f in figures])
        beaten = np.array([i not in best for i in range(len(figures))])
        style = {"marker": marker, "color": color}
        axes.scatter(x[beaten], y[beaten], s=8, alpha=0.25, linewidths=0, **style)
        axes.scatter(x[~beaten], y[~beaten], s=24, label=f"{link:.4g} GiB/s", **style)
        order = np.argsort(x, kind="stable")
        bound = np.array([f.get("bound_ms", np.nan) for f in figures])
        axes.plot(x[order], bound[order], color=color, linewidth=0.8, linestyle=":")
    axes.set(xlabel="GiB of experts on the device", ylabel="TPOT, ms", title=title, yscale="log")
    for each in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        each("{x:g}")
    axes.legend(fontsize=8, title="dotted: no cache is faster")
    picture, kind = io.BytesIO(), path.suffix.lower()
    figure.savefig(picture, dpi=110, format=kind.removeprefix("."), metadata=_UNSAID.get(kind))
    write_whole(path, picture.getvalue())
    return ""


def rows(
    policy: str, names: Sequence[str], swept: Sequence[SweepPoint], machines: Sequence[Machine]
) -> Iterator[results.ResultRow]:
    """Yields a row for each setting and speed of the link.

    Args:
      machines: one per speed of the link.
    """
    versions = results.package_versions("moejax", "jax")
    today, command = results.today(), results.command_line()
    for machine in machines:
        for name, one in zip(names, swept, strict=True):
            found = one.figures(machine)
            yield results.ResultRow(
                what=f"sweep, {policy}, {name}, {machine.link_gib_per_s:.4g} GiB/s, TPOT",
                figure=found.pop("tpot_ms"),
                unit="ms",
                baseline=found,
                device="simulated",
                versions=versions,
                date=today,
                command=command,
            )
