"""Claims of a paper and the runs that their rows come from, as tables of RESULTS.md."""

from collections.abc import Sequence
from typing import Any

from scripts.studies.tables.rows import Found


class Runs:
    """Runs in the order in which they are named: [s1], [s2] and so on."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, ...], list[int]] = {}

    def cite(self, *found: Found) -> str:
        """Names the runs that rows come from."""
        numbers = set()
        for one in found:
            lines = self._runs.setdefault(one.origin, [])
            if one.line not in lines:
                lines.append(one.line)
            numbers.add(list(self._runs).index(one.origin) + 1)
        return f"[{', '.join(f's{number}' for number in sorted(numbers))}]"

    def table(self) -> str:
        """File and lines, device, versions, date and command of each run."""
        rows = [
            [f"[s{number}]", f"`{file}`, {_lines_of(lines)}", device, versions, date,
             f"`{command}`"]
            for number, ((file, device, versions, date, command), lines) in enumerate(
                self._runs.items(), 1
            )
        ]  # fmt: skip
        if not rows:
            return "No run of the study model yet."
        return markdown_table(["", "rows", "device", "versions", "date", "command"], rows)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> str:
    """A table; refuses a row of another length.

    Args:
      align: "l" or "r" for the first columns; the last of them goes for the others, too.
    """

    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"{row} has not the {len(header)} columns of {header}")
    sides = (align or "l").ljust(len(header), (align or "l")[-1])
    marks = [" ---: " if side == "r" else " --- " for side in sides]
    return "\n".join([line(header), f"|{'|'.join(marks)}|", *map(line, rows)])


def _lines_of(numbers: Sequence[int]) -> str:
    """Numbers of lines as one reads them: lines 1-3, 7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in parts)
    return f"{'lines' if len(numbers) > 1 else 'line'} {shown}"
