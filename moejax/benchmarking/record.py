"""Records of a benchmark: a table, rows of `moejax.files.result_rows`, JSON, CSV."""

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moejax.benchmarking.running import BenchmarkResult, Point
from moejax.config.benchmark import BenchmarkConfig
from moejax.config.options import to_config_dict
from moejax.files import result_rows as results
from moejax.files.result_rows import ResultRow
from moejax.files.whole import write_whole
from moejax.inference.report import NO_COUNTS

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
REFUSED = "GiB, refused"  # unit of a row that says what did not run; its figure is the limit
OF_BATCH = ("prompt_tokens", "new_tokens", "ttft_s", "decode_s", "calls")  # in the JSON file
# Columns of the table: heading, figure, digits after the point.
COLUMNS = (
    ("TTFT ms", "TTFT median", 1),
    ("p99", "TTFT p99", 1),
    ("TPOT ms", "TPOT median", 2),
    ("p99", "TPOT p99", 2),
    ("ITL p99", "ITL p99", 2),
    ("prefill tok/s", "prefill throughput", 0),
    ("decode tok/s", "decode throughput", 1),
    ("hits %", "hit rate of decode", 1),
    ("MB/step", "link bytes of a decode step", 1),
    ("device GiB", "device memory peak", 2),
    ("host GiB", "host memory peak", 2),
    ("KL", "KL of the exact model", 4),
    ("floor %", "share of the byte floor", 1),
    ("compile s", "compile", 1),
)


def _rows_of(outcome: BenchmarkResult) -> list[ResultRow]:
    """A row a figure; of a refused point one row, whose `what` says why."""
    device = results.describe_device(outcome.device)
    common: dict[str, Any] = {
        "device": device, "versions": results.package_versions(*PACKAGES),
        "date": results.today(), "command": results.command_line(),
    }  # fmt: skip
    rows = []
    for point in outcome.points:
        about = f"{outcome.about}, {point.name}"
        if point.refusal:
            what = f"refused, {about}: {point.refusal}"
            rows.append(ResultRow(what=what, figure=point.gib, unit=REFUSED, baseline={}, **common))
            continue
        about = f"{about}, {point.requests}; routing {point.routing}"
        for name, of in point.figures.items():
            row = ResultRow(what=f"{name}, {about}", figure=of.value, unit=of.unit,
                            baseline=of.spread, **common)  # fmt: skip
            rows.append(row)
    return rows


