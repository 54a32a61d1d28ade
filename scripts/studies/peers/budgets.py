"""Tables of our budgets, each beside the fastest of llama.cpp in the same budget."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scripts.studies.peers import llama_cpp, ours
from scripts.studies.peers.running import NOT_RUN, decode, prefill
from scripts.studies.peers.section import NONE, PROMPT, ROOM, Row, of_whom, said
from scripts.studies.tables.paper import markdown_table

FIRST = "Qwen3-30B-A3B"
MISSING = "not measured"
LESS = 0.9  # below so many times our memory a row of theirs says what it took


class Point(NamedTuple):
    """One budget of a model, and one workload."""

    own: Mapping[str, Row]  # our fastest row by routing; under no limit each routing has the same
    error: str  # of ours, which then has no row
    # llama.cpp's fastest row that took no more than `ROOM` times the budget; where all experts are
    # on the device on both sides, memory is no matter
    theirs: Row | None

    def times(self, routing: str = ours.EVEN) -> float:
        """Our rate over theirs; 0 where ours failed, NaN where one is missing."""
        if self.error:
            return 0.0
        if self.theirs is None or routing not in self.own:
            return math.nan
        return self.own[routing].row.figure / self.theirs.row.figure


def point(rows: Sequence[Row], shape: str, gib: float, workload: str) -> Point:
    """Rows of a budget in GiB; 0: all experts are on the device."""
    limit = f"{gib:g} GiB, " if gib else f"all on the device, {ours.OWN}"
    mine = [
        row for row in rows
        if row.peer == ours.NAME and row.shape == shape and f", {limit}" in row.setting
    ]  # fmt: skip
    own: dict[str, Row] = {}
    for row in sorted(mine, key=lambda one: one.row.figure):
        if row.workload == workload and not row.is_plain and row.load != "server":
            own |= {r: row for r in ours.ROUTINGS if not gib or r in row.setting}
    failed = [row for row in mine if row.workload == NOT_RUN]
    error = str(failed[-1].row.baseline["error"]) if failed and not own else ""
    theirs = [
        row for row in rows
        if (row.peer, row.shape, row.workload) == (llama_cpp.NAME, shape, workload)
        and row.load != "server"
        and (row.peak_gib <= ROOM * gib if gib else row.is_resident)
    ]  # fmt: skip
    return Point(own, error, max(theirs, key=lambda row: row.row.figure, default=None))


def _budgets(shape: str) -> list[float]:
    return [0, *reversed(ours.BUDGETS[shape])]


def _rate(row: Row | None) -> str:
    return "" if row is None else said(row.row.figure)


def _memory(gib: float) -> str:
    return f"{gib:g} GiB" if gib else "all on the device"


def short(rows: Sequence[Row]) -> str:
    """Decode of one sequence after a prompt of 512 by model and budget, for the README."""
    if not rows:
        return NONE % "scripts/studies/peers/README.md"
    shapes = dict.fromkeys(row.shape for row in rows)
    made = []
    for shape in shapes:
        points = {gib: point(rows, shape, gib, decode(PROMPT)) for gib in _budgets(shape)}
        limited = "; ".join(
            f"{_memory(gib)}: {_cell(one)}" for gib, one in points.items() if gib and one.own
        )
        times = [one.times() for one in points.values() if not math.isnan(one.times())]
        made.append((min(times, default=math.inf), [shape, _cell(points[0]), limited]))
    cells = [one for _, one in sorted(made, key=lambda pair: pair[0])]
    head = ["ours / llama.cpp's, tokens/s", "all on the device", "under a budget, even routing"]
    return "\n".join([of_whom(rows), "", markdown_table(head, cells)])


def _cell(one: Point) -> str:
    own = "failed" if one.error else _rate(one.own.get(ours.EVEN)) or MISSING
    theirs = _rate(one.theirs) or MISSING
    if one.theirs and one.own:
        took = one.theirs.peak_gib
        is_less = took < LESS * max(row.peak_gib for row in one.own.values())
        theirs += f" (in {took:.1f} GiB)" if is_less else ""
    return f"{own} / {theirs}"


def in_line(rows: Sequence[Row], peer: str) -> str:
    """Decode rates of Qwen3-30B-A3B, for a cell of the README's table; of ours by routing."""
    cells = []
    for gib in (0, 12, 7, 3):
        one = point(rows, FIRST, gib, decode(PROMPT))
        if peer == ours.NAME:
            ranked = sorted(one.own.values(), key=lambda row: row.row.figure)
            rates = dict.fromkeys(_rate(row) for row in (ranked[:1] + ranked[-1:]))
            cells.append(" to ".join(rates) or MISSING)
        else:
            cells.append(_rate(one.theirs) or MISSING)
    return "; ".join(cells)


