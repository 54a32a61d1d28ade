"""Multiple choice by log-likelihood: how rows become questions, and answers become figures.

The wording is that of EleutherAI's lm_eval (0.4): a choice is scored after the query and a space.
Accuracy takes the likeliest choice, normalised accuracy the one of the largest log-likelihood per
character; of equals the first.
"""

import dataclasses
import re
import string
from collections.abc import Callable, Sequence

import numpy as np

from moejax.errors import MoejaxError
from moejax.evaluation.rows import Row, check_text, index_of, shown, text_of, texts_of

BETWEEN_SHOTS = "\n\n"
_LETTERS = tuple(string.ascii_uppercase)
_FROM_ONE = tuple(str(number) for number in range(1, 1 + len(_LETTERS)))


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
        """Raises MoejaxError when there is nothing to choose from, no right one, or no text."""
        check_text(self.query, "query")
        check_text(self.group, "group")
        for i, choice in enumerate(self.choices):
            check_text(choice, f"choices[{i}]")
        if len(self.choices) < 2:
            raise MoejaxError(f"{len(self.choices)} choices; two are the least")
        if not 0 <= self.gold < len(self.choices):
            raise MoejaxError(
                f"the answer {shown(self.gold)} is none of {len(self.choices)} choices"
            )
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
    """Rows of the hub, whose choices have labels, or rows with a list of choices."""
    choices, labels = row["choices"], None
    if isinstance(choices, dict):
        texts = texts_of(choices, "text")
        labels = texts_of(choices, "label") if "label" in choices else None
        if labels is not None and len(labels) != len(texts):
            raise MoejaxError(f"choices has {len(texts)} texts and {len(labels)} labels")
    else:
        texts = texts_of(row, "choices")
    gold = _keyed(row, texts, labels) if "answerKey" in row else gold_index(row, texts)
    stem = _query_of(row).removeprefix("Question: ")
    return Question(f"Question: {stem}\nAnswer:", texts, gold)


def _keyed(row: Row, texts: Sequence[str], labels: Sequence[str] | None) -> int:
    """The right choice by `answerKey`: its label; without labels A is the first, and so is 1."""
    key = str(row["answerKey"]).strip()
    ways = (tuple(labels),) if labels is not None else (_LETTERS, _FROM_ONE)
    for way in ways:
        if key in way[: len(texts)]:
            return way.index(key)
    of = ", ".join(labels) if labels is not None else f"A.. or 1.. of {len(texts)} choices"
    raise MoejaxError(f"answerKey {shown(row['answerKey'])} is none of {of}")


def _hellaswag(row: Row) -> Question:
    label, begin, end = (text_of(row, name) for name in ("activity_label", "ctx_a", "ctx_b"))
    choices = tuple(_without_markup(ending) for ending in texts_of(row, "endings"))
    query = _without_markup(f"{label}: {begin} {end.capitalize()}")
    return Question(query, choices, index_of(row, "label"))


def _without_markup(text: str) -> str:
    """HellaSwag's texts from WikiHow hold [title], [step] and the like."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _piqa(row: Row) -> Question:
    choices = (text_of(row, "sol1"), text_of(row, "sol2"))
    return Question(f"Question: {text_of(row, 'goal')}\nAnswer:", choices, index_of(row, "label"))


def _mmlu(row: Row) -> Question:
    texts = texts_of(row, "choices")
    if len(texts) > len(_LETTERS):
        raise MoejaxError(f"{len(texts)} choices, which is more than there are letters")
    letters = _LETTERS[: len(texts)]
    listed = "".join(f"\n{a}. {text}" for a, text in zip(letters, texts, strict=True))
    query = f"{text_of(row, 'question').strip()}{listed}\nAnswer:"
    return Question(query, letters, gold_index(row, texts), _group_of(row, "subject"))


def _mmlu_heading(subject: str) -> str:
    about = f" about {subject.replace('_', ' ')}" if subject else ""
    return f"The following are multiple choice questions (with answers){about}.\n\n"


def _plain(row: Row) -> Question:
    texts = texts_of(row, "choices")
    return Question(_query_of(row), texts, gold_index(row, texts), _group_of(row, "group"))


def _group_of(row: Row, name: str) -> str:
    return text_of(row, name) if name in row else ""


def _query_of(row: Row) -> str:
    for name in ("query", "question"):
        if name in row:
            return text_of(row, name)
    raise KeyError("query")


def gold_index(row: Row, choices: Sequence[str]) -> int:
    """The right choice of a row: an index, a letter (A is the first), or the choice's own text.

    It stands under "gold", "answer" or "label".
    """
    for name in ("gold", "answer", "label"):
        if name in row:
            said = row[name]
            break
    else:
        raise KeyError("answer")
    if isinstance(said, str):
        text = said.strip()
        if said in choices:
            return list(choices).index(said)
        if text in _LETTERS:
            return _LETTERS.index(text)
        if not text.isdecimal():
            raise MoejaxError(
                f"{name} {shown(said)} is no index, no letter and none of the choices"
            )
    return index_of(row, name)


CHOICE_TASKS = (
    ChoiceTask("arc_easy", _arc),
    ChoiceTask("arc_challenge", _arc),
    ChoiceTask("hellaswag", _hellaswag),
    ChoiceTask("piqa", _piqa),
    ChoiceTask("mmlu", _mmlu, _mmlu_heading),
    ChoiceTask("choices", _plain),
)
