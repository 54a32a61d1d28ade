"""Perplexity of a text: the task of `moejax.evaluate` that needs no questions."""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import tqdm
from absl import logging

from moejax import report
from moejax.checkpoints import resolve_checkpoint
from moejax.config import EvaluateConfig
from moejax.errors import MoejaxError
from moejax.evaluation import fidelity, record
from moejax.evaluation.loading import load_engine
from moejax.evaluation.perplexity import LogLikelihood, Windowing, log_likelihood
from moejax.evaluation.texts import Text

if TYPE_CHECKING:
    from moejax.engine import Engine


def run(config: EvaluateConfig, text: Text, output: Path | None) -> None:
    """Measures, prints a line, writes the JSON file."""
    if output:
        record.check_output(output)
    directory = resolve_checkpoint(config.checkpoint)
    # Float32 is float32 on every device; on a GPU the default would shorten its products.
    with jax.default_matmul_precision("highest"):
        tiering = config.policy.tiering()
        engine = load_engine(config, directory, tiering)
        windowing = config.windowing()
        check_window(engine, windowing)
        if engine.tokenizer is None:
            raise MoejaxError(f"{config.checkpoint} has no tokenizer.json, so it takes no text")
        stream = record.encode(engine.tokenizer, directory, text, special=config.add_special_tokens)
        if config.max_tokens and len(stream.ids) > config.max_tokens:
            stream, text = record.beginning(engine.tokenizer, stream, text, config.max_tokens)
        started = time.perf_counter()
        with report.recorded(engine, config, config.text):
            measured = measure(engine, stream.ids, windowing, config.batch_size)
        seconds = time.perf_counter() - started - engine.compile_seconds
        ledger = engine.ledger

        def written(found: fidelity.Fidelity | None) -> dict[str, Any]:
            result = record.perplexity_record(
                engine,
                text,
                stream,
                windowing,
                measured,
                checkpoint=config.checkpoint,
                stored=record.stored_bytes(directory),
                seconds=seconds,
                policy=dataclasses.asdict(config.policy) if tiering else None,
                ledger=ledger,
                fidelity=found,
            )
            if output:
                record.write_record(output, result)
            return result

        result, found = written(None), None
        if tiering and config.fidelity_share:
            chosen = fidelity.sample(stream.ids, windowing, config.fidelity_share)
            own = fidelity.predictions(engine.logits, chosen)
            try:  # the exact model stands beside this one: there may be no room
                exact = load_engine(config, directory, None)
                found = fidelity.compare(fidelity.predictions(exact.logits, chosen), own)
            except MoejaxError as error:
                logging.error("the KL of the exact model was not measured: %s", error)
            else:
                result = written(found)
    print(record.summary(result))
    for line in [*(ledger.describe() if ledger else []), *([found.describe()] if found else [])]:
        print(line)


def check_window(engine: "Engine", windowing: Windowing) -> None:
    """Raises MoejaxError for a window longer than the model's context."""
    longest = engine.config.max_positions
    if windowing.window > longest:
        raise MoejaxError(
            f"window={windowing.window} is beyond the model's context of {longest}; set "
            f"--config.window={longest} or less, and name it where the figure is printed"
        )


def measure(
    engine: "Engine", ids: list[int], windowing: Windowing, batch_size: int
) -> LogLikelihood:
    """Scores the tokens under a progress bar."""
    with contextlib.closing(
        tqdm.tqdm(total=max(0, len(ids) - 1), desc="scoring", unit="tok")
    ) as bar:

        def show(so_far: LogLikelihood) -> None:
            bar.set_postfix_str(f"perplexity {so_far.perplexity:.3f}", refresh=False)
            bar.update(so_far.num_scored - bar.n)

        return log_likelihood(ids, windowing, engine.score, batch_size=batch_size, on_batch=show)
