"""Scores of tasks under policies and in low precisions, document by document.

    python -m scripts.studies.quality.task_scores --checkpoint=RUN/model --label=study \
        --data=DIR/eval --work_dir=WORK \
        --output=scripts/studies/quality/task_scores.jsonl  # gpu
    python -m scripts.studies.quality.task_scores --label=study --output=rows.jsonl --judge_only

Each method is a run of `moejax.lm_eval`, so anyone can repeat one alone: the row has its model
arguments. Attention stays as it is, experts in low precision are HQQ's in groups of 64 (MiLo's are
of a checkpoint that is written beside the model's), and all is computed in float32. Hotness and the
lists of buddies come from the text that ships, never from the tasks. A row keeps which documents
were right, so methods are compared document by document. Bars stand in `task_cases.py` and are
printed first; methods that the output has are passed over.
"""

import subprocess
import sys
from pathlib import Path

from absl import app, flags

from scripts.studies.measuring import MORE, Report
from scripts.studies.quality.cases import describe, rows_of, standard_error
from scripts.studies.quality.task_cases import (
    CLAIMS,
    DEFAULT,
    METHODS,
    QUANTIZED,
    TASKS,
    Scored,
    arguments_of,
    batch_of,
    checkpoint_of,
    packed,
    wrong_of,
)

PROFILE = "buddies.safetensors"

_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "a model of 16 experts a layer")
_LABEL = flags.DEFINE_string("label", "demo", "name of the model in rows")
_DATA = flags.DEFINE_string("data", "", "folder of the tasks' files, as `moejax.lm_eval` has it")
_CALIBRATION = flags.DEFINE_string(
    "calibration", DEFAULT, "text of quantizers that need one: a file, or the one that ships"
)
_WORK_DIR = flags.DEFINE_string("work_dir", "", "folder of the runs' own output")
_TASKS = flags.DEFINE_list("tasks", list(TASKS), "tasks with the metric acc_norm")
_METHODS = flags.DEFINE_multi_enum("methods", list(METHODS), list(METHODS), "which methods")
_DOCUMENTS = flags.DEFINE_integer("documents", 1000, "documents of a task, the first ones, at most")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")
_PLATFORM = flags.DEFINE_string("platform", "auto", "auto, cpu, gpu")
_JUDGE = flags.DEFINE_bool("judge_only", False, "measure nothing, print the verdicts of the rows")


def score(method: str) -> dict[str, Scored] | str:
    """Runs a method; what it scored, or the end of its log where it failed."""
    folder = Path(_WORK_DIR.value) / "".join(c if c.isalnum() else "_" for c in method)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.rglob("samples_*.jsonl"):
        old.unlink()
    command = [
        sys.executable, "-m", "moejax.lm_eval", "--model", "moejax",
        "--model_args", arguments_of(method, _CHECKPOINT.value, _CALIBRATION.value),
        "--tasks", ",".join(_TASKS.value), "--data", _DATA.value,
        "--limit", str(_DOCUMENTS.value), "--output_path", str(folder), "--log_samples",
        "--batch_size", str(batch_of(method)),
    ]  # fmt: skip
    if _PLATFORM.value == "cpu":
        command += ["--device", "cpu"]
    with (folder / "log.txt").open("w") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if status:
        return f"status {status}: {(folder / 'log.txt').read_text()[-600:]}"
    return {task: Scored.read(folder, task) for task in _TASKS.value}


def main(argv: list[str]) -> None:
    """Measures the methods that the output lacks, writes rows, prints verdicts."""
    del argv
    output = Path(_OUTPUT.value)
    for bar in CLAIMS:
        print(f"bar: {bar.paper}, {bar.said} ({bar.where}): {bar.bar}")
    is_done = _JUDGE.value or _measure(output)
    for line in describe(CLAIMS, wrong_of(rows_of(output), _LABEL.value)):
        print(line.replace("nats a token", "of the answers"))
    if not is_done:
        print("more to do: run the same command again", flush=True)
        sys.exit(MORE)


def _measure(output: Path) -> bool:
    """Runs what is missing; returns whether all are there."""
    done, is_whole = {row["what"] for row in rows_of(output)}, True
    report = Report(_device(), "", _OUTPUT.value, ("moejax", "jax", "jaxlib", "lm_eval"))
    for method in _METHODS.value:
        if all(_what(task, method) in done for task in _TASKS.value):
            continue
        found = score(method) if _prepare(method) else "what it reads could not be made"
        if isinstance(found, str):
            print(f"{method}: {found}", flush=True)
            is_whole = False
            continue
        for task, scored in found.items():
            report.add(
                _what(task, method), float(scored.right.mean()), "acc_norm",
                **{"standard error": standard_error(scored.right.astype(float)),
                   "acc": scored.plain, "documents": len(scored.right),
                   "right": packed(scored.right), "batch": batch_of(method),
                   "model arguments": arguments_of(
                       method, Path(_CHECKPOINT.value).name, _CALIBRATION.value)},
            )  # fmt: skip
    return is_whole


def _prepare(method: str) -> bool:
    """Makes what a method reads, a profile or a checkpoint, unless it is there; whether it is."""
    checkpoint = _CHECKPOINT.value
    made, command = Path(checkpoint) / PROFILE, ["moejax.profile_experts"]
    if method in QUANTIZED:
        output = checkpoint_of(method, checkpoint, _CALIBRATION.value)
        made, command = Path(output) / "config.json", ["moejax.quantize"]
        chosen = f"output={output}", f"calibration={_CALIBRATION.value}", *QUANTIZED[method]
        command += [f"--config.{flag}" for flag in chosen]
    elif "buddymoe" not in " ".join(METHODS[method]):
        return True
    given = (f"--config.checkpoint={checkpoint}", f"--config.platform={_PLATFORM.value}")
    return made.exists() or not subprocess.run([sys.executable, "-m", *command, *given]).returncode


def _what(task: str, method: str) -> str:
    return f"tasks | {task} | {method} | {_LABEL.value}"


def _device() -> str:
    """The device that the runs find, asked of a process that ends."""
    asked = (
        "from moejax.devices import choose_device; "
        "from moejax.files.result_rows import describe_device; "
        f"print(describe_device(choose_device({_PLATFORM.value!r})))"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    app.run(main)
