"""Files of questions: JSON Lines, plain or packed; what stands in a field of a row."""

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from moejax.errors import MoejaxError
from moejax.evaluation.texts import decoded, unpacked

Row = dict[str, Any]
_DIGITS = re.compile("[0-9]{1,9}")


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a file, in its order."""

    rows: list[Row]
    source: str  # the file's name
    sha256: str  # of what it holds, unpacked


def read_rows(path: Path) -> Rows:
    """Reads a JSON Lines file (.jsonl, or packed: .xz, .gz), an object a line.

    Raises:
      MoejaxError: the file is missing or broken, or a line is no object.
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


def shown(value: Any) -> str:
    """A value of a row as a message quotes it, the beginning of a long one."""
    written = json.dumps(value)
    return written if len(written) <= 40 else f"{written[:40]}..."


def check_text(value: Any, name: str) -> str:
    """The value, where it is a text; JSON can hold half of a surrogate pair, which is none.

    Args:
      value: of a row.
      name: of its field, for the message.

    Raises:
      MoejaxError: it is something else.
    """
    if not isinstance(value, str):
        raise MoejaxError(f"{name} must be a text, not {shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MoejaxError(f"{name} is not Unicode: {error.reason} in {shown(value)}") from error
    return value


def text_of(row: Row, name: str) -> str:
    """The text in a field.

    Raises:
      KeyError: there is no such field.
      MoejaxError: it holds no text.
    """
    return check_text(row[name], name)


def texts_of(row: Row, name: str) -> tuple[str, ...]:
    """The texts in a field that holds a list of them; raises as `text_of`."""
    values = row[name]
    if not isinstance(values, list):
        raise MoejaxError(f"{name} must be a list of texts, not {shown(values)}")
    return tuple(check_text(value, f"{name}[{i}]") for i, value in enumerate(values))


def index_of(row: Row, name: str) -> int:
    """The index in a field, as a number or in digits; raises as `text_of`."""
    value = row[name]
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MoejaxError(f"{name} must be the index of a choice, not {shown(value)}")
    return value
