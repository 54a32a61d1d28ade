"""Scores of tasks under policies and in low precisions, document by document.

    python -m scripts.studies.quality.task_scores --checkpoint=RUN/model --label=study \
        --data=DIR/eval --work_dir=WORK --parallel=8 \
        --output=scripts/studies/quality/task_scores.jsonl  # gpu
    python -m scripts.studies.quality.task_scores --label=study --output=rows.jsonl --judge_only

Each method is a run of `moejax.lm_eval`, so anyone can repeat one alone: the row has its model
arguments. Attention stays as it is, experts in low precision are HQQ's in groups of 64, and all is
computed in float32. Hotness and the lists of buddies come from the text that ships, never from the
tasks. A row keeps which documents were right, so methods are compared document by document. Bars
stand in `CLAIMS` and are printed first; methods that the output has are passed over.
"""

import concurrent.futures
import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from scripts.studies.measuring import Report
from scripts.studies.quality.cases import (
    Claim,
    Comparison,
    describe,
    rows_of,
    standard_error,
)

TASKS = ("arc_easy", "arc_challenge", "hellaswag", "piqa")
MORE = 3  # exit status: the time is up, or a method failed
PROFILE = "buddies.safetensors"
_POLICY = "scripts.studies.{}.controls:{}"
_LOW = ("policy.tiers=int4+int2", "policy.emulate=True")


def _dymoe(retention: float, *more: str) -> tuple[str, ...]:
    settings = " ".join((f"retention={retention}", "prefetch=0", *more))
    return (f"policy.name={_POLICY.format('dymoe', 'AsAsked')}", f"policy.settings={settings}",
            *_LOW)  # fmt: skip


def _dynaexq(share: float) -> tuple[str, ...]:
    """The share of 16 experts that is hot; asked anew every 2,048 tokens."""
    settings = f"period=2048 n_hot={round(16 * share)} max_requests=512"
    return ("policy.name=dynaexq", f"policy.settings={settings}", *_LOW, "policy.slots=15+16")


def _buddies(name: str, slots: int, **settings: Any) -> tuple[str, ...]:
    """Experts of a layer in so many slots of 16, in the precision of the checkpoint."""
    given = " ".join(f"{key}={value}" for key, value in settings.items())
    return (f"policy.name={name}", f"policy.settings=background_bytes=0 {given}".strip(),
            "policy.emulate=True", f"policy.slots={slots}")  # fmt: skip


_RANDOM = _POLICY.format("buddymoe", "MatchedRandom")
METHODS: dict[str, tuple[str, ...]] = {
    "exact": (),
    **{f"INT{bits}": ("policy.name=resident", f"policy.tiers=int{bits}") for bits in (4, 3, 2)},
    "DyMoE 4/2, r = 0.75": _dymoe(0.75),
    "DyMoE 4/0, r = 0.75": _dymoe(0.75, "low=skip"),
    "DynaExq 4/2, a half hot": _dynaexq(0.5),
    "DynaExq 4/2, a quarter hot": _dynaexq(0.25),
    "BuddyMoE c = 0.75, rho 3": _buddies("buddymoe", 12, rho=3),
    "random c = 0.75, rho 3": _buddies(_RANDOM, 12, rho=3),
    "BuddyMoE c = 0.5, rho 3": _buddies("buddymoe", 8, rho=3),
    "random c = 0.5, rho 3": _buddies(_RANDOM, 8, rho=3),
    "DyMoE 4/2, r = 0.9": _dymoe(0.9),
    "DyMoE 4/0, r = 0.9": _dymoe(0.9, "low=skip"),
    "DyMoE 4/2, r = 0.75, by load": _dymoe(0.75, "selection=load"),
}
ALL = "mean of the tasks"


def _wrong(*terms: tuple[float, str], margin: float = 0.0) -> Comparison:
    """A weighted sum of shares of wrong answers that must be at most a margin."""
    return Comparison(tuple((factor, f"{ALL} | {name}") for factor, name in terms), margin)


