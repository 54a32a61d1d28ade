"""Rows for the papers' figures of routing and of weights, from the demo model, on a CPU.

    python -m scripts.studies.quality.routing_and_weights --texts=DIR --platform=cpu \
        --output=scripts/studies/quality/reproduce.jsonl

DIR holds eval/wikitext2.test.raw.xz and valid/{books,textbooks,code,math,chinese}.jsonl.xz.
Sections: `routing` (how often each expert is chosen, by layer and text: DynaExq's Figure 1, MiLo's
Figure 3, BuddyMoE's Figure 6; heavy hitters and neighbouring layers: DyMoE's Figures 4 and 6),
`coactivation` (BuddyMoE's Figures 4, 7 and 9, and how long its lists are), `weights` (MiLo's Table
2 and Figures 2, 4 and 5). Takes one to two minutes on two cores.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from absl import app, flags

from moejax.devices import choose_device, enable_compilation_cache
from scripts.studies.measuring import Report
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
_LABEL = flags.DEFINE_string("label", "demo", "name of the model in rows")
_WINDOW = flags.DEFINE_integer("window", 512, "tokens of a window")
_WINDOWS = flags.DEFINE_integer("windows", 20, "of each text")
_LAYERS = flags.DEFINE_list("layers", [], "of the section weights, with layer 1 second; []: all")
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
    demo.layers = tuple(map(int, _LAYERS.value))
    report = Report(device, "", _OUTPUT.value, ("moejax", "jax", "jaxlib"))
    for name in _SECTIONS.value:
        for found in SECTIONS[name](demo):
            what = f"{name} | {found.what} | {_LABEL.value}"
            report.add(what, found.figure, found.unit, **found.more)
        print(f"{name}: {time.perf_counter() - clock:.0f} s so far", flush=True)


if __name__ == "__main__":
    app.run(main)
