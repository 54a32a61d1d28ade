"""Perplexity of the demo model under policies, beside what they are compared with.

    python -m scripts.studies.quality.policies --texts=DIR \
        --output=scripts/studies/quality/policy_quality.jsonl

DIR holds eval/wikitext2.test.raw.xz and valid/{books,textbooks,code,math,chinese}.jsonl.xz.
Sections: `dynaexq` (its Figure 4), `dymoe` (Table 2, Figures 3, 5 and 11), `buddymoe` (Tables 2 to
4), `domains` (buddy lists of one domain, used on another), `shift` (prose, then code, then maths),
`stand_ins` (what of an absent expert's output another gives back).

Runs are teacher-forced, through the engine's steps, with tables in place of slots
(`bench.py`); low precisions are HQQ in groups of 64. Prompts of DyMoE go one at a
time; its rows "token by token" decide each token by its own gate (eq. 3). Rows say how many tokens
were scored.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from absl import app, flags

from moejax.devices import choose_device, enable_compilation_cache
from scripts.studies.measuring import Report
from scripts.studies.quality import sections as quality_sections
from scripts.studies.quality import stand_ins as quality_stand_ins
from scripts.studies.quality.bench import DOMAINS, Model, Texts
from scripts.studies.quality.sections import Bench, Point

SECTIONS: dict[str, Callable[[Bench], Iterator[Point]]] = {
    "dynaexq": quality_sections.dynaexq,
    "dymoe": quality_sections.dymoe,
    "buddymoe": quality_sections.buddymoe,
    "domains": quality_sections.domains,
    "shift": quality_sections.shift,
    "stand_ins": quality_stand_ins.stand_ins,
}

_TEXTS = flags.DEFINE_string("texts", None, "folder of the texts", required=True)
_SECTIONS = flags.DEFINE_list("sections", list(SECTIONS), "what to measure")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "a model small enough for this")
_WINDOW = flags.DEFINE_integer("window", 512, "tokens of a window")
_WIKI = flags.DEFINE_integer("wiki", 10, "windows of WikiText-2's test text")
_EACH = flags.DEFINE_integer("each", 2, "windows of each domain of the mixed text")
_CALIBRATION = flags.DEFINE_integer("calibration", 10, "windows of warm-ups and profiles")
_METHOD = flags.DEFINE_string("method", "hqq", "quantizer: rtn, hqq or least_squares")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")
_PLATFORM = flags.DEFINE_string("platform", "auto", "auto, cpu, gpu")
_CACHE = flags.DEFINE_string("cache", "", "compilation cache")


def main(argv: list[str]) -> None:
    """Measures, prints a table a section, writes rows."""
    del argv
    device = choose_device(_PLATFORM.value)
    enable_compilation_cache(_CACHE.value)
    jax.config.update("jax_default_matmul_precision", "highest")
    clock = time.perf_counter()
    model = Model(_CHECKPOINT.value, device, _METHOD.value)
    texts = Texts(Path(_TEXTS.value), model.tokenizer, _WINDOW.value)
    bench = Bench(
        model,
        texts,
        texts.wikitext(_WIKI.value),
        texts.mixed(_EACH.value),
        texts.calibration(_CALIBRATION.value),
        {
            "wikitext-2": texts.wikitext(_WIKI.value, between=True),
            "mixed": texts.mixed(_EACH.value, between=True),
        },
    )
    sizes = {text.name: text.num_targets for text in (bench.wiki, bench.mixed, bench.calibration)}
    print(f"{_CHECKPOINT.value}, windows of {_WINDOW.value} tokens, scored: {sizes}")
    scored = {
        "window": _WINDOW.value,
        "windows of wikitext-2": _WIKI.value,
        "windows of each domain": _EACH.value,
        "domains": list(DOMAINS),
        "windows of calibration": _CALIBRATION.value,
        "quantizer": f"{_METHOD.value}, groups of 64",
    }
    report = Report(device, "", _OUTPUT.value, ("moejax", "jax", "jaxlib"))
    for name in _SECTIONS.value:
        for point in SECTIONS[name](bench):
            what = f"{name} | {point.section} | {point.text} | {point.series} | {point.x:g}"
            more = json.loads(json.dumps(scored | point.more))
            report.add(what, point.perplexity, point.unit, **more)
        print(f"{name}: {time.perf_counter() - clock:.0f} s so far", flush=True)


if __name__ == "__main__":
    app.run(main)
