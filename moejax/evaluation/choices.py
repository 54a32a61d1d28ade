"""Multiple choice by log-likelihood: how rows become questions, and answers become figures.

The wording is that of EleutherAI's lm_eval (0.4): a choice is scored after the query and a space.
Accuracy takes the likeliest choice, normalised accuracy the one of the largest log-likelihood per
character; of equals the first.
"""

import dataclasses
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moejax.errors import MoejaxError
from moejax.evaluation.rows import Row

BETWEEN_SHOTS = "\n\n"


@dataclasses.dataclass(frozen=True)
class Question:
    """One document.

    Attributes:
      query: what stands before the choices.
      choices: at least two; each is scored after the query and a space.
      gold: index of the right one.
      group: a part of the task that gets a figure of its own, such as MMLU's subjects; "": none.
    """

    query: str
    choices: tuple[str, ...]
    gold: int
    group: str = ""

    def check(self) -> None:
        """Raises MoejaxError when there is nothing to choose from, or no right one."""
        if len(self.choices) < 2:
            raise MoejaxError(f"{len(self.choices)} choices; two are the least")
        if not 0 <= self.gold < len(self.choices):
            raise MoejaxError(f"the answer {self.gold} is none of {len(self.choices)} choices")
        if not all(self.choices):
            raise MoejaxError("a choice without text")

    @property
    def answered(self) -> str:
        """The query with the right choice: an example."""
        return f"{self.query} {self.choices[self.gold]}"


@dataclasses.dataclass(frozen=True)
class ChoiceTask:
    """A set of questions that are answered by log-likelihood.

    Attributes:
      name: of the task.
      read: a question of a row; a row that lacks something raises KeyError, TypeError, ValueError,
        IndexError or MoejaxError.
      heading: what stands before everything, from the group.
      fewshot: examples before a question, unless something else is asked for.
    """

    name: str
    read: Callable[[Row], Question]
    heading: Callable[[str], str] = lambda group: ""
    fewshot: int = 0

    metrics = ("acc", "acc_norm")

    def prompt(self, question: Question, shots: Sequence[Question]) -> str:
        """The context of a question after examples."""
        examples = "".join(shot.answered + BETWEEN_SHOTS for shot in shots)
        return self.heading(question.group) + examples + question.query

    def measure(self, question: Question, log_likelihoods: Sequence[float]) -> dict[str, float]:
        """0 or 1 a metric, from the log-likelihood of each choice in nats."""
        nats = np.asarray(log_likelihoods)
        lengths = np.array([len(choice) for choice in question.choices])
        return {
            "acc": float(np.argmax(nats) == question.gold),
            "acc_norm": float(np.argmax(nats / lengths) == question.gold),
        }


def _arc(row: Row) -> Question:
    """AI2's own rows, or rows with a list of choices."""
    choices = row["choices"]
    if isinstance(choices, dict):
        stem, texts = row["question"], tuple(choices["text"])
        gold = list(choices["label"]).index(row["answerKey"])
    else:
        stem, texts = _query_of(row), tuple(choices)
        gold = gold_index(row, texts)
    return Question(f"Question: {stem.removeprefix('Question: ')}\nAnswer:", texts, gold)


def _hellaswag(row: Row) -> Question:
    query = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    choices = tuple(_without_markup(ending) for ending in row["endings"])
    return Question(_without_markup(query), choices, int(row["label"]))


def _without_markup(text: str) -> str:
    """HellaSwag's texts from WikiHow hold [title], [step] and the like."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _piqa(row: Row) -> Question:
    choices = (row["sol1"], row["sol2"])
    return Question(f"Question: {row['goal']}\nAnswer:", choices, int(row["label"]))


def _mmlu(row: Row) -> Question:
    texts = tuple(row["choices"])
    letters = tuple(string.ascii_uppercase[: len(texts)])
    listed = "".join(f"\n{a}. {text}" for a, text in zip(letters, texts, strict=True))
    query = f"{row['question'].strip()}{listed}\nAnswer:"
    return Question(query, letters, gold_index(row, texts), str(row.get("subject", "")))


def _mmlu_heading(subject: str) -> str:
    about = f" about {subject.replace('_', ' ')}" if subject else ""
    return f"The following are multiple choice questions (with answers){about}.\n\n"


def _plain(row: Row) -> Question:
    texts = tuple(row["choices"])
    return Question(_query_of(row), texts, gold_index(row, texts), str(row.get("group", "")))


def _query_of(row: Row) -> str:
    for name in ("query", "question"):
        if name in row:
            return row[name]
    raise KeyError("query")


def gold_index(row: dict[str, Any], choices: Sequence[str]) -> int:
    """The right choice of a row: an index, a letter (A is the first), or the choice's own text.

    It stands under "gold", "answer" or "label".
    """
    for name in ("gold", "answer", "label"):
        if name in row:
            said = row[name]
            break
    else:
        raise KeyError("answer")
    if isinstance(said, int):
        return said
    if said in choices:
        return list(choices).index(said)
    text = str(said).strip()
    if len(text) == 1 and text in string.ascii_uppercase:
        return string.ascii_uppercase.index(text)
    return int(text)


CHOICE_TASKS = (
    ChoiceTask("arc_easy", _arc),
    ChoiceTask("arc_challenge", _arc),
    ChoiceTask("hellaswag", _hellaswag),
    ChoiceTask("piqa", _piqa),
    ChoiceTask("mmlu", _mmlu, _mmlu_heading),
    ChoiceTask("choices", _plain),
)
