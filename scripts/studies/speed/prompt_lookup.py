"""Prompt lookup where experts move: acceptance on real text, bytes, and predicted tokens a second.

    python -m scripts.studies.speed.prompt_lookup --data=DIR --parent=PARENT --work=WORK \
        --output=scripts/studies/speed/prompt_lookup.jsonl

DIR as of `scripts.studies.quality.policies`; PARENT is what `scripts.studies.study_model.parent`
makes. Question: does speculation without a second model pay? A draft is what followed the latest
earlier place of the last tokens in prompt and answer; one step verifies it, and what it accepts is
to the token what greedy decoding gives. Nothing of it is in the package: the answers of
SmolLM2-135M-Instruct (greedy, float32) are made once, drafts are judged on them afterwards.

  acceptance  six tasks of 30 prompts, 128 tokens at most: go on with WikiText-2; summarize and
              quote a passage; correct its spelling; go on with code; answer a question on a
              passage; GSM8K. Answers end before the first 12 tokens that they say again, since so
              small a model loops where a large one would not. Beside them references: what the
              text, the code, the correction, the solution really is.
  bytes       verify steps replayed by the simulator's rules under LRU caches of the slots that
              `moejax.plan` gives Qwen3-30B-A3B in INT4 with attention in INT4. A step fetches the
              experts of all its rows; those of wrong tokens stay in the cache. Two routings: made
              up at its shape (popularity as r^-0.85; tokens independent), and the demo model's on
              these very texts, scaled to its shape. A wrong token has the routing of the place
              that it was copied from. Rows without a draft are idle.
  time        base(u) + bytes / link, where u is the experts of a layer that a step reads: fitted to
              `benchmark_h200.jsonl` (batches of 1 and 4 under 8 and 12 GiB); resident, interpolated
              between batches of 1, 4 and 16 of `packed_model_h200.jsonl`. Looking up is free, and
              several waves of a layer cost nothing: both favour speculation.

THE BAR, written on 2026-11-25 before any row. Go, if with one n and one k for all tasks, under each
of 3, 7 and 12 GiB and by either routing, predicted tokens a second are at least 1.15 times those
without lookup on the geometric mean of the tasks, and at least 0.97 times on every task. Else no
go. The best setting of eight is judged by the texts that chose it, which favours a go.

It was no go by four tasks (code: 64 tokens an answer); questions, GSM8K and the references have no
rows. They could not change it: on "continue" every setting is below 0.97 under 3 and 7 GiB by the
demo's routing.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import tokenizers
from absl import app, flags

import moejax
from moejax.benchmarking.routing import scaled_trace
from moejax.devices import choose_device, enable_compilation_cache
from moejax.engine import Engine
from moejax.files.result_rows import read_rows
from moejax.models.shapes import CONFIGS
from moejax.routing.trace import PREFILL, read_trace
from scripts.studies.measuring import Report
from scripts.studies.speed.lookup_costs import (
    BUDGETS,
    SHAPE,
    Clock,
    Moved,
    made_up_ids,
    pooled_clock,
    replayed,
    resident_clock,
    slots_of_budgets,
)
from scripts.studies.speed.lookup_steps import Verify, token_rows, verify_steps
from scripts.studies.speed.lookup_texts import Answer, answered, pieces, prompts, without_loop

SHORTEST, DRAFTS = (2, 3), (2, 3, 4, 8)  # n and k
ROUTINGS = ("made up", "demo's")
GAIN, LOSS = 1.15, 0.97
TASKS = ("continue", "summarize", "correct", "code", "question", "sum")
SOURCES = ("model", "reference")
ABOUT = f"{SHAPE} in INT4"

_DATA = flags.DEFINE_string("data", None, "folder of the texts", required=True)
_PARENT = flags.DEFINE_string("parent", None, "directory of SmolLM2-135M-Instruct", required=True)
_WORK = flags.DEFINE_string("work", None, "folder of answers and traces, kept", required=True)
_COUNT = flags.DEFINE_integer("prompts", 30, "of each task")
_TOKENS = flags.DEFINE_integer("tokens", 128, "of an answer at most")
_TASKS = flags.DEFINE_list("tasks", list(TASKS), "which are made, or replayed")
_ONLY = flags.DEFINE_enum("only", "", ["", "answers"], "makes the answers alone")
_OUTPUT = flags.DEFINE_string("output", None, "JSON Lines file to append to", required=True)
_CACHE = flags.DEFINE_string("cache", "", "compilation cache")


def answers(work: Path) -> list[Answer]:
    """All answers; those of tasks that have none yet are made."""
    found = []
    for task, asked in prompts(Path(_DATA.value), _COUNT.value).items():
        if task not in _TASKS.value:
            continue
        path = work / f"{task}.json"
        if not path.exists():
            made = answered(Path(_PARENT.value), asked, _TOKENS.value)
            path.write_text(json.dumps([dataclasses.asdict(one) for one in made]))
            print(f"{path}: {len(made)} answers", flush=True)
        found += [Answer(**one) for one in json.loads(path.read_text())]
    return found


def demo_ids(work: Path, name: str, some: Sequence[Answer]) -> np.ndarray:
    """uint8[N, 7, 4]: the demo's experts at each token of the prompts and answers in turn."""
    path = work / f"{name}.npy"
    if path.exists():
        return np.load(path)
    split = pieces(Path(_PARENT.value))
    own = tokenizers.Tokenizer.from_file(str(Path(moejax.__file__).parent / "demo/tokenizer.json"))
    parts = []
    with Engine.from_pretrained("demo", platform="cpu", progress=False) as engine:
        for one in some:
            texts = split([*one.prompt, *one.tokens])
            encoded = own.encode("".join(texts), add_special_tokens=False)
            record = work / "one.trace"
            with engine.recording(record):
                engine.generate([encoded.ids], max_new_tokens=1)
            trace = read_trace(record)
            ids = trace.ids[trace.phase == PREFILL]
            parts.append(ids[token_rows(texts, encoded.offsets)])
    np.save(path, np.concatenate(parts))
    return np.load(path)


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Answers of one task under one setting, as steps over positions of the joined texts."""

    tokens: int  # after the first of each answer
    drafted: int  # steps with a draft
    wrong: int  # rows of wrong tokens
    steps: list[list[int]]


def decoded(some: Sequence[Answer], k: int, shortest: int) -> Decoded:
    """Runs prompt lookup over known answers."""
    start, tokens, steps = 0, 0, []
    found: list[Verify] = []
    for one in some:
        now = list(verify_steps(one.prompt, one.tokens, k=k, shortest=shortest))
        steps += [[start + at for at in step.rows] for step in now]
        tokens += len(one.tokens) - 1
        start += len(one.prompt) + len(one.tokens)
        found += now
    wrong = sum(len(step.sources) - step.accepted for step in found)
    return Decoded(tokens, sum(bool(step.sources) for step in found), wrong, steps)


def speeds(run: Decoded, moved: Moved, clocks: tuple[Clock, Clock]) -> dict[str, float]:
    """Predicted tokens a second: under each budget, and resident."""
    pooled, resident = clocks
    of = {
        f"{gib:g} GiB": pooled.step_ms(moved.experts, nbytes)
        for gib, nbytes in zip(BUDGETS, moved.num_bytes, strict=True)
    }
    of["resident"] = resident.step_ms(moved.experts, 0)
    return {name: 1e3 * run.tokens / len(run.steps) / ms for name, ms in of.items()}


def replay_task(
    report: Report, name: str, some: Sequence[Answer], ids: Mapping[str, np.ndarray]
) -> None:
    """Adds the rows of one task's answers under all settings and routings."""
    folder = Path(__file__).parent
    clocks = pooled_clock(folder), resident_clock(folder)
    slots, nbytes = slots_of_budgets()
    plain = decoded(some, 0, SHORTEST[0])
    for routing, experts in ids.items():
        before = replayed(plain.steps, experts, list(slots.values()), nbytes)
        base = speeds(plain, before, clocks)
        report.add(
            f"{name}, {routing} routing, without lookup",
            1.0,
            "tokens/step",
            **_said(base, plain, before),
        )
        for shortest in SHORTEST:
            for k in DRAFTS:
                run = decoded(some, k, shortest)
                moved = replayed(run.steps, experts, list(slots.values()), nbytes)
                now = speeds(run, moved, clocks)
                gain = {where: now[where] / base[where] for where in base}
                report.add(
                    f"{name}, {routing} routing, n {shortest}, k {k}", run.tokens / len(run.steps),
                    "tokens/step", drafted=run.drafted / len(run.steps),
                    wrong_a_token=run.wrong / run.tokens, **_said(now, run, moved),
                    **{f"gain, {where}": value for where, value in gain.items()},
                )  # fmt: skip


