"""Times two trees of this repository on one GPU, turn by turn, and compares their rows.

    git worktree add old COMMIT                          # or unpack `git archive COMMIT` into old/
    python -m scripts.compare_commits --old=old --new=.
    python -m scripts.compare_commits --old=old --new=. --job=mixtral --turns=3

Each job is a run of `moejax.benchmark` with small settings: times of a resident Qwen3-30B in INT4,
of the same with 24 slots a layer, of Mixtral under 24 GiB, and one row each of DynaExq, DyMoE and
BuddyMoE. The trees take turns (old, new, new, old, ...), each in a process of its own, so that a
drift of the clocks falls on both. The rows of a turn are printed when it ends, so that a run that
is cut keeps them; after a job's last turn a table compares the medians. Times of whole processes,
which compile without a cache, are rows too. Exits with 1 where a time is longer by more than
`--most_percent`.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import app, flags

from moejax.files.result_rows import read_rows

_OLD = flags.DEFINE_string("old", None, "folder of the old tree", required=True)
_NEW = flags.DEFINE_string("new", ".", "folder of the new tree")
_JOB = flags.DEFINE_multi_string("job", [], "name of a job; []: all")
_TURNS = flags.DEFINE_integer("turns", 2, "runs of each tree", lower_bound=1)
_MOST = flags.DEFINE_float("most_percent", 2.0, "a time may be longer by so much")

TIMES = ("ms", "us", "s")  # units of rows in which less is better


_COMMON = ("--config.attention_bits=4", "--config.context=1024", "--config.platform=gpu",
           "--config.compilation_cache=")  # fmt: skip
_QWEN3, _MIXTRAL = "--config.shape=Qwen3-30B-A3B", "--config.shape=Mixtral-8x7B"
_TIERS = ("--config.policy.tiers=int4,int2", "--config.memory.host_gib=4")
JOBS: Mapping[str, Sequence[str]] = {  # flags of `moejax.benchmark`
    "resident": (_QWEN3,),
    "slots": (_QWEN3, "--config.memory.slots=24"),
    "mixtral": (_MIXTRAL, "--config.budgets=(24,)"),
    "dynaexq": (_QWEN3, "--config.policy.name=dynaexq", *_TIERS, "--config.policy.slots=32,128",
                "--config.policy.settings=period=64,max_requests=16"),
    "dymoe": (_MIXTRAL, "--config.policy.name=dymoe", *_TIERS, "--config.budgets=(24,)",
              "--config.policy.settings=retention=0.75,prefetch=0"),
    "buddymoe": (_QWEN3, "--config.policy.name=buddymoe", "--config.policy.tiers=int4",
                 "--config.policy.slots=96", "--config.memory.host_gib=4"),
}  # fmt: skip


def run(tree: Path, words: Sequence[str]) -> dict[str, float]:
    """Times of a job's rows by what they say, and of the whole process; a failure ends all."""
    with tempfile.TemporaryDirectory() as folder:
        rows, start = Path(folder) / "rows.jsonl", time.monotonic()
        command = [sys.executable, "-m", "moejax.benchmark", *words, *_COMMON]
        command.append(f"--config.output={rows}")
        path = os.pathsep.join(
            [str(tree.resolve()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        )
        env = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(
                f"{tree}: {' '.join(command)} failed:\n{done.stdout[-800:]}{done.stderr[-800:]}"
            )
        found = {row.what: row.figure for row in read_rows(rows) if row.unit in TIMES}
    return found | {"the whole process, s": time.monotonic() - start}


def compared(
    old: Sequence[Mapping[str, float]], new: Sequence[Mapping[str, float]]
) -> dict[str, tuple[float, float]]:
    """Medians over turns of what both trees measured, old and new."""
    names = [name for name in old[0] if all(name in turn for turn in (*old, *new))]
    return {
        name: (
            statistics.median(turn[name] for turn in old),
            statistics.median(turn[name] for turn in new),
        )
        for name in names
    }


def main(argv: list[str]) -> None:
    """Runs the jobs and prints a table of each."""
    del argv
    names = _JOB.value or list(JOBS)
    if unknown := set(names) - set(JOBS):
        sys.exit(f"--job={unknown.pop()}: no such job; there are {', '.join(JOBS)}")
    trees = {"old": Path(_OLD.value), "new": Path(_NEW.value)}
    for tree in trees.values():
        if not (tree / "moejax" / "benchmark.py").is_file():
            sys.exit(f"{tree} is no tree of this repository: it has no moejax/benchmark.py")
    slower = []
    for name in names:
        turns: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
        for turn in range(_TURNS.value):
            for which in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                turns[which].append(found := run(trees[which], JOBS[name]))
                for what, figure in found.items():
                    print(f"{name}, turn {turn + 1}, {which}: {what}: {figure:.4g}", flush=True)
        print("\n| job | row | old | new | change |\n| --- | --- | --- | --- | --- |")
        for what, (before, after) in compared(turns["old"], turns["new"]).items():
            percent = 100 * (after / before - 1)
            print(f"| {name} | {what} | {before:.4g} | {after:.4g} | {percent:+.1f} % |")
            if percent > _MOST.value:
                slower.append(f"{name}, {what}: {percent:+.1f} %")
        print(flush=True)
    if slower:
        sys.exit("slower:\n" + "\n".join(slower))


if __name__ == "__main__":
    app.run(main)
