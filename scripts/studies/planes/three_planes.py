"""Whether planes (2, 1, 1) pay: errors at 4, 3 and 2 bits, and of experts in three tiers.

    python -m scripts.studies.planes.three_planes --output=scripts/studies/planes/demo_planes.jsonl

Codes of the demo's experts of layer 3 by HQQ, where 3 bits are a width beside 4 and 2. Then the
error that tokens meet, the root of the mean of squared errors weighted by the experts' share of the
routing (WikiText-2, rows of the study `quality`), with the best choice of each expert's width at
equal bytes: among 4 and 2 bits, and among 4, 3 and 2.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moejax.checkpoints.open import open_checkpoint
from moejax.devices import choose_device
from moejax.quantization.grid import Grid, Width, dequantize, relative_error
from moejax.quantization.hqq import hqq
from moejax.weights.qtensor import dense
from pallas_kernels import layout
from scripts.studies.measuring import Report

LAYER = 3
SHARES = (0.25, 0.5, 0.75)  # of the bytes from all experts at 2 bits to all at 4
ROUTING = Path("scripts/studies/quality/reproduce.jsonl")

_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")


class ThreeWidths(Grid):
    """A grid of planes (2, 4) whose codes are chosen for 3 bits too."""

    @functools.cached_property
    def widths(self) -> tuple[Width, ...]:
        """Widths of 4, 3 and 2 bits; the narrower two divide what the first leaves."""
        wide, narrow = super().widths
        step = layout.prefix_constants(3).scale_factor / layout.prefix_constants(4).scale_factor
        share = narrow.share / 2
        return wide, Width(1, step, (2**3 - 1) / 2, share), narrow._replace(share=share)


def errors_of(weights: jax.Array, kind: type[Grid]) -> list[float]:
    """Relative error at each width, the widest first."""
    grid = kind(bits=4, group_size=64, zero_kind="float", planes=(2, 4))
    codes = hqq(weights, grid)
    found = (relative_error(weights, dequantize(codes, grid, width)) for width in grid.widths)
    return [float(error.mean()) for error in found]


def least_error(shares: np.ndarray, squared: dict[int, float], more_bits: int) -> float:
    """Least weighted error of experts that have 2 bits each and `more_bits` in all beside."""
    least = np.zeros(more_bits + 1)
    for share in shares:
        options = [
            np.concatenate([np.full(bits - 2, np.inf), least[: more_bits + 3 - bits]])
            + share * error
            for bits, error in squared.items()
        ]
        least = np.min(options, axis=0)
    return float(np.sqrt(least.min()))


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    device = choose_device("auto")
    report = Report(device, "", _OUTPUT.value, ("jax", "jaxlib", "flax"))
    leaves = open_checkpoint("demo").load(dtype="float32", device=device, progress=False)
    experts = dense(leaves["moe.gate_up"], jnp.float32)[LAYER]
    rows = map(json.loads, ROUTING.read_text(encoding="utf-8").splitlines())
    counts = [
        np.array(row["baseline"]["counts"], np.float64)
        for row in rows
        if row["what"].startswith("routing | counts | wikitext-2 | layer")
    ]
    for name, kind, widths in (
        ("planes 2,2", Grid, (4, 2)), ("planes 2,1,1", ThreeWidths, (4, 3, 2)),
    ):  # fmt: skip
        errors = dict(zip(widths, errors_of(experts, kind), strict=True))
        for bits, error in errors.items():
            report.add(f"three planes | hqq | {name} | {bits} bits", error, "")
        squared = {bits: error**2 for bits, error in errors.items()}
        for share in SHARES:
            found = [least_error(of / of.sum(), squared, int(2 * share * len(of))) for of in counts]
            what = f"three planes | error met by tokens | {name} | {2 + 2 * share:g} bits"
            report.add(what, float(np.mean(found)), "", layers=len(found))


if __name__ == "__main__":
    app.run(main)
