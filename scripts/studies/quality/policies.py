"""Quality of a model under policies, beside what they are compared with.

    python -m scripts.studies.quality.policies --checkpoint=RUN/model --label=study --origins=4 \
        --texts=DIR --output=scripts/studies/quality/study_quality.jsonl --time_budget_s=500
    python -m scripts.studies.quality.policies --label=study --output=rows.jsonl --judge_only

DIR holds eval/wikitext2.{test,valid}.raw.xz, and valid/ and train/{books,textbooks,code,math,
chinese}.jsonl.xz; what is scored is of eval's test and of valid, profiles and warm-ups are of the
rest. Sections: `dynaexq` (Figure 4), `shift` (prose, then code, then maths), `dymoe` (Table 2,
Figures 3, 5 and 11), `heavy` (Figure 4), `buddymoe` (Tables 2 to 4), `fidelity` and `layers` (some
of their cases beside the exact model), `decide` (the methods of `scripts.studies.speed.decide`).

Runs are teacher-forced, through the engine's steps, with tables in place of slots (`bench.py`); low
precisions are HQQ in groups of 64. Cases that the output has are passed over, so the same command
goes on where it stopped; with a time budget it ends with status 3 while there is more to do. The
bars stand in the sections' files and are printed first; `--judge_only` prints the verdicts.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from moejax.devices import choose_device, enable_compilation_cache
from scripts.studies.measuring import MORE, Report
from scripts.studies.quality import buddymoe, cases, decide, dymoe, dynaexq, exact
from scripts.studies.quality.bench import DOMAINS, Model, Texts
from scripts.studies.quality.cases import Case, Claim
from scripts.studies.quality.subject import Subject

SECTIONS: dict[str, Callable[[Subject], Iterator[Case]]] = {
    "dynaexq": dynaexq.cases,
    "shift": dynaexq.shift,
    "dymoe": dymoe.cases,
    "heavy": dymoe.heavy,
    "buddymoe": buddymoe.cases,
    "fidelity": exact.fidelity,
    "layers": exact.layers,
    "decide": decide.cases,
}

_TEXTS = flags.DEFINE_string("texts", "", "folder of the texts")
_SECTIONS = flags.DEFINE_list("sections", list(SECTIONS), "what to measure")
_CASES = flags.DEFINE_multi_string("cases", [""], "regular expressions of cases, in this order")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "a model whose float32 fits")
_LABEL = flags.DEFINE_string("label", "demo", "name of the model in rows")
_ORIGINS = flags.DEFINE_integer("origins", 0, "expert e is of shard e mod this; 0: not known")
_WIKI = flags.DEFINE_integer("wiki", 40, "windows of WikiText-2's test text")
_EACH = flags.DEFINE_integer("each", 8, "windows of each domain of the mixed text")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")
_BUDGET = flags.DEFINE_float("time_budget_s", 0, "begin no case after so long; 0: no limit")
_JUDGE = flags.DEFINE_bool("judge_only", False, "measure nothing, print the verdicts of the rows")
_PLATFORM = flags.DEFINE_string("platform", "auto", "auto, cpu, gpu")
_CACHE = flags.DEFINE_string("cache", "", "compilation cache")

WINDOW = 512  # tokens of a window
CALIBRATION = 10  # windows of the text that ships
METHOD = "hqq"  # quantizer


def claims(num_layers: int) -> tuple[Claim, ...]:
    """Bars of all sections, for a model of so many sparse layers."""
    return (*dynaexq.CLAIMS, *dymoe.claims(num_layers), *buddymoe.CLAIMS, *exact.CLAIMS)


def main(argv: list[str]) -> None:
    """Measures what is missing, writes rows, prints verdicts."""
    del argv
    clock = time.perf_counter()
    written = Path(_OUTPUT.value)
    device = choose_device(_PLATFORM.value)
    enable_compilation_cache(_CACHE.value)
    jax.config.update("jax_default_matmul_precision", "highest")
    is_done = True
    subject = None if _JUDGE.value else _subject(device)
    bars = claims(subject.model.num_layers if subject else _num_layers(cases.rows_of(written)))
    for bar in bars:
        print(f"bar: {bar.paper}, {bar.said} ({bar.where}): {bar.bar}")
    print(f"bar: {dymoe.HEAVY_BAR}", f"bar: {exact.LAYERS_BAR}", sep="\n")
    if subject:
        is_done = _measure(subject, device, clock)
    for line in cases.describe(bars, cases.nats_of(cases.rows_of(written), _LABEL.value)):
        print(line)
    if not is_done:
        print("more to do: run the same command again", flush=True)
        sys.exit(MORE)


def _num_layers(rows: Iterable[Mapping[str, Any]]) -> int:
    """Layers of the model of `--label`: of each alone in low precision there is a row."""
    one = re.compile(rf"{re.escape(_LABEL.value)} \| .*one layer in int2 \| (\d+)")
    found = (int(match[1]) for row in rows if (match := one.fullmatch(row["what"])))
    return 1 + max(found, default=0)


def _subject(device: jax.Device) -> Subject:
    if not _TEXTS.value:
        sys.exit("error: give --texts, the folder of the texts (--judge_only reads rows alone)")
    model = Model(_CHECKPOINT.value, device, METHOD)
    texts = Texts(Path(_TEXTS.value), model.tokenizer, WINDOW)
    subject = Subject(
        model,
        texts,
        texts.wikitext(_WIKI.value),
        texts.mixed(_EACH.value),
        texts.calibration(CALIBRATION),
        {
            "wikitext-2": texts.wikitext(_WIKI.value, scored=False),
            "mixed": texts.mixed(_EACH.value, scored=False),
        },
        _ORIGINS.value,
    )
    sizes = {text.name: text.num_targets for text in (subject.wiki, subject.mixed)}
    print(f"{_CHECKPOINT.value}, windows of {WINDOW} tokens, scored: {sizes}")
    return subject


def _measure(subject: Subject, device: jax.Device, clock: float) -> bool:
    """Measures the cases that the output lacks; returns whether all are there."""
    scored = {
        "window": WINDOW,
        "windows of wikitext-2": _WIKI.value,
        "windows of each domain": _EACH.value,
        "domains": list(DOMAINS),
        "windows of calibration": CALIBRATION,
        "quantizer": f"{METHOD}, groups of 64",
        "profiles": "wikitext-2's validation text, the domains' training text",
    }
    path = Path(_OUTPUT.value)
    done = {
        (row["what"].partition(" | ")[0], row["baseline"].get("section"), row["baseline"]["case"])
        for row in cases.rows_of(path)
        if "case" in row["baseline"]
    }
    report = Report(device, "", _OUTPUT.value, ("moejax", "jax", "jaxlib"))
    for name in _SECTIONS.value:
        every = list(SECTIONS[name](subject))
        for case in (c for words in _CASES.value for c in every if re.search(words, c.name)):
            if (_LABEL.value, name, case.name) in done:
                continue
            if _BUDGET.value and time.perf_counter() - clock > _BUDGET.value:
                return False
            points = list(case.measure())  # all of a case, or nothing
            for point in points:
                beside = {"section": name, "case": case.name, **scored, **point.beside}
                report.add(
                    f"{_LABEL.value} | {name} | {point.key}", point.figure, point.unit,
                    **json.loads(json.dumps(beside)),
                )  # fmt: skip
            done.add((_LABEL.value, name, case.name))
            print(f"{name}, {case.name}: {time.perf_counter() - clock:.0f} s so far", flush=True)
    return True


if __name__ == "__main__":
    app.run(main)
