r"""Times methods by `moejax.benchmark`, for the picture of a shape and the papers' tables.

    python -m scripts.studies.speed.decide --output=decide.jsonl  # gpu
    python -m scripts.studies.speed.decide --section=dymoe --output=x.jsonl --config.trace=F  # gpu
    python -m scripts.studies.speed.decide --section=buddymoe --shape=tiny --output=x.jsonl \
        --config.platform=cpu

One run a method (`configurations.py` has them); a budget that cannot hold a method is a row that
says why. Further `--config.` flags go to every run. Methods that the output has are passed over:
the same command goes on where it stopped, and ends with status 3 while there is more to do.
"""

import subprocess
import sys
from pathlib import Path

from absl import app, flags

from scripts.studies.measuring import time_limit
from scripts.studies.speed.configurations import SECTIONS, has_rows

_SECTION = flags.DEFINE_enum("section", "decide", list(SECTIONS), "whose methods")
_SHAPE = flags.DEFINE_string("shape", "", "which shape; '': the section's")
_METHOD = flags.DEFINE_multi_string("method", [], "names of methods; []: all")
_HOST = flags.DEFINE_float("host_gib", 4, "of rows, which experts share; 0: all rows")
_OUTPUT = flags.DEFINE_string("output", None, "JSON Lines file to append to", required=True)
_BUDGET = flags.DEFINE_float("time_budget_s", 0, "begin no method after so long; 0: no limit")


def main(argv: list[str]) -> None:
    """Runs what the output lacks."""
    check_time, output = time_limit(_BUDGET.value), Path(_OUTPUT.value)
    section = SECTIONS[_SECTION.value]
    shape = _SHAPE.value or section.shape
    common = (f"--config.shape={shape}", f"--config.memory.host_gib={_HOST.value:g}",
              *section.common, f"--config.output={output}")  # fmt: skip
    failed = []
    for method, words in section.of(shape).items():
        if _METHOD.value and method not in _METHOD.value:
            continue
        given = {word.partition("=")[0]: word for word in (*common, *words, *argv[1:])}
        command = ["python", "-m", "moejax.benchmark", *given.values()]  # tuples would add up
        if has_rows(output, command):
            continue
        check_time()
        print(f"== {method}", flush=True)
        # Its status is 1 where every budget is refused, which its rows say.
        subprocess.run([sys.executable, *command[1:]], check=False)
        if not has_rows(output, command):
            failed.append(method)
    if failed:
        sys.exit(f"error: no row, or none of a budget: {', '.join(failed)}")


if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: flags.FLAGS(argv, known_only=True))
