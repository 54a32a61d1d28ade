"""The last section of RESULTS.md: what ran on a GPU, from the rows themselves."""

from collections import Counter

from scripts.studies.tables.page import markdown_table
from scripts.studies.tables.rows import Found, Results

HEAD = ("rows of", "rows", "with a known flaw", "dates", "device", "versions", "commands")
INTRODUCTION = """\
## What ran on a GPU

Each row of `scripts/studies/*/*.jsonl` has the command, device, versions and date of its run. Logs
are not kept: this is the summary of the committed rows, by file, with every command and how many of
its rows still count (a run's row goes when a later run measures the same). Commands are as one
types them in the repository's root; `gpu_tests_h200.jsonl` was typed from what pytest printed."""


def section(results: Results) -> str:
    """A table of the files, and their commands."""
    files: dict[str, list[Found]] = {}
    for one in results.measured:
        if not one.row.device.startswith(("NVIDIA", "AMD Instinct")):
            continue
        files.setdefault(one.file, []).append(one)
    table = markdown_table(HEAD, [_row(name, found) for name, found in files.items()])
    commands = [line for name, found in files.items() for line in _commands(name, found)]
    opened = ["<details><summary>The commands</summary>", "", *commands, "</details>"]
    return "\n".join([INTRODUCTION, "", *table, "", *opened]) + "\n"


def _row(name: str, found: list[Found]) -> list[str]:
    def distinct(values: list[str]) -> str:
        return ", ".join(sorted(set(values)))

    versions = distinct(
        [f"{of} {number}" for one in found for of, number in one.row.versions.items()]
    )
    flawed = sum(bool(one.row.flaw) for one in found)
    dates, devices = (
        distinct([getattr(one.row, field) for one in found]) for field in ("date", "device")
    )
    count = len({one.row.command for one in found})
    return [f"`{name}`", str(len(found)), str(flawed), dates, devices, versions, str(count)]


def _commands(name: str, found: list[Found]) -> list[str]:
    counted = Counter((one.row.date, one.row.command) for one in found)
    lines = [
        f"- {date}, {rows} row{'s' * (rows > 1)}: `{command}`"
        for (date, command), rows in counted.items()
    ]
    return [f"`{name}`:", "", *lines, ""]
