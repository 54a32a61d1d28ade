"""Which small model counts: the study model where it has the rows, else the demo."""

from collections.abc import Callable, Mapping, Sequence

from scripts.studies.quality.cases import MET, NOT_MEASURED, NOT_SHOWN, Claim, verdict
from scripts.studies.tables.paper import Judged, Paper
from scripts.studies.tables.rows import Found

STUDY, DEMO = "study", "demo"
NAMES = {STUDY: "the study model", DEMO: "the demo model"}  # the first one that has rows counts
DIFFERS = {  # how a number differs from the papers'
    STUDY: "study model (374 million parameters, 30 layers of 16 experts, top 4)",
    DEMO: "demo model (13.5 million parameters, 7 layers of 32 experts, top 4)",
}


def claims(paper: Paper, bars: Sequence[Claim], doubts: Mapping[str, str] | None = None) -> None:
    """Adds what the study model's rows say to bars that were written before them.

    Bars without rows are named in the region "missing".

    Args:
      doubts: why a bar shows nothing where it is met, by what its claim says.
    """
    missing = []
    for bar in bars:
        names = [f"{STUDY} | {row}" for test in bar.tests for _, row in test.terms]
        rows = [paper.results.get(name) for name in names]
        if all(rows):
            paper.claim(
                bar.said, bar.where, rows, _judge(paper, bar, (doubts or {}).get(bar.said, ""))
            )
        else:
            missing.append(f"{bar.said} ({bar.bar})")
    said = "; ".join(missing) or "none"
    paper.inline("missing", f" {len(missing)} of {len(bars)} bars, {NOT_MEASURED}: {said}.")


def _judge(paper: Paper, bar: Claim, doubt: str) -> Callable[..., Judged]:
    def judged(*rows: Found) -> Judged:
        nats = {one.row.what.partition(" | ")[2]: one.more["nats"] for one in rows}
        found, outcomes = verdict(bar, nats)
        tests = []
        for test, one in zip(bar.tests, outcomes, strict=True):
            name = test.terms[0][1].partition(" | ")[2].replace(" | ", ", ")
            margin = f" (at most {test.margin:g})" if test.margin else ""
            tests.append(f"{name} {one.mean:+.3f} ± {one.error:.3f}{margin}, {one.verdict}")
        above = f"Nats a token above it, ± a standard error: {'; '.join(tests)}"
        said = f"{NAMES[STUDY]}; {bar.bar}. {above} {paper.cite(*rows)}"
        return (f"{said}; {doubt}", NOT_SHOWN) if doubt and found == MET else (said, found)

    return judged
