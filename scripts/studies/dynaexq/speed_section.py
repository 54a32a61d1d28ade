"""DynaExq's Figure 5 and its claim of throughput beside what we measured."""

import itertools
import re

from scripts.studies.tables.drawing import Canvas, bars
from scripts.studies.tables.page import IN_PART, MET, NOT_MEASURED, NOT_MET, Page, borne_out
from scripts.studies.tables.rows import Found, Results

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
    """Throughput over that of INT2: the resident model, and a pool of all experts."""
    said, where = "retains typically more than 85 % of INT2's throughput", "4.4, Figure 5"
    own = [_own(page.results, batch, "resident") for batch in BATCHES]
    pooled = [_own(page.results, batch, "pool") for batch in BATCHES]
    wide = [_wide(page.results, gib) for gib in GIBS]
    rows = [one for one in (*own, *pooled, *wide) if one]
    if not rows:
        page.claim(said, where, NOT_MEASURED, NOT_MEASURED)
        return
    met = sum(one.figure >= THROUGHPUT_BAR for one in rows)
    verdict = MET if met == len(rows) else IN_PART if 2 * met > len(rows) else NOT_MET
    parts = [
        f"{page.shown(one, '{:.0f} %')} at batch {batch}"
        for batch, one in zip(BATCHES, own, strict=True)
    ]
    alike = [
        f"{page.shown(one, '{:.0f} %')} at batch {batch}"
        for batch, one in zip(BATCHES, pooled, strict=True)
    ]
    wider = [
        f"{page.shown(one, '{:.0f} %')} under {gib} GiB"
        for gib, one in zip(GIBS, wide, strict=True)
    ]
    page.claim(
        said, where,
        f"H200, while the workload shifts, of the resident INT2 model: {MODEL} {', '.join(parts)}; "
        f"{WIDE} {', '.join(wider)}. The resident model routes as its own random router says; of "
        f"INT2 in a pool, which routes as the trace does, {MODEL} {', '.join(alike)}",
        borne_out(verdict, *rows),
    )  # fmt: skip


def _own(results: Results, batch: int, beside: str) -> Found | None:
    """Share of uniform INT2's throughput, where a quarter of the experts is hot."""
    said = f"dynaexq int4/int2, 32 hot of 128, batch {batch}: throughput over uniform INT2"
    return results.latest(re.escape(f"{said} ({beside}), {SPEED}"))


def _wide(results: Results, gib: int) -> Found | None:
    """Share of throughput under a budget of the device's memory."""
    about = re.escape(f"dynaexq_wide, {WIDE}, 48 layers, attention bf16")
    over = rf"dynaexq int4/int2, {gib} GiB, \d+ hot of 512, shifting: throughput over the resident"
    return results.latest(f"{over} int2 model, {about}")


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
        "TTFT, ms", "prefill, tokens/s", "TPOT, ms", "uniform low, ms: resident, pool",
        "throughput over them", "gate mass of the hot tier", "time over the bytes'",
    ]  # fmt: skip
    page.table(["ours, batch 1", *head, "what differs"], rows)


def _wide_row(page: Page, model: str, pair: str, gib: int, kind: str) -> list[str]:
    base = rf"dynaexq {pair}, {gib} GiB, \d+ hot of \d+, {kind}"
    about = re.escape(f"dynaexq_wide, {model}, 48 layers, attention bf16")
    get, low = page.results.latest, pair.split("/")[1]
    mass, of_bytes = (
        get(f"{base}: {bar}, {about}")
        for bar in ("gate mass of the hot tier", "time over that of the bytes")
    )
    first, step = (get(f"{base}, {part}, {about}") for part in ("TTFT", "TPOT"))
    prefill = [""] * 2  # a prompt's time does not depend on what comes after it
    if kind == "steady":
        prefill = [
            page.shown(first, "{:.0f}"),
            page.derived("{:.0f}", lambda ms: 1e3 * PROMPT / ms, first),
        ]
    ends = [
        get(f"uniform {low}, {held}, TPOT, {about}")
        for held in ("resident model", "a pool of all experts")
    ]
    over = [
        get(f"{base}: throughput over {end}, {about}")
        for end in (f"the resident {low} model", f"uniform {low}")
    ]
    return [
        f"{model}, {pair.upper()}, {gib} GiB, {kind}", *prefill, page.shown(step),
        ", ".join(page.shown(one) for one in ends),
        ", ".join(page.shown(one, "{:.0f} %") for one in over),
        page.shown(mass, "{:.0f} %"), page.shown(of_bytes),
        f"{model}'s shape, {CARD}; routing replayed",
    ]  # fmt: skip
