"""Questions and problems through an engine, resumably: what `moejax.evaluate` does with tasks."""

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import tqdm

from moejax import report
from moejax.checkpoints import resolve_checkpoint
from moejax.config import EvaluateConfig
from moejax.errors import MoejaxError
from moejax.evaluation import record
from moejax.evaluation.answers import Answer, AnswerFile, beside, check_place
from moejax.evaluation.choices import ChoiceTask, Question
from moejax.evaluation.loading import load_engine
from moejax.evaluation.problems import GenerationTask, Problem
from moejax.evaluation.rows import Rows
from moejax.evaluation.tasks import TASKS, Document, documents

if TYPE_CHECKING:
    from moejax.engine import Engine

# Documents between two writings of answers, in batches: like lengths go together inside of it.
BATCHES_PER_WRITE = 4


def run(config: EvaluateConfig, data: Rows, shots: Rows | None, output: Path | None) -> None:
    """Measures, prints lines, writes the JSON file and beside it the answers.

    Args:
      config: of the run.
      data: its documents.
      shots: examples, where it takes some.
      output: of the result.
    """
    task = TASKS[config.task]
    fewshot = config.num_fewshot()
    chosen = documents(task, data, shots, fewshot=fewshot, limit=config.limit, seed=config.seed)
    if output:
        record.check_output(output)
        check_place(beside(output))
    directory = resolve_checkpoint(config.checkpoint)
    with jax.default_matmul_precision("highest"):
        tiering = config.policy.tiering()
        engine = load_engine(config, directory, tiering)
        if engine.tokenizer is None:
            raise MoejaxError(f"{config.checkpoint} has no tokenizer.json, so it takes no text")
        head = _head(config, data, shots if fewshot else None, directory, engine)
        place = beside(output) if output else None
        answers = AnswerFile(place, head, numbers=task.metrics)
        started, compiled = time.perf_counter(), engine.compile_seconds
        with report.recorded(engine, config, data.source):
            answer_all(engine, task, chosen, answers, config)
        seconds = time.perf_counter() - started - (engine.compile_seconds - compiled)
        ledger = engine.ledger
        result = record.task_record(
            engine,
            head,
            checkpoint=config.checkpoint,
            stored=record.stored_bytes(directory),
            seconds=seconds,
            ledger=ledger,
            figures=figures(task, chosen, answers.known),
            batch_size=config.num_rows(),
            num_resumed=answers.num_resumed,
        )
        if output:
            record.write_record(output, result)
        answers.finish()
    for line in [*record.task_summary(result), *(ledger.describe() if ledger else [])]:
        print(line)


def _head(
    config: EvaluateConfig, data: Rows, shots: Rows | None, directory: Path, engine: "Engine"
) -> dict[str, Any]:
    """What is measured, of what, how: answers serve only a run with the same."""
    task = TASKS[config.task]
    generated = isinstance(task, GenerationTask)
    return {
        "task": config.task,
        "data": {"source": data.source, "sha256": data.sha256},
        "protocol": {
            "fewshot": config.num_fewshot(),
            "fewshot_data": shots and {"source": shots.source, "sha256": shots.sha256},
            "limit": config.limit,
            "seed": config.seed,
            "decoding": "greedy" if generated else "log-likelihood of each choice",
            "until": list(task.until) if isinstance(task, GenerationTask) else [],
            "max_new_tokens": config.answer_length() if generated else 0,
        },
        "checkpoint": {"name": config.checkpoint, **record.fingerprint(directory)},
        **record.of_engine(engine, policy=config.policy, memory=config.memory),
    }


def answer_all(
    engine: "Engine",
    task: ChoiceTask | GenerationTask,
    chosen: Sequence[Document],
    answers: AnswerFile,
    config: EvaluateConfig,
) -> None:
    """Answers what is not known yet, the longest prompts first, under a progress bar."""
    missing = [document for document in chosen if document.index not in answers.known]
    missing.sort(key=lambda document: (-len(document.prompt), document.index))
    batch_size = config.num_rows()
    size = BATCHES_PER_WRITE * batch_size
    bar = tqdm.tqdm(total=len(chosen), initial=len(chosen) - len(missing), desc=task.name)
    with contextlib.closing(bar):
        for first in range(0, len(missing), size):
            part = missing[first : first + size]
            if isinstance(task, ChoiceTask):
                found = choose(engine, task, part, batch_size)
            else:
                found = generate(engine, task, part, batch_size, config.answer_length())
            answers.add(found)
            right = [answer[task.metrics[0]] for answer in answers.known.values()]
            bar.set_postfix_str(f"{task.metrics[0]} {sum(right) / len(right):.3f}", refresh=False)
            bar.update(len(part))


