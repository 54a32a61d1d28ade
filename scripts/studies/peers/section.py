"""Tables and the picture of other engines beside moejax, from the rows of `bench_peers`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moejax.files.result_rows import ResultRow, read_rows
from scripts.studies.peers import ours
from scripts.studies.peers.running import NOT_RUN, decode, prefill
from scripts.studies.tables.drawing import Canvas, lines
from scripts.studies.tables.paper import markdown_table

FOLDER = Path(__file__).parent
ROOM = 1.05  # ours may take so many times their memory: a step of a budget
PROMPT = 512
COLUMNS = 3  # of panels
COMMAND = "python -m scripts.studies.peers.bench_peers"
NONE = f"No rows yet: `{COMMAND}` ([its study](%s)) makes them on a GPU, and this table with them."


class Row(NamedTuple):
    """A row of `bench_peers`, taken apart."""

    peer: str  # engine
    shape: str  # of the model
    setting: str  # the rest of what was run: depth, bits, flags or budget, routing
    load: str  # of the case
    workload: str  # of the figure; "not run" with an error
    row: ResultRow  # as it stands in the file

    @property
    def peak_gib(self) -> float:
        """Device memory: what JAX held and CUDA's context, or the driver's count; NaN: unknown."""
        found = self.row.baseline
        if "own_peak_gib" in found:
            return float(found["own_peak_gib"]) + ours.CONTEXT_GIB
        return float(found.get("peak_gib", math.nan))

    @property
    def is_resident(self) -> bool:
        """Whether all experts are on the device."""
        return ours.OWN in self.setting or "-ncmoe 0 " in self.setting

    @property
    def is_plain(self) -> bool:
        """Whether its weights are bf16."""
        return ", bf16" in self.setting


def taken_apart(rows: Sequence[ResultRow]) -> list[Row]:
    """Rows by their parts; of those that say the same the last."""
    found = {}
    for row in rows:
        peer, about, load, workload = row.what.split(" | ")
        shape, _, setting = about.partition(", ")
        found[row.what] = Row(peer, shape, setting, load, workload, row)
    return list(found.values())


def all_rows() -> list[Row]:
    """Rows of the files of this study."""
    return taken_apart(
        [row for path in sorted(FOLDER.glob("peers_*.jsonl")) for row in read_rows(path)]
    )


def beside(rows: Sequence[Row], theirs: Row, routing: str) -> Row | None:
    """Our fastest row of the same workload, bits and depth in the memory that they took.

    Where both have all experts on the device, memory is no matter.
    """
    found = [
        row
        for row in rows
        if row.peer == ours.NAME
        and (row.shape, row.workload, row.is_plain)
        == (theirs.shape, theirs.workload, theirs.is_plain)
        and (row.load == "server") == (theirs.load == "server")
        and row.setting.split(",")[0] == theirs.setting.split(",")[0]
        and (row.peak_gib <= ROOM * theirs.peak_gib or (row.is_resident and theirs.is_resident))
        and (routing in row.setting or "routers' routing" in row.setting)
    ]
    return max(found, key=lambda row: row.row.figure, default=None)


def comparisons(rows: Sequence[Row], workloads: Sequence[str]) -> list[list[str]]:
    """Cells of a table, where we lose first."""
    made: list[tuple[float, list[str]]] = []
    for row in rows:
        # The load `one` measures the same.
        is_repeated = row.load == "batch" and row.workload in (prefill(PROMPT), decode(PROMPT))
        if row.peer == ours.NAME or row.workload not in workloads or is_repeated:
            continue
        found = [beside(rows, row, routing) for routing in ours.ROUTINGS]
        cells = ["" if one is None else said(one.row.figure) for one in found]
        first = found[0]
        own, times = "", ""
        if first is None:
            ratio, times = _missing(rows, row)
        else:
            ratio = first.row.figure / row.row.figure
            own, times = f"{first.peak_gib:.1f}", f"{ratio:.2f}"
        peak = "" if math.isnan(row.peak_gib) else f"{row.peak_gib:.1f}"
        cells = [row.shape, row.workload, f"{row.peer}: {row.setting}", peak,
                 said(row.row.figure), own, *cells, times]  # fmt: skip
        made.append((ratio, cells))
    return [cells for _, cells in sorted(made, key=lambda one: one[0])]


def _missing(rows: Sequence[Row], theirs: Row) -> tuple[float, str]:
    """Why none of ours stands beside a row: 0 and the words of a loss, else infinity."""
    own = [row for row in rows if row.peer == ours.NAME
           and (row.shape, row.is_plain) == (theirs.shape, theirs.is_plain)]  # fmt: skip
    if theirs.is_resident and any(row.is_resident and row.row.unit == NOT_RUN for row in own):
        return 0.0, "ours failed"
    limited = [row.peak_gib for row in own
               if not row.is_resident and row.workload == theirs.workload]  # fmt: skip
    if limited and min(limited) > ROOM * theirs.peak_gib:
        return 0.0, "ours takes more"
    return math.inf, "not measured"


HEAD = ["shape", "workload", "engine", "GiB", "tokens/s", "our GiB", "ours, even", "ours, recorded",
        "ours, skewed", "even / theirs"]  # fmt: skip


def said(rate: float) -> str:
    """Four digits of a rate, or all before its point."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def whole(rows: Sequence[Row]) -> str:
    """Every workload, and what could not run."""
    if not rows:
        return NONE % "../scripts/studies/peers/README.md"
    made = [of_whom(rows), ""]
    one = [prefill(PROMPT), decode(PROMPT)]
    servers = [row for row in rows if row.load == "server"]
    loops = [row for row in rows if row.load != "server"]
    for title, some, are_one in (
        ("One sequence, a prompt of 512", loops, True),
        ("Longer prompts, and more sequences", loops, False),
        ("Servers, asked by one client", servers, None),
    ):
        names = dict.fromkeys(row.workload for row in some if row.row.unit != NOT_RUN)
        cells = comparisons(some, [n for n in names if are_one in (None, n in one)])
        if cells:
            made += [f"**{title}**", "", markdown_table(HEAD, cells), ""]
    failed = [[f"{r.peer}, {r.shape}: {r.setting}", r.load, str(r.row.baseline["error"])]
              for r in rows if r.row.unit == NOT_RUN]  # fmt: skip
    if failed:
        made += ["**Could not run**", "", markdown_table(["what", "load", "its error"], failed)]
    return "\n".join(made).rstrip()


