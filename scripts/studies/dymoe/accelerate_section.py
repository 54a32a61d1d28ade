"""Transformers with accelerate beside ours: DyMoE's Figure 10, of one form of weights at a time."""

import itertools
import math
import re
from collections.abc import Sequence

from scripts.studies.tables.drawing import Canvas, bars
from scripts.studies.tables.page import MET, NOT_MEASURED, NOT_MET, OTHER, OURS, PAPER, Page
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


def accelerate(results: Results, model: str, gib: int, hosting: str, share: int) -> Pair:
    """TTFT and TPOT of transformers and accelerate under a cap, all layers in INT4."""
    about = rf"{model}, \d+ layers, {INT4}, batch 1, {gib} GiB, {share}% for weights, random router"
    ttft, tpot = (
        results.latest(rf"transformers and accelerate, {re.escape(hosting)}, {part}, {about}")
        for part in ("prompt of 512, TTFT", "TPOT")
    )
    return of_one_run(ttft, tpot)


def cached(results: Results, model: str, gib: int, label: str = "cache") -> Pair:
    """TTFT and TPOT of our pool without a policy, everything in INT4, under the same cap."""
    about = rf"{model}, \d+ layers, INT4 g64 float, attention INT4, head bf16, {gib} GiB, batch 1"
    ttft, tpot = (
        results.latest(rf"{re.escape(label)}, {part}, {about}")
        for part in ("prompt of 512, TTFT", r"\d+ slots of \d+, ahead \d+, TPOT")
    )
    return of_one_run(ttft, tpot)


def dymoe(results: Results, model: str, gib: int) -> Pair:
    """TTFT and TPOT of DyMoE 4/0 with look-ahead, attention in bf16; of Mixtral alone."""
    if model not in DYMOE:
        return None, None
    ttft, tpot = (
        results.get(f"cache, 4/0, prefetch, {gib} GiB, {part}, {MIXTRAL}")
        for part in ("TTFT", "TPOT")
    )
    return of_one_run(ttft, tpot)


def of_one_run(ttft: Found | None, tpot: Found | None) -> Pair:
    """Both; of two runs the newer one's alone."""
    if ttft is None or tpot is None or ttft.origin == tpot.origin:
        return ttft, tpot
    return (ttft, None) if ttft.is_newer_than(tpot) else (None, tpot)


def over(page: Page, base: Sequence[Found | None], own: Sequence[Found | None]) -> list[str]:
    """How many times as fast, in TTFT and in TPOT."""
    return [
        page.derived("{:.2f}", lambda a, b: a / b, *pair) for pair in zip(base, own, strict=True)
    ]


def claims(page: Page) -> None:
    """DyMoE's own rows decide, where there are some; our cache alone is another thing."""
    for (model, gib), row in zip(
        CAPS, ("Accelerate, Mixtral-8x7B", "Accelerate, Qwen3-30B-A3B, 12 GB"), strict=True
    ):
        bar = page.published.number("Figure 10", row, "TPOT")
        own = dymoe(page.results, model, gib)[1]
        plain = [accelerate(page.results, model, gib, HOSTINGS[0], share)[1] for share in SHARES]
        page.claim(
            f"TPOT {bar:g} times as fast as accelerate ({model})", "6.2, Figure 10",
            _said(page, model, gib, plain), _verdict(bar, own, plain),
        )  # fmt: skip


