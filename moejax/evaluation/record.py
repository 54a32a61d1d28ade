"""Records of an evaluation: the figure, and all that is needed to measure it again."""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax.checkpoints.safetensors_reader import stored_tensors
from moejax.errors import MoejaxError
from moejax.evaluation.perplexity import RULE, STANDARD_ERROR, LogLikelihood
from moejax.experts.bits import describe_bits
from moejax.files import result_rows as results
from moejax.files.whole import ROOM, write_whole
from moejax.inference import report

if TYPE_CHECKING:
    from moejax.engine import Engine


def stored_bytes(directory: Path) -> int | None:
    """Bytes of all tensors in a directory's safetensors files; None without any."""
    try:
        return sum(tensor.num_bytes for tensor in stored_tensors(directory).values())
    except MoejaxError:
        return None


def perplexity_record(
    engine: "Engine",
    head: dict[str, Any],  # identity of the measurement (`answers.AnswerFile`)
    measured: LogLikelihood,
    *,
    num_bytes: int,
    stored: int | None,  # bytes of the checkpoint's tensors, None if not known
    seconds: float,  # time of scoring without compiling
    batch_size: int,
    seed: int,
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
            "batch_size": batch_size,
            "seed": seed,
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


def fingerprint(directory: Path) -> dict[str, Any]:
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


def summary(record: dict[str, Any]) -> str:
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


def check_output(path: Path, name: str = "output") -> None:
    """Raises MoejaxError unless `path`, given by the field `name`, can be written."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a directory" if path.is_dir() else f"lies in {path.parent}, which is not there"
        raise MoejaxError(f"{name} {path} {what}; name a file in a directory that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise MoejaxError(f"{name} {path} cannot be written: no permission")


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes JSON, whole or not at all."""
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, text, f"{ROOM}, and run the same command again to resume")
