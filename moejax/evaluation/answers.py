"""Windows' scores kept beside the result, from which an interrupted evaluation resumes."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from moejax.errors import MoejaxError
from moejax.evaluation.perplexity import WindowScore
from moejax.files.whole import write_errors, write_whole

_AGAIN = "make room, and run the same command again to resume from the answers in it"


class AnswerFile:
    """JSON Lines: a head that names the measurement, then a window's score a line, then an end.

    An existing file is handled as follows:

    - a file of another kind: an error;
    - the answers of an unfinished run with another head: an error;
    - the answers of an unfinished run with this head: they are known. A line that is not an answer
      is dropped with a warning; an incomplete last line of a killed process is dropped;
    - the answers of a finished run with another head: kept under the next free name;
    - the answers of a finished run with this head: replaced, the run begins anew.

    Nothing is written before the first new answer.
    """

    def __init__(
        self,
        path: Path | None,  # of the file; None keeps answers in memory only
        # plain JSON values; answers are reused only by a run with an equal head
        head: dict[str, Any],
        *,
        anew: str = "",  # reason to reuse no answer; "": answers are reused
    ):
        """Reads the answers that exist.

        Raises:
          MoejaxError: the file belongs to another run, or is not a file of answers.
        """
        self._path = path
        self._head = json.loads(json.dumps(head))
        self._begun = False
        self._aside = False
        self.known: dict[int, WindowScore] = {}  # by window, those of the file first
        if path is not None and (stored := _stored(path)):
            if not stored.finished:
                self._go_on(path, stored, anew)
            elif stored.head != self._head:
                self._aside = True
                logging.warning(
                    "%s holds the answers of a finished run with other settings; they are kept in "
                    "%s", path, _free_name(path).name,
                )  # fmt: skip
        self.num_resumed = len(self.known)  # how many were there already

    def add(self, scores: Mapping[int, WindowScore]) -> None:
        """Keeps the scores of windows."""
        self.known |= scores
        self._append(_lines(scores))

    def finish(self) -> None:
        """Marks the run as finished, result included: the next run begins anew."""
        self._append([{"end": len(self.known)}])

    def _go_on(self, path: Path, stored: "_Stored", anew: str) -> None:
        if stored.head != self._head:
            different = [k for k in self._head if stored.head.get(k) != self._head[k]]
            raise MoejaxError(
                f"{path} holds answers of another run ({', '.join(different) or 'more fields'} "
                "differ); delete it, or name another output"
            )
        if anew:
            logging.warning(
                "%s: %d answers of an interrupted run are not taken over: %s",
                path, len(stored.answers), anew,
            )  # fmt: skip
            return
        self.known = stored.answers
        if stored.num_wrong:
            logging.warning(
                "%s: %d lines are no answers and are left out; what they answered is asked again",
                path, stored.num_wrong,
            )  # fmt: skip

    def _append(self, lines: list[dict[str, Any]]) -> None:
        if self._path is None:
            return
        if self._begun:
            with write_errors(self._path, _AGAIN), self._path.open("a", encoding="utf-8") as file:
                file.write(_text(lines))
                file.flush()
                os.fsync(file.fileno())
            return
        end = [line for line in lines if "end" in line]
        content = _text([{"head": self._head}, *_lines(self.known), *end])
        if self._aside:
            self._path.rename(_free_name(self._path))
        write_whole(self._path, content, _AGAIN)
        self._begun = True


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Content of a file of answers."""

    head: dict[str, Any]
    answers: dict[int, WindowScore]
    finished: bool
    num_wrong: int  # lines that are none of these


def check_place(path: Path) -> None:
    """Raises MoejaxError if answers would overwrite a file of another kind."""
    _stored(path)


def is_unfinished(path: Path) -> bool:
    """Whether answers of a run that did not end are there."""
    try:
        stored = _stored(path)
    except (MoejaxError, OSError):
        return False
    return stored is not None and not stored.finished and bool(stored.answers)


def beside(output: Path) -> Path:
    """Path of a result's answers."""
    return output.with_name(f"{output.stem}.answers.jsonl")


def _stored(path: Path) -> _Stored | None:
    """Reads the answers; None if there is no file."""
    content = path.read_bytes() if path.exists() else b""
    if not content.strip():
        return None
    whole = content.split(b"\n")[:-1]  # the last is no whole line
    first, *rows = [_row(line) for line in whole] or [{}]
    head = first.get("head")
    if not isinstance(head, dict):
        raise MoejaxError(f"{path} is no file of answers; move it away, or name another output")
    ends = ["end" in row for row in rows]
    found = [score for row in rows if (score := _score(row))]
    return _Stored(head, dict(found), any(ends), len(rows) - len(found) - sum(ends))


def _row(line: bytes) -> dict[str, Any]:
    """Parses the object of a line; empty if it has none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _lines(scores: Mapping[int, WindowScore]) -> list[dict[str, Any]]:
    return [{"index": i, "nats": n, "tokens": tokens} for i, (n, tokens) in scores.items()]


def _score(row: dict[str, Any]) -> tuple[int, WindowScore] | None:
    """The window and score of a line; None if it has none."""
    index, nats, tokens = (row.get(name) for name in ("index", "nats", "tokens"))
    if type(index) is int and type(nats) is float and math.isfinite(nats) and type(tokens) is int:
        return index, WindowScore(nats, tokens)
    return None


def _text(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _free_name(path: Path) -> Path:
    """First free name of x.answers.1.jsonl, x.answers.2.jsonl, ..."""
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return kept