# Written before any row. The margins are the papers' own numbers.
CLAIMS = (
    Claim("DynaExq", "of the gap between INT4 and INT2, 79 % comes back", "Table 1, 80B, A6000",
          "with a half hot, at least 79 % of the gap in wrong answers comes back",
          (_wrong((1, "DynaExq 4/2, a half hot"), (-0.21, "INT2"), (-0.79, "INT4")),)),
    Claim("DynaExq", "of the gap between INT4 and INT2, 24 % comes back", "Table 1, 80B, 5090",
          "with a quarter hot, at least 24 % of the gap in wrong answers comes back",
          (_wrong((1, "DynaExq 4/2, a quarter hot"), (-0.76, "INT2"), (-0.24, "INT4")),)),
    Claim("DyMoE", "4/2 at r = 0.75 loses 1.74 points at most to INT4", "Table 2, Mixtral, GSM8K",
          "at most 0.0174 more wrong answers than INT4",
          (_wrong((1, "DyMoE 4/2, r = 0.75"), (-1, "INT4"), margin=0.0174),)),
    Claim("DyMoE", "4/0 at r = 0.75 loses 2.58 points at most to INT4", "Table 2, Mixtral, GSM8K",
          "at most 0.0258 more wrong answers than INT4",
          (_wrong((1, "DyMoE 4/0, r = 0.75"), (-1, "INT4"), margin=0.0258),)),
    Claim("DyMoE", "INT2 in place of skipping helps", "Table 2",
          "4/2 has fewer wrong answers than 4/0, both at r = 0.75",
          (_wrong((1, "DyMoE 4/2, r = 0.75"), (-1, "DyMoE 4/0, r = 0.75")),)),
    Claim("DyMoE", "heavy hitters tell critical experts", "6.3, Figure 11",
          "4/2 has fewer wrong answers than 4/2 by plain load, both at r = 0.75",
          (_wrong((1, "DyMoE 4/2, r = 0.75"), (-1, "DyMoE 4/2, r = 0.75, by load")),)),
    *(Claim("BuddyMoE", f"loses {share} of what random experts lose, c = {rate}", f"Table {table}",
            f"loses at most {share} of what random experts lose for the same pairs",
            (_wrong((1, f"BuddyMoE c = {rate}, rho 3"), (-share, f"random c = {rate}, rho 3"),
                    (share - 1, "exact")),))
      for rate, table, share in ((0.75, 2, 0.216), (0.5, 3, 0.198))),
)  # fmt: skip

_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "a model of 16 experts a layer")
_LABEL = flags.DEFINE_string("label", "demo", "name of the model in rows")
_DATA = flags.DEFINE_string("data", "", "folder of the tasks' files, as `moejax.lm_eval` has it")
_WORK_DIR = flags.DEFINE_string("work_dir", "", "folder of the runs' own output")
_TASKS = flags.DEFINE_list("tasks", list(TASKS), "tasks with the metric acc_norm")
_METHODS = flags.DEFINE_multi_enum("methods", list(METHODS), list(METHODS), "which methods")
_DOCUMENTS = flags.DEFINE_integer("documents", 1000, "documents of a task, the first ones, at most")
_PARALLEL = flags.DEFINE_integer("parallel", 1, "runs at once")
_BUDGET = flags.DEFINE_float("time_budget_s", 0, "begin no method after so long; 0: no limit")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")
_PLATFORM = flags.DEFINE_string("platform", "auto", "auto, cpu, gpu")
_JUDGE = flags.DEFINE_bool("judge_only", False, "measure nothing, print the verdicts of the rows")


@dataclasses.dataclass(frozen=True)
class Scored:
    """Answers of one task: right or not by document, and the score by plain log-likelihood."""

    right: np.ndarray  # bool[documents], by acc_norm
    plain: float  # acc

    @staticmethod
    def read(folder: Path, task: str) -> "Scored":
        """Reads the samples that lm_eval wrote."""
        (path,) = folder.rglob(f"samples_{task}_*.jsonl")
        rows = sorted(rows_of(path), key=lambda row: row["doc_id"])
        return Scored(
            np.array([row["acc_norm"] == 1 for row in rows]),
            float(np.mean([row["acc"] for row in rows])),
        )


def packed(right: np.ndarray) -> str:
    """The answers bool[n] as hexadecimal digits, the first document in the highest bit."""
    return np.packbits(right).tobytes().hex()


