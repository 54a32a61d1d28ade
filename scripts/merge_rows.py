"""Rows that were measured elsewhere, to where documents are made from; newer ones replace older.

    python -m scripts.merge_rows results/ --suffix=_h200
    python -m scripts.make_documents --figures     # then

A row replaces those of the same `what`. Commands are kept as one would type them: without the
folder of compiled programs, and with the file in which the row now stands.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path

from absl import app, flags

from moejax.files.result_rows import ResultRow, read_rows
from moejax.files.whole import write_whole

_INTO = flags.DEFINE_string("into", "scripts/studies", "folder of the folders of rows")
_SUFFIX = flags.DEFINE_string("suffix", "_h200", "of their names, before .jsonl: of the device")
LEFT_OUT = "compile"  # in the `what` of rows that are not taken
_OUTPUT = re.compile(r"(?<=\s)(--(?:config\.)?out(?:put)?=)\S+")
_PROGRAMS = re.compile(r" --(?:cache|programs|config\.compilation_cache|turn)=\S+")


def merged(old: list[ResultRow], new: list[ResultRow], path: str) -> list[ResultRow]:
    """The old rows that are not measured again, then the new, the last of each `what`."""
    taken = {}
    for row in new:
        if LEFT_OUT not in row.what:
            command = _PROGRAMS.sub("", _OUTPUT.sub(rf"\g<1>{path}", row.command))
            taken[row.what] = dataclasses.replace(row, command=command)
    return [row for row in old if row.what not in taken] + list(taken.values())


def place_of(folder: Path, name: str) -> Path:
    """The file of that name below a folder; where there is none yet, in the folder itself."""
    return next(iter(sorted(folder.rglob(name))), folder / name)


def main(argv: list[str]) -> None:
    """Merges each file of a folder."""
    if len(argv) != 2 or not (found := sorted(Path(argv[1]).glob("*.jsonl"))):
        sys.exit("error: give a folder that has .jsonl files: see scripts/merge_rows.py")
    for file in found:
        into = place_of(Path(_INTO.value), f"{file.stem}{_SUFFIX.value}.jsonl")
        old = read_rows(into) if into.exists() else []
        rows = merged(old, read_rows(file), str(into))
        lines = (json.dumps(dataclasses.asdict(row), ensure_ascii=False) for row in rows)
        write_whole(into, "".join(f"{line}\n" for line in lines))
        print(f"{into}: {len(old)} rows were there, {len(rows)} are")


if __name__ == "__main__":
    app.run(main)
