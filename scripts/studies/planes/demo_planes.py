"""Bit planes on the demo model: perplexity at each width beside separate copies.

    python -m scripts.studies.planes.demo_planes --text=wiki.valid.raw --output=rows.jsonl

Every row is quantized by `moejax.quantize`, read back at one width and scored in float32, in
windows of 2048 tokens that do not overlap. `--sections` chooses among `methods` (each method by
planes and apart), `weights` (the weight between the widths, by each method), `compensators` (MiLo's
ranks in the wider widths, and groups of 128 that pay for them) and `errors` (the same as `weights`
in relative errors of one layer's experts, without a text), all for the widths of `--planes`. Rows
that the output has are passed over; with `--time_budget_s` the command ends with status 3 while
there is more to do. Another model: `--checkpoint=RUN/model --label=study`.
"""

import functools
import lzma
import math
import sys
import tempfile
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moejax import quantize
from moejax.checkpoints.open import open_checkpoint
from moejax.config.commands import QuantizeConfig
from moejax.devices import choose_device, enable_compilation_cache
from moejax.quantization.grid import Grid, dequantize, relative_error
from moejax.quantization.hqq import hqq
from moejax.quantization.least_squares import least_squares
from moejax.quantization.pipeline.recipe import parse_planes
from moejax.text.tokenizer import Tokenizer
from moejax.weights.qtensor import dense
from scripts.demo_training.scoring import Windows, cut_windows, make_scorer, score_windows
from scripts.studies.measuring import Report
from scripts.studies.quality.cases import rows_of

WINDOW = 2048
MORE = 3  # exit status: the time is up, and there is more to do
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
_TEXT = flags.DEFINE_string("text", "", "UTF-8 text to score, plain or .xz")
_WINDOWS = flags.DEFINE_integer("windows", 4, "windows that are scored, spread over the text")
_SAMPLES = flags.DEFINE_integer("samples", 32, "samples of calibration")
_SECTIONS = flags.DEFINE_list("sections", ["methods", "weights"], "what to measure")
_METHODS = flags.DEFINE_list("methods", list(METHODS), "methods of quantization")
_PLANES = flags.DEFINE_string("planes", "2,4", "widths of bit planes")
_WEIGHTS = flags.DEFINE_list("weights", list(WEIGHTS), "weights between the widths")
_FORMS = flags.DEFINE_list("forms", ["planes", "int4", "int2"], "of the section methods")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")


class Bench:
    """The model, the text, and the compiled scorer."""

    def __init__(self, device: jax.Device):
        checkpoint = open_checkpoint(_CHECKPOINT.value)
        tokenizer = Tokenizer.from_directory(checkpoint.directory)
        assert tokenizer is not None
        path = Path(_TEXT.value)
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        windows = cut_windows(np.array(tokenizer.encode(raw.decode())), WINDOW, WINDOW)
        chosen = np.linspace(0, len(windows.tokens) - 1, _WINDOWS.value).astype(int)
        self.windows = Windows(windows.tokens[chosen], windows.scored[chosen])
        self.scorer = make_scorer(checkpoint.config, jnp.float32, "xla")
        self.device = device

    def log_perplexity(self, directory: Path | str, read_bits: int = 0) -> tuple[float, int]:
        """Mean nats a token, and bytes of the packed leaves, of a checkpoint read at a width."""
        leaves = open_checkpoint(str(directory), read_bits).load(
            dtype="float32", device=self.device, progress=False
        )
        plain = {name: dense(leaf, jnp.float32) for name, leaf in leaves.items()}
        score = score_windows(self.scorer, plain, self.windows, batch_size=4)
        packed = [leaf for leaf in leaves.values() if not isinstance(leaf, jax.Array)]
        return score.bits / score.num_targets * math.log(2), sum(leaf.nbytes for leaf in packed)


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


def errors(report: Report, device: jax.Device, prefix: str, written: Container[str]) -> None:
    """Relative errors of the demo's experts of layer 3 at both widths, by weight."""
    leaves = open_checkpoint(_CHECKPOINT.value).load(dtype="float32", device=device, progress=False)
    experts = dense(leaves["moe.gate_up"], jnp.float32)[3]
    planes = parse_planes(_PLANES.value)
    label = "" if _PLANES.value == "2,4" else f"planes {_PLANES.value} | "
    for name, run in (("hqq", hqq), ("least_squares", least_squares)):
        for weight in map(float, _WEIGHTS.value):
            grid = Grid(
                bits=planes[-1], group_size=64, zero_kind="float", planes=planes,
                plane_weight=weight,
            )  # fmt: skip
            codes = run(experts, grid)
            for bits, width in zip(reversed(planes), grid.widths, strict=True):
                error = relative_error(experts, dequantize(codes, grid, width)).mean()
                what = f"{prefix}errors | {name} | {weight:g} | {label}{bits} bits"
                if what not in written:
                    report.add(what, float(error), "")


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    clock = time.perf_counter()
    device = choose_device("auto")
    enable_compilation_cache("auto")
    jax.config.update("jax_default_matmul_precision", "highest")
    report = Report(device, "", _OUTPUT.value, ("jax", "jaxlib", "flax"))
    prefix = "" if _LABEL.value == "demo" else f"{_LABEL.value} | "
    written = {row["what"] for row in rows_of(Path(_OUTPUT.value))} if _OUTPUT.value else set()
    if "errors" in _SECTIONS.value:
        errors(report, device, prefix, written)
    if set(_SECTIONS.value) <= {"errors"}:
        return
    bench = Bench(device)
    add = functools.partial(
        report.add, unit="nats", windows=_WINDOWS.value, tokens=int(bench.windows.scored.sum())
    )
    plain_row = f"{prefix}unquantized | log-perplexity"
    if "methods" in _SECTIONS.value and plain_row not in written:
        plain, _ = bench.log_perplexity(_CHECKPOINT.value)
        add(plain_row, plain)
    for name, settings in schemes():
        label = prefix + name
        if any(what.startswith(f"{label} | ") for what in written):
            continue
        if _BUDGET.value and time.perf_counter() - clock > _BUDGET.value:
            print("more to do: run the same command again", flush=True)
            sys.exit(MORE)
        with tempfile.TemporaryDirectory() as directory:
            config = QuantizeConfig(
                checkpoint=_CHECKPOINT.value,
                output=directory,
                calibration_samples=_SAMPLES.value,
                **settings,
            )
            outcome = quantize.run(config, progress=False)
            stored = outcome.totals["quantized_bits_per_weight"]
            widths = parse_planes(settings["planes"]) if "planes" in settings else (0,)
            for bits in reversed(widths):
                nats, num_bytes = bench.log_perplexity(directory, bits)
                width = bits or settings["bits"]
                add(
                    f"{label} | {width} bits | log-perplexity", nats,
                    bits_a_weight=8 * num_bytes / outcome.totals["quantized_weights"],
                    stored_bits_a_weight=stored,
                )  # fmt: skip


if __name__ == "__main__":
    app.run(main)