def _record_of(
    config: BenchmarkConfig, outcome: BenchmarkResult, rows: Sequence[ResultRow]
) -> dict:
    """Everything as JSON has it."""
    return {
        "benchmark": {
            "model": outcome.about,
            "config": to_config_dict(config).to_dict(),
            "decoding": "greedy",
            "steps_per_call": outcome.steps_per_call,
            "runs": config.runs,
            "bandwidth": dataclasses.asdict(outcome.bandwidth),
        },
        "points": [_of_point(point) for point in outcome.points],
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _of_point(point: Point) -> dict[str, Any]:
    found: dict[str, Any] = {"batch": point.batch, "device_gib": point.gib}
    if point.refusal or point.measured is None:
        return {**found, "status": "refused", "reason": point.refusal}
    measured = point.measured
    every = [batch for run in measured.runs for batch in run]
    return {
        **found,
        "status": "measured",
        "requests": point.requests,
        "context": point.context,
        "routing": point.routing,
        "placement": point.placement,
        "figures": {
            name: {"value": of.value, "unit": of.unit, **of.spread}
            for name, of in point.figures.items()
        },
        "device_peak_is_older": point.peak_is_older,
        "kernels": point.kernels,
        "ledger": {phase: ledger.as_dict() for phase, ledger in measured.ledgers.items()},
        "requests_a_run": sum(len(batch.new_tokens) for batch in measured.runs[0]),
        "prompt_tokens": sum(sum(batch.prompt_tokens) for batch in every),
        "new_tokens": sum(sum(batch.new_tokens) for batch in every),
        "compile_s_inside_runs": measured.late_compile_s,
        "runs": [
            {"wall_s": wall, "batches": [{of: getattr(b, of) for of in OF_BATCH} for b in run]}
            for run, wall in zip(measured.runs, measured.wall_s, strict=True)
        ],
    }


class Files:
    """Writes what is known after every point, so that an interrupted sweep keeps it."""

    def __init__(self, paths: Sequence[Path], config: BenchmarkConfig):
        """By the names' ends: .json everything, .csv the rows, .jsonl gets rows appended."""
        self._paths, self._config = paths, config
        self._num_appended = 0

    def write(self, outcome: BenchmarkResult) -> None:
        """Writes the points so far."""
        rows = _rows_of(outcome)
        for path in self._paths:
            if path.suffix == ".jsonl":
                results.append_rows(path, rows[self._num_appended :])
            elif path.suffix == ".csv":
                write_whole(path, _csv_text(rows))
            else:
                record = _record_of(self._config, outcome, rows)
                text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
                write_whole(path, text + "\n")
        self._num_appended = len(rows)


def _csv_text(rows: Sequence[ResultRow]) -> str:
    """The rows as CSV; what is a mapping is JSON in its cell."""
    out = io.StringIO()
    writer = csv.writer(out)
    names = [field.name for field in dataclasses.fields(ResultRow)]
    writer.writerow(names)
    for row in rows:
        cells = (getattr(row, name) for name in names)
        writer.writerow([json.dumps(c) if isinstance(c, dict) else c for c in cells])
    return out.getvalue()


def lines(config: BenchmarkConfig, outcome: BenchmarkResult, *, stats: bool) -> list[str]:
    """Lines for stdout: the run, a table, then what moved under each point; `stats`: by layer."""
    versions = ", ".join(f"{k} {v}" for k, v in results.package_versions("jax", "jaxlib").items())
    bandwidth = outcome.bandwidth
    found = [
        f"{outcome.about} on {results.describe_device(outcome.device)}; {versions}; "
        f"{results.today()}",
        f"{config.new_tokens} new tokens a request, greedy, calls of {outcome.steps_per_call} "
        f"steps; median of {config.runs} runs after a warm-up; bandwidth "
        f"{bandwidth.bytes_per_s / 1e9:.4g} GB/s, {bandwidth.source}",
        *_about(outcome.points),
        "",
        *_table(outcome.points),
    ]
    for point in outcome.points:
        found += _moved(point, stats)
    return found


def _about(points: Sequence[Point]) -> list[str]:
    """Requests and routing, each said once where points do not differ."""
    found = []
    for name in ("requests", "routing"):
        said: dict[str, list[str]] = {}
        for point in points:
            if not point.refusal:
                said.setdefault(getattr(point, name), []).append(point.name)
        for text, names in said.items():
            of = "" if len(said) == 1 else f" of {'; '.join(names)}"
            found.append(f"{name}{of}: {text}")
    return found


def _table(points: Sequence[Point]) -> list[str]:
    known = {name for point in points for name in point.figures}
    columns = [column for column in COLUMNS if column[1] in known]
    head = ["batch", "GiB", *(heading for heading, _, _ in columns)]
    cells = []
    for point in points:
        row = [str(point.batch), f"{point.gib:g}" if point.gib else "-"]
        if point.refusal:
            cells.append([*row, f"refused: {point.refusal}"])
            continue
        for _, name, digits in columns:
            figure = point.figures.get(name)
            text = "-" if figure is None else f"{figure.value:.{digits}f}"
            older = name == "device memory peak" and point.peak_is_older
            row.append(f"<={text}" if older else text)
        cells.append(row)
    widths = [
        max(len(row[i]) for row in [head, *cells] if len(row) == len(head) or i < 2)
        for i in range(len(head))
    ]
    return [
        "  ".join(
            cell.ljust(0) if i == 2 and len(row) == 3 != len(head) else cell.rjust(widths[i])
            for i, cell in enumerate(row)
        )
        for row in [head, *cells]
    ]


def _moved(point: Point, stats: bool) -> list[str]:
    if point.measured is None:
        return []
    found = list(point.placement)
    for phase, ledger in point.measured.ledgers.items():
        found += [f"{phase}: {line}" for line in ledger.describe()]
        found += [f"{phase}: {line}" for line in (ledger.describe_layers() if stats else [])]
    if stats and not point.measured.ledgers:
        found.append(NO_COUNTS)
    late = point.measured.late_compile_s
    if late:
        found.append(f"{late:.2f} s of compiling fell into runs, and are in none of the times")
    return ["", f"{point.name}:", *(f"  {line}" for line in found)] if found else []