def _said(page: Page, model: str, gib: int, plain: list[Found | None]) -> str:
    def times(bases: Sequence[Found | None], own: Found | None) -> str:
        of = [
            f"{page.derived('{:.1f}', lambda a, b: a / b, base, own)} ({share} %)"
            for share, base in zip(SHARES, bases, strict=True)
            if base and own
        ]
        return " and ".join(of) or NOT_MEASURED

    pinned = [accelerate(page.results, model, gib, HOSTINGS[1], share)[1] for share in SHARES]
    own, cache = dymoe(page.results, model, gib)[1], cached(page.results, model, gib)[1]
    speeds = [one.more["link_gib_per_s"] for one in plain if one]
    speed = f" at {min(speeds):.1f} GiB/s" if speeds else ""
    return (
        "H200, accelerate in INT4 (in brackets the share of the memory for its weights); times as "
        f"fast: DyMoE 4/0 at {gib} GiB {times(plain, own)}; our INT4 cache alone "
        f"{times(plain, cache)} (accelerate brings what the device does not hold module by module "
        f"from pageable memory{speed}, the slow path: this says little about kernels); with its "
        f"weights pinned beforehand {times(pinned, cache)}"
    )


def _verdict(bar: float, own: Found | None, plain: Sequence[Found | None]) -> str:
    """Met where every setting of accelerate that was measured is beaten by so much."""
    reached = [one.figure / own.figure >= bar for one in plain
               if one and own and one.row.device == own.row.device]  # fmt: skip
    return OTHER if not reached else MET if all(reached) else NOT_MET


def figure(page: Page) -> None:
    """Figure 10 as ratios, the times of bf16 apart, and the picture."""
    paper, results = page.published, page.results
    rows = []
    for row in paper.rows("Figure 10"):
        shown = [paper("Figure 10", row, part) for part in ("TTFT", "TPOT")]
        differs = "not run here" if not row.startswith("Accelerate") else "RTX 3090, real weights"
        rows.append([f"DyMoE over {row}", PAPER, *shown, differs])
    for model, gib in CAPS:
        rows += _ratios(page, model, gib)
    rows.append(
        ["ours over accelerate, Mixtral-8x7B, 16 GiB", OURS, NOT_MEASURED, NOT_MEASURED,
         "accelerate was not run under 16 GiB"]
    )  # fmt: skip
    page.heading("Figure 10: end to end", _introduction(page))
    page.table(["what", "whose", "TTFT", "TPOT", "what differs"], rows)
    _bf16(page)
    _draw(page, {
        f"accelerate,\n{hosting.split(',')[0]},\n{share} %":
            accelerate(results, CAPS[0][0], CAPS[0][1], hosting, share)
        for hosting, share in ((HOSTINGS[0], 90), (HOSTINGS[0], 97), (HOSTINGS[1], 97))
    } | {
        "ours,\n" + label.replace(" and", " and\n"): cached(results, *CAPS[0], label)
        for label in ("load on demand", "cache", "cache and prefetch")
    })  # fmt: skip


def _ratios(page: Page, model: str, gib: int) -> list[list[str]]:
    rows = []
    for hosting, share in itertools.product(HOSTINGS, SHARES):
        base = accelerate(page.results, model, gib, hosting, share)
        where = f"accelerate, {hosting}, {share} % for weights, {model}, {gib} GiB"
        differs = "; accelerate's slow path, so little about kernels" * (hosting == HOSTINGS[0])
        if None in base:
            ended = "; accelerate's run ended before its steps"
            differs += "; accelerate was not run so" if base[0] is None else ended
        own = over(page, base, cached(page.results, model, gib))
        rows.append([f"our INT4 cache over {where}", OURS, *own, f"{CARD}, same cap{differs}"])
        ahead = cached(page.results, model, gib, AHEAD)
        if any(ahead):
            name = f"our INT4 cache, look-ahead in prompts, over {where}"
            own = over(page, base, ahead)
            rows.append([name, OURS, *own, f"{CARD}, same cap{differs}"])
        if model in DYMOE:
            own = over(page, base, dymoe(page.results, model, gib))
            rows.append([f"our DyMoE 4/0 over {where}", OURS, *own, f"{CARD}, {LOOSE}{differs}"])
    if model not in DYMOE:
        name = f"our DyMoE 4/0 over accelerate, {model}, {gib} GiB"
        rows.append([name, OURS, NOT_MEASURED, NOT_MEASURED, f"DyMoE was not run on {model}"])
    return rows


