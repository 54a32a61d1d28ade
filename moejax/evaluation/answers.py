"""Answers so far, kept beside the result: what an interrupted evaluation goes on from."""

import json
import os
from pathlib import Path
from typing import Any

from moejax.errors import MoejaxError

Answer = dict[str, Any]


class AnswerFile:
    """JSON Lines: a head that says what is measured, then an answer a line, then an end.

    A file whose head is another's is an error; one that is complete is begun anew. What a killed
    process left of a line is dropped.

    Attributes:
      known: answers by document, those of the file first.
      num_resumed: how many were there already.
    """

    def __init__(self, path: Path | None, head: dict[str, Any]):
        """Reads what is there.

        Args:
          path: of the file; None keeps answers in memory only.
          head: of plain JSON values; answers serve only a run with the same.

        Raises:
          MoejaxError: the file is of another run.
        """
        self._path = path
        self._head = json.loads(json.dumps(head))
        self.known: dict[int, Answer] = {}
        if path is not None and path.exists():
            self._read(path)
        self.num_resumed = len(self.known)
        if path is not None:
            lines = [{"head": self._head}, *self.known.values()]
            partial = path.with_name(f".{path.name}.partial")
            partial.write_text("".join(map(_line, lines)), encoding="utf-8")
            partial.replace(path)

    def add(self, answers: list[Answer]) -> None:
        """Keeps answers, each with its document's "index"."""
        self.known |= {answer["index"]: answer for answer in answers}
        self._append(answers)

    def finish(self) -> None:
        """Says that no answer is missing: the next run begins anew."""
        self._append([{"end": len(self.known)}])

    def _append(self, lines: list[dict[str, Any]]) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, lines)))
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        rows = []
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:  # the last is no whole line
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        if not rows:
            return
        was = rows[0].get("head")
        if not isinstance(was, dict):
            raise MoejaxError(f"{path} is no file of answers; name another output")
        if "end" in rows[-1]:
            return
        if was != self._head:
            different = [k for k in self._head if was.get(k) != self._head[k]]
            raise MoejaxError(
                f"{path} holds answers of another run ({', '.join(different) or 'more fields'} "
                "differ); delete it, or name another output"
            )
        self.known = {row["index"]: row for row in rows[1:] if "index" in row}


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def beside(output: Path) -> Path:
    """The place of the answers of a result."""
    return output.with_name(f"{output.stem}.answers.jsonl")
