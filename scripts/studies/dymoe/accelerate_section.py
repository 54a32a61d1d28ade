"""Transformers with accelerate beside ours: DyMoE's Figure 10, of one form of weights at a time."""

import itertools
import math
import re
from collections.abc import Sequence

from scripts.studies.tables.drawing import Canvas, bars
from scripts.studies.tables.paper import MET, NOT_MEASURED, NOT_MET, OTHER, OURS, Judged, Paper
from scripts.studies.tables.rows import Found, Results

Pair = tuple[Found | None, Found | None]  # TTFT and TPOT of one run

INT4 = "INT4 g128, experts are modules, attention INT4, head bf16"
SHARES = (90, 97)  # percent of the memory for weights: accelerate's default, and what it can fill
HOSTINGS = ("pageable", "pinned, cache kept")
CAPS = (("Mixtral-8x7B", 24), ("Qwen3-30B-A3B", 12))
MIXTRAL = "dymoe, Mixtral-8x7B, 32 layers, attention bf16"
DYMOE = ("Mixtral-8x7B",)  # what its rows are of
AHEAD = "cache and prefetch in prompts"
LEAST_MS = 10  # where the picture's axis begins
CARD = "H200, random weights"
LOOSE = "ours with attention bf16, its budget planned and not enforced"
PROMPT = "prompt of 512, TTFT"


def accelerate(results: Results, model: str, gib: int, hosting: str, share: int) -> Pair:
    """TTFT and TPOT of transformers and accelerate under a cap, all layers in INT4."""
    about = rf"{model}, \d+ layers, {INT4}, batch 1, {gib} GiB, {share}% for weights, random router"
    theirs = rf"transformers and accelerate, {re.escape(hosting)}"
    return of_one_run(*(results.latest(rf"{theirs}, {part}, {about}") for part in (PROMPT, "TPOT")))


def cached(results: Results, model: str, gib: int, label: str = "cache") -> Pair:
    """TTFT and TPOT of our pool without a policy, everything in INT4, under the same cap."""
    about = rf"{model}, \d+ layers, INT4 g64 float, attention INT4, head bf16, {gib} GiB, batch 1"
    parts = (PROMPT, r"\d+ slots of \d+, ahead \d+, TPOT")
    return of_one_run(*(results.latest(rf"{re.escape(label)}, {part}, {about}") for part in parts))


def dymoe(results: Results, model: str, gib: int) -> Pair:
    """TTFT and TPOT of DyMoE 4/0 with look-ahead, attention in bf16; of Mixtral alone."""
    if model not in DYMOE:
        return None, None
    row = f"cache, 4/0, prefetch, {gib} GiB"
    return of_one_run(*(results.get(f"{row}, {part}, {MIXTRAL}") for part in ("TTFT", "TPOT")))


def of_one_run(ttft: Found | None, tpot: Found | None) -> Pair:
    """Both; of two runs the newer one's alone."""
    if ttft is None or tpot is None or ttft.origin == tpot.origin:
        return ttft, tpot
    return (ttft, None) if ttft.is_newer_than(tpot) else (None, tpot)


def claims(paper: Paper) -> None:
    """DyMoE's own rows decide, where there are some; our cache alone is another thing."""
    for (model, gib), row in zip(
        CAPS, ("Accelerate, Mixtral-8x7B", "Accelerate, Qwen3-30B-A3B, 12 GB"), strict=True
    ):
        bar = paper.published.number("Figure 10", row, "TPOT")
        plain, pinned = (
            [accelerate(paper.results, model, gib, hosting, share)[1] for share in SHARES]
            for hosting in HOSTINGS
        )
        own, cache = (get(paper.results, model, gib)[1] for get in (dymoe, cached))
        finding = _finding(paper, gib, plain, pinned, own, cache)
        # Met where every setting of accelerate that was measured is beaten by so much.
        reached = [one.figure / own.figure >= bar for one in plain
                   if one and own and one.row.device == own.row.device]  # fmt: skip
        verdict = OTHER if not reached else MET if all(reached) else NOT_MET

        def judge(*_: Found, said: Judged = (finding, verdict)) -> Judged:
            return said

        said = f"TPOT {bar:g} times as fast as accelerate ({model})"
        measured = [one for one in (*plain, own) if one]
        paper.claim(said, "6.2, Figure 10", measured, judge)


def _finding(
    paper: Paper, gib: int, plain: Sequence[Found | None], pinned: Sequence[Found | None],
    own: Found | None, cache: Found | None,
) -> str:  # fmt: skip
    def times(bases: Sequence[Found | None], own: Found | None) -> str:
        of = [
            f"{paper.ratio(base, own, '{:.1f}')} ({share} %)"
            for share, base in zip(SHARES, bases, strict=True)
            if base and own
        ]
        return " and ".join(of) or NOT_MEASURED

    speeds = [one.more["link_gib_per_s"] for one in plain if one]
    speed = f" at {min(speeds):.1f} GiB/s" if speeds else ""
    return (
        "H200, accelerate in INT4 (in brackets the share of the memory for its weights); times as "
        f"fast: DyMoE 4/0 at {gib} GiB {times(plain, own)}; our INT4 cache alone "
        f"{times(plain, cache)} (accelerate brings what the device does not hold module by module "
        f"from pageable memory{speed}, the slow path: this says little about kernels); with its "
        f"weights pinned beforehand {times(pinned, cache)}"
    )


