"""The tasks of `moejax.evaluate` beside perplexity, and the documents of a file for one of them."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from moejax.errors import MoejaxError
from moejax.evaluation.choices import CHOICE_TASKS, ChoiceTask, Question
from moejax.evaluation.problems import GENERATION_TASKS, GenerationTask, Problem
from moejax.evaluation.rows import Rows

Task = ChoiceTask | GenerationTask
TASKS: dict[str, Task] = {task.name: task for task in (*CHOICE_TASKS, *GENERATION_TASKS)}


@dataclasses.dataclass(frozen=True)
class Document:
    """One question or problem of a file.

    Attributes:
      index: of its row, from 0.
      content: what is asked.
      prompt: with heading and examples.
    """

    index: int
    content: Question | Problem
    prompt: str


def documents(
    task: Task, data: Rows, shots: Rows | None, *, fewshot: int, limit: int, seed: int
) -> list[Document]:
    """The documents of a file, in its order.

    Args:
      task: says how rows are read and worded.
      data: the file.
      shots: what examples are taken from: its first `fewshot` rows, those of the document's own
        group where there are groups, the document itself left out.
      fewshot: examples before each.
      limit: take a random sample of so many; 0: all.
      seed: of the sample.

    Raises:
      MoejaxError: a row is not of the task's form, or there are too few examples.
    """
    asked = contents(task, data)
    examples = contents(task, shots) if shots and fewshot else []
    chosen = range(len(asked))
    if limit and limit < len(asked):
        chosen = sorted(random.Random(seed).sample(chosen, limit))  # type: ignore[assignment]
    found = []
    for index in chosen:
        content = asked[index]
        before = [shot for shot in examples if shot.group == content.group and shot != content]
        if len(before) < fewshot:
            of = f" of {content.group}" if content.group else ""
            raise MoejaxError(f"{len(before)} examples{of}, where fewshot={fewshot} asks for more")
        prompt = task.prompt(content, before[:fewshot])  # type: ignore[arg-type]
        found.append(Document(index, content, prompt))
    return found


def contents(task: Task, data: Rows) -> Sequence[Question | Problem]:
    """What each row asks.

    Raises:
      MoejaxError: a row is not of the task's form.
    """
    return [_content(task, data, number, row) for number, row in enumerate(data.rows)]


def _content(task: Task, data: Rows, number: int, row: dict[str, Any]) -> Question | Problem:
    try:
        content = task.read(row)
        content.check()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, MoejaxError) as error:
        said = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        names = ", ".join(row)
        raise MoejaxError(
            f"{data.source}, row {number} is no {task.name} ({said}); it has {names}"
        ) from error
    return content
