"""Bit planes on the demo model: perplexity at each width beside separate copies.

    python -m scripts.studies.planes.demo_planes --text=wiki.valid.raw --output=rows.jsonl

Every row is quantized by `moejax.quantize`, read back at one width and scored in float32, in
windows of 2048 tokens that do not overlap: each method by planes of the widths of `--planes`, and
apart (`--weights`: by planes alone, at those weights of the widest width). Rows that the output has
are passed over; with `--time_budget_s` the command ends with status
3 while there is more to do. Another model: `--checkpoint=RUN/model --label=study`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from moejax.devices import choose_device, enable_compilation_cache
from moejax.quantization.pipeline.recipe import parse_planes
from scripts.studies.measuring import Report, time_limit
from scripts.studies.quality.cases import rows_of
from scripts.studies.quantizers.quantized import Bench, Scored

METHODS = ("rtn", "hqq", "least_squares", "gptq", "milo")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "a plain model that fits in float32")
_LABEL = flags.DEFINE_string("label", "demo", "name of the model in rows; demo: none")
_BUDGET = flags.DEFINE_float("time_budget_s", 0, "begin no quantization after so long; 0: no limit")
_TEXT = flags.DEFINE_string("text", None, "UTF-8 text to score, plain or .xz", required=True)
_WINDOWS = flags.DEFINE_integer("windows", 4, "windows that are scored, spread over the text")
_SAMPLES = flags.DEFINE_integer("samples", 32, "samples of calibration")
_METHODS = flags.DEFINE_list("methods", list(METHODS), "methods of quantization")
_PLANES = flags.DEFINE_string("planes", "2,4", "widths of bit planes")
_WEIGHTS = flags.DEFINE_list("weights", [], "of the widest width, by planes alone; []: the default")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")


def schemes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Label and settings of every quantization."""
    planes = "planes" if _PLANES.value == "2,4" else f"planes {_PLANES.value}"
    for method in _METHODS.value:
        settings = {"method": method, "planes": _PLANES.value}
        for weight in map(float, _WEIGHTS.value):
            label = f"methods | {method} | {planes}, weight {weight:g}"
            yield label, settings | {"plane_weight": weight}
        if _WEIGHTS.value:
            continue
        yield f"methods | {method} | {planes}", settings
        for bits in (4, 2):
            yield f"methods | {method} | int{bits}", {"method": method, "bits": bits}


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    check_time = time_limit(_BUDGET.value)
    device = choose_device("auto")
    enable_compilation_cache("auto")
    jax.config.update("jax_default_matmul_precision", "highest")
    report = Report(device, "", _OUTPUT.value, ("jax", "jaxlib", "flax"))
    prefix = "" if _LABEL.value == "demo" else f"{_LABEL.value} | "
    written = {row["what"] for row in rows_of(Path(_OUTPUT.value))}
    bench = Bench(_CHECKPOINT.value, _TEXT.value, _WINDOWS.value, device)

    def add(what: str, scored: Scored, **more: float) -> None:
        nats = [round(one, 5) for one in scored.nats]  # of batches of windows
        report.add(what, scored.mean, "nats", **bench.beside, **more, nats=nats)

    plain_row = f"{prefix}unquantized | log-perplexity"
    if plain_row not in written:
        add(plain_row, bench.score(_CHECKPOINT.value))
    for name, settings in schemes():
        label = prefix + name
        if any(what.startswith(f"{label} | ") for what in written):
            continue
        check_time()
        with bench.quantized(_SAMPLES.value, settings) as (folder, outcome):
            stored = outcome.totals["quantized_bits_per_weight"]
            widths = parse_planes(settings["planes"]) if "planes" in settings else (0,)
            for bits in reversed(widths):
                scored = bench.score(folder, bits)
                add(
                    f"{label} | {bits or settings['bits']} bits | log-perplexity", scored,
                    bits_a_weight=8 * scored.packed_bytes / outcome.totals["quantized_weights"],
                    stored_bits_a_weight=stored,
                )  # fmt: skip


if __name__ == "__main__":
    app.run(main)
