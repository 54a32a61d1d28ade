"""Files of rows: JSON Lines, plain or packed."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from moejax.errors import MoejaxError
from moejax.text.corpus import decoded, unpacked

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a file, in its order."""

    rows: list[Row]
    source: str  # the file's name
    sha256: str  # of what it holds, unpacked


def read_rows(path: Path) -> Rows:
    """Reads a JSON Lines file (.jsonl, or packed: .xz, .gz), an object a line.

    Raises:
      MoejaxError: the file is missing or broken, or a line is not an object.
    """
    if not path.exists():
        raise MoejaxError(f"there is no data file {path}; name one of JSON Lines")
    content = unpacked(path)
    rows = []
    for number, line in enumerate(decoded(path, content).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise MoejaxError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise MoejaxError(f"{path}, line {number} is no JSON object: {line.strip()[:60]}")
        rows.append(row)
    if not rows:
        raise MoejaxError(f"{path} holds no rows")
    return Rows(rows, path.name, hashlib.sha256(content).hexdigest())
