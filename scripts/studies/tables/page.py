"""A paper's part of RESULTS.md as it is written: claims, tables, figures, and their runs."""

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
MARKS = "†‡§¶"  # of rows with a known flaw, one a flaw
COUNTED = ("megabytes_a_step",)  # beside a time, and right where the time is not
PAPER, OURS = "paper", "**ours**"
Draw = Callable[[Canvas], None]


class Page:
    """One section. Numbers of ours end with [n], the run of the section's last table.

    Of rows with a known flaw a mark of `MARKS` follows, which the section's beginning explains.
    """

    def __init__(self, title: str, results: Results, published: Published, figures: str):
        """Nothing is written yet.

        Args:
          title: of the section.
          results: ours.
          published: the paper's.
          figures: their folder as RESULTS.md names it.
        """
        self.results, self.published, self._folder = results, published, figures
        self._title = title
        self._claims: list[list[str]] = []
        self._lines: list[str] = []
        self._runs: dict[tuple[str, ...], list[int]] = {}
        self._flaws: list[str] = []
        self._first = ""
        self.drawings: dict[str, Draw] = {}

    def cite(self, *found: Found) -> str:
        """[n] of the runs that rows come from, and the marks of what is wrong with them."""
        flaws = [one.row.flaw for one in found if one.row.flaw]
        self._flaws += [flaw for flaw in dict.fromkeys(flaws) if flaw not in self._flaws]
        marks = "".join(sorted({MARKS[self._flaws.index(flaw)] for flaw in flaws}))
        return f"{self._number(*found)}{marks}"

    def _number(self, *found: Found) -> str:
        numbers = []
        for one in found:
            lines = self._runs.setdefault(one.origin, [])
            if one.line not in lines:
                lines.append(one.line)
            numbers.append(list(self._runs).index(one.origin) + 1)
        return f"[{', '.join(map(str, sorted(set(numbers))))}]"

    def ours(self, what: str, form: str = "{:.2f}", key: str = "", scale: float = 1.0) -> str:
        """A figure of ours and its run, or "not measured".

        Args:
          what: of the row, exactly.
          form: of the number.
          key: of what stands beside the figure; "": the figure.
          scale: the number is multiplied by it.
        """
        return self.shown(self.results.get(what), form, key, scale)

    def shown(
        self, found: Found | None, form: str = "{:.2f}", key: str = "", scale: float = 1.0
    ) -> str:
        """Formats a row that was looked for in another way, as `ours` does."""
        if found is None or (key and key not in found.more):
            return NOT_MEASURED
        value = found.more[key] if key else found.figure
        cited = self._number(found) if key in COUNTED else self.cite(found)
        return f"{form.format(scale * value)} {cited}"

    def derived(self, form: str, compute: Callable[..., float], *found: Found | None) -> str:
        """A number that is computed from figures of one device, or that there is none."""
        rows = [one for one in found if one is not None]
        if len(rows) < len(found):
            return NOT_MEASURED
        if len({one.row.device for one in rows}) > 1:
            return OTHER_DEVICE
        return f"{form.format(compute(*(one.figure for one in rows)))} {self.cite(*rows)}"

    def claim(self, claim: str, section: str, finding: str, verdict: str) -> None:
        """A row of the section's first table."""
        self._claims.append([claim, section, finding, verdict])

    def first_line(self, text: str) -> None:
        """Sets the text before the claims: how the section's perplexities are taken."""
        self._first = text

    @property
    def claims(self) -> list[list[str]]:
        """Claim, section, what we find, verdict."""
        return self._claims

    @property
    def verdicts(self) -> list[str]:
        """Verdicts of the claims, in their order."""
        return [claim[3] for claim in self._claims]

    def heading(self, text: str, *paragraphs: str) -> None:
        """A part of the section."""
        self._lines += ["", f"### {text}", ""]
        for paragraph in paragraphs:
            self.text(paragraph)

    def text(self, paragraph: str) -> None:
        """A paragraph."""
        self._lines += [*([] if self._lines[-1:] == [""] else [""]), paragraph, ""]

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; texts are to the left, numbers too: they end with their runs."""
        self._lines += [
            *([] if self._lines[-1:] == [""] else [""]),
            *markdown_table(header, rows),
            "",
        ]

    def figure(self, name: str, caption: str, draw: Draw, found: Sequence[Found | None]) -> None:
        """A picture of rows; where one of the rows is missing a line says so instead.

        Args:
          name: of the file, without suffix.
          caption: what is to be seen, and on what.
          draw: draws it.
          found: the rows that it draws.
        """
        rows = [one for one in found if one is not None]
        if not rows or len(rows) < len(found):
            self.text(f"*{caption}*: {NOT_MEASURED}.")
            return
        self.drawings[name] = draw
        self.text(f"![{name}]({self._folder}/{name}.png)")
        self.text(f"*{caption}* {self.cite(*rows)}")

    def draw(self, folder: Path) -> list[Path]:
        """Writes the pictures."""
        return [Canvas.save(draw, folder / f"{name}.png") for name, draw in self.drawings.items()]

    def markdown(self) -> str:
        """The whole section."""
        head = ["claim", "section", "what we find", "verdict"]
        runs = [
            [f"[{number}]", f"`{file}`, {_lines_of(lines)}", device, versions, date, f"`{command}`"]
            for number, ((file, device, versions, date, command), lines) in enumerate(
                self._runs.items(), 1
            )
        ]
        lines = [f"## {self._title}", "", self._first, "", *markdown_table(head, self._claims), ""]
        lines += [f"{MARKS[i]} Known to be wrong: {flaw}." for i, flaw in enumerate(self._flaws)]
        lines += self._lines
        lines += ["", "### Runs of this section", ""]
        lines += markdown_table(["", "rows", "device", "versions", "date", "command"], runs)
        text = "\n".join(lines) + "\n"
        while "\n\n\n" in text:
            text = text.replace("\n\n\n", "\n\n")
        return text


def borne_out(verdict: str, *found: Found | None) -> str:
    """A verdict, or that it is not shown where a claim would be met by rows with a known flaw."""
    is_flawed = any(one is not None and one.row.flaw for one in found)
    return NOT_SHOWN if is_flawed and verdict in (MET, IN_PART) else verdict


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; refuses a row of another length."""

    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"{row} has not the {len(header)} columns of {header}")
    return [line(header), "|" + " --- |" * len(header), *map(line, rows)]


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
