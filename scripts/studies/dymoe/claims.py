"""DyMoE's claims beside what we measured, and where its rows of ours are found."""

from collections.abc import Sequence

from scripts.studies.dymoe import accelerate_section as accelerate
from scripts.studies.dymoe.accelerate_section import MIXTRAL
from scripts.studies.tables.page import MET, NOT_MEASURED, NOT_MET, OTHER, Page, borne_out
from scripts.studies.tables.rows import Found, Results

GIBS = (16, 24)
TEXTS = ("wikitext-2", "mixed")
PHASES = {"prompts": "prefill", "token by token": "token by token"}
HIGH = 0.75  # our reading of "consistently high" and "high statistical correlation"


def quality(phase: str, text: str, series: str, r: str) -> str:
    """The row of a perplexity of the demo model."""
    return f"dymoe | dymoe {PHASES[phase]} | {text} | {series} | {r}"


def ratio(results: Results, row: str, base: str, gib: int, part: str = "TPOT") -> list[Found]:
    """Row that says how many times as fast a row of our Table 3 is, of one run if there is one.

    Returns:
      The row of the ratio that the row's own run wrote; else the base's time and the row's; nothing
      where one is missing.
    """
    own, first = (results.get(f"{name}, {gib} GiB, {part}, {MIXTRAL}") for name in (row, base))
    stored = results.get(f"{row} over {base}, {gib} GiB, {part}, {MIXTRAL}")
    if own and stored and stored.origin == own.origin:
        return [stored]
    return [first, own] if first and own else []


def ratio_of(found: list[Found]) -> float | None:
    """Value of the ratio; None without one, and over two devices."""
    if not found or len({one.row.device for one in found}) > 1:
        return None
    return found[0].figure / found[1].figure if len(found) > 1 else found[0].figure


def ratio_shown(page: Page, found: list[Found]) -> str:
    """Value of the ratio and its run."""
    rows: list[Found | None] = [*found] or [None]
    return page.derived("{:.2f}", lambda a, b=1.0: a / b, *rows)


def write(page: Page) -> None:
    """All claims."""
    _speed_claims(page)
    accelerate.claims(page)
    paper = page.published
    fiddler = paper("Figure 10", "Fiddler, Mixtral-8x7B, 24 GB", "TTFT")
    page.claim(
        f"up to {fiddler} times Fiddler's TTFT, 14.58 its TPOT; 2.27 times Mixtral-Offloading's "
        "TPOT", "6.2, Figure 10", "none of these runs here; their rows stand as published", OTHER,
    )  # fmt: skip
    _quality_claims(page)
    _observation_claims(page)


def _speed_claims(page: Page) -> None:
    claims: Sequence[tuple[str, str, str, str]] = (
        ("a cache over load on demand", "cache", "load on demand", "cache over load on demand"),
        ("prefetch over the cache", "cache, prefetch", "cache", "prefetch over cache"),
        ("4/2 over the cache", "cache, 4/2", "cache", "Dyquant(4/2) over cache"),
    )
    for said, row, base, place in claims:
        printed = [page.published("Text", f"{place}, {gib} GB", "TPOT") for gib in GIBS]
        _speed_claim(page, said, row, base, printed)
    table = page.published.number
    last, first = "6. Cache+Dyquant(4/0)+Prefetcher", "1. Load on Demand"
    printed = [
        f"{table('Table 3', first, f'{g} GB TPOT') / table('Table 3', last, f'{g} GB TPOT'):.2f}"
        for g in GIBS
    ]
    _speed_claim(page, "all of it (4/0) over load on demand", "cache, 4/0, prefetch",
                 "load on demand", printed)  # fmt: skip


def _speed_claim(page: Page, said: str, row: str, base: str, printed: list[str]) -> None:
    found = [ratio(page.results, row, base, gib) for gib in GIBS]
    shown = [ratio_shown(page, rows) for rows in found]
    over = map(ratio_of, found)
    reached = [one >= float(least) for one, least in zip(over, printed, strict=True) if one]
    verdict = NOT_MEASURED
    if False in reached:
        verdict = NOT_MET
    elif len(reached) == len(GIBS):
        verdict = MET
    page.claim(
        f"TPOT, {said}: {' and '.join(printed)} times as fast at 16 and 24 GB", "6.4, Table 3",
        f"Mixtral's shape, H200, {' and '.join(shown)}",
        borne_out(verdict, *(one for rows in found for one in rows)),
    )  # fmt: skip