def of_whom(rows: Sequence[Row]) -> str:
    """Devices, versions and dates."""
    devices = ", ".join(sorted({row.row.device for row in rows}))
    dates = sorted({row.row.date for row in rows})
    versions = {f"{n} {v}" for row in rows for n, v in row.row.versions.items()}
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{devices}; {', '.join(sorted(versions))}; {when}."


def curves(rows: Sequence[Row], shape: str) -> dict[str, tuple[list[float], list[float]]]:
    """Decode rates over device memory: the fastest setting of each memory, rising.

    Others come first; ours is a curve by routing, each up to the row that holds all experts.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    of_shape = [
        row for row in rows
        if (row.shape, row.load, row.workload) == (shape, "one", decode(PROMPT))
        and not math.isnan(row.peak_gib) and not row.is_plain
    ]  # fmt: skip
    replayed = [r for r in ours.ROUTINGS if any(r in row.setting for row in of_shape)]
    for row in sorted(of_shape, key=lambda row: row.peer == ours.NAME):
        names = [row.peer]
        if row.peer == ours.NAME and replayed:
            names = [f"{row.peer}, {r}" for r in replayed if r in row.setting or row.is_resident]
        for name in names:
            points.setdefault(name, []).append((row.peak_gib, row.row.figure))
    order = [name for r in replayed for name in points if name.endswith(r)]
    names = [name for name in points if name not in order] + order
    return {name: _frontier(points[name]) for name in names}


def _frontier(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    found: list[tuple[float, float]] = []
    for gib, rate in sorted(points, key=lambda point: (point[0], -point[1])):
        if not found or rate > found[-1][1]:
            found.append((gib, rate))
    return [gib for gib, _ in found], [rate for _, rate in found]


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draws tokens a second over device memory, a panel a shape; nothing without rows."""
    by_shape = {row.shape: curves(rows, row.shape) for row in rows}
    shapes = {shape: found for shape, found in by_shape.items() if found}
    if not shapes:
        return []

    def figure(canvas: Canvas) -> None:
        columns = min(len(shapes), COLUMNS)
        panels = canvas.panels(-(-len(shapes) // columns), columns)
        for panel in panels[len(shapes) :]:
            panel.set_axis_off()
        for panel, (shape, found) in zip(panels, shapes.items(), strict=False):
            lines(panel, found, title=shape, xlabel="device memory, GiB (peak)",
                  ylabel="decode, tokens/s")  # fmt: skip

    return [Canvas.save(figure, folder / "beside_other_systems.png")]