def _said(speed: dict[str, float], run: Decoded, moved: Moved) -> dict[str, float]:
    megabytes = {
        f"MB a token, {gib:g} GiB": 1e-6 * nbytes * len(run.steps) / run.tokens
        for gib, nbytes in zip(BUDGETS, moved.num_bytes, strict=True)
    }
    fast = {f"tokens/s, {where}": value for where, value in speed.items()}
    return {"experts_a_step": moved.experts, **megabytes, **fast}


def judge(path: Path) -> list[str]:
    """Lines on the mean over tasks and the least of each setting; whether one meets the bar."""
    gains = {
        row.what.replace(" routing, ", ", "): row.baseline
        for row in read_rows(path)
        if "gain, resident" in row.baseline
    }
    lines = []
    for source in SOURCES:
        passed = []
        for shortest, k in itertools.product(SHORTEST, DRAFTS):
            meets = True
            for routing in ROUTINGS:
                end = f"n {shortest}, k {k}, {ABOUT}"
                names = [f"{task}, {source}, {routing}, {end}" for task in TASKS]
                of = [gains[name] for name in names if name in gains]
                meets &= bool(of)
                if not of:
                    continue
                for where in ("resident", *(f"{gib:g} GiB" for gib in BUDGETS)):
                    values = [float(gain[f"gain, {where}"]) for gain in of]
                    mean, least = statistics.geometric_mean(values), min(values)
                    lines.append(
                        f"{source}, {routing} routing, n {shortest}, k {k}, {where}: mean "
                        f"{mean:.2f}, least {least:.2f} of {len(of)} tasks"
                    )
                    meets &= where == "resident" or (mean >= GAIN and least >= LOSS)
            passed += [f"n {shortest}, k {k}"] if meets else []
        said = f"go with {'; '.join(passed)}" if passed else "no go"
        lines += [f"{said}, by the tasks that have rows"] if source == "model" else []
    return lines