def unpacked(text: str, count: int) -> np.ndarray:
    """The answers bool[count] of `packed`."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count).astype(bool)


def wrong_of(rows: Iterable[Mapping[str, Any]], label: str) -> dict[str, Sequence[float]]:
    """Wrong answers (0 or 1) by document of each row, and of all tasks of a method together.

    A document counts so much that tasks count equally in the mean over all of them.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for row in rows:
        section, task, method, model = row["what"].split(" | ")
        if section == "tasks" and model == label:
            beside = row["baseline"]
            right = unpacked(beside["right"], beside["documents"])
            found.setdefault(method, {})[task] = 1.0 - right
    together: dict[str, Sequence[float]] = {}
    for method, of in found.items():
        total = sum(map(len, of.values()))
        for task, wrong in of.items():
            together[f"{task} | {method}"] = wrong.tolist()
        together[f"{ALL} | {method}"] = np.concatenate(
            [of[task] * (total / len(of) / len(of[task])) for task in sorted(of)]
        ).tolist()
    return together


def arguments_of(method: str, checkpoint: str) -> str:
    """Model arguments of lm_eval."""
    return ",".join([f"pretrained={checkpoint}", "dtype=float32", *METHODS[method]])


def score(method: str) -> dict[str, Scored] | str:
    """Runs a method; what it scored, or the end of its log where it failed."""
    folder = Path(_WORK_DIR.value) / "".join(c if c.isalnum() else "_" for c in method)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.rglob("samples_*.jsonl"):
        old.unlink()
    command = [
        sys.executable, "-m", "moejax.lm_eval", "--model", "moejax",
        "--model_args", arguments_of(method, _CHECKPOINT.value),
        "--tasks", ",".join(_TASKS.value), "--data", _DATA.value,
        "--limit", str(_DOCUMENTS.value), "--output_path", str(folder), "--log_samples",
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
    clock, output = time.perf_counter(), Path(_OUTPUT.value)
    for bar in CLAIMS:
        print(f"bar: {bar.paper}, {bar.said} ({bar.where}): {bar.bar}")
    is_done = _JUDGE.value or _measure(clock, output)
    for line in describe(CLAIMS, wrong_of(rows_of(output), _LABEL.value)):
        print(line.replace("nats a token", "of the answers"))
    if not is_done:
        print("more to do: run the same command again", flush=True)
        sys.exit(MORE)


def _measure(clock: float, output: Path) -> bool:
    """Runs what is missing, some methods at once; returns whether all are there."""
    done = {row["what"] for row in rows_of(output)}
    missing = [
        method
        for method in _METHODS.value
        if any(_what(task, method) not in done for task in _TASKS.value)
    ]
    if any("buddymoe" in " ".join(METHODS[method]) for method in missing):
        _profile()
    report = Report(_device(), "", _OUTPUT.value, ("moejax", "jax", "jaxlib", "lm_eval"))
    is_whole = True

    def run(method: str) -> dict[str, Scored] | str:
        if _BUDGET.value and time.perf_counter() - clock > _BUDGET.value:
            return "not begun: the time is up"
        return score(method)

    with concurrent.futures.ThreadPoolExecutor(_PARALLEL.value) as pool:
        running = {pool.submit(run, method): method for method in missing}
        for future in concurrent.futures.as_completed(running):
            method, found = running[future], future.result()
            if isinstance(found, str):
                print(f"{method}: {found}", flush=True)
                is_whole = False
                continue
            for task, scored in found.items():
                report.add(
                    _what(task, method), float(scored.right.mean()), "acc_norm",
                    **{"standard error": standard_error(scored.right.astype(float)),
                       "acc": scored.plain, "documents": len(scored.right),
                       "right": packed(scored.right),
                       "model arguments": arguments_of(method, Path(_CHECKPOINT.value).name)},
                )  # fmt: skip
    return is_whole


def _profile() -> None:
    """Profiles the text that ships, unless the checkpoint has a profile."""
    if not (Path(_CHECKPOINT.value) / PROFILE).exists():
        subprocess.run(
            [sys.executable, "-m", "moejax.profile_experts",
             f"--config.checkpoint={_CHECKPOINT.value}"], check=True,
        )  # fmt: skip


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
