"""Runs the benchmarks whose files are in a folder through `moejax.evaluate`; rows of figures.

    python -m scripts.run_benchmarks --data=EVAL_DIR --limit=300 \
        --output=scripts/results/evaluation.jsonl
    python -m scripts.run_benchmarks --data=EVAL_DIR --tasks=mmlu -- --config.policy.name=dymoe \
        --config.policy.tiers=int4,int2

What follows `--` goes to every run. `--keep=DIR` keeps results and answers: started again with the
same folder, an interrupted run goes on. HumanEval runs programs that the model wrote, and is left
out without `--execute`.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import app, flags

from moejax import cli, evaluate, results

_DATA = flags.DEFINE_string("data", None, "folder of the files", required=True)
_LIMIT = flags.DEFINE_integer("limit", 300, "documents of a task, a random sample; 0: all")
_GENERATED = flags.DEFINE_integer("generated", 50, "the same of tasks that generate")
_TASKS = flags.DEFINE_list("tasks", None, "some of them only")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "as moejax.evaluate takes it")
_EXECUTE = flags.DEFINE_boolean("execute", False, "run what the model wrote for HumanEval")
_KEEP = flags.DEFINE_string("keep", "", "folder of results and answers; '': none are kept")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append rows to")

# Task: its file, the file of its examples, how many of them, what chance gets.
RUNS: dict[str, tuple[str, str, int, float]] = {
    "arc_easy": ("arc_easy.test", "", 0, 0.25),
    "arc_challenge": ("arc_challenge.test", "", 0, 0.25),
    "hellaswag": ("hellaswag.validation", "", 0, 0.25),
    "piqa": ("piqa.validation", "", 0, 0.5),
    "mmlu": ("mmlu.test", "mmlu.dev", 5, 0.25),
    "gsm8k": ("gsm8k.test", "gsm8k.train", 5, 0.0),
    "humaneval": ("humaneval.test", "", 0, 0.0),
}
GENERATE = ("gsm8k", "humaneval")


def find(name: str) -> Path:
    """A file of the folder, plain or packed."""
    for suffix in (".jsonl", ".jsonl.xz", ".jsonl.gz"):
        path = Path(_DATA.value) / f"{name}{suffix}"
        if path.exists():
            return path
    sys.exit(f"error: there is no {name}.jsonl in {_DATA.value}, plain or packed")


def arguments(task: str, output: Path, rest: list[str]) -> list[str]:
    """Of `moejax.evaluate`."""
    data, shots, fewshot, _ = RUNS[task]
    limit = _GENERATED.value if task in GENERATE else _LIMIT.value
    found = [
        f"--config.task={task}", f"--config.data={find(data)}", f"--config.fewshot={fewshot}",
        f"--config.limit={limit}", f"--config.checkpoint={_CHECKPOINT.value}",
        f"--config.output={output}",
    ]  # fmt: skip
    if shots:
        found.append(f"--config.fewshot_data={find(shots)}")
    if task == "humaneval":
        found += ["--config.execute=True", "--config.max_new_tokens=256"]
    return [*found, *rest]


def rows_of(task: str, record: dict[str, Any]) -> list[results.ResultRow]:
    """A row a metric."""
    policy = record["policy"]["name"] if record["policy"] else "no policy"
    return [
        results.ResultRow(
            what=f"{metric}, {task}, {record['documents']} documents, "
            f"{record['protocol']['fewshot']} examples, {record['checkpoint']}, "
            f"{record['dtype']}, {policy}",
            figure=found["value"],
            unit="share",
            baseline={"standard error": found["stderr"] or 0.0, "chance": RUNS[task][3]},
            device=record["device"],
            versions=record["versions"],
            date=record["date"],
            command=results.command_line(),
        )
        for metric, found in record["metrics"].items()
    ]


def main(argv: list[str]) -> None:
    """Runs them one after the other."""
    names = _TASKS.value or [task for task in RUNS if task != "humaneval" or _EXECUTE.value]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(_KEEP.value or name)
        folder.mkdir(parents=True, exist_ok=True)
        for task in names:
            output = folder / f"{task}.json"
            given = ["evaluate", *arguments(task, output, argv[1:])]
            if status := cli.exit_status(evaluate.COMMAND, given):
                sys.exit(status)
            if _OUTPUT.value:
                results.append_rows(
                    Path(_OUTPUT.value), rows_of(task, json.loads(output.read_text()))
                )


if __name__ == "__main__":
    app.run(main)
