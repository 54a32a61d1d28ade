"""DynaExq's Figure 5 and its claim of throughput beside what we measured."""

import itertools
import re

from scripts.reproducing import flaws
from scripts.reproducing.drawing import Canvas, bars
from scripts.reproducing.page import IN_PART, MET, NOT_MEASURED, NOT_MET, Page, borne_out
from scripts.reproducing.rows import Found, Results

BATCHES = (1, 4, 16)
MODEL = "Qwen3-30B-A3B"
SPEED = f"dynaexq, {MODEL}, 48 layers, attention bf16"
THROUGHPUT_BAR = 85.0
SPEEDS = {
    "uniform INT2, resident": r"uniform INT2, resident model, batch {}, TPOT",
    "uniform INT2, pool of all experts": r"uniform INT2, a pool of all experts, batch {}, TPOT",
    "DynaExq INT4/INT2, a quarter hot": r"dynaexq int4/int2, 32 hot of 128, batch {}, TPOT",
}
WIDE = "Qwen3-Next-80B-A3B"
WIDE_PAIRS = ((MODEL, "bf16/int4"), (WIDE, "int4/int2"))
GIBS = (32, 48)
PROMPT = 512  # tokens of the prompts under budgets
CARD = "H200, random weights"
RESIDENT = ((MODEL, "INT4"), (MODEL, "INT3"), (WIDE, "INT4"))


def claim(page: Page) -> None:
    """Throughput over uniform INT2's; rows without routers cannot bear it out."""
    said, where = "retains typically more than 85 % of INT2's throughput", "4.4, Figure 5"
    own = [_over_resident(page.results, batch) for batch in BATCHES]
    wide = [_over_pool(page.results, gib) for gib in GIBS]
    rows = [one for one, _ in (*own, *wide) if one]
    if not rows:
        page.claim(said, where, NOT_MEASURED, NOT_MEASURED)
        return
    met = sum(one.figure >= THROUGHPUT_BAR for one in rows)
    verdict = MET if met == len(rows) else IN_PART if 2 * met > len(rows) else NOT_MET
    parts = [
        f"{page.shown(one, '{:.0f} %')}{_estimate(step, 'uniform_resident_ms')} at batch {batch}"
        for batch, (one, step) in zip(BATCHES, own, strict=True)
    ]
    wider = [
        f"{page.shown(one, '{:.0f} %')}{_estimate(step, 'uniform_ms')} under {gib} GiB"
        for gib, (one, step) in zip(GIBS, wide, strict=True)
    ]
    page.claim(
        said, where,
        f"H200; {MODEL}, of the resident INT2 model: {', '.join(parts)}; {WIDE}, of a pool of all "
        f"experts in INT2: {', '.join(wider)} (in brackets: with the routers, which these rows "
        "left out)", borne_out(verdict, *rows),
    )  # fmt: skip


def _estimate(step: Found | None, beside: str) -> str:
    if step is None or not step.row.flaw:
        return ""
    return f" ({flaws.said(flaws.with_routers(step, beside))})"


def _over_resident(results: Results, batch: int) -> tuple[Found | None, Found | None]:
    """Share of uniform INT2's throughput, and the step that it is of."""
    base, about = rf"dynaexq int4/int2, 32 hot of 128, batch {batch}", re.escape(SPEED)
    over = results.latest(rf"{base}: throughput over uniform INT2 \(resident\), {about}")
    return over, results.latest(rf"{base}, TPOT, {about}")


def _over_pool(results: Results, gib: int) -> tuple[Found | None, Found | None]:
    base = rf"dynaexq int4/int2, {gib} GiB, \d+ hot of 512, shifting"
    about = re.escape(f"dynaexq_wide, {WIDE}, 48 layers, attention bf16")
    over = results.latest(rf"{base}: throughput over uniform int2, {about}")
    return over, results.latest(rf"{base}, TPOT, {about}")


def figure_5(page: Page) -> None:
    """Latency and throughput."""
    page.heading(
        "Figure 5: latency and throughput",
        "The paper's picture (RTX 5090 and A6000) prints no numbers. Ours is the models' real "
        "shapes with random weights on an H200; routing is replayed, and shifts so that promotions "
        f"go on. TTFT and prefill of {PROMPT} tokens stand beside the rows under budgets.",
    )
    found = {
        name: [page.results.latest(f"{said.format(b)}, {re.escape(SPEED)}") for b in BATCHES]
        for name, said in SPEEDS.items()
    }
    rows = []
    for name, ones in found.items():
        cells = ([page.shown(one), page.shown(one, "{:.0f}", "tokens_per_s")] for one in ones)
        rows.append([name, *(cell for pair in cells for cell in pair), f"{MODEL}'s shape, {CARD}"])
    head = [f"batch {b}, {part}" for b in BATCHES for part in ("TPOT, ms", "tokens/s")]
    page.table([f"{MODEL}, ours, decode", *head, "what differs"], rows)
    _resident_table(page)
    _wide_table(page)
    _draw(page, found)


