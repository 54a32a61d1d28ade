"""Times methods under budgets by `moejax.benchmark`, for the picture of a shape.

    python -m scripts.studies.speed.decide --shape=Qwen3-30B-A3B --output=decide.jsonl  # gpu

One run a method, a sequence at a time, attention in INT4; a budget that cannot hold a method is a
row that says why. Methods that the output has are passed over: the same command goes on where it
stopped, and ends with status 3 while there is more to do.
"""

import subprocess
import sys
from pathlib import Path

from absl import app, flags

from moejax.files.result_rows import read_rows
from scripts.studies.measuring import time_limit
from scripts.studies.tables.decisions import BUDGETS, METHODS, about

_SHAPE = flags.DEFINE_string("shape", "Qwen3-30B-A3B", "which shape")
_GIBS = flags.DEFINE_list("budgets", [f"{gib:g}" for gib in BUDGETS], "GiB of device memory")
_HOST = flags.DEFINE_float("host_gib", 4, "of rows, which experts share; 0: all rows")
_PLATFORM = flags.DEFINE_string("platform", "gpu", "gpu; cpu only tries the script")
_OUTPUT = flags.DEFINE_string("output", None, "JSON Lines file to append to", required=True)
_BUDGET = flags.DEFINE_float("time_budget_s", 0, "begin no method after so long; 0: no limit")


def main(argv: list[str]) -> None:
    """Runs what the output lacks."""
    del argv
    check_time, output = time_limit(_BUDGET.value), Path(_OUTPUT.value)
    common = [
        f"--config.shape={_SHAPE.value}", "--config.attention_bits=4",
        f"--config.memory.host_gib={_HOST.value}", f"--config.platform={_PLATFORM.value}",
        f"--config.budgets=({','.join(_GIBS.value)},)", f"--config.output={output}",
    ]  # fmt: skip
    for method, words in METHODS.items():
        if has_rows(output, method):
            continue
        check_time()
        print(f"== {method}", flush=True)
        # Its status is 1 where every budget is refused, which its rows say.
        subprocess.run([sys.executable, "-m", "moejax.benchmark", *common, *words], check=False)
        if not has_rows(output, method):
            sys.exit(f"error: {method} gave no row")


def has_rows(output: Path, method: str) -> bool:
    """Whether a method has rows in a file."""
    model = f"{about(_SHAPE.value, method)}, batch 1"
    return output.is_file() and any(model in row.what for row in read_rows(output))


if __name__ == "__main__":
    app.run(main)