def choose(
    engine: "Engine", task: ChoiceTask, part: Sequence[Document], batch_size: int
) -> list[Answer]:
    """The log-likelihood of each choice of each document, and whether the best is right."""
    asked = [(document, _question(document)) for document in part]
    pairs = [(document.prompt, f" {choice}") for document, of in asked for choice in of.choices]
    scored = iter(engine.loglikelihood(pairs, batch_size=batch_size))
    found = []
    for document, question in asked:
        nats = [next(scored).log_likelihood for _ in question.choices]
        if not all(map(math.isfinite, nats)):
            raise MoejaxError(
                f"row {document.index} got log-likelihoods of {nats}: the weights hold NaN or "
                "infinite values, or the dtype is too small for them (try float32)"
            )
        measured = task.measure(question, nats)
        found.append({"index": document.index, "log_likelihoods": nats, **measured})
    return found


def generate(
    engine: "Engine",
    task: GenerationTask,
    part: Sequence[Document],
    batch_size: int,
    max_new_tokens: int,
) -> list[Answer]:
    """The greedy answer to each document, and whether it is right.

    A prompt that leaves no room for an answer is cut at its beginning.
    """
    context = engine.budget.context if engine.budget else engine.config.context_limit
    room = context - max_new_tokens
    if room < 1:
        raise MoejaxError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the context of "
            f"{context}"
        )
    found = []
    counts = engine.ledger is not None  # what is run in addition would be counted
    for first in range(0, len(part), batch_size):
        batch = part[first : first + batch_size]
        ids = [engine.scorer.encode(document.prompt) for document in batch]
        filled = [tokens[-room:] for tokens in ids]
        if not counts:  # a batch of another size would be compiled
            filled += [filled[-1]] * (batch_size - len(batch))
        texts = engine.generate(filled, max_new_tokens=max_new_tokens, stop=task.until)
        for document, tokens, answer in zip(batch, ids, texts[: len(batch)], strict=True):
            problem, text = _problem(document), answer.text or ""
            found.append(
                {
                    "index": document.index,
                    "text": text,
                    "finish_reason": answer.finish_reason,
                    "cut_tokens": max(0, len(tokens) - room),
                    **task.judge(problem, text),
                }
            )
    return found


def figures(
    task: ChoiceTask | GenerationTask, chosen: Sequence[Document], answers: dict[int, Answer]
) -> dict[str, Any]:
    """Means with their standard errors, of all documents and of each group."""
    groups = sorted({document.content.group for document in chosen} - {""})
    of_group = {
        group: [answers[d.index] for d in chosen if d.content.group == group] for group in groups
    }
    every = [answers[document.index] for document in chosen]
    return {
        "documents": len(every),
        "metrics": {name: mean([a[name] for a in every]) for name in task.metrics},
        "groups": {
            group: {name: mean([a[name] for a in part]) for name in task.metrics}
            | {"documents": len(part)}
            for group, part in of_group.items()
        },
        "cut_documents": sum(bool(answer.get("cut_tokens")) for answer in every),
    }


def mean(values: Sequence[float]) -> dict[str, float | None]:
    """The mean, and the standard error from the sample's variance; None of a single value."""
    count = len(values)
    value = sum(values) / count
    if count < 2:
        return {"value": value, "stderr": None}
    variance = sum((x - value) ** 2 for x in values) / (count - 1)
    return {"value": value, "stderr": math.sqrt(variance / count)}


def _question(document: Document) -> Question:
    assert isinstance(document.content, Question)
    return document.content


def _problem(document: Document) -> Problem:
    assert isinstance(document.content, Problem)
    return document.content