def _draw(page: Page, found: dict[str, list[Found | None]]) -> None:
    complete = {
        b: [one for one in ones if one]
        for b, ones in zip(BATCHES, zip(*found.values(), strict=True), strict=True)
        if all(ones) and len({one.row.device for one in ones if one}) == 1
    }

    def draw(canvas: Canvas) -> None:
        (panel,) = canvas.panels(1, 1, size=(5.5, 3.2))
        speeds = [[one.more["tokens_per_s"] for one in ones] for ones in complete.values()]
        series = dict(zip(SPEEDS, zip(*speeds, strict=True), strict=True))
        device = next(iter(complete.values()))[0].row.device
        bars(panel, [f"batch {b}" for b in complete], series, ylabel="decode, tokens/s",
             title=f"{MODEL}, {device}")  # fmt: skip

    caption = f"Figure 5, ours: decode throughput under INT2 and DynaExq, {MODEL}'s shape, {CARD}."
    rows_drawn = [one for ones in complete.values() for one in ones]
    page.figure("dynaexq_figure_5", caption, draw, rows_drawn or [None])


def _resident_table(page: Page) -> None:
    """Prefill and decode of uniform precisions that fit."""
    rows = []
    for model, bits in RESIDENT:
        said = (
            f"{model}, 48 layers, {bits} g64 float, attention {bits}, head bf16, "
            "prefill by mosaic and mosaic"
        )
        step = f"batch 1 prompt 512 TPOT, random cache, calls of 16, {said}"
        rows.append([
            f"{model}, uniform {bits}, attention {bits}",
            page.ours(f"batch 1 prompt 2048 TTFT, {said}", "{:.0f}"),
            page.ours(f"batch 1 prompt 2048 prefill, {said}", "{:.0f}"),
            page.ours(f"{step}, decode by mosaic and mosaic"),
            f"{model}'s shape, {CARD}, resident, no policy",
        ])  # fmt: skip
    page.table(["ours, batch 1", "TTFT of 2048 tokens, ms", "prefill, tokens/s", "TPOT, ms",
                "what differs"], rows)  # fmt: skip


def _wide_table(page: Page) -> None:
    """Two precisions under budgets, as Table 1's rows of both models."""
    rows = [
        _wide_row(page, model, pair, gib, kind)
        for (model, pair), gib, kind in itertools.product(WIDE_PAIRS, GIBS, ("steady", "shifting"))
    ]
    head = [
        "TTFT, ms", "prefill, tokens/s", "TPOT, ms", "uniform low, ms", "throughput over it",
        "gate mass of the hot tier", "time over the bytes'",
    ]  # fmt: skip
    page.table(["ours, batch 1", *head, "what differs"], rows)


def _wide_row(page: Page, model: str, pair: str, gib: int, kind: str) -> list[str]:
    base = rf"dynaexq {pair}, {gib} GiB, \d+ hot of \d+, {kind}"
    about = re.escape(f"dynaexq_wide, {model}, 48 layers, attention bf16")
    bars = ("throughput over uniform int[24]", "gate mass of the hot tier",
            "time over that of the bytes")  # fmt: skip
    over, mass, of_bytes = (page.results.latest(f"{base}: {bar}, {about}") for bar in bars)
    first, step = (page.results.latest(f"{base}, {part}, {about}") for part in ("TTFT", "TPOT"))
    prefill = [""] * 2  # a prompt's time does not depend on what comes after it
    if kind == "steady":
        prefill = [
            page.shown(first, "{:.0f}"),
            page.derived("{:.0f}", lambda ms: 1e3 * PROMPT / ms, first),
        ]
    low = page.results.latest(
        rf"uniform {pair.split('/')[1]}, a pool of all experts, TPOT, {about}"
    )
    differs = f"{model}'s shape, {CARD}; routing replayed"
    if step and of_bytes is None:
        high = pair.split("/")[0].upper()
        differs += f"; no pool of all experts in {high} was timed, which the bytes' time needs"
    return [f"{model}, {pair.upper()}, {gib} GiB, {kind}", *prefill, page.shown(step),
            page.shown(low), page.shown(over, "{:.0f} %"), page.shown(mass, "{:.0f} %"),
            page.shown(of_bytes), differs]  # fmt: skip