def _quality_claims(page: Page) -> None:
    results = page.results
    r90, r75, whole = (
        results.get(quality("prompts", "wikitext-2", *of))
        for of in (("4/0", "0.9"), ("4/0", "0.75"), ("4/0", "1"))
    )
    small = results.get(quality("prompts", "wikitext-2", "4/2", "0.75"))
    if not (r90 and r75 and whole and small):
        page.claim("4/0 and 4/2 lose little", "6.3", NOT_MEASURED, NOT_MEASURED)
        return
    page.claim(
        "4/0 at r = 0.9 is nearly as good as uniform INT4", "6.3, Table 2",
        f"perplexity {page.shown(r90)} against {page.shown(whole)}",
        MET if r90.figure < 1.01 * whole.figure else NOT_MET,
    )  # fmt: skip
    page.claim(
        "at r = 0.75, INT2 in place of skipping recovers quality (Mixtral; not Qwen3)",
        "6.3, Table 2", f"perplexity 4/2 {page.shown(small)}, 4/0 {page.shown(r75)}",
        MET if small.figure < r75.figure else NOT_MET,
    )  # fmt: skip


def _observation_claims(page: Page) -> None:
    for claim, better, worse in (
        ("experts chosen by heavy hitters are worth more than random ones", "token", "random"),
        ("more experts for early layers are better than the same for all", "depth", "equal"),
    ):
        said, won = [], []
        for phase in PHASES:
            found = [
                page.results.get(quality(phase, "wikitext-2", f"figure 3 {name}", "0.75"))
                for name in (better, worse)
            ]
            if found[0] is None or found[1] is None:
                said.append(f"{phase} {NOT_MEASURED}")
                continue
            won.append(found[0].figure < found[1].figure)
            said.append(f"{phase} {page.shown(found[0])} against {page.shown(found[1])}")
        verdict = NOT_MEASURED if len(won) < len(PHASES) else MET if all(won) else NOT_MET
        page.claim(claim, "3.1, Figure 3", f"perplexity at r = 0.75: {'; '.join(said)}", verdict)
    layers = [one for _, one in layer_rows(page.results)]
    if layers:
        page.claim(
            "shallow layers suffer most from INT2", "3.2, Figure 5",
            f"the first layer's perplexity grows {page.shown(layers[0], '{:.3f}')} times, the last "
            f"one's {page.shown(layers[-1], '{:.3f}')}",
            MET if layers[0].figure > layers[-1].figure else NOT_MET,
        )  # fmt: skip
    _likeness(page, "the activations of adjacent layers are alike at every depth", "3.3, Figure 6",
              similarity_rows(page.results), "cosine {} to {}")  # fmt: skip
    _likeness(page, "an expert's load and its load of heavy hitters are highly correlated",
              "3.3, Figure "
              "4", correlation_rows(page.results), "means of layers {} to {}")  # fmt: skip


def _likeness(page: Page, claim: str, place: str, found: list[Found], form: str) -> None:
    if not found:
        page.claim(claim, place, NOT_MEASURED, NOT_MEASURED)
        return
    ordered = sorted(found, key=lambda one: one.figure)
    least, most = ordered[0], ordered[-1]
    verdict = MET if least.figure >= HIGH else NOT_MET
    said = form.format(page.shown(least), page.shown(most))
    page.claim(claim, place, f"{said} ({HIGH} and more is our reading of high)", verdict)


def layer_rows(results: Results) -> list[tuple[int, Found]]:
    """Perplexity with one layer's experts in INT2, over that without, by layer."""
    found = results.every(r"dymoe \| dymoe layers \| calibration \| times the perplexity \| (\d+)")
    return sorted(((int(m[1]), one) for m, one in found), key=lambda pair: pair[0])


def similarity_rows(results: Results) -> list[Found]:
    """Cosine of the residual stream before the experts of adjacent layers."""
    found = results.every(r"routing \| similarity \| wikitext-2 \| layers (\d+) and \d+ \| demo")
    return [one for _, one in sorted(found, key=lambda pair: int(pair[0][1]))]


def correlation_rows(results: Results) -> list[Found]:
    """Correlation of loads, by layer."""
    found = results.every(r"routing \| heavy correlation \| all texts \| layer (\d+) \| demo")
    return [one for _, one in sorted(found, key=lambda pair: int(pair[0][1]))]
