"""Tasks that are answered by generation: GSM8K and HumanEval, worded and judged as in lm_eval."""

import dataclasses
import re
from collections.abc import Callable, Sequence

from moejax.errors import MoejaxError
from moejax.evaluation.choices import BETWEEN_SHOTS
from moejax.evaluation.execution import Verdict, run_program
from moejax.evaluation.rows import Row, check_text, text_of

NO_ANSWER = "[invalid]"
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))


@dataclasses.dataclass(frozen=True)
class Problem:
    """One document.

    Attributes:
      query: the prompt, after examples.
      reference: the right answer, or the program that tests one.
      group: see `choices.Question`.
    """

    query: str
    reference: str
    group: str = ""

    def check(self) -> None:
        """Raises MoejaxError when it asks nothing, or what it holds is no text."""
        for name in ("query", "reference", "group"):
            check_text(getattr(self, name), name)
        if not self.query.strip():
            raise MoejaxError("a problem without text")

    @property
    def answered(self) -> str:
        """The query with its answer: an example."""
        return f"{self.query} {self.reference}"


@dataclasses.dataclass(frozen=True)
class GenerationTask:
    """A set of problems that are answered greedily, in text.

    Attributes:
      name: of the task.
      read: a problem of a row; see `choices.ChoiceTask`.
      judge: 0 or 1 a metric, of a problem and the text that was generated.
      metrics: their names.
      until: strings that end an answer.
      max_new_tokens: of an answer, unless something else is asked for.
      fewshot: examples before a problem, unless something else is asked for.
      executes: whether `judge` runs what the model wrote.
    """

    name: str
    read: Callable[[Row], Problem]
    judge: Callable[[Problem, str], dict[str, float]]
    metrics: tuple[str, ...]
    until: tuple[str, ...]
    max_new_tokens: int
    fewshot: int = 0
    executes: bool = False

    def prompt(self, problem: Problem, shots: Sequence[Problem]) -> str:
        """The prompt of a problem after examples."""
        return "".join(shot.answered + BETWEEN_SHOTS for shot in shots) + problem.query


def strict_answer(text: str) -> str:
    """The number after the first ####, as GSM8K's solutions end."""
    found = _STRICT.search(text)
    return found[1].strip() if found else NO_ANSWER


def flexible_answer(text: str) -> str:
    """The last number of a text."""
    found = _FLEXIBLE.findall(text)
    return next((part.strip() for part in found[-1] if part), NO_ANSWER) if found else NO_ANSWER


def same_number(answer: str, reference: str) -> bool:
    """Whether they are the same but for commas, dollar signs, a last full stop and the solution."""
    for ignored in _IGNORED:
        answer, reference = ignored.sub("", answer), ignored.sub("", reference)
    return answer.lower() == reference.lower()


def _judge_gsm8k(problem: Problem, text: str) -> dict[str, float]:
    return {
        "exact_match_strict": float(same_number(strict_answer(text), problem.reference)),
        "exact_match_flexible": float(same_number(flexible_answer(text), problem.reference)),
    }


def _gsm8k(row: Row) -> Problem:
    return Problem(f"Question: {text_of(row, 'question')}\nAnswer:", text_of(row, "answer"))


def _humaneval(row: Row) -> Problem:
    test, entry_point = text_of(row, "test"), text_of(row, "entry_point")
    return Problem(text_of(row, "prompt"), f"{test}\ncheck({entry_point})")


def _judge_humaneval(problem: Problem, text: str) -> dict[str, float]:
    program = f"{problem.query}{text}\n{problem.reference}"
    return {"pass_at_1": float(run_program(program).verdict is Verdict.PASSED)}


GENERATION_TASKS = (
    GenerationTask(
        "gsm8k",
        _gsm8k,
        _judge_gsm8k,
        ("exact_match_strict", "exact_match_flexible"),
        until=("Question:", "</s>", "<|im_end|>"),
        max_new_tokens=256,
        fewshot=5,
    ),
    GenerationTask(
        "humaneval",
        _humaneval,
        _judge_humaneval,
        ("pass_at_1",),
        until=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
        max_new_tokens=1024,
        executes=True,
    ),
)
