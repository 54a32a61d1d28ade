"""The text and the pictures of RESULTS.md."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from scripts.studies.buddymoe import section as reproduce_buddymoe
from scripts.studies.dymoe import section as reproduce_dymoe
from scripts.studies.dynaexq import section as reproduce_dynaexq
from scripts.studies.milo import section as reproduce_milo
from scripts.studies.tables import gpu_runs
from scripts.studies.tables.page import IN_PART, MET, NOT_MEASURED, NOT_MET, NOT_SHOWN, OTHER, Page
from scripts.studies.tables.rows import Results

FIGURES = "docs/figures"
PAPERS: dict[str, Callable[[Results, str], Page]] = {
    "DynaExq": reproduce_dynaexq.build,
    "DyMoE": reproduce_dymoe.build,
    "BuddyMoE": reproduce_buddymoe.build,
    "MiLo": reproduce_milo.build,
}
INTRODUCTION = """\
# Results: four papers, and what we measured

One engine runs the methods of four papers. Speed was measured on an H200 with the real shapes of
the papers' models, random weights and replayed routing. Quality was measured on the demo model
that ships (13.5 million parameters, 7 layers of 32 experts, top 4), mostly as perplexity, since
the model is at chance on tasks. The papers' own models were not at hand. So shapes and ratios can
be compared with the papers', levels cannot.
"""
# By paper: what was reproduced, what was not, and why. Decimals stand in the claims of the paper.
SUMMARY = {
    "DynaExq": (
        "in part: experts chosen by use beat random and frequency-blind choices at 10 of 10 "
        "shares (INT4/INT2) and 7 of 10 (bf16/INT4); DynaExq keeps 83 to 94 % of INT2's "
        "throughput (paper: typically more than 85 %); it follows a shift from prose to code "
        "and maths",
        "the accuracies of Table 1; few experts take most of the load in the last layer, not in"
        " the first",
        "the real 30B and 80B weights were not at hand; the gap that comes back is of "
        "perplexity here and of accuracies in the paper",
    ),
    "DyMoE": (
        "a cache is 1.95 and 3.84 times as fast as load on demand (paper: 1.88 and 2.20); 4/0 "
        "at r = 0.9 is near INT4; INT2 is better than skipping; heavy hitters choose better "
        "than chance; adjacent layers are alike",
        "prefetch makes decode slower (0.87 and 0.89 times; paper: 1.13 and 1.15); 4/2 gains "
        "1.10 for 1.60 at 24 GB, all of it 2.17 for 2.67 at 16 GB; over accelerate with pinned "
        "weights 3.7 for 8.31; more experts for early layers help prompts, not decode; the last"
        " layer suffers most from INT2, not the first",
        "an H200 with a faster link took the place of an RTX 3090; accelerate's default is its "
        "slow path; Fiddler and Mixtral-Offloading did not run",
    ),
    "BuddyMoE": (
        "throughput rises by 7.8, 38.0 and 70.6 % (paper: 7.4, 5.8 and 10.3 %); at least 99.0 %"
        " fewer bytes cross the link (paper: 16.7 %); co-activation is concentrated, more so in"
        " late layers",
        "buddies cost little accuracy: they lose 0.51 to 0.61 of what random experts lose, "
        "about as much as leaving the pairs out (0.53 to 0.63); experts are alike: cosines of "
        "0.005 to 0.034",
        "the demo's experts are not redundant: even the best other resident, chosen in "
        "hindsight, leaves 0.95 of the error; the paper's models were not at hand",
    ),
    "MiLo": (
        "at one size dense ranks beat uniform and sparse ones (21.43, 22.23, 22.42); the error "
        "falls and converges; dense layers have heavier tails; kurtosis goes with error; INT3 "
        "keeps outliers",
        "INT3 factors cost 0.7 to 1.2 % of perplexity (paper: 0.2 %); INT3 is 1.01 to 1.06 "
        "times as fast as INT4 (paper: 1.27 to 1.32); unpacking first is not faster at batch 1",
        "matrices of the demo are small, so factors weigh more; MARLIN did not run: INT4 here "
        "is our own kernel",
    ),
}
READING = """\
How to read the rest:

- `python -m scripts.make_results` makes this page from `scripts/studies/*/*.jsonl` (ours) and
  `scripts/studies/*/published.csv` (the papers' printed numbers). Nobody edits it by hand.
- A number of **ours** ends with [n]: the run in the last table of its section, with the rows' file
  and lines, device, versions, date and command. Other numbers are the paper's, as printed.
- **not measured**: the row does not exist yet, and no number stands in for it.
- The column "what differs" says where a row is not the paper's.
- The last section lists what ran on a GPU, with every command.
- Systems that did not run here (Fiddler, Mixtral-Offloading, MoE-Infinity, MARLIN, GPTQ3bit) stand
  as published.
- A mark (†) behind a run means that its row has a known flaw, which the beginning of the section
  names. No verdict of "met" rests on such a row.
- A rule in the section's script computes each verdict from the rows. "not comparable": the number
  can neither support the claim nor contradict it. "not shown": only rows with a known flaw would
  meet the claim.
"""


def build(results: Results) -> dict[str, Page]:
    """The sections by paper."""
    return {name: make(results, FIGURES) for name, make in PAPERS.items()}


def document(pages: dict[str, Page]) -> str:
    """The text of RESULTS.md."""
    kinds = (MET, IN_PART, NOT_MET, NOT_SHOWN, OTHER, NOT_MEASURED)
    lines = [INTRODUCTION, "| paper | reproduced | not reproduced | why |", "|" + " --- |" * 4]
    lines += [f"| {name} | {' | '.join(SUMMARY[name])} |" for name in pages]
    lines += ["", "Claims of each paper by verdict:", ""]
    lines += [f"| paper | {' | '.join(kinds)} |", "|" + " --- |" * (len(kinds) + 1)]
    for name, page in pages.items():
        counted = Counter(page.verdicts)
        lines.append(f"| {name} | {' | '.join(str(counted[kind]) for kind in kinds)} |")
    sections = [page.markdown() for page in pages.values()]
    results = next(iter(pages.values())).results
    lines += ["", READING]
    return "\n".join([*lines, *sections, gpu_runs.section(results)])


def draw(pages: dict[str, Page], folder: Path) -> list[Path]:
    """The pictures; those of figures that are no longer drawn go."""
    drawn = [path for page in pages.values() for path in page.draw(folder)]
    for name in PAPERS:
        for path in folder.glob(f"{name.lower()}_figure_*.png"):
            if path not in drawn:
                path.unlink()
    return drawn
