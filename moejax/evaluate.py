"""What a model is worth: its perplexity on a text.

    python -m moejax.evaluate --config.text=wiki.test.raw --config.join=wikitext
    python -m moejax.evaluate --config=configs/evaluate_wikitext2_2048_512.py
    python -m moejax.evaluate --config.checkpoint=DIR --config.text=mine.txt --config.output=x.json
    python -m moejax.evaluate --config.policy.name=dymoe --config.policy.tiers="('int4', 'int2')"

One line with the result goes to stdout, a progress bar to stderr, everything that is needed to
measure it again to the JSON file. Figures of different windows, strides, texts or tokenizers are
not to be compared: the protocol stands in the line and in the file.
"""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tqdm
from absl import flags, logging

from moejax import cli, report
from moejax.config import EvaluateConfig, MemoryConfig
from moejax.errors import MoejaxError
from moejax.evaluation.perplexity import LogLikelihood, Windowing, log_likelihood
from moejax.evaluation.texts import load_text

if TYPE_CHECKING:  # importing the engine imports JAX, which --help and mistakes need not wait for
    from moejax.engine import Engine
    from moejax.evaluation.fidelity import Fidelity
    from moejax.tiering import Tiering


def define_flags(values: flags.FlagValues) -> None:
    """No flags beside `--config`."""
    del values


def evaluate(config: EvaluateConfig, values: flags.FlagValues) -> None:
    """Measures, prints a line, writes the JSON file."""
    del values
    text = load_text(str(cli.user_path(config.text)), config.join)
    output = cli.user_path(config.output) if config.output else None

    import jax

    from moejax.checkpoints import resolve_checkpoint
    from moejax.evaluation import fidelity, record

    if output:
        record.check_output(output)
    directory = resolve_checkpoint(config.checkpoint)
    # Float32 is float32 on every device; on a GPU the default would shorten its products.
    with jax.default_matmul_precision("highest"):
        tiering = config.policy.tiering()
        engine = load(config, directory, tiering)
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

        def written(found: "Fidelity | None") -> dict[str, Any]:
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
                exact = load(config, directory, None)
                found = fidelity.compare(fidelity.predictions(exact.logits, chosen), own)
            except MoejaxError as error:
                logging.error("the KL of the exact model was not measured: %s", error)
            else:
                result = written(found)
    print(record.summary(result))
    for line in [*(ledger.describe() if ledger else []), *([found.describe()] if found else [])]:
        print(line)


def load(config: EvaluateConfig, directory: Path, policy: "Tiering | None") -> "Engine":
    """The engine of a configuration; without a policy, the exact one."""
    from moejax.engine import Engine

    return Engine.from_pretrained(
        directory,
        dtype=config.dtype,
        platform=config.platform,
        compilation_cache=config.compilation_cache,
        limits=config.memory.limits() if config.memory != MemoryConfig() else None,
        policy=policy,
        batch=config.batch_size,
    )


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


COMMAND = cli.Command(
    doc=__doc__, default=EvaluateConfig(), define_flags=define_flags, body=evaluate
)

if __name__ == "__main__":
    cli.run(COMMAND)
