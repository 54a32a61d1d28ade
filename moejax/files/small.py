"""Small files from elsewhere: read whole, after checking that reading is harmless."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from moejax.errors import MoejaxError

MOST_BYTES = 48_000_000  # of tokenizer.json, of an index, of a manifest; Gemma's tokenizer has 33
# JSON's commas and opening brackets, about as many as its values. A value takes up to 200
# bytes as a Python object.
MOST_VALUES = 2_000_000
_MOST_DEPTH = 64
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def read_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Reads a regular file, or the one that a link leads to.

    Raises:
      MoejaxError: it is too large, no regular file, or a link that leads nowhere.
      OSError: it cannot be read; FileNotFoundError if it is missing.
    """
    check_link(path)
    check_regular(path, path.stat().st_mode)  # first: opening some devices does something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        check_regular(path, found.st_mode)
        if found.st_size > most_bytes:
            raise MoejaxError(
                f"{path} has more than {most_bytes / 1e6:g} MB, which no such file needs; download "
                "it again"
            )
        return file.read(found.st_size)


def parse_json(content: bytes, most_values: int = MOST_VALUES) -> Any:
    """Parses a JSON value of bounded size; ValueError if it is none, or nested too deeply."""
    num_values = sum(map(content.count, (b",", b"[", b"{")))
    if num_values > most_values:
        raise ValueError(f"it holds {num_values:,} values, expected at most {most_values:,}")
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError(f"it is nested more than {_MOST_DEPTH} deep") from error


def check_depth(value: Any) -> None:
    """Raises ValueError for a JSON value nested too deeply to print."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (list, dict))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")


def check_link(path: Path) -> None:
    """Raises MoejaxError for a link that leads nowhere."""
    if path.is_symlink() and not path.exists():
        raise MoejaxError(
            f"{path} is a link to {path.readlink()}, which is not there; download it again"
        )


def check_regular(path: Path, mode: int) -> None:
    """Raises MoejaxError unless `mode`, the mode of `path`, is a regular file's."""
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
        raise MoejaxError(f"{path} is {kind}, expected a regular file; download it again")
