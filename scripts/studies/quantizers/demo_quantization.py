"""Every quantizer on one small model: perplexity, bits a weight, seconds.

    python -m scripts.studies.quantizers.demo_quantization --text=wiki.test.raw \
        --output=scripts/studies/quantizers/demo_quantization.jsonl
    python -m scripts.studies.quantizers.demo_quantization --checkpoint=RUN/model --label=study \
        --text=wiki.test.raw --samples=32 --time_budget_s=450 --output=rows.jsonl  # until status 0

`--sections` chooses among the table, `ranks` (memory against perplexity by rank: MiLo's Figure 11),
`policies` (Table 7: one iteration, one byte budget for all) and `curve` (error by iteration:
Figure 10). RESULTS.md draws its figures from these rows.

Attention and experts are quantized; the router and the embedding, which is the head too, stay as
they are. Perplexity is that of windows of 2048 tokens that do not overlap, after an end-of-text
token, in float32 by one compiled program for all rows. Bits a weight count codes, scales, zeros and
factors. Rows are written as they are measured, with the nats of each batch of windows; those that
the output has are passed over. Bars stand in `recipes.py`, and are printed first.
"""

import lzma
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moejax.checkpoints.open import open_checkpoint
from moejax.devices import choose_device, enable_compilation_cache
from moejax.files.result_rows import describe_device
from moejax.quantization.grid import Grid
from moejax.quantization.milo import MiloSettings, milo
from moejax.quantization.pipeline.calibration import calibration_tokens
from moejax.quantization.ranks import assign_ranks, parse_policy
from moejax.text.tokenizer import Tokenizer
from moejax.weights.qtensor import dense
from scripts.demo_training.scoring import (
    Windows,
    cut_windows,
    make_scorer,
    score_windows,
)
from scripts.studies.measuring import Report
from scripts.studies.quality.cases import describe, rows_of, standard_error
from scripts.studies.quantizers.calibration import calibrate
from scripts.studies.quantizers.methods import (
    Measured,
    Quantized,
    Quantizer,
    Recipe,
    make_stacks,
    plan_ranks,
)
from scripts.studies.quantizers.recipes import DEMO_KB, FULL, HQQ, RANKS, TABLE, claims, policies

WINDOW = 2048
SECTIONS = ("table", "ranks", "policies")
MORE = 3  # exit status: the time is up, and there is more to do
CURVE_POLICY = "Uniform-12.5%"

_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "a model small enough for this")
_LABEL = flags.DEFINE_string("label", "demo", "name of the model in rows")
_TEXT = flags.DEFINE_string("text", None, "UTF-8 text to score, plain or .xz", required=True)
_WINDOWS = flags.DEFINE_integer("windows", 0, "score only so many windows, spread; 0: all")
_BATCH = flags.DEFINE_integer("batch", 8, "windows scored at once")
_CALIBRATION = flags.DEFINE_string("calibration", "", "text of calibrated methods; '': the shipped")
_SAMPLES = flags.DEFINE_integer("samples", 128, "windows of calibration at most")
_SECTIONS = flags.DEFINE_list(
    "sections", ["table", "ranks", "policies", "curve"], "what to measure"
)
_ONLY = flags.DEFINE_string("only", "", "measure only rows whose label holds this, and HQQ's")
_MULTIPLE = flags.DEFINE_integer("multiple", 1, "adaptive ranks are multiples of this")
_KERNEL = flags.DEFINE_bool("kernel", False, "solve HQQ by the GPU kernel")
_THREADS = flags.DEFINE_integer("threads", os.cpu_count() or 1, "programs compiled side by side")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to; what it has is kept")
_BUDGET = flags.DEFINE_float("time_budget_s", 0, "begin no row after so long; 0: no limit")
_PLATFORM = flags.DEFINE_string("platform", "auto", "auto, cpu, gpu")
_CACHE = flags.DEFINE_string("cache", "", "compilation cache")


