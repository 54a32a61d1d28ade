"""Every quantizer on one small model: perplexity, bits a weight, seconds.

    python -m scripts.studies.quantizers.demo_quantization --text=wiki.test.raw \
        --output=scripts/studies/quantizers/demo_quantization.jsonl
    python -m scripts.studies.quantizers.demo_quantization --checkpoint=RUN/model --label=study \
        --text=wiki.test.raw --samples=32 --time_budget_s=450 --output=rows.jsonl  # until status 0

`--sections` chooses among the table, `ranks` (memory against perplexity by rank: MiLo's Figure 11)
and `policies` (Table 7: one iteration, one byte budget for all).

Every row is quantized by `moejax.quantize`: attention, experts and MLPs; router, embedding and head
stay as they are. Bits a weight count codes, scales, zeros and factors. Rows are written as they are
measured, with the nats of each batch of windows; those that the output has are passed over. Bars
stand in `recipes.py`, and are printed first.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from moejax.checkpoints import resolve_checkpoint
from moejax.devices import choose_device, enable_compilation_cache
from moejax.quantization.pipeline.inventory import take_inventory
from moejax.quantization.ranks import RankedMatrix, assign_ranks, parse_policy
from scripts.studies.measuring import Report, time_limit
from scripts.studies.quality.cases import describe, rows_of, standard_error
from scripts.studies.quantizers.quantized import Bench
from scripts.studies.quantizers.recipes import (
    DEMO_KB,
    FULL,
    HQQ,
    RANKS,
    TABLE,
    Recipe,
    claims,
    policies,
)

_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "a model small enough for this")
_LABEL = flags.DEFINE_string("label", "demo", "name of the model in rows")
_TEXT = flags.DEFINE_string("text", None, "UTF-8 text to score, plain or .xz", required=True)
_WINDOWS = flags.DEFINE_integer("windows", 0, "score only so many windows, spread; 0: all")
_SAMPLES = flags.DEFINE_integer("samples", 0, "of calibration; 0: 128, or as many as there are")
_CALIBRATION = flags.DEFINE_string("calibration", "default", "text, as moejax.quantize takes it")
_SECTIONS = flags.DEFINE_list("sections", ["table", "ranks", "policies"], "what to measure")
_ONLY = flags.DEFINE_multi_string("only", [""], "rows whose label holds this, and HQQ's, in order")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to; what it has is kept")
_BUDGET = flags.DEFINE_float("time_budget_s", 0, "begin no row after so long; 0: no limit")

Figures = dict[str, tuple[float, str]]  # figure and unit, by name


def dense_kilobytes(checkpoint: str) -> int:
    """Kilobytes that Dense-25% takes with factors in INT8."""
    matrices = [
        RankedMatrix(
            name=entry.name, kind=entry.kind, num_rows=entry.shape[0], num_inputs=entry.shape[1]
        )
        for entry in take_inventory(resolve_checkpoint(checkpoint)).entries
        if entry.kind in ("attention", "experts", "mlp")
    ]
    plan = assign_ranks(parse_policy("Dense-25%"), matrices, factor_bits=8)
    return math.ceil(plan.num_bytes / 1000)


def measured(bench: Bench, recipe: Recipe) -> tuple[Figures, dict[str, Any]]:
    """Figures of a recipe, and what stands beside the perplexity."""
    if recipe == FULL:
        figures, scored = {}, bench.score(_CHECKPOINT.value)
    else:
        settings = recipe.settings() | {"calibration": _CALIBRATION.value}
        with bench.quantized(_SAMPLES.value, settings) as (folder, outcome):
            scored, totals = bench.score(folder), outcome.totals
        figures = {
            "bits per weight": (totals["quantized_bits_per_weight"], "bits"),
            "model bits per weight": (totals["bits_per_weight"], "bits"),
            "quantizing and compiling": (sum(outcome.seconds.values()), "s"),
            "surged": (totals["surged_matrices"], "matrices"),
            "starved": (totals["starved_matrices"], "matrices"),
        }
    beside = {
        "nats": [round(one, 5) for one in scored.nats],
        "standard_error": standard_error(np.array(scored.nats)),
    }
    return {"perplexity": (math.exp(scored.mean), "perplexity"), **figures}, beside


def chosen(kilobytes: int) -> Iterator[tuple[str, Recipe]]:
    """Recipes that flags ask for, with their sections."""
    sections = {"table": TABLE, "ranks": RANKS, "policies": policies(kilobytes)}
    for name, part in itertools.product(_SECTIONS.value, _ONLY.value):
        for recipe in sections[name]:
            if part in recipe.label or recipe in (FULL, HQQ):
                yield name, recipe


def nats_of(rows: Iterable[dict[str, Any]], prefix: str) -> dict[str, list[float]]:
    """Nats of each recipe's windows, by section and label."""
    return {
        row["what"].removeprefix(prefix).removesuffix(" | perplexity"): row["baseline"]["nats"]
        for row in rows
        if row["what"].startswith(prefix) and "nats" in row["baseline"]
    }


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    check_time = time_limit(_BUDGET.value)
    device = choose_device("auto")
    enable_compilation_cache("auto")
    jax.config.update("jax_default_matmul_precision", "highest")
    is_demo = _LABEL.value == "demo"
    kilobytes = DEMO_KB if is_demo else dense_kilobytes(_CHECKPOINT.value)
    prefix = "" if is_demo else f"{_LABEL.value} | "
    bars, path = claims(kilobytes), Path(_OUTPUT.value)
    for bar in bars:
        print(f"bar: {bar.paper}, {bar.said} ({bar.where}): {bar.bar}")
    bench = Bench(_CHECKPOINT.value, _TEXT.value, _WINDOWS.value, device)
    report = Report(device, "", _OUTPUT.value, ("jax", "jaxlib", "flax"))
    written = {row["what"] for row in rows_of(path)}
    for section, recipe in chosen(kilobytes):
        label = f"{prefix}{section} | {recipe.label}"
        if f"{label} | perplexity" in written:
            continue
        check_time()
        written.add(f"{label} | perplexity")
        figures, beside = measured(bench, recipe)
        for name, (figure, unit) in figures.items():
            more = beside if name == "perplexity" else {}
            report.add(f"{label} | {name}", figure, unit, **bench.beside, **more)
    for line in describe(bars, nats_of(rows_of(path), prefix)):
        print(line)


if __name__ == "__main__":
    app.run(main)
