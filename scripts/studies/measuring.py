"""Figures of a benchmark as they come, and the time that a command may take."""

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from moejax.files.result_rows import (
    ResultRow,
    append_rows,
    command_line,
    describe_device,
    package_versions,
    today,
)

MORE = 3  # exit status: the time is up, and there is more to do


class Report:
    """Rows: printed and written as they come, and printed as a table at the end."""

    def __init__(
        self,
        device: jax.Device | str,
        about: str,
        output: str,
        packages: Sequence[str] = ("jax", "jaxlib"),
    ) -> None:
        """Nothing is written yet.

        Args:
          device: of JAX; its name where another library runs.
          about: what goes for all figures; "": nothing.
          output: a JSON Lines file, or "".
          packages: whose versions the rows state.
        """
        self.device, self.output = device, output
        self.end = f", {about}" if about else ""
        self.rows: list[ResultRow] = []
        self._versions = package_versions(*packages)

    def add(self, what: str, figure: float, unit: str, **beside: Any) -> None:
        """Keeps, prints and writes one figure."""
        row = ResultRow(
            what=f"{what}{self.end}",
            figure=figure,
            unit=unit,
            baseline=beside,
            device=(self.device if isinstance(self.device, str) else describe_device(self.device)),
            versions=self._versions,
            date=today(),
            command=command_line(),
        )
        self.rows.append(row)
        print(self._line(row), flush=True)
        if self.output:
            append_rows(Path(self.output), [row])

    def attempt(self, part: Callable[..., Any], *args: Any) -> Any:
        """The part's value, or None after its error was printed."""
        try:
            return part(self, *args)
        except Exception as error:
            traceback.print_exc()
            print(f"  FAILED {part.__name__} {args[:1]}: {error!s:.300}", flush=True)
            return None

    def table(self) -> str:
        """All figures, one a line."""
        return "\n".join(map(self._line, self.rows))

    def _line(self, row: ResultRow) -> str:
        what = row.what.removesuffix(self.end)
        return f"  {what:66s} {row.figure:11.4g} {row.unit:5s} {_numbers(row.baseline)}"


def _numbers(values: Mapping[str, Any]) -> str:
    """The numbers among some values, without lists and texts."""
    return ", ".join(f"{n} {v:.4g}" for n, v in values.items() if isinstance(v, float | int))


def time_limit(seconds: float) -> Callable[[], None]:
    """Makes a check that ends the process with status 3 once the seconds are up; 0: never."""
    start = time.perf_counter()

    def check() -> None:
        if seconds and time.perf_counter() - start > seconds:
            print("more to do: run the same command again", flush=True)
            sys.exit(MORE)

    return check
