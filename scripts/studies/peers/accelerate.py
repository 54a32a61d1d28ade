"""Transformers with accelerate's offload, by the study of DyMoE (`bench_accelerate`)."""

import functools
import sys
from collections.abc import Iterator

from moejax.files.result_rows import ResultRow, read_rows
from moejax.models.shapes import CONFIGS
from scripts.studies.peers.running import Case, Figure, NotRunError, Place, decode, prefill

NAME = "transformers and accelerate"
GIB = {"Qwen3-30B-A3B": (12, 7), "Mixtral-8x7B": (20, 14)}
FORM = "INT4 g128, attention INT4, head bf16"
PROMPT = 512


def cases(shape: str) -> Iterator[Case]:
    """Runs of a shape under caps, weights pinned and its cache of device memory kept."""
    for gib in GIB.get(shape, ()):
        about = f"{shape}, {CONFIGS[shape].num_layers} layers, {FORM}, {gib} GiB"
        about += ", pinned, 97% for weights | one"
        yield Case(NAME, about, 200, functools.partial(_measure, shape=shape, gib=gib))


def _measure(place: Place, *, shape: str, gib: float) -> list[Figure]:
    rows = place.logs / "accelerate.jsonl"
    rows.unlink(missing_ok=True)
    ran = place.run(
        [sys.executable, "-m", "scripts.studies.dymoe.bench_accelerate", f"--model={shape}",
         f"--gib={gib}", "--hosting=kept", "--share=0.97", f"--prompt={PROMPT}",
         f"--out={rows}"], log="accelerate",
    )  # fmt: skip
    more: dict[str, float | str] = {} if ran.peak_gib is None else {"peak_gib": ran.peak_gib}
    found = of_rows(read_rows(rows) if rows.exists() else [])
    return [f._replace(more=f.more | more) for f in found]


def of_rows(rows: list[ResultRow]) -> list[Figure]:
    """Figures of its rows of times.

    Raises:
      NotRunError: there is no time among them.
    """
    found = []
    for row in rows:
        if row.unit != "ms":
            continue
        if "TTFT" in row.what:
            found.append(Figure(prefill(PROMPT), 1e3 * PROMPT / row.figure, {}))
        elif "TPOT" in row.what:
            found.append(Figure(decode(PROMPT), 1e3 / row.figure, {}))
    if not found:
        raise NotRunError("it measured no time: see its log")
    return found
