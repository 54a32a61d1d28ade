"""The text and the pictures of RESULTS.md."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from scripts import (
    reproduce_buddymoe,
    reproduce_dymoe,
    reproduce_dynaexq,
    reproduce_milo,
)
from scripts.reproducing import gpu_runs
from scripts.reproducing.command import FIGURES
from scripts.reproducing.page import IN_PART, MET, NOT_MEASURED, NOT_MET, NOT_SHOWN, OTHER, Page
from scripts.reproducing.rows import Results

PAPERS: dict[str, Callable[[Results, str], Page]] = {
    "DynaExq": reproduce_dynaexq.build,
    "DyMoE": reproduce_dymoe.build,
    "BuddyMoE": reproduce_buddymoe.build,
    "MiLo": reproduce_milo.build,
}
INTRODUCTION = """\
# Results: four papers, and what we measured

Made by `python -m scripts.make_results` from `scripts/results/*.jsonl` (ours) and
`scripts/papers/*.csv` (what the papers print); not edited by hand.

- A number of **ours** ends with [n]: the run in the last table of its section, with the rows'
  file and lines, device, versions, date and command. Other numbers are the paper's, as printed.
- **not measured** is a row that does not exist yet; no number stands in for it.
- The papers' models were not at hand. Speed is of their real shapes with random weights, routing
  replayed; quality is of the demo model that ships (13.5 million parameters, 7
  layers of 32 experts, top 4), mostly as perplexity, since it is at chance on tasks. So levels
  cannot be compared with the papers', only shapes and ratios; the column "what differs" says so.
- What ran on a GPU, with every command, is the last section.
- What we did not run (Fiddler, Mixtral-Offloading, MoE-Infinity, MARLIN, GPTQ3bit) stands as
  published.
- A number with a mark (†) behind its run is of a row with a known flaw, which the section's
  beginning names. Verdicts of "met" rest on no such row.
- A verdict is computed from the rows by the rule in the section's script; "not comparable" where a
  number can neither bear the claim out nor speak against it, "not shown" where a claim would be met
  by rows with a known flaw alone.
"""


def build(results: Results) -> dict[str, Page]:
    """The sections by paper."""
    return {name: make(results, FIGURES) for name, make in PAPERS.items()}


def document(pages: dict[str, Page]) -> str:
    """The text of RESULTS.md."""
    kinds = (MET, IN_PART, NOT_MET, NOT_SHOWN, OTHER, NOT_MEASURED)
    lines = [INTRODUCTION, f"| paper | {' | '.join(kinds)} |", "|" + " --- |" * (len(kinds) + 1)]
    for name, page in pages.items():
        counted = Counter(page.verdicts)
        lines.append(f"| {name} | {' | '.join(str(counted[kind]) for kind in kinds)} |")
    sections = [page.markdown() for page in pages.values()]
    results = next(iter(pages.values())).results
    return "\n".join(["\n".join(lines), "", *sections, gpu_runs.section(results)])


def draw(pages: dict[str, Page], folder: Path) -> list[Path]:
    """The pictures; those of figures that are no longer drawn go."""
    drawn = [path for page in pages.values() for path in page.draw(folder)]
    for name in PAPERS:
        for path in folder.glob(f"{name.lower()}_figure_*.png"):
            if path not in drawn:
                path.unlink()
    return drawn