class Bench:
    """The model, the text, and the programs of one run."""

    def __init__(self, device: jax.Device):
        checkpoint = open_checkpoint(_CHECKPOINT.value)
        self.device, self.config = device, checkpoint.config
        leaves = checkpoint.load(dtype="float32", device=device, progress=False)
        self.weights = {name: dense(leaf, jnp.float32) for name, leaf in leaves.items()}
        tokenizer = Tokenizer.from_directory(checkpoint.directory)
        assert tokenizer is not None
        self.windows, self.text_bytes = _windows(tokenizer, _read_text(Path(_TEXT.value)))
        self.scorer = make_scorer(self.config, jnp.float32, "xla")
        text = _read_text(Path(_CALIBRATION.value)) if _CALIBRATION.value else None
        self.calibration_tokens = calibration_tokens(
            tokenizer,
            vocab_size=self.config.vocab_size,
            max_positions=self.config.context_limit,
            text=text,
            num_samples=_SAMPLES.value,
        )
        calibration = calibrate(self.config, self.weights, self.calibration_tokens, device)
        shares = calibration.expert_shares
        self.stacks = make_stacks(self.config, self.weights, shares)
        self.kilobytes = DEMO_KB
        if _LABEL.value != "demo":
            matrices = [matrix for stack in self.stacks for matrix in stack.matrices]
            plan = assign_ranks(parse_policy("Dense-25%"), matrices, factor_bits=8)
            self.kilobytes = math.ceil(plan.num_bytes / 1000)
        self.sections = {"table": TABLE, "ranks": RANKS, "policies": policies(self.kilobytes)}
        recipes = [recipe for recipes in self.sections.values() for recipe in recipes]
        plans = [
            self.ranks(recipe) for recipe in [*recipes, Recipe(method="milo", policy=CURVE_POLICY)]
        ]
        most = [max(int(plan[i].max()) for plan in plans) for i in range(len(self.stacks))]
        self.quantizer = Quantizer(
            self.weights,
            self.stacks,
            calibration.of_stacks(self.stacks),
            most,
            use_kernel=_KERNEL.value,
        )

    def prepare(self, chosen: Mapping[str, Sequence[Recipe]]) -> None:
        """Compiles what the sections need."""
        recipes = {recipe for part in chosen.values() for recipe in part if recipe.method != "fp"}
        self.quantizer.prepare([(r, self.ranks(r)) for r in recipes], _THREADS.value)

    def ranks(self, recipe: Recipe) -> list[np.ndarray]:
        """Ranks of each stack's matrices."""
        return plan_ranks(recipe, self.stacks, _MULTIPLE.value)

    def measure(self, recipe: Recipe) -> Measured:
        """Quantizes and scores."""
        total = sum(leaf.size for leaf in self.weights.values())
        size = sum(stack.weights.size for stack in self.stacks)
        if recipe.method == "fp":
            quantized = Quantized(self.quantizer.weights, 2 * size, 0.0, {}, 0, 0)
        else:
            quantized = self.quantizer.run(recipe, self.ranks(recipe))
        weights = {
            name: jax.device_put(leaf, self.device) for name, leaf in quantized.weights.items()
        }
        bits, nats = 0.0, []
        for first in range(0, len(self.windows.tokens), _BATCH.value):
            some = Windows(*(part[first : first + _BATCH.value] for part in self.windows))
            score = score_windows(self.scorer, weights, some, batch_size=_BATCH.value)
            bits += score.bits
            nats.append(score.bits * math.log(2) / score.num_targets)
        return Measured(
            recipe=recipe,
            perplexity=2 ** (bits / int(self.windows.scored.sum())),
            nats=tuple(nats),
            bits_per_byte=bits / self.text_bytes,
            bits_per_weight=8 * quantized.num_bytes / size,
            model_bits_per_weight=(8 * quantized.num_bytes + 16 * (total - size)) / total,
            quantized=quantized,
        )

    def curve(self, policy: str) -> dict[str, np.ndarray]:
        """By kind: mean over matrices of |W - U V - W'|_F / |W|_F after each of 20 passes."""
        found: dict[str, list[np.ndarray]] = {}
        plan = self.ranks(Recipe(method="milo", policy=policy))
        grid = Grid(bits=3, group_size=64, zero_kind="float")
        for stack, ranks in zip(self.stacks, plan, strict=True):
            settings = MiloSettings(max_rank=int(ranks.max()), tolerance=-math.inf)
            errors = milo(stack.weights, grid, settings, jnp.asarray(ranks)).errors
            whole = jnp.linalg.norm(stack.weights, axis=(-2, -1))
            errors = np.asarray(errors / whole[:, None])
            found.setdefault(stack.matrices[0].kind, []).append(errors)
        return {kind: np.concatenate(parts).mean(axis=0) for kind, parts in found.items()}