def main(argv: list[str]) -> None:
    """Makes answers, replays them, writes the rows, prints what they say."""
    del argv
    enable_compilation_cache(_CACHE.value)
    work, config = Path(_WORK.value), CONFIGS[SHAPE]
    work.mkdir(parents=True, exist_ok=True)
    found = answers(work)
    if _ONLY.value:
        return
    report = Report(choose_device("cpu"), ABOUT, _OUTPUT.value, ("jax", "transformers"))
    for source, task in itertools.product(SOURCES, _TASKS.value):
        some = [one for one in found if (one.task, one.source) == (task, source)]
        if not some:
            continue
        name, whole = f"{task}, {source}", sum(len(one.tokens) for one in some)
        if source == "model":
            some = [dataclasses.replace(one, tokens=without_loop(one.tokens)) for one in some]
        some = [one for one in some if len(one.tokens) > 1]
        kept = sum(len(one.tokens) for one in some)
        report.add(
            f"{name}, tokens before a loop", 100 * kept / whole, "%", answers=len(some), tokens=kept
        )
        small = demo_ids(work, f"{task}_{source}", some).astype(np.int32)
        big = scaled_trace(
            small, 32, num_layers=config.num_layers, of_experts=config.num_experts,
            width=config.experts_per_token,
        )  # fmt: skip
        replay_task(report, name, some, {"made up": made_up_ids(len(small)), "demo's": big})
        jax.clear_caches()
    print("\n".join(judge(Path(_OUTPUT.value))))


if __name__ == "__main__":
    app.run(main)
