"""The rows of the studies, checked, with the file and line that each came from."""

import dataclasses
import datetime
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moejax.files.result_rows import ResultRow

# Of rows that say the same and have the same date these came first.
FIRST_RUNS = ("earlier_h200.jsonl", "policies_h200.jsonl")


class BrokenRowError(ValueError):
    """A row that is not of the schema; says its file and line."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A row, and where it stands."""

    row: ResultRow
    file: str
    line: int

    @property
    def figure(self) -> float:
        """The row's figure."""
        return self.row.figure

    @property
    def more(self) -> dict[str, Any]:
        """Values beside the figure; some rows keep lists there."""
        return dict(self.row.baseline)

    @property
    def origin(self) -> tuple[str, str, str, str, str]:
        """File, device, versions, date and command: what rows of one run share."""
        versions = ", ".join(f"{name} {number}" for name, number in self.row.versions.items())
        return self.file, self.row.device, versions, self.row.date, self.row.command


def _broken(row: Any) -> str | None:
    """Says what is wrong with a decoded row; None where nothing is."""
    names = [field.name for field in dataclasses.fields(ResultRow)]
    if not isinstance(row, dict):
        return "is no object"
    if sorted(row) != sorted(names):
        return f"has the fields {', '.join(sorted(row))}; a row has {', '.join(sorted(names))}"
    for name in ("what", "unit", "device", "date", "command"):
        text = row[name]
        if not isinstance(text, str) or not (text or name == "unit"):
            return f"{name}={text!r} must be a text"
    figure = row["figure"]
    if isinstance(figure, bool) or not isinstance(figure, int | float) or not math.isfinite(figure):
        return f"figure={figure!r} must be a finite number"
    for name in ("baseline", "versions"):
        if not isinstance(row[name], dict):
            return f"{name}={row[name]!r} must be an object"
    if not all(isinstance(version, str) for version in row["versions"].values()):
        return f"versions={row['versions']!r} must be texts"
    try:
        datetime.date.fromisoformat(row["date"])
    except ValueError:
        return f"date={row['date']!r} is no ISO date"
    return None


def read_checked(path: Path) -> Iterator[Found]:
    """The rows of a file.

    Args:
      path: a JSON Lines file.

    Raises:
      BrokenRowError: a line is no JSON, or no row.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            decoded = json.loads(line)
        except json.JSONDecodeError as error:
            raise BrokenRowError(f"{path}:{number}: is no JSON: {error}") from error
        said = _broken(decoded)
        if said:
            raise BrokenRowError(f"{path}:{number}: {said}")
        yield Found(ResultRow(**decoded), path.name, number)


class Results:
    """All measured rows, in the order of files; of rows that say the same the latest counts."""

    def __init__(self, folder: Path):
        """Reads every file below a folder, in the order of their names.

        Args:
          folder: with *.jsonl in it, or in folders of it.

        Raises:
          BrokenRowError: see `read_checked`.
        """
        paths = sorted(folder.rglob("*.jsonl"), key=lambda path: path.name)
        self.measured = [one for path in paths for one in read_checked(path)]
        latest: dict[str, Found] = {}
        for one in sorted(
            self.measured, key=lambda of: (of.row.date, of.file not in FIRST_RUNS, of.file, of.line)
        ):
            latest.pop(one.row.what, None)  # so that the order is that of the latest
            latest[one.row.what] = one
        self._rows = latest

    def get(self, what: str) -> Found | None:
        """The latest row that says exactly this; None where nothing was measured."""
        return self._rows.get(what)

    def every(self, pattern: str) -> list[tuple[re.Match[str], Found]]:
        """The latest row of each `what` that is of a pattern (of all of it), oldest first."""
        of = re.compile(pattern)
        matched = ((of.fullmatch(what), one) for what, one in self._rows.items())
        return [(match, one) for match, one in matched if match]