def _read_text(path: Path) -> str:
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes()).decode()
    return path.read_text(encoding="utf-8")


def _windows(tokenizer: Tokenizer, text: str) -> tuple[Windows, int]:
    """The windows that are scored, and the bytes of text that they hold."""
    windows = cut_windows(np.array(tokenizer.encode(text)), WINDOW, WINDOW)
    count = len(windows.tokens)
    if not 0 < _WINDOWS.value < count:
        return windows, len(text.encode())
    chosen = np.linspace(0, count - 1, _WINDOWS.value).astype(int)
    tokens, scored = windows.tokens[chosen], windows.scored[chosen]
    texts = [tokenizer.decode(row[1:][mask]) for row, mask in zip(tokens, scored, strict=True)]
    return Windows(tokens, scored), sum(len(part.encode()) for part in texts)


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    device = choose_device(_PLATFORM.value)
    enable_compilation_cache(_CACHE.value)
    jax.config.update("jax_default_matmul_precision", "highest")
    clock = time.perf_counter()
    bench = Bench(device)
    scored = int(bench.windows.scored.sum())
    print(
        f"{_CHECKPOINT.value}: {scored} tokens, {bench.text_bytes} bytes in "
        f"{len(bench.windows.tokens)} windows of {WINDOW} that do not overlap; calibration "
        f"{' x '.join(map(str, bench.calibration_tokens.shape))} tokens; "
        f"{describe_device(device)}; ready after {time.perf_counter() - clock:.0f} s"
    )

    report = Report(device, "", _OUTPUT.value, ("jax", "jaxlib", "flax"))

    prefix = "" if _LABEL.value == "demo" else f"{_LABEL.value} | "
    path = Path(_OUTPUT.value)
    written = {row["what"] for row in rows_of(path)}

    def write(section: str, label: str, figures: dict[str, tuple[float, str]], **more: Any) -> None:
        for name, (figure, unit) in figures.items():
            report.add(
                f"{prefix}{section} | {label} | {name}", figure, unit, tokens=scored,
                windows=len(bench.windows.tokens), **(more if name == "perplexity" else {}),
            )  # fmt: skip

    bars = claims(bench.kilobytes)
    for bar in bars:
        print(f"bar: {bar.paper}, {bar.said} ({bar.where}): {bar.bar}")
    work = {
        section: [
            r for r in recipes if f"{prefix}{section} | {r.label} | perplexity" not in written
        ]
        for section, recipes in _chosen(bench).items()
    }
    bench.prepare(work)
    done: dict[Recipe, Measured] = {}
    for section, recipes in work.items():
        for recipe in recipes:
            if _BUDGET.value and time.perf_counter() - clock > _BUDGET.value:
                print("more to do: run the same command again", flush=True)
                sys.exit(MORE)
            if recipe not in done:
                done[recipe] = bench.measure(recipe)
            found = done[recipe]
            error = standard_error(np.array(found.nats))
            nats = [round(one, 5) for one in found.nats]
            write(section, recipe.label, found.figures(), nats=nats, standard_error=error)
    if "curve" in _SECTIONS.value and not any(f"{prefix}curve" in what for what in written):
        for kind, errors in bench.curve(CURVE_POLICY).items():
            points = {f"pass {i}": (float(error), "") for i, error in enumerate(errors, 1)}
            write("curve", f"{kind}, {CURVE_POLICY}", points)
    for line in describe(bars, _nats(rows_of(path), prefix)):
        print(line)
    print(f"all of it: {time.perf_counter() - clock:.0f} s")


def _nats(rows: Iterable[dict[str, Any]], prefix: str) -> dict[str, list[float]]:
    """Nats of each recipe's windows, by section and label."""
    end = " | perplexity"
    return {
        row["what"].removeprefix(prefix).removesuffix(end): row["baseline"]["nats"]
        for row in rows
        if row["what"].startswith(prefix)
        and row["what"].endswith(end)
        and "nats" in row["baseline"]
    }


def _chosen(bench: Bench) -> dict[str, list[Recipe]]:
    """The recipes of each section that flags ask for."""
    return {
        name: [r for r in recipes if _ONLY.value in r.label or r in (FULL, HQQ)]
        for name, recipes in bench.sections.items()
        if name in _SECTIONS.value
    }


if __name__ == "__main__":
    app.run(main)
