"""Runs cases one after another within a time, and appends their rows to a file.

What has rows is passed over, so a call goes on where the last one stopped.
"""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from moejax.files.result_rows import (
    ResultRow,
    append_rows,
    command_line,
    package_versions,
    read_rows,
    today,
)
from scripts.studies.peers import ours
from scripts.studies.peers.running import NOT_RUN, Case, Figure, NotRunError, OutOfTimeError, Place

UNIT = "tokens/s"
PATHS = ("llama_cpp", "gguf", "freetoken", "trace")  # flags
CHOICES = ("only", "seconds")  # flags that change no row


def chosen(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """Cases by name, in the order of the words that their names have."""
    if not only:
        return list(cases)
    have = ([case for case in cases if word in "\n".join(case.names)] for word in only)
    return list({case.names: case for of_word in have for case in of_word}.values())


def names_done(rows: Path, again: bool) -> set[str]:
    """Names of the cases that have rows; with `again` not of those that could not run."""
    return {
        row.what.rpartition(" | ")[0]
        for row in (read_rows(rows) if rows.exists() else [])
        if not (again and row.unit == NOT_RUN)
    }


def run_cases(cases: Sequence[Case], place: Place, rows: Path, device: str) -> int:
    """Runs cases that end in time and appends their rows; how many are left."""
    left = 0
    for case in cases:
        if time.monotonic() + case.seconds > place.end:
            left += 1
            continue
        began = time.monotonic()
        try:
            found = rows_of(case, case.measure(place), device)
        except OutOfTimeError:
            left += 1
            continue
        except NotRunError as error:
            figure = Figure(NOT_RUN, 0.0, {"error": str(error)})
            abouts = (case.about, *case.others)
            found = rows_of(case, [figure._replace(about=about) for about in abouts], device)
        append_rows(rows, found)
        print(f"{case.names[0]}: {time.monotonic() - began:.0f} s", flush=True)
        for row in found:
            said = row.baseline["error"] if row.unit == NOT_RUN else f"{row.figure:.4g} {row.unit}"
            print(f"    {row.what.rpartition(' | ')[2]}: {said}", flush=True)
    return left


def rows_of(case: Case, figures: list[Figure], device: str) -> list[ResultRow]:
    """Rows of a case."""
    packages = package_versions(*(("jax", "jaxlib", "flax") if case.peer == ours.NAME else ()))
    command, rows = without_paths(command_line()), []
    for workload, rate, more, about in figures:
        beside = {name: value for name, value in more.items() if name != "version"}
        versions = {case.peer: str(more["version"])} if "version" in more else packages
        row = ResultRow(
            what=f"{case.peer} | {about or case.about} | {workload}", figure=rate,
            unit=NOT_RUN if workload == NOT_RUN else UNIT, baseline=beside, device=device,
            versions=versions, date=today(), command=command,
        )  # fmt: skip
        rows.append(row)
    return rows


def without_paths(command: str) -> str:
    """The command with names for this machine's paths, and without the choice of cases."""
    words = []
    for word in shlex.split(command):
        flag, _, value = word.removeprefix("--").partition("=")
        if flag in PATHS:
            word = f"--{flag}={flag.upper()}"
        if word.startswith("/"):
            word = "results/"
        if flag not in CHOICES or not value:
            words.append(word)
    return shlex.join(words)
