"""A paper's part of RESULTS.md: claims, tables, figures and their runs, each a region."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.studies.tables.drawing import Canvas
from scripts.studies.tables.published import Published
from scripts.studies.tables.rows import Found, Results

NOT_MEASURED = "not measured"
OTHER_DEVICE = "not measured on one device"
MET, NOT_MET, OTHER = "met", "not met", "not comparable"
IN_PART, NOT_SHOWN = "met in part", "not shown"
VERDICTS = (MET, IN_PART, NOT_MET, NOT_SHOWN, OTHER, NOT_MEASURED)
SPEED_SPREAD = 0.03  # of times between runs: load on demand took 127.4 to 131.6 ms
PERPLEXITY_SPREAD = 0.01  # of the demo's perplexities between runs and programs
PAPER, OURS = "paper", "**ours**"
Draw = Callable[[Canvas], None]
Judged = tuple[str, str | bool]  # what we find, and the verdict; True: met


def against(values: Sequence[float], bars: Sequence[float], spread: float) -> str:
    """Verdict of values that are to reach bars; what is nearer than the spread is not shown.

    Met by all, met in part by some where others are not met, not met by none.
    """
    passed = [value / bar >= 1 + spread for value, bar in zip(values, bars, strict=True)]
    failed = [value / bar < 1 - spread for value, bar in zip(values, bars, strict=True)]
    if any(failed):
        return IN_PART if any(passed) else NOT_MET
    return MET if all(passed) else NOT_SHOWN


class Paper:
    """Regions of one paper's section, made in the order in which they are read.

    A number of ours ends with [n], the run of the section's last table.

    Attributes:
      results: our rows.
      published: the paper's numbers.
      claims: claim, section, what we find, verdict.
      regions: Markdown by name, without the paper's.
      drawings: pictures by the file's name.
    """

    def __init__(self, name: str, results: Results):
        self.name, self.results, self.published = name, results, Published(name)
        self.claims: list[list[str]] = []
        self.regions: dict[str, str] = {}
        self.drawings: dict[str, Draw] = {}
        self._runs: dict[tuple[str, ...], list[int]] = {}

    def cite(self, *found: Found) -> str:
        """[n] of the runs that rows come from."""
        numbers = set()
        for one in found:
            lines = self._runs.setdefault(one.origin, [])
            if one.line not in lines:
                lines.append(one.line)
            numbers.add(list(self._runs).index(one.origin) + 1)
        return f"[{', '.join(map(str, sorted(numbers)))}]"

    def ours(self, what: str, form: str = "{:.2f}", key: str = "", scale: float = 1.0) -> str:
        """The figure of the row that says exactly this; see `shown`."""
        return self.shown(self.results.get(what), form, key, scale)

    def shown(
        self, found: Found | None, form: str = "{:.2f}", key: str = "", scale: float = 1.0
    ) -> str:
        """A figure of ours and its run, or "not measured".

        Args:
          found: the row.
          form: of the number.
          key: of what stands beside the figure; "": the figure.
          scale: the number is multiplied by it.
        """
        if found is None or (key and key not in found.more):
            return NOT_MEASURED
        value = found.more[key] if key else found.figure
        return f"{form.format(scale * value)} {self.cite(found)}"

    def derived(self, form: str, compute: Callable[..., float], *found: Found | None) -> str:
        """A number that is computed from figures of one device, or that there is none."""
        rows = [one for one in found if one is not None]
        if len(rows) < len(found):
            return NOT_MEASURED
        if len({one.row.device for one in rows}) > 1:
            return OTHER_DEVICE
        return f"{form.format(compute(*(one.figure for one in rows)))} {self.cite(*rows)}"

    def ratio(self, base: Found | None, own: Found | None, form: str = "{:.2f}") -> str:
        """How many times as fast a row is as its base."""
        return self.derived(form, lambda a, b: a / b, base, own)

    def claim(
        self, said: str, where: str, rows: Sequence[Found | None], judge: Callable[..., Judged]
    ) -> None:
        """A row of the section's first table.

        Args:
          said: by the paper.
          where: its section.
          rows: that decide; without one of them the claim is not measured.
          judge: what we find, and the verdict, from the rows.
        """
        finding, verdict = NOT_MEASURED, NOT_MEASURED
        found = [one for one in rows if one is not None]
        if len(found) == len(rows):
            finding, judged = judge(*found)
            verdict = judged if isinstance(judged, str) else MET if judged else NOT_MET
        self.claims.append([said, where, finding, verdict])

    @property
    def verdicts(self) -> list[str]:
        """Verdicts of the claims, in their order."""
        return [claim[3] for claim in self.claims]

    def inline(self, region: str, text: str) -> None:
        """A text with numbers, within a line of the page."""
        self.regions[region] = text

    def table(self, region: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table, whose last column is "what differs"."""
        self.regions[region] = markdown_table([*head, "what differs"], rows)

    def theirs(
        self, place: str, differs: str, columns: Sequence[str] | None = None
    ) -> list[list[str]]:
        """The paper's rows of a table, as printed."""
        columns = self.published.columns(place) if columns is None else columns
        return [
            [row, PAPER, *(self.published(place, row, column) for column in columns), differs]
            for row in self.published.rows(place)
        ]

    def figure(self, region: str, draw: Draw, found: Sequence[Found | None]) -> None:
        """A picture of rows, `NAME_figure_N.png`; its region has their runs, behind the caption."""
        rows = [one for one in found if one is not None]
        if not rows or len(rows) < len(found):
            self.regions[region] = f": {NOT_MEASURED}."
            return
        self.drawings[f"{self.name}_{region.replace(' ', '_')}"] = draw
        self.regions[region] = f" {self.cite(*rows)}"

    def draw(self, folder: Path) -> list[Path]:
        """Writes the pictures."""
        return [Canvas.save(draw, folder / f"{name}.png") for name, draw in self.drawings.items()]

    def finish(self) -> None:
        """Makes the regions that need all others: claims and runs."""
        head = ["claim", "section", "what we find", "verdict"]
        self.regions["claims"] = markdown_table(head, self.claims)
        runs = [
            [f"[{number}]", f"`{file}`, {_lines_of(lines)}", device, versions, date, f"`{command}`"]
            for number, ((file, device, versions, date, command), lines) in enumerate(
                self._runs.items(), 1
            )
        ]
        self.regions["runs"] = markdown_table(
            ["", "rows", "device", "versions", "date", "command"], runs
        )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; refuses a row of another length."""

    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"{row} has not the {len(header)} columns of {header}")
    return "\n".join([line(header), "|" + " --- |" * len(header), *map(line, rows)])


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
