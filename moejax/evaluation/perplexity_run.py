"""Perplexity of a text: the run of `moejax.evaluate`, and its record.

The record has the figure, and all that is needed to measure it again.
"""

import contextlib
import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import tqdm
from absl import logging

from moejax.checkpoints import resolve_checkpoint
from moejax.checkpoints.open import open_checkpoint
from moejax.checkpoints.safetensors_reader import stored_tensors
from moejax.config.commands import EvaluateConfig
from moejax.errors import MoejaxError, print_stderr
from moejax.evaluation import fidelity
from moejax.evaluation.answers import AnswerFile, beside, check_place
from moejax.evaluation.expert_errors import layer_errors
from moejax.evaluation.perplexity import (
    RULE,
    STANDARD_ERROR,
    LogLikelihood,
    WindowScore,
    log_likelihood,
)
from moejax.experts.bits import describe_bits
from moejax.files import result_rows as results
from moejax.files.whole import ROOM, check_output, write_whole
from moejax.inference import report
from moejax.loading import load_scoring_engine, recorded
from moejax.text.corpus import Text, TokenizedText, beginning, encode
from moejax.text.windows import Windowing

if TYPE_CHECKING:
    from moejax.engine import Engine


def run(config: EvaluateConfig, text: Text, output: Path | None) -> None:
    """Measures, prints a line, writes the JSON file and each window's nats beside it."""
    if output:
        check_output(output, begins='{"task":"perplexity"')
        check_place(beside(output))
    directory = resolve_checkpoint(config.checkpoint)
    # Float32 is float32 on every device; on a GPU the default would shorten its products.
    with jax.default_matmul_precision("highest"):
        tiering = config.policy.tiering()
        windowing = config.windowing()
        model = open_checkpoint(str(directory), config.read_bits).config
        if windowing.window > (longest := model.context_limit):
            raise MoejaxError(
                f"window={windowing.window} is beyond the model's context of {longest}; set "
                f"--config.window={longest} or less, and name it where the figure is printed"
            )
        engine = load_scoring_engine(config, directory, tiering)
        assert engine.tokenizer is not None
        stream = encode(engine.tokenizer, directory, text, special=config.add_special_tokens)
        if config.max_tokens and len(stream.ids) > config.max_tokens:
            stream, text = beginning(engine.tokenizer, stream, text, config.max_tokens)
        head = _head(config, text, stream, directory, engine)
        place = beside(output) if output else None
        answers = AnswerFile(place, head, anew=config.begins_anew())
        if answers.num_resumed:
            count = f"{answers.num_resumed} of {windowing.num_windows(len(stream.ids))} windows"
            print_stderr(f"{count} are taken over from {place}")
        started, compiled = time.perf_counter(), engine.compile_seconds
        with recorded(engine, config, config.text):
            measured = _measure(engine, stream.ids, windowing, config.num_rows(), answers)
        seconds = time.perf_counter() - started - (engine.compile_seconds - compiled)
        result = _perplexity_record(
            config, engine, head, measured, num_bytes=text.num_bytes, seconds=seconds,
            stored=_stored_bytes(directory), num_resumed=answers.num_resumed,
        )  # fmt: skip
        if output:
            _write_record(output, result)
        answers.finish()
        moved = engine.ledger.describe() if engine.ledger else []
        print("\n".join([_summary(result), *moved, *layer_errors(config, engine)]), flush=True)
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
                    _write_record(output, result | {"fidelity": dataclasses.asdict(found)})
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
        "checkpoint": {**name, **_fingerprint(directory)},
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
    nats = sum(of.nats for of in answers.known.values())
    num_scored = sum(of.num_scored for of in answers.known.values())
    total = max(0, len(ids) - 1)
    with contextlib.closing(
        tqdm.tqdm(total=total, initial=num_scored, desc="scoring", unit="tok")
    ) as bar:

        def keep(scores: dict[int, WindowScore]) -> None:
            nonlocal nats, num_scored
            answers.add(scores)
            nats += sum(of.nats for of in scores.values())
            num_scored += sum(of.num_scored for of in scores.values())
            so_far = LogLikelihood(nats, num_scored, len(answers.known))
            bar.set_postfix_str(f"perplexity {so_far.perplexity:.3f}", refresh=False)
            bar.update(num_scored - bar.n)

        return log_likelihood(
            ids, windowing, engine.score, batch_size=batch_size, known=answers.known,
            on_batch=keep,
        )  # fmt: skip