def by_budget(rows: Sequence[Row], shapes: Sequence[str]) -> str:
    """Decode and prefill of models under each budget, with what was not measured."""
    made = []
    for shape in shapes:
        for gib in _budgets(shape):
            one = point(rows, shape, gib, decode(PROMPT))
            read = point(rows, shape, gib, prefill(PROMPT))
            own = one.own.get(ours.EVEN)
            hits = own.row.baseline.get("hits_percent", math.nan) if own else math.nan
            cells = ["failed", "failed"] if one.error else [MISSING, MISSING]
            if own:
                cells = [_rate(own), _rate(read.own.get(ours.EVEN))]
            made.append([
                shape, _memory(gib), f"{own.peak_gib:.1f}" if own else "",
                "" if math.isnan(float(hits)) else f"{float(hits):.0f} %", *cells,
                f"{one.theirs.peak_gib:.1f}" if one.theirs else "",
                _rate(one.theirs), _rate(read.theirs),
            ])  # fmt: skip
    head = ["model", "budget", "our GiB", "hits", "decode", "prefill of 512", "llama.cpp's GiB",
            "its decode", "its prefill"]  # fmt: skip
    return "\n".join([of_whom([row for row in rows if row.shape in shapes]), "",
                      markdown_table(head, made)])  # fmt: skip


# Bars of Qwen3-30B-A3B: budget in GiB, routing, workload, times llama.cpp's rate.
BARS: tuple[tuple[float, str, str, float], ...] = (
    *((0, ours.OWN, decode(PROMPT, count), 1.7) for count in ours.SEQUENCES),
    (12, ours.RECORDED, decode(PROMPT), 2.5), (7, ours.RECORDED, decode(PROMPT), 2.5),
    (12, ours.EVEN, decode(PROMPT), 1.2), (7, ours.EVEN, decode(PROMPT), 1.2),
    (3, ours.EVEN, decode(PROMPT), 1.3),
    *((gib, ours.EVEN, prefill(4096), 1.3) for gib in (12, 7, 3)),
)  # fmt: skip


def bars(rows: Sequence[Row]) -> str:
    """Each bar that was set before the rows, and whether they meet it; misses first."""
    made = []
    for gib, routing, workload, least in BARS:
        one = point(rows, FIRST, gib, workload)
        by = routing if gib else ours.EVEN
        times = one.times(by)
        verdict = "not shown" if math.isnan(times) else "met" if times >= least else "missed"
        # A prompt has the random routers' routing under every budget.
        how = "" if workload.startswith("prefill") else f", {routing if gib else 'random routing'}"
        cells = [f"{workload}, {_memory(gib)}{how}", _rate(one.own.get(by)), _rate(one.theirs),
                 "" if math.isnan(times) else f"{times:.2f}", f"{least:g}", verdict]  # fmt: skip
        made.append((math.inf if math.isnan(times) else times / least, cells))
    head = ["Qwen3-30B-A3B", "ours", "llama.cpp's", "times", "at least", "verdict"]
    return markdown_table(head, [cells for _, cells in sorted(made, key=lambda one: one[0])])
