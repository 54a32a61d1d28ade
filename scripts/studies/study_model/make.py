"""Makes the study model: packs text, trains, measures, scores tasks, writes card and pieces.

    python -m scripts.studies.study_model.make --config=configs/train_study_model.py \
        --parent=PARENT --data=DIR --work_dir=RUN  # gpu

Each step is a command of its own and is passed over where its result is there, so the same command
goes on after a stop. `--time_budget_s` limits the training of one call, `--steps` names some steps
only. `--data` has `train/`, `valid/` and `eval/`; without `train/` the packed text must be there.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from scripts.studies.study_model.experiment import MODELS

_CONFIG = flags.DEFINE_string("config", None, "the experiment", required=True)
_PARENT = flags.DEFINE_string("parent", None, "Hugging Face directory of the parent", required=True)
_DATA = flags.DEFINE_string("data", None, "directory of texts and task data", required=True)
_WORK_DIR = flags.DEFINE_string("work_dir", None, "where everything is written", required=True)
_TIME_BUDGET_S = flags.DEFINE_float("time_budget_s", 0.0, "of training in this call; 0: no limit")
_TASKS = flags.DEFINE_list("tasks", ["arc_easy", "hellaswag", "piqa"], "tasks of lm_eval")
_DOCUMENTS = flags.DEFINE_integer("documents", 1000, "documents of a task, at most")
STEPS = ("prepare_data", "train", "evaluate", "tasks", "card", "pieces")
_STEPS = flags.DEFINE_multi_enum("steps", list(STEPS), list(STEPS), "which steps")

_HERE = "scripts.studies.study_model"


def commands(
    *, config: str, parent: str, data: Path, work: Path, time_budget_s: float = 0.0,
    tasks: Sequence[str] = (), documents: int = 0,
) -> dict[str, list[tuple[Path, list[str]]]]:  # fmt: skip
    """The commands of each step, each after a file that is there once it is done."""
    run = [f"--config={config}", f"--parent={parent}", f"--corpus={work / 'corpus'}"]
    run.append(f"--run_dir={work}")
    pack = [f"--data={data}", f"--parent={parent}", f"--output={work / 'corpus'}"]
    cut = [f"--directory={work / 'model'}", f"--pieces={work / 'pieces'}"]
    score = {
        name: [
            "moejax.lm_eval", "--model=moejax", f"--model_args=pretrained={work / name}",
            f"--tasks={','.join(tasks)}", f"--data={data / 'eval'}", f"--limit={documents}",
            f"--output_path={work / 'tasks' / name}",
        ]
        for name in MODELS
    }  # fmt: skip
    return {
        "prepare_data": [(work / "corpus/corpus.json", [f"{_HERE}.prepare_data", *pack])],
        "train": [
            (
                work / "parent_as_experts/config.json",
                [f"{_HERE}.train", *run, f"--time_budget_s={time_budget_s}"],
            )
        ],
        "evaluate": [(work / "evaluation.json", [f"{_HERE}.evaluate", *run])],
        "tasks": [(work / "tasks" / name / "done", command) for name, command in score.items()],
        "card": [(work / "model/README.md", [f"{_HERE}.card", f"--run_dir={work}"])],
        "pieces": [(work / "pieces/pieces.json", [f"{_HERE}.pieces", "split", *cut])],
    }


def main(argv: list[str]) -> None:
    """Runs the steps in turn; ends with the status of one that fails."""
    del argv
    table = commands(
        config=_CONFIG.value,
        parent=_PARENT.value,
        data=Path(_DATA.value),
        work=Path(_WORK_DIR.value),
        time_budget_s=_TIME_BUDGET_S.value,
        tasks=_TASKS.value,
        documents=_DOCUMENTS.value,
    )
    for step in (step for step in STEPS if step in _STEPS.value):
        for result, command in table[step]:
            if result.exists():
                print(f"{step}: {result} is there", flush=True)
                continue
            print(f"{step}: python -m {' '.join(command)}", flush=True)
            if status := subprocess.run([sys.executable, "-m", *command]).returncode:
                sys.exit(status)
            if step == "tasks":
                result.touch()


if __name__ == "__main__":
    app.run(main)