def _introduction(page: Page) -> str:
    about = rf"Mixtral-8x7B, \d+ layers, {INT4}, batch 1, 24 GiB"
    theirs = [
        page.shown(
            page.results.latest(
                rf"transformers and accelerate, pageable, peak of the device, {about}, "
                rf"{share}% for weights, random router"
            ),
            "{:.1f} GiB",
        )
        for share in SHARES
    ]
    ours = page.shown(
        page.results.latest(
            r"cache, peak of the device, Mixtral-8x7B, \d+ layers, INT4 g64 float, attention INT4, "
            r"head bf16, 24 GiB, batch 1"
        ),
        "{:.1f} GiB",
    )
    return (
        "How many times as fast. Fiddler, Mixtral-Offloading and MoE-Infinity (for which 6.2 "
        "prints no number) were not run. accelerate runs beside us with all layers in INT4, TTFT "
        "and TPOT of one run; pageable is what it does by itself, module by module over the slow "
        "path of the link, so that those ratios say little about kernels; pinned, which it does "
        f"not do by itself, is faster. Under 24 GiB it fills {theirs[0]} with {SHARES[0]} % "
        f"of the memory for weights, its default, {theirs[1]} with {SHARES[1]} %, and our cache "
        f"{ours}; its codes are in groups of 128, ours of 64; its router is random, ours replays a "
        "flat trace."
    )


def _bf16(page: Page) -> None:
    """Times of accelerate in bf16, another form of weights than any row of ours."""
    rows = []
    for model, gib in CAPS:
        for hosting in HOSTINGS:
            about = (
                rf"{model}, scaled from \d+ of \d+ layers, bf16, experts are modules, batch 1, "
                rf"{gib} GiB, \d+% for weights, random router"
            )
            ttft, tpot = (
                page.results.latest(
                    rf"transformers and accelerate, {re.escape(hosting)}, {part}, {about}"
                )
                for part in ("prompt of 512, TTFT", "TPOT")
            )
            pair = of_one_run(ttft, tpot)
            one = next((found for found in pair if found), None)
            scaled = re.search(r"scaled from \d+ of \d+ layers", one.row.what) if one else None
            differs = f"{CARD}{f'; {scaled[0]}' if scaled else ''}; ours was not run in bf16"
            times = [page.shown(found, "{:.0f}") for found in pair]
            name = f"accelerate in bf16, {hosting}, {model}, {gib} GiB"
            rows.append([name, OURS, *times, differs])
    page.text(
        "accelerate in bf16, in milliseconds: the times of a part of the layers, scaled to all of "
        "them; no ratio of RESULTS.md is to them."
    )
    page.table(["bf16", "whose", "TTFT, ms", "TPOT, ms", "what differs"], rows)


def _draw(page: Page, found: dict[str, Pair]) -> None:
    """Times of both under the cap where most was measured."""
    model, gib = CAPS[0]

    def draw(canvas: Canvas) -> None:
        (panel,) = canvas.panels(1, 1, size=(6.5, 3.4))
        series = {
            f"{part}, ms": [one.figure if (one := pair[i]) else math.nan for pair in found.values()]
            for i, part in enumerate(("TTFT", "TPOT"))
        }
        bars(panel, list(found), series, yscale="log", ylabel="ms", ylim=(LEAST_MS, None),
             title=f"{model}, {gib} GiB, H200")  # fmt: skip
        panel.tick_params(axis="x", labelsize=7)

    page.figure(
        "dymoe_figure_10",
        f"Figure 10, ours: {model}'s shape under {gib} GiB of an H200, everything in INT4 "
        "(accelerate's in groups of 128, ours of 64), without DyMoE's own rows; in percent: of the "
        "memory for accelerate's weights.", draw, [one for pair in found.values() for one in pair],
    )  # fmt: skip
