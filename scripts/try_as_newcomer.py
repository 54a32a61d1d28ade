"""README's first command in a fresh clone and a fresh environment: how long to the first text.

    python -m scripts.try_as_newcomer --output=scripts/results/newcomer.jsonl

Clones the last commit, takes the command from the clone's README, runs it in a shell that knows no
other environment of Python, and then quantizes the demo model with what was installed. Downloads
count, except for what pip's cache has.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
from absl import app, flags

from moejax import results

ROOT = Path(__file__).parents[1]
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append rows to")
_PYTHON = flags.DEFINE_string("python", "", "folder of the python3 to begin with; '': as it is")
_QUANTIZE = """\
python -m moejax.quantize --config.output=demo-int4 --config.method=rtn --config.bits=4
python -m moejax.generate --config.checkpoint=demo-int4 --prompt="The history of"
"""


def first_command(readme: str) -> str:
    """The first fence of shell in a page."""
    found = re.search(r"```bash[^\n]*\n(.*?)```", readme, re.DOTALL)
    if found is None:
        raise ValueError("the page has no commands")
    return found[1]


def timed(command: str, folder: Path, environment: dict[str, str]) -> tuple[float, str]:
    """Seconds of a shell's command, and what it wrote to stdout.

    Raises:
      SystemExit: it failed.
    """
    begin = time.perf_counter()
    done = subprocess.run(
        ["bash", "-e", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"exit status {done.returncode}: {command}")
    return time.perf_counter() - begin, done.stdout


def main(argv: list[str]) -> None:
    """Runs both, prints and writes the seconds."""
    del argv
    ours = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    path = [p for p in ours["PATH"].split(os.pathsep) if not (Path(p) / "activate").exists()]
    ours["PATH"] = os.pathsep.join([_PYTHON.value, *path] if _PYTHON.value else path)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name) / "moejax"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        first = first_command((clone / "README.md").read_text("utf-8"))
        begin = f"source {clone}/.venv-demo/bin/activate\n"
        for what, command in (
            ("fresh clone to the first text", first),
            ("the demo model in INT4, and its text", begin + _QUANTIZE),
        ):
            seconds, text = timed(command, clone, ours)
            if not text.strip():
                sys.exit(f"no text came: {command}")
            print(f"{what}: {seconds:.0f} s\n{text}")
            rows.append(
                results.ResultRow(
                    what=f"newcomer: {what}", figure=seconds, unit="s", baseline={},
                    device=results.describe_device(jax.devices("cpu")[0]),
                    versions=results.package_versions("jax"), date=results.today(),
                    command=results.command_line(),
                )
            )  # fmt: skip
    if _OUTPUT.value:
        results.append_rows(Path(_OUTPUT.value), rows)


if __name__ == "__main__":
    app.run(main)
