"""Rows for the papers' figures of routing and of weights, from the demo model, on a CPU.

    python -m scripts.studies.quality.routing_and_weights --texts=DIR --platform=cpu \
        --output=scripts/studies/quality/reproduce.jsonl

DIR holds eval/wikitext2.test.raw.xz and valid/{books,textbooks,code,math,chinese}.jsonl.xz.
Sections: `routing` (how often each expert is chosen, by layer and text: DynaExq's Figure 1, MiLo's
Figure 3, BuddyMoE's Figure 6; heavy hitters and neighbouring layers: DyMoE's Figures 4 and 6),
`coactivation` (BuddyMoE's Figures 4, 7 and 9, and how long its lists are), `weights` (MiLo's Table
2 and Figures 2, 4 and 5). Takes one to two minutes on two cores.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from absl import app, flags

from moejax.devices import choose_device, enable_compilation_cache
from moejax.files.result_rows import (
    ResultRow,
    append_rows,
    command_line,
    describe_device,
    package_versions,
    today,
)
from scripts.studies.quality import coactivation, routing, weights
from scripts.studies.quality.bench import Texts
from scripts.studies.quality.demo import Demo, Finding

SECTIONS: dict[str, Callable[[Demo], Iterator[Finding]]] = {
    "routing": routing.measure,
    "coactivation": coactivation.measure,
    "weights": weights.measure,
}

_TEXTS = flags.DEFINE_string("texts", None, "folder of the texts", required=True)
_SECTIONS = flags.DEFINE_list("sections", list(SECTIONS), "what to measure")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "a model small enough for this")
_WINDOW = flags.DEFINE_integer("window", 512, "tokens of a window")
_WINDOWS = flags.DEFINE_integer("windows", 20, "of each text")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")
_PLATFORM = flags.DEFINE_string("platform", "auto", "auto, cpu, gpu")
_CACHE = flags.DEFINE_string("cache", "", "compilation cache")


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    device = choose_device(_PLATFORM.value)
    enable_compilation_cache(_CACHE.value)
    jax.config.update("jax_default_matmul_precision", "highest")
    clock = time.perf_counter()
    demo = Demo.load(_CHECKPOINT.value, device)
    demo.texts = Texts(Path(_TEXTS.value), demo.tokenizer, _WINDOW.value)
    demo.num_windows = _WINDOWS.value
    for name in _SECTIONS.value:
        for found in SECTIONS[name](demo):
            print(f"  {found.what:60s} {found.figure:10.4g} {found.unit}", flush=True)
            if _OUTPUT.value:
                append_rows(Path(_OUTPUT.value), [row(name, found, device)])
        print(f"{name}: {time.perf_counter() - clock:.0f} s so far", flush=True)


def row(section: str, found: Finding, device: jax.Device) -> ResultRow:
    """Makes a row of the results."""
    what = f"{section} | {found.what} | {_CHECKPOINT.value}"
    return ResultRow(
        what=what,
        figure=found.figure,
        unit=found.unit,
        baseline=found.more,
        device=describe_device(device),
        versions=package_versions("moejax", "jax", "jaxlib"),
        date=today(),
        command=command_line(["-m", "scripts.studies.quality.routing_and_weights", *sys.argv[1:]]),
    )


if __name__ == "__main__":
    app.run(main)
