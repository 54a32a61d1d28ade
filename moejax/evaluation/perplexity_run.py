"""Perplexity of a text: the run of `moejax.evaluate`."""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import tqdm
from absl import logging

from moejax.checkpoints import resolve_checkpoint
from moejax.config.commands import EvaluateConfig
from moejax.errors import MoejaxError, print_stderr
from moejax.evaluation import fidelity, record
from moejax.evaluation.answers import AnswerFile, beside, check_place
from moejax.evaluation.perplexity import LogLikelihood, WindowScore, log_likelihood
from moejax.loading import load_scoring_engine, recorded
from moejax.text.corpus import Text, TokenizedText, beginning, encode
from moejax.text.windows import Windowing

if TYPE_CHECKING:
    from moejax.engine import Engine


def run(config: EvaluateConfig, text: Text, output: Path | None) -> None:
    """Measures, prints a line, writes the JSON file and each window's nats beside it."""
    if output:
        record.check_output(output)
        check_place(beside(output))
    directory = resolve_checkpoint(config.checkpoint)
    # Float32 is float32 on every device; on a GPU the default would shorten its products.
    with jax.default_matmul_precision("highest"):
        tiering = config.policy.tiering()
        engine = load_scoring_engine(config, directory, tiering)
        windowing = config.windowing()
        if windowing.window > (longest := engine.config.context_limit):
            raise MoejaxError(
                f"window={windowing.window} is beyond the model's context of {longest}; set "
                f"--config.window={longest} or less, and name it where the figure is printed"
            )
        if engine.tokenizer is None:
            raise MoejaxError(f"{config.checkpoint} has no tokenizer.json, so it takes no text")
        stream = encode(engine.tokenizer, directory, text, special=config.add_special_tokens)
        if config.max_tokens and len(stream.ids) > config.max_tokens:
            stream, text = beginning(engine.tokenizer, stream, text, config.max_tokens)
        head = _head(config, text, stream, directory, engine)
        place = beside(output) if output else None
        answers = AnswerFile(place, head, numbers=("nats", "tokens"), anew=config.begins_anew())
        if answers.num_resumed:
            count = f"{answers.num_resumed} of {windowing.num_windows(len(stream.ids))} windows"
            print_stderr(f"{count} are taken over from {place}")
        started, compiled = time.perf_counter(), engine.compile_seconds
        with recorded(engine, config, config.text):
            measured = _measure(engine, stream.ids, windowing, config.num_rows(), answers)
        seconds = time.perf_counter() - started - (engine.compile_seconds - compiled)
        result = record.perplexity_record(
            engine,
            head,
            measured,
            num_bytes=text.num_bytes,
            stored=record.stored_bytes(directory),
            seconds=seconds,
            batch_size=config.num_rows(),
            seed=config.seed,
            num_resumed=answers.num_resumed,
        )
        if output:
            record.write_record(output, result)
        answers.finish()
        moved = engine.ledger.describe() if engine.ledger else []
        print("\n".join([record.summary(result), *moved]), flush=True)
        if tiering and config.fidelity_share:
            chosen = fidelity.sample(stream.ids, windowing, config.fidelity_share, config.seed)
            # Both models read these windows; the exact one is loaded first.
            reading = 2 * seconds * chosen.tokens.size / max(1, measured.num_scored)
            print_stderr(
                f"comparing with the exact model on {chosen.num_tokens} tokens: about "
                f"{engine.load_seconds + reading:.0f} s and compiling; "
                "--config.fidelity_share=0 leaves it out"
            )
            if found := _compared(config, directory, engine, chosen):
                if output:
                    record.write_record(output, result | {"fidelity": dataclasses.asdict(found)})
                print(found.describe())


def _head(
    config: EvaluateConfig, text: Text, stream: TokenizedText, directory: Path, engine: "Engine"
) -> dict[str, Any]:
    """Identity of a measurement: windows are reused only by a run with an equal one.

    The batch size is not part of it: a run may resume with another.
    """
    name: dict[str, Any] = {"name": config.checkpoint}
    if config.read_bits:
        name["read_bits"] = config.read_bits
    return {
        "task": "perplexity",
        "text": {"source": text.source, "sha256": text.sha256},
        "tokens": len(stream.ids),
        "protocol": {
            **dataclasses.asdict(config.windowing()),
            "bos": stream.bos,
            "add_special_tokens": config.add_special_tokens,
            "tokenizer_sha256": stream.tokenizer_sha256,
        },
        "checkpoint": {**name, **record.fingerprint(directory)},
        "dtype": str(engine.dtype),
        "device": engine.device.device_kind,
        "policy": dataclasses.asdict(config.policy) if config.policy.name else None,
        "memory": dataclasses.asdict(config.memory),
        **({"mesh": config.mesh} if config.mesh else {}),
    }


def _compared(
    config: EvaluateConfig, directory: Path, engine: "Engine", chosen: fidelity.Sample
) -> fidelity.Fidelity | None:
    """Compares with the exact model; logs an error and returns None if it does not fit."""
    own = fidelity.predictions(engine.logits, chosen)
    try:
        exact = load_scoring_engine(config, directory, None)
        return fidelity.compare(fidelity.predictions(exact.logits, chosen), own)
    except MoejaxError as error:
        logging.error("the KL of the exact model was not measured: %s", error)
        return None


def _measure(
    engine: "Engine", ids: list[int], windowing: Windowing, batch_size: int, answers: AnswerFile
) -> LogLikelihood:
    """Scores the windows that have no answer yet, under a progress bar."""
    known = {i: WindowScore(of["nats"], of["tokens"]) for i, of in answers.known.items()}
    nats = sum(of.nats for of in known.values())
    num_scored = sum(of.num_scored for of in known.values())
    total = max(0, len(ids) - 1)
    with contextlib.closing(
        tqdm.tqdm(total=total, initial=num_scored, desc="scoring", unit="tok")
    ) as bar:

        def keep(scores: dict[int, WindowScore]) -> None:
            nonlocal nats, num_scored
            answers.add(
                [{"index": i, "nats": n, "tokens": tokens} for i, (n, tokens) in scores.items()]
            )
            nats += sum(of.nats for of in scores.values())
            num_scored += sum(of.num_scored for of in scores.values())
            so_far = LogLikelihood(nats, num_scored, len(answers.known))
            bar.set_postfix_str(f"perplexity {so_far.perplexity:.3f}", refresh=False)
            bar.update(num_scored - bar.n)

        return log_likelihood(
            ids, windowing, engine.score, batch_size=batch_size, known=known, on_batch=keep
        )