def figure_10(paper: Paper) -> None:
    """Figure 10 as ratios, the times of bf16 apart, and the picture."""
    paper.inline("memory", _memory(paper))
    rows = paper.theirs("Figure 10", "", ["TTFT", "TPOT"])
    for row in rows:
        differs = "RTX 3090, real weights" if row[0].startswith("Accelerate") else "not run here"
        row[0], row[-1] = f"DyMoE over {row[0]}", differs
    for model, gib in CAPS:
        rows += _ratios(paper, model, gib)
    rows.append(
        ["ours over accelerate, Mixtral-8x7B, 16 GiB", OURS, NOT_MEASURED, NOT_MEASURED,
         "accelerate was not run under 16 GiB"]
    )  # fmt: skip
    paper.table("end to end", ["what", "whose", "TTFT", "TPOT"], rows)
    _bf16(paper)
    _draw(paper)


def _ratios(paper: Paper, model: str, gib: int) -> list[list[str]]:
    """Ours over each setting of accelerate."""
    own = {"our INT4 cache over": (cached(paper.results, model, gib), f"{CARD}, same cap")}
    ahead = cached(paper.results, model, gib, AHEAD)
    if any(ahead):
        own["our INT4 cache, look-ahead in prompts, over"] = (ahead, f"{CARD}, same cap")
    if model in DYMOE:
        own["our DyMoE 4/0 over"] = (dymoe(paper.results, model, gib), f"{CARD}, {LOOSE}")
    rows = []
    for hosting, share in itertools.product(HOSTINGS, SHARES):
        base = accelerate(paper.results, model, gib, hosting, share)
        where = f"accelerate, {hosting}, {share} % for weights, {model}, {gib} GiB"
        more = "; accelerate's slow path, so little about kernels" * (hosting == HOSTINGS[0])
        if None in base:
            ended = "; accelerate's run ended before its steps"
            more += "; accelerate was not run so" if base[0] is None else ended
        for name, (pair, differs) in own.items():
            over = [paper.ratio(*parts) for parts in zip(base, pair, strict=True)]
            rows.append([f"{name} {where}", OURS, *over, f"{differs}{more}"])
    if model not in DYMOE:
        name = f"our DyMoE 4/0 over accelerate, {model}, {gib} GiB"
        rows.append([name, OURS, NOT_MEASURED, NOT_MEASURED, f"DyMoE was not run on {model}"])
    return rows


def _memory(paper: Paper) -> str:
    """How much of 24 GiB accelerate and our cache fill."""
    about = rf"Mixtral-8x7B, \d+ layers, {INT4}, batch 1, 24 GiB"
    theirs = [
        f"transformers and accelerate, pageable, peak of the device, {about}, {share}% for "
        "weights, random router"
        for share in SHARES
    ]
    ours = (
        r"cache, peak of the device, Mixtral-8x7B, \d+ layers, INT4 g64 float, attention INT4, "
        "head bf16, 24 GiB, batch 1"
    )
    shown = [paper.shown(paper.results.latest(what), "{:.1f} GiB") for what in (*theirs, ours)]
    return (
        f"it fills {shown[0]} with {SHARES[0]} % of the memory for weights, its default, "
        f"{shown[1]} with {SHARES[1]} %, and our cache {shown[2]}"
    )


def _bf16(paper: Paper) -> None:
    """Times of accelerate in bf16, another form of weights than any row of ours."""
    rows = []
    for (model, gib), hosting in itertools.product(CAPS, HOSTINGS):
        about = (
            rf"{model}, scaled from \d+ of \d+ layers, bf16, experts are modules, batch 1, "
            rf"{gib} GiB, \d+% for weights, random router"
        )
        theirs = rf"transformers and accelerate, {re.escape(hosting)}"
        pair = of_one_run(
            *(paper.results.latest(rf"{theirs}, {part}, {about}") for part in (PROMPT, "TPOT"))
        )
        one = next((found for found in pair if found), None)
        scaled = re.search(r"scaled from \d+ of \d+ layers", one.row.what) if one else None
        differs = f"{CARD}{f'; {scaled[0]}' if scaled else ''}; ours was not run in bf16"
        times = [paper.shown(found, "{:.0f}") for found in pair]
        rows.append([f"accelerate in bf16, {hosting}, {model}, {gib} GiB", OURS, *times, differs])
    paper.table("bf16", ["bf16", "whose", "TTFT, ms", "TPOT, ms"], rows)


def _draw(paper: Paper) -> None:
    """Times of both under the cap where most was measured."""
    model, gib = CAPS[0]
    found = {
        f"accelerate,\n{hosting.split(',')[0]},\n{share} %":
            accelerate(paper.results, model, gib, hosting, share)
        for hosting, share in ((HOSTINGS[0], 90), (HOSTINGS[0], 97), (HOSTINGS[1], 97))
    } | {
        "ours,\n" + label.replace(" and", " and\n"): cached(paper.results, model, gib, label)
        for label in ("load on demand", "cache", "cache and prefetch")
    }  # fmt: skip

    def draw(canvas: Canvas) -> None:
        (panel,) = canvas.panels(1, 1, size=(6.5, 3.4))
        series = {
            f"{part}, ms": [one.figure if (one := pair[i]) else math.nan for pair in found.values()]
            for i, part in enumerate(("TTFT", "TPOT"))
        }
        bars(panel, list(found), series, yscale="log", ylabel="ms", ylim=(LEAST_MS, None),
             title=f"{model}, {gib} GiB, H200")  # fmt: skip
        panel.tick_params(axis="x", labelsize=7)

    paper.figure("figure 10", draw, list(itertools.chain(*found.values())))
