"""Predictions of a sweep beside what a benchmark measured.

    python -m scripts.make_trace --shape=Qwen3-30B-A3B --tokens=256 --out=x.trace
    python -m moejax.benchmark --config.shape=Qwen3-30B-A3B --config.trace=x.trace \
        --config.budgets=6,8,10,12 --config.prompt_tokens=16 --config.new_tokens=513 \
        --config.output=measured.json
    python -m scripts.studies.speed.compare_predicted measured.json --trace=x.trace \
        --output=rows.jsonl

The benchmark decodes the trace's first sequence over and over, and its slots are full when it
begins to measure: the replay takes twice as many steps, of which the second half counts. The
machine (a step's own time, and the link) is fitted to the measured times and bytes of the budgets
with the fewest and the most slots; the times of all others are predicted from the bytes of the
replay alone. Batch 1, experts on demand, no look-ahead.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

from moejax.errors import MoejaxError
from moejax.files.result_rows import ResultRow, append_rows, command_line, package_versions, today
from moejax.routing.simulate.costs import Machine, Measured, calibrate, step_ms
from moejax.routing.simulate.sweeping import LRU, Tiers, sweep
from moejax.routing.trace import DECODE, Trace, read_trace, replay_of_trace, trace_of_replay

_TRACE = flags.DEFINE_string("trace", None, "that the benchmark replayed", required=True)
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file that rows are appended to")


class Point(NamedTuple):
    """A budget of the benchmark: slots of a layer, ms and bytes a step, share of hits, steps."""

    slots: int
    tpot_ms: float
    num_bytes: float
    hit_rate: float
    steps: int


class Predicted(NamedTuple):
    """Time and hit rate of the replay."""

    tpot_ms: float
    hit_rate: float


def points_of(record: dict[str, Any]) -> list[Point]:
    """Points of the JSON that `moejax.benchmark` writes, by slots; refused ones are left out."""
    found = []
    for point in record["points"]:
        cached = re.search(r"(\d+) of \d+ experts of a layer cached", " ".join(point["placement"]))
        if point["status"] != "measured" or point["batch"] != 1 or not cached:
            continue
        figures = {name: figure["value"] for name, figure in point["figures"].items()}
        found.append(
            Point(
                int(cached[1]),
                figures["TPOT median"],
                1e6 * figures["link bytes of a decode step"],
                figures["hit rate of decode"] / 100,
                max(batch["new_tokens"][0] for run in point["runs"] for batch in run["batches"])
                - 1,
            )
        )
    return sorted(found)


def replayed(trace: Trace, num_steps: int) -> Trace:
    """The first decoded sequence over and over, so many steps."""
    first = int(trace.sequence[trace.phase == DECODE][0])
    ids = replay_of_trace(trace, first)
    return trace_of_replay(np.resize(ids, (num_steps, *ids.shape[1:])), trace.num_experts)


def predict(
    trace: Trace, points: list[Point], expert_bytes: int
) -> tuple[Machine, list[Predicted]]:
    """The machine of the first and the last point, and all of them by the replay."""
    ends = [Measured(tpot_ms=p.tpot_ms, num_bytes=p.num_bytes) for p in (points[0], points[-1])]
    machine = calibrate(ends)
    tiers = Tiers(names=("experts",), expert_bytes=(expert_bytes,))
    grid = [{"slots": point.slots} for point in points]
    steps = points[0].steps
    once, twice = (sweep(replayed(trace, n * steps), LRU, grid, tiers) for n in (1, 2))
    found = []
    for first, both in zip(once, twice, strict=True):
        second = dataclasses.replace(
            both.traffic, steps=steps, fetches=both.traffic.fetches - first.traffic.fetches,
            misses=both.traffic.misses - first.traffic.misses,
            ahead=both.traffic.ahead - first.traffic.ahead,
        )  # fmt: skip
        hit_rate = 1 - float(second.misses.sum()) / (steps * trace.num_layers * trace.width)
        found.append(Predicted(step_ms(machine, second), hit_rate))
    return machine, found


def expert_bytes_of(record: dict[str, Any]) -> int:
    """Bytes of one expert, by the ledger."""
    ledgers = (point["ledger"] for point in record["points"] if point["status"] == "measured")
    return int(next(ledgers)["decode"]["expert_bytes"])


def main(argv: list[str]) -> None:
    """A line and rows of every budget."""
    if len(argv) != 2:
        sys.exit("give the JSON file of a benchmark: compare_predicted FILE --trace=TRACE")
    record = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    points = points_of(record)
    if len(points) < 3:
        sys.exit(f"{argv[1]} has {len(points)} budgets with cached experts at batch 1: give three")
    try:
        trace = read_trace(Path(_TRACE.value))
        machine, predicted = predict(trace, points, expert_bytes_of(record))
    except MoejaxError as error:
        sys.exit(f"{argv[1]}: {error}")
    print(f"{machine.base_ms:.3f} ms a step and {machine.link_gib_per_s:.1f} GiB/s, by the ends")
    model, measured_by = record["benchmark"]["model"], record["rows"][0]
    rows = []
    for point, found in zip(points, predicted, strict=True):
        ratio = found.tpot_ms / point.tpot_ms
        fits = " (fitted)" if point in (points[0], points[-1]) else ""
        print(
            f"{point.slots} slots{fits}: TPOT {point.tpot_ms:.3f} ms measured, {found.tpot_ms:.3f} "
            f"predicted ({ratio:.3f}); hits {100 * point.hit_rate:.2f} % and "
            f"{100 * found.hit_rate:.2f}"
        )
        rows.append(
            ResultRow(
                what=f"predicted over measured TPOT{fits}, {model}, {point.slots} slots, batch 1",
                figure=ratio,
                unit="x",
                baseline={
                    "measured_ms": point.tpot_ms, "predicted_ms": found.tpot_ms,
                    "hit_rate": point.hit_rate, "predicted_hit_rate": found.hit_rate,
                    "base_ms": machine.base_ms, "link_gib_per_s": machine.link_gib_per_s,
                    "steps": point.steps,
                },
                device=measured_by["device"],
                versions=measured_by["versions"] | package_versions("numpy"),
                date=today(),
                command=command_line(),
            )
        )  # fmt: skip
    if _OUTPUT.value:
        append_rows(Path(_OUTPUT.value), rows)


if __name__ == "__main__":
    app.run(main)
