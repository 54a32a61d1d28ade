"""Every quantizer on the demo model in one run: perplexity, bits a weight, seconds.

    python -m scripts.studies.quantizers.demo_quantization --text=wiki.test.raw \
        --output=scripts/studies/quantizers/demo_quantization.jsonl

`--sections` chooses among the table, `ranks` (memory against perplexity by rank: MiLo's Figure 11),
`policies` (Table 7: one iteration, one byte budget for all) and `curve` (error by iteration:
Figure 10). RESULTS.md draws its figures from these rows.

Attention and experts are quantized; the router and the embedding, which is the head too, stay as
they are. Perplexity is that of windows of 2048 tokens that do not overlap, after an end-of-text
token, in float32 by one compiled program for all rows. Bits a weight count codes, scales, zeros and
factors. Rows are written as they are measured.
"""

import lzma
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

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
from moejax.text.tokenizer import Tokenizer
from moejax.weights.qtensor import dense
from scripts.demo_training.scoring import (
    Windows,
    cut_windows,
    make_scorer,
    score_windows,
)
from scripts.studies.measuring import Report
from scripts.studies.quantizers.calibration import calibrate
from scripts.studies.quantizers.methods import (
    Measured,
    Quantized,
    Quantizer,
    Recipe,
    make_stacks,
    plan_ranks,
)
from scripts.studies.quantizers.recipes import FULL, HQQ, POLICIES, RANKS, TABLE

WINDOW = 2048
SECTIONS = {"table": TABLE, "ranks": RANKS, "policies": POLICIES}
CURVE_POLICY = "Uniform-12.5%"

_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "a model small enough for this")
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
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")
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
        recipes = [recipe for recipes in SECTIONS.values() for recipe in recipes]
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
        score = score_windows(self.scorer, weights, self.windows, batch_size=_BATCH.value)
        return Measured(
            recipe=recipe,
            perplexity=2 ** (score.bits / score.num_targets),
            bits_per_byte=score.bits / self.text_bytes,
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

    def write(section: str, label: str, figures: dict[str, tuple[float, str]]) -> None:
        for name, (figure, unit) in figures.items():
            report.add(
                f"{section} | {label} | {name}", figure, unit, tokens=scored,
                windows=len(bench.windows.tokens),
            )  # fmt: skip

    bench.prepare(_chosen())
    done: dict[Recipe, Measured] = {}
    for section, recipes in _chosen().items():
        for recipe in recipes:
            if recipe not in done:
                done[recipe] = bench.measure(recipe)
            write(section, recipe.label, done[recipe].figures())
    if "curve" in _SECTIONS.value:
        for kind, errors in bench.curve(CURVE_POLICY).items():
            points = {f"pass {i}": (float(error), "") for i, error in enumerate(errors, 1)}
            write("curve", f"{kind}, {CURVE_POLICY}", points)
    print(f"all of it: {time.perf_counter() - clock:.0f} s")


def _chosen() -> dict[str, list[Recipe]]:
    """The recipes of each section that flags ask for."""
    return {
        name: [r for r in recipes if _ONLY.value in r.label or r in (FULL, HQQ)]
        for name, recipes in SECTIONS.items()
        if name in _SECTIONS.value
    }


if __name__ == "__main__":
    app.run(main)
