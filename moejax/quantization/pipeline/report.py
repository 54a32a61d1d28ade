"""Report of a quantization, in a few lines for people."""

import heapq
from collections import defaultdict
from collections.abc import Iterator

from moejax.checkpoints.formats.manifest import MANIFEST_FILE
from moejax.quantization.pipeline.plots import REPORT_FOLDER
from moejax.quantization.pipeline.run import Outcome

_NUM_WORST = 5


def report_lines(outcome: Outcome) -> Iterator[str]:
    """Lines with shares, bits, bytes by class, the worst matrices, times and remarks."""
    t = outcome.totals
    if outcome.was_done:
        yield f"{outcome.output} is finished already; nothing was done (checksums agree)"
    yield (
        f"quantized: {100 * t['quantized_share']:.2f} % of {t['weights']:,} weights, at "
        f"{t['quantized_bits_per_weight']:.3f} bits a weight; the whole model at "
        f"{t['bits_per_weight']:.3f} (scales, zeros, compensators and plain tensors counted)"
    )
    yield f"{'class':<16}{'weights':>16}{'MB':>12}{'bits a weight':>16}"
    for kind, counted in t["classes"].items():
        bits = 8 * counted["bytes"] / counted["weights"]
        megabytes = counted["bytes"] / 1e6
        yield f"{kind:<16}{counted['weights']:>16,}{megabytes:>12.2f}{bits:>16.3f}"
    yield f"{'all':<16}{t['weights']:>16,}{t['bytes'] / 1e6:>12.2f}{t['bits_per_weight']:>16.3f}"
    yield "largest relative errors:"
    errors = (
        (record["relative_error"], name)
        for name, record in outcome.records.items()
        if "bits" in record
    )
    for error, name in heapq.nlargest(_NUM_WORST, errors):
        yield f"  {error:.4f}  {name}"
    narrow: dict[str, list[float]] = defaultdict(list)
    for record in outcome.records.values():
        for bits, error in record.get("narrow_errors", {}).items():
            narrow[bits].append(error)
    for bits, found in narrow.items():
        mean = sum(found) / len(found)
        yield f"bit planes: read_bits={bits} reads {bits} bits, mean relative error {mean:.4f}"
    if t["surged_matrices"]:
        yield f"{t['surged_matrices']} matrices keep INT8 factors: INT3 lost too much of the gain"
    if t["starved_matrices"]:
        yield f"{t['starved_matrices']} matrices saw too little text and took the fallback"
    yield from outcome.remarks
    if outcome.seconds:
        phases = ", ".join(f"{name} {spent:.1f} s" for name, spent in outcome.seconds.items())
        earlier = f" ({outcome.shards_before} files are of an earlier run)"
        yield f"time: {phases}{earlier if outcome.shards_before else ''}"
    plots = outcome.output / REPORT_FOLDER
    if plots.is_dir():  # it takes matplotlib
        yield f"plots: {plots}"
    yield f"manifest: {outcome.output / MANIFEST_FILE}"
