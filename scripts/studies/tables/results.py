"""The regions of RESULTS.md: those of each paper, the counts of verdicts, what ran on a GPU."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from scripts.studies.buddymoe import section as buddymoe
from scripts.studies.dymoe import section as dymoe
from scripts.studies.dynaexq import section as dynaexq
from scripts.studies.milo import section as milo
from scripts.studies.tables.paper import VERDICTS, Paper, markdown_table
from scripts.studies.tables.rows import Found, Results

ROWS = Path(__file__).parents[1]
TITLES = {"dynaexq": "DynaExq", "dymoe": "DyMoE", "buddymoe": "BuddyMoE", "milo": "MiLo"}
_SECTIONS: dict[str, Callable[[Paper], None]] = {
    "dynaexq": dynaexq.write, "dymoe": dymoe.write, "buddymoe": buddymoe.write, "milo": milo.write,
}  # fmt: skip


def papers(results: Results) -> dict[str, Paper]:
    """The sections by paper."""
    found = {}
    for name, write in _SECTIONS.items():
        found[name] = Paper(name, results)
        write(found[name])
        found[name].finish()
    return found


def regions(results: Results) -> dict[str, str]:
    """All regions by name, such as "dymoe table 3"."""
    found = papers(results)
    made: dict[str, str] = {}
    for name, paper in found.items():
        made |= {f"{name} {region}": text for region, text in paper.regions.items()}
    made["verdicts"] = _verdicts(found)
    made["gpu files"], made["gpu commands"] = _gpu_runs(results)
    return made


def draw(found: dict[str, Paper], folder: Path) -> list[Path]:
    """The pictures; those of figures that are no longer drawn go."""
    drawn = [path for paper in found.values() for path in paper.draw(folder)]
    for name in found:
        for path in folder.glob(f"{name}_figure_*.png"):
            if path not in drawn:
                path.unlink()
    return drawn


def _verdicts(found: dict[str, Paper]) -> str:
    rows = []
    for name, paper in found.items():
        counted = Counter(paper.verdicts)
        rows.append([TITLES[name], *(str(counted[verdict]) for verdict in VERDICTS)])
    return markdown_table(["paper", *VERDICTS], rows)


def _gpu_runs(results: Results) -> tuple[str, str]:
    """A table of the files whose rows a GPU measured, and their commands."""
    files: dict[str, list[Found]] = {}
    for one in results.measured:
        if one.row.device.startswith(("NVIDIA", "AMD Instinct")):
            files.setdefault(one.file, []).append(one)
    rows, lines = [], []
    for name, found in files.items():
        of = [one.row for one in found]
        versions = {f"{of} {number}" for row in of for of, number in row.versions.items()}
        rows.append([
            f"`{name}`", str(len(of)),
            *(", ".join(sorted(values)) for values in (
                {row.date for row in of}, {row.device for row in of}, versions,
            )),
            str(len({row.command for row in of})),
        ])  # fmt: skip
        counted = Counter((row.date, row.command) for row in of)
        lines += [f"`{name}`:", ""]
        lines += [
            f"- {date}, {count} row{'s' * (count > 1)}: `{command}`"
            for (date, command), count in counted.items()
        ]
        lines += [""]
    head = ["rows of", "rows", "dates", "device", "versions", "commands"]
    return markdown_table(head, rows), "\n".join(lines).rstrip()
