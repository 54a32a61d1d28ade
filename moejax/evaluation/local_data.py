"""Data sets of lm_eval's tasks from a folder of JSON Lines, in place of the Hub.

A file holds one split of a data set: `arc_easy.test.jsonl`, or packed (`.jsonl.xz`, `.jsonl.gz`).
Its name begins with that of the task (`arc_easy`), of the part of the data set (`ARC-Easy`) or of
the data set itself (`ai2_arc`); case, dots and dashes make no difference. Rows are the Hub's. In a
file of all parts of a data set, such as `mmlu.test.jsonl`, a field `subject` names the part.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask

from moejax.errors import MoejaxError
from moejax.text.corpus import json_lines, read_text

Row = dict[str, Any]
_PART = "subject"  # names the part in a file of several
_FILE = re.compile(r"(?P<name>.+)\.(?P<split>\w+)\.jsonl(\.xz|\.gz)?")


class _Splits(datasets.DatasetDict):
    """Splits of a data set; one that the folder lacks is empty.

    lm_eval reads the split of the examples even when it uses none of them.
    """

    def __missing__(self, name: str) -> datasets.Dataset:
        return datasets.Dataset.from_list([])


@dataclasses.dataclass(frozen=True)
class LocalData:
    """A folder of data sets."""

    folder: Path  # of the files
    num_fewshot: int | None = None  # examples before each document; None for the task's own number

    def _splits(self, task: Any) -> _Splits:
        """Reads the data set of one of lm_eval's tasks."""
        if not self.folder.is_dir():
            raise MoejaxError(f"--data {self.folder} is no folder; name one of JSON Lines files")
        part = task.dataset_name
        names = [task.task, *([part] if part else []), task.dataset_path.rpartition("/")[2]]
        found = _Splits()
        for name in map(_plain, names):
            for path in sorted(self.folder.iterdir()):
                match = _FILE.fullmatch(path.name)
                if match and _plain(match["name"]) == name and match["split"] not in found:
                    rows = _rows_of(path, part, task.dataset_path)
                    found[match["split"]] = datasets.Dataset.from_list(rows)
        self._check(task, found)
        return found

    def _check(self, task: Any, found: _Splits) -> None:
        asked = task.test_split or task.validation_split or task.training_split
        needed = {asked: "asks the questions of"}
        num = (task.num_fewshot or 0) if self.num_fewshot is None else self.num_fewshot
        if num:
            split = task.fewshot_config.split or task.training_split or task.validation_split
            needed.setdefault(split or asked, f"takes {num} examples from")
        for split, does in needed.items():
            if split not in found:
                raise MoejaxError(
                    f"{task.task} {does} the split {split!r}, and {self.folder} has no "
                    f"{task.task}.{split}.jsonl (.xz, .gz)"
                )


def _plain(name: str) -> str:
    return re.sub(r"[-.]", "_", name.lower())


def _rows_of(path: Path, part: str | None, dataset: str) -> list[Row]:
    rows = [row for _, row in json_lines(path, read_text(path))]
    if not rows:
        raise MoejaxError(f"{path} holds no rows")
    if part and any(_PART in row for row in rows):
        rows = [row for row in rows if _plain(str(row.get(_PART))) == _plain(part)]
        if not rows:
            raise MoejaxError(f"{path} has no rows whose {_PART} is {part!r}")
    return [_as_ai2(row) for row in rows] if dataset.endswith("ai2_arc") else rows


def _as_ai2(row: Row) -> Row:
    """Converts a row of ARC to AI2's form; some copies have `query`, `choices` and `gold`."""
    if "gold" not in row:
        return row
    labels = [chr(ord("A") + i) for i in range(len(row["choices"]))]
    return {
        "question": row["query"].removeprefix("Question: "),
        "choices": {"text": row["choices"], "label": labels},
        "answerKey": labels[row["gold"]],
    }


@contextlib.contextmanager
def in_place_of_the_hub(data: LocalData) -> Iterator[None]:
    """Makes lm_eval's tasks read `data`, by overriding `download` as its documentation asks."""

    def download(self: ConfigurableTask, dataset_kwargs: Any = None, **_: Any) -> None:
        del dataset_kwargs
        self.dataset = data._splits(self.config)

    of_lm_eval = ConfigurableTask.download
    ConfigurableTask.download = download
    try:
        yield
    finally:
        ConfigurableTask.download = of_lm_eval
