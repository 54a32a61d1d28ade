"""The loss curve of a run."""

import json
from pathlib import Path
from typing import Any


def read_log(path: Path) -> list[dict[str, Any]]:
    """The objects of a log.jsonl, in order."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def without_repeats(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that count: a resumed run repeats the steps since its checkpoint."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        step = row.get("step", 0)
        if row["event"] in ("train", "valid"):
            kept = [r for r in kept if r["event"] != row["event"] or r.get("step", 0) < step]
        kept.append(row)
    return kept


def draw_loss_curve(log_path: Path, image_path: Path) -> bool:
    """Draws training loss and held-out bits per byte; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = without_repeats(read_log(log_path))
    train = [row for row in rows if row["event"] == "train"]
    valid = [row for row in rows if row["event"] == "valid"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    left.plot(
        [r["tokens"] / 1e6 for r in train], [r["cross_entropy"] for r in train], linewidth=0.8
    )
    left.set(xlabel="million tokens", ylabel="training loss, nats a token", title="Training")
    if train:
        losses = [r["cross_entropy"] for r in train]
        left.set_ylim(min(losses) - 0.1, sorted(losses)[int(len(losses) * 0.98)] + 0.3)
    for name in sorted({key for row in valid for key in row["bits_per_byte"] if "valid/" in key}):
        points = [
            (r["step"], r["bits_per_byte"][name]) for r in valid if name in r["bits_per_byte"]
        ]
        right.plot(*zip(*points, strict=True), label=name.removeprefix("valid/"), marker=".")
    right.set(xlabel="step", ylabel="bits per byte", title="Held-out text")
    if valid:
        right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(image_path, dpi=120)
    pyplot.close(figure)
    return True
