"""Runs the commands of the documents, or reads their flags where they cannot be run here.

    python -m scripts.check_documents                 # what runs offline on a CPU, in a minute
    python -m scripts.check_documents --all           # what takes longer, too
    python -m scripts.check_documents --only=docs/benchmark.md

`scripts/documents/commands.py` says how a command is marked. Every command is read first: flags
that a main does not have, files of configurations that are not there, or a fence without a known
mark are errors. Commands run in a temporary folder, on the demo model, shortened by flags.
"""

import contextlib
import io
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from absl import app, flags

from scripts.documents import commands, dry
from scripts.documents.workspace import Workspace

# Programs run once, for milliseconds: without optimisation they take a third of the time, most of
# which is compiling. Read when JAX first compiles.
_COMPILE_QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

_ALL = flags.DEFINE_bool("all", False, "run commands that are marked long, too, at full length")
_ONLY = flags.DEFINE_string("only", "", "of files whose name begins so")


def run_all(chosen: list[commands.Command], folder: Path, *, shorter: bool) -> list[str]:
    """Runs commands in a new folder; what fails, a line each. A command runs once."""
    wrong, space, done = [], Workspace(folder), set()
    os.chdir(folder)
    for command in chosen:
        key = command.text if command.is_program else str(command.parts)
        if key in done:
            continue
        done.add(key)
        begin, said = time.perf_counter(), io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                space.run(command, shorter=shorter or command.fate == commands.RUN)
        except (*dry.ERRORS, SystemExit) as error:
            wrong.append(f"{command.place}: {command.text}\n    {error}\n{said.getvalue()[-2000:]}")
        said_of = " ".join(command.text.split())[:90]
        print(f"{time.perf_counter() - begin:5.1f} s  {command.place}  {said_of}", flush=True)
    return wrong


def main(argv: list[str]) -> None:
    """Reads all, then runs what is to be run; exit status 1 where anything is wrong."""
    del argv
    os.chdir(commands.ROOT)
    if not _ALL.value:
        os.environ["XLA_FLAGS"] = f"{_COMPILE_QUICKLY} {os.environ.get('XLA_FLAGS', '')}"
    found = [one for one in commands.of_documents() if one.place.startswith(_ONLY.value)]
    wrong = dry.check_all(found)
    fates = (commands.RUN, "long") if _ALL.value else (commands.RUN,)
    chosen = [one for one in found if one.fate in fates]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # where "auto" keeps compiled programs
        wrong += run_all(chosen, Path(folder), shorter=not _ALL.value)
        os.chdir(commands.ROOT)
    counts = Counter(one.fate for one in found)
    print(f"{len(found)} commands: " + ", ".join(f"{n} {fate}" for fate, n in counts.items()))
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    app.run(main)
