"""Numbers that papers print: `published.csv` of each, typed once and checked with their texts."""

import csv
import dataclasses
from pathlib import Path

COLUMNS = ["place", "row", "column", "value", "unit", "section"]
FOLDER = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One printed number.

    Attributes:
      place: such as "Table 1"; "Text" of what stands in a paragraph.
      row: its label.
      column: its label.
      value: as printed, so that no digit is lost; "OOM", "–" and such stand as they are.
      unit: "" of shares and scores.
      section: where the place is.
    """

    place: str
    row: str
    column: str
    value: str
    unit: str
    section: str


class Published:
    """The cells of one paper, by place, row and column."""

    def __init__(self, name: str, folder: Path = FOLDER):
        """Reads NAME/published.csv.

        Raises:
          ValueError: another header, a row that is too short, no value, or the same cell twice.
        """
        self.name = name
        self.cells: dict[tuple[str, str, str], Cell] = {}
        path = folder / name / "published.csv"
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file)
        if header != COLUMNS:
            raise ValueError(f"{path}: the header is {header}; it must be {COLUMNS}")
        for number, row in enumerate(rows, 2):
            if len(row) != len(COLUMNS) or not row[3]:
                raise ValueError(f"{path}:{number}: {row} is no {', '.join(COLUMNS)}")
            cell = Cell(*row)
            key = cell.place, cell.row, cell.column
            if key in self.cells:
                raise ValueError(f"{path}:{number}: {key} stands there twice")
            self.cells[key] = cell

    def __call__(self, place: str, row: str, column: str = "") -> str:
        """A cell as printed; "" where the paper leaves it empty."""
        cell = self.cells.get((place, row, column))
        return cell.value if cell else ""

    def number(self, place: str, row: str, column: str = "") -> float:
        """A cell as a number.

        Raises:
          KeyError: there is no such cell.
          ValueError: it is no number.
        """
        return float(self.cells[place, row, column].value)

    def rows(self, place: str) -> list[str]:
        """The labels of a place's rows, in its order."""
        return list(dict.fromkeys(c.row for c in self.cells.values() if c.place == place))

    def columns(self, place: str) -> list[str]:
        """The labels of a place's columns, in its order."""
        return list(dict.fromkeys(c.column for c in self.cells.values() if c.place == place))
