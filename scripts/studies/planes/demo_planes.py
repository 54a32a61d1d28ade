"""Bit planes on the demo model: perplexity at each width beside separate copies.

    python -m scripts.studies.planes.demo_planes --text=wiki.valid.raw --output=rows.jsonl

Every row is quantized by `moejax.quantize`, read back at one width and scored in float32, in
windows of 2048 tokens that do not overlap. `--sections` chooses among `methods` (each method by
planes and apart), `weights` (the weight between the widths, by each method) and `compensators`
(MiLo's ranks in the wider widths, and groups of 128 that pay for them), all for the widths of
`--planes`. Rows that the output has are passed over; with `--time_budget_s` the command ends with
status 3 while there is more to do. Another model: `--checkpoint=RUN/model --label=study`.
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
# Down projections have 64 inputs; the budget makes 4.5 bits a weight of it all, as INT4 has.
SHORT_OF_BITS = {"group_size": 128, "rules": "*.down_proj: group=64",
                 "rank": "Dense-25% + Kurtosis-6.25% within 265 KB"}  # fmt: skip
COMPENSATORS: dict[str, dict[str, Any]] = {
    "no wider ranks": {"rank_divisor": 0},
    "wider ranks a quarter": {"rank_divisor": 4},
    "groups of 128 | no wider ranks": {"rank_divisor": 0, **SHORT_OF_BITS},
    "groups of 128 | wider ranks a quarter": {"rank_divisor": 4, **SHORT_OF_BITS},
}
WEIGHTS = ("0", "0.5", "0.8", "0.9", "0.95", "1")

_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "a plain model that fits in float32")
_LABEL = flags.DEFINE_string("label", "demo", "name of the model in rows; demo: none")
_BUDGET = flags.DEFINE_float("time_budget_s", 0, "begin no quantization after so long; 0: no limit")
_TEXT = flags.DEFINE_string("text", None, "UTF-8 text to score, plain or .xz", required=True)
_WINDOWS = flags.DEFINE_integer("windows", 4, "windows that are scored, spread over the text")
_SAMPLES = flags.DEFINE_integer("samples", 32, "samples of calibration")
_SECTIONS = flags.DEFINE_list("sections", ["methods", "weights"], "what to measure")
_METHODS = flags.DEFINE_list("methods", list(METHODS), "methods of quantization")
_PLANES = flags.DEFINE_string("planes", "2,4", "widths of bit planes")
_WEIGHTS = flags.DEFINE_list("weights", list(WEIGHTS), "weights between the widths")
_FORMS = flags.DEFINE_list("forms", ["planes", "int4", "int2"], "of the section methods")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")


def schemes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Label and settings of every quantization."""
    planes = "planes" if _PLANES.value == "2,4" else f"planes {_PLANES.value}"
    if "methods" in _SECTIONS.value:
        for method in _METHODS.value:
            for form in _FORMS.value:
                settings: dict[str, Any] = {"method": method}
                if form == "planes":
                    yield f"methods | {method} | {planes}", settings | {"planes": _PLANES.value}
                else:
                    bits = int(form.removeprefix("int"))
                    yield f"methods | {method} | {form}", settings | {"bits": bits}
    if "weights" in _SECTIONS.value:
        for method in _METHODS.value:
            for weight in map(float, _WEIGHTS.value):
                settings = {"method": method, "planes": _PLANES.value, "plane_weight": weight}
                yield f"weights | {method} | {weight:g} | {planes}", settings
    if "compensators" in _SECTIONS.value:
        for name, how in COMPENSATORS.items():
            yield f"compensators | {name} | {planes}", {
                "method": "milo", "planes": _PLANES.value, **how
            }  # fmt: skip


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
    if "methods" in _SECTIONS.value and plain_row not in written:
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