def _stored_bytes(directory: Path) -> int | None:
    """Bytes of all tensors in a directory's safetensors files; None without any."""
    try:
        return sum(tensor.num_bytes for tensor in stored_tensors(directory).values())
    except MoejaxError:
        return None


def _perplexity_record(
    config: EvaluateConfig,
    engine: "Engine",
    head: dict[str, Any],  # identity of the measurement (`answers.AnswerFile`)
    measured: LogLikelihood,
    *,
    num_bytes: int,
    stored: int | None,  # bytes of the checkpoint's tensors, None if not known
    seconds: float,  # time of scoring without compiling
    num_resumed: int,  # windows that an earlier run scored; times and ledger are without them
) -> dict[str, Any]:
    """Builds the result as JSON."""
    mean, ledger = measured.nats / measured.num_scored, engine.ledger
    return {
        "task": head["task"],
        "checkpoint": head["checkpoint"]["name"],
        "perplexity": measured.perplexity,
        "perplexity_stderr": measured.perplexity_stderr,
        "nats_per_token": {"value": mean, "stderr": measured.stderr},
        "bits_per_byte": measured.bits_per_byte(num_bytes),
        "nats": measured.nats,
        "tokens": head["tokens"],
        "tokens_scored": measured.num_scored,
        "bytes": num_bytes,
        "text": head["text"],
        "protocol": {
            **head["protocol"],
            "windows": measured.num_windows,
            "rule": RULE,
            "standard_error": STANDARD_ERROR,
            "vocab_size": engine.config.vocab_size,
            "batch_size": config.num_rows(),
            "seed": config.seed,
            "files": head["checkpoint"],
        },
        "policy": head["policy"],
        "limits": head["memory"],
        "ledger": None if ledger is None else ledger.as_dict(),
        "resumed_windows": num_resumed,
        "fidelity": None,  # where a policy is compared with the exact model, later
        "dtype": str(engine.dtype),
        "experts": engine.experts_used,
        "kernels": engine.kernels,
        "weights": {
            "parameters": engine.num_weights,
            "bytes": engine.bits.nbytes,
            "bits_per_weight": engine.bits_per_weight,
            "bits_per_weight_by_part": engine.bits.parts,
            "stored_bytes": stored,
            "stored_bits_per_weight": None if stored is None else 8 * stored / engine.num_weights,
        },
        "memory": {
            "device_peak_bytes": report.device_peak_bytes(engine.device),
            "host_peak_bytes": report.host_peak_bytes(),
        },
        "seconds": {
            "load": engine.load_seconds, "compile": engine.compile_seconds, "score": seconds,
        },
        "device": results.describe_device(engine.device),
        "versions": results.package_versions("jax", "jaxlib", "flax", "numpy", "tokenizers"),
        "date": results.today(),
        "command": results.command_line(),
    }  # fmt: skip


def _fingerprint(directory: Path) -> dict[str, Any]:
    """Identifies a checkpoint: hashes of its small files, sizes and times of the rest."""
    small = {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in ("config.json", "tokenizer.json")
        if (directory / name).is_file()
    }
    large = [
        [path.name, path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(directory.glob("*.safetensors"))
    ]
    return {"sha256": small, "files": large}


def _summary(record: dict[str, Any]) -> str:
    """Summarises the result in one line, with its protocol."""
    protocol, weights = record["protocol"], record["weights"]
    bits = describe_bits(weights["bits_per_weight"], weights["bits_per_weight_by_part"], 3)
    forms = "/".join(record["experts"]) or "none (nothing was left to run)"
    stored = weights["stored_bits_per_weight"]
    in_files = "" if stored is None else f", {stored:.3f} in the files"
    stride = f"stride {protocol['stride']}" + (", one at a time" if record["policy"] else "")
    stderr = record["perplexity_stderr"]
    error = "" if stderr is None else f" ± {stderr:.4f}"
    return (
        f"perplexity {record['perplexity']:.4f}{error}, {record['bits_per_byte']:.4f} bits a byte; "
        f"{record['tokens_scored']} of {record['tokens']} tokens scored, {record['bytes']} bytes "
        f"of {record['text']['source']}; window {protocol['window']}, {stride}, "
        f"bos {protocol['bos'] or 'none'}; {bits} in memory"
        f"{in_files}; {record['dtype']}, experts by {forms}, "
        f"{record['seconds']['score']:.1f} s"
    )


def _write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes JSON, whole or not at all."""
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, text, f"{ROOM}, and run the same command again to resume")
