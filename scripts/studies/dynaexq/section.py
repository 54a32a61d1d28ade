"""DynaExq's Table 1 and Figures 1, 4 and 5 beside what we measured."""

import itertools
import math
import re

from scripts.studies.quality.dynaexq import CLAIMS
from scripts.studies.tables import protocol, subjects
from scripts.studies.tables.drawing import Canvas, bars, lines
from scripts.studies.tables.paper import (
    IN_PART,
    MET,
    NOT_MET,
    OURS,
    PAPER,
    SPEED_SPREAD,
    Judged,
    Paper,
    against,
)
from scripts.studies.tables.resident import resident
from scripts.studies.tables.routing import routing_of
from scripts.studies.tables.rows import Found, Results

PAIRS = {"int4/int2": ("INT4", "INT2"), "bf16/int4": ("bf16", "INT4")}
LOW_SHARES = ("0.25", "0.5", "0.625", "0.75", "0.875")
TEXTS = ("wikitext-2", "mixed")
DOMAINS = ("books", "code", "math")
CHOICES = {"by hotness": "hot", "random": "random, mean of 2", "lowest ids": "first"}
LAYERS = (0, 6)  # the first, and the last
FIGURE_1_TEXTS = ("books", "code", "math", "chinese")
TASKS = {
    "GSM8K": "exact_match_strict, gsm8k, 40 documents, 5 examples",
    "Human Eval": "pass_at_1, humaneval, 40 documents, 0 examples",
}

QWEN3, WIDE = "Qwen3-30B-A3B", "Qwen3-Next-80B-A3B"
CARD = "H200, random weights"
SPEED = f"dynaexq, {QWEN3}, 48 layers, attention bf16"
BATCHES = (1, 4, 16)
SPEEDS = {
    "uniform INT2, resident": "uniform INT2, resident model, batch {}, TPOT",
    "uniform INT2, pool of all experts": "uniform INT2, a pool of all experts, batch {}, TPOT",
    "DynaExq INT4/INT2, a quarter hot": "dynaexq int4/int2, 32 hot of 128, batch {}, TPOT",
}
GIBS = (32, 48)
THROUGHPUT_BAR = 85.0
PROMPT = 512  # tokens of the prompts under budgets


def write(paper: Paper) -> None:
    """All regions."""
    paper.inline("protocol", protocol.of_policies(paper, *subjects.NAMES))
    _claims(paper)
    _table_1(paper)
    _figure_1(paper)
    _figure_4(paper)
    _figure_5(paper)


def perplexity(results: Results, pair: str, text: str, series: str, share: str) -> Found | None:
    """A perplexity of DynaExq's study: of the study model, else of the demo."""
    if series == "uniform":
        name = f"uniform {pair.split('/')[int(share)]} | 0"
    else:
        name = f"{pair} {series.partition(',')[0]} | {share}"
    return results.get(f"{subjects.STUDY} | dynaexq | {text} | {name}") or results.get(
        f"dynaexq | dynaexq {pair} | {text} | {series} | {share}"
    )


def _recovered_by(paper: Paper, pair: str, text: str, found: Found | None) -> str:
    """Share of the gap in log-perplexity between the precisions of a pair."""
    ends = [perplexity(paper.results, pair, text, "uniform", share) for share in ("1", "0")]
    return paper.derived(
        "{:.0f} %",
        lambda own, low, high: 100 * math.log(low / own) / math.log(low / high), found, *ends,
    )  # fmt: skip


def _differs(*found: Found | None) -> str:
    """Differences of rows of `quality.policies`."""
    of_study = all(one and one.row.what.startswith(f"{subjects.STUDY} | ") for one in found)
    how = subjects.DIFFERS[subjects.STUDY if of_study else subjects.DEMO]
    return f"{how}, HQQ g64, perplexity"


def _counts(results: Results, layer: int, text: str) -> Found | None:
    return results.get(f"routing | counts | {text} | layer {layer} | demo")


def _recovered(paper: Paper, method: str) -> str:
    """Share of the gap between INT4 and INT2 that Table 1's averages recover."""
    high, low, got = (
        paper.published.number("Table 1", f"Qwen3-MoE-80B, {name}", "AVG.")
        for name in ("Int4", "Int2", method)
    )
    return f"{100 * (got - low) / (high - low):.0f} %"


def _claims(paper: Paper) -> None:
    at_random = " and ".join(
        _recovered_by(
            paper, "int4/int2", text, perplexity(paper.results, "int4/int2", text, "random", "0.75")
        )
        for text in TEXTS
    )
    doubt = f"experts at random recover {at_random}, so that any choice passes this bar"
    subjects.claims(paper, CLAIMS, {"24 % of the gap between INT4 and INT2 comes back": doubt})
    _throughput_claim(paper)
    _between_claim(paper)
    paper.claim(
        "adapts when the workload shifts, which static precisions cannot", "1, 3.2",
        [
            paper.results.get(f"shift | shift | {domain} | {name} | 0")
            for domain in DOMAINS
            for name in ("dynaexq, T 512", "static, hottest of the prose")
        ],
        lambda *rows: _shift(paper, rows),
    )  # fmt: skip
    paper.claim(
        "few experts of a layer are much used, and which ones depends on the workload",
        "1, Figure 1",
        [_counts(paper.results, layer, text) for layer in LAYERS for text in ("books", "code")],
        lambda *rows: _skew(paper, rows),
    )


def _shift(paper: Paper, rows: tuple[Found, ...]) -> Judged:
    pairs = dict(zip(DOMAINS, zip(rows[::2], rows[1::2], strict=True), strict=True))
    wins = sum(moved.figure < static.figure for moved, static in pairs.values())
    said = ", ".join(
        f"{domain} {' and '.join(paper.shown(one, '{:.0f}', 'recovered', 100) for one in pair)}"
        for domain, pair in pairs.items()
    )
    finding = (
        "the demo model, books, then code, then maths, a quarter of the experts in INT4; of the "
        f"gap between INT2 and INT4 DynaExq and the prose's hottest experts recover {said} %"
    )
    return finding, {0: NOT_MET, len(pairs): MET}.get(wins, IN_PART)


def _skew(paper: Paper, rows: tuple[Found, ...]) -> Judged:
    parts, is_skewed = [], []
    for layer, books, code in zip(LAYERS, rows[::2], rows[1::2], strict=True):
        a, b = ([n / sum(one.more["counts"]) for n in one.more["counts"]] for one in (books, code))
        distance = sum(abs(x - y) for x, y in zip(a, b, strict=True)) / 2
        parts.append(
            f"layer {layer}: a quarter of the experts take {paper.shown(books, '{:.0f} %')} "
            f"of the assignments in books, {paper.shown(code, '{:.0f} %')} in code, total "
            f"variation between the two {distance:.2f}"
        )
        is_skewed.append(min(books.figure, code.figure) > 50 and distance > 0.5)
    rule = (
        "met by a layer where a quarter takes most of the load, and most of it moves; the rule is "
        "ours, written after the rows, and even use would have 25 % and 0; the study model's "
        "routers were started by domain, so that its own skew shows nothing"
    )
    verdict = MET if all(is_skewed) else IN_PART if any(is_skewed) else NOT_MET
    return f"the demo model, {'; '.join(parts)} ({rule})", verdict


def _throughput_claim(paper: Paper) -> None:
    """Throughput over that of INT2: the resident model, and a pool of all experts."""
    own, pooled = (
        [
            paper.results.get(
                f"dynaexq int4/int2, 32 hot of 128, batch {batch}: throughput over uniform INT2 "
                f"({beside}), {SPEED}"
            )
            for batch in BATCHES
        ]
        for beside in ("resident", "pool")
    )
    about = re.escape(f"dynaexq_wide, {WIDE}, 48 layers, attention bf16")
    wide = [
        paper.results.latest(
            rf"dynaexq int4/int2, {gib} GiB, \d+ hot of 512, shifting: throughput over the "
            rf"resident int2 model, {about}"
        )
        for gib in GIBS
    ]

    planes = paper.results.get(
        "dynaexq int4/int2 by planes, 32 hot of 128, batch 1: throughput over uniform INT2 "
        f"(resident), {SPEED}"
    )

    def shares(rows: list[Found | None], places: list[str]) -> str:
        pairs = zip(rows, places, strict=True)
        return ", ".join(f"{paper.shown(one, '{:.0f} %')} {place}" for one, place in pairs)

    base = re.escape(f"dynaexq_wide, {QWEN3}, 48 layers, attention bf16")
    plain = [
        paper.results.latest(
            rf"dynaexq bf16/int4, {gib} GiB, \d+ hot of 128, shifting: throughput over the "
            rf"resident int4 model, {base}"
        )
        for gib in GIBS
    ]

    def judge(*rows: Found) -> Judged:
        parts, alike = (
            shares(some, [f"at batch {batch}" for batch in BATCHES]) for some in (own, pooled)
        )
        wider = shares(wide, [f"under {gib} GiB" for gib in GIBS])
        coarse = shares(plain, [f"under {gib} GiB" for gib in GIBS])
        finding = (
            f"H200, while the workload shifts, of the resident INT2 model: {QWEN3} {parts}, by bit "
            f"planes {paper.shown(planes, '{:.0f} %')} at batch 1; {WIDE} {wider}; "
            f"BF16/INT4 of the resident INT4 model: {QWEN3} {coarse} (nearer to the bar "
            f"than {100 * SPEED_SPREAD:.0f} % is not shown). The resident "
            "model routes as its own random router says; of INT2 in a pool, "
            f"which routes as the trace does, {QWEN3} {alike}"
        )
        bars = [THROUGHPUT_BAR] * len(rows)
        return finding, against([one.figure for one in rows], bars, SPEED_SPREAD)

    said = "retains typically more than 85 % of the low precision's throughput"
    paper.claim(said, "4.4, Figure 5", [*own, planes, *wide, *plain], judge)


def _between_claim(paper: Paper) -> None:
    """Whether DynaExq is faster than the resident model of high precision, in TPOT and in TTFT."""
    get = paper.results.latest
    pairs = ((QWEN3, "bf16/int4"), (WIDE, "int4/int2"))
    rows: list[Found | None] = []
    for (model, pair), gib in itertools.product(pairs, GIBS):
        high, low = pair.split("/")
        about = re.escape(f"dynaexq_wide, {model}, 48 layers, attention bf16")
        run = rf"dynaexq {pair}, {gib} GiB, \d+ hot of \d+"
        rows += [
            get(rf"{run}, shifting: throughput over the resident {high} model, {about}"),
            get(rf"{run}, steady, TTFT, {about}"),
            get(rf"uniform {low}, resident model, TTFT, {about}"),
        ]

    def judge(*found: Found) -> Judged:
        speeds = found[::3]
        prompts = list(zip(found[2::3], found[1::3], strict=True))  # of the low model, of DynaExq
        over = [100 * low.figure / own.figure for low, own in prompts]
        finding = (
            "H200, while the workload shifts, of the resident model of HIGH precision, which the "
            f"card holds: {', '.join(paper.shown(one, '{:.0f} %') for one in speeds)} ({QWEN3} "
            f"BF16/INT4 and {WIDE} INT4/INT2, each under 32 and 48 GiB): slower than both, but "
            f"for what is within {100 * SPEED_SPREAD:.0f} %; TTFT at "
            f"{min(over):.0f} to {max(over):.0f} % of the low model's speed "
            f"{paper.cite(*(one for pair in prompts for one in pair))}"
        )
        return finding, against([one.figure for one in speeds], [100.0] * 4, SPEED_SPREAD)

    paper.claim(
        "throughput and latency lie between the models of high and of low precision",
        "4.4, Figure 5", rows, judge,
    )  # fmt: skip


def _table_1(paper: Paper) -> None:
    columns = paper.published.columns("Table 1")
    scores = {
        task: paper.ours(f"{what}, demo, float32, no policy", "{:.1f}", scale=100)
        for task, what in TASKS.items()
    }
    demo = [scores.get(column, "not run") for column in columns]
    paper.table("table 1", ["model, method", "whose", *columns], [
        *paper.theirs("Table 1", "published, not run"),
        ["demo, float32", OURS, *demo, "demo model on a CPU, 40 documents"],
    ])  # fmt: skip
    rows = []
    for pair, (high, low) in PAIRS.items():
        for name, series, share in (
            (f"uniform {high}", "uniform", "0"), ("DynaExq, half hot", "hot", "0.5"),
            ("DynaExq, a quarter hot", "hot", "0.75"), (f"uniform {low}", "uniform", "1"),
        ):  # fmt: skip
            found = [perplexity(paper.results, pair, text, series, share) for text in TEXTS]
            gaps = [
                _recovered_by(paper, pair, text, one) if series == "hot" else ""
                for text, one in zip(TEXTS, found, strict=True)
            ]
            cells = [OURS, *map(paper.shown, found), *gaps]
            rows.append([f"{high} and {low}: {name}", *cells, _differs(*found)])
    rows += [
        [f"Int4 and Int2, 80B: {method}", PAPER, "", "", _recovered(paper, method), "",
         "of Table 1's averages"]
        for method in ("DynaExq(A6000)", "DynaExq(5090)")
    ]  # fmt: skip
    head = ["precisions", "whose", "WikiText-2", "mixed text", "gap recovered", "mixed"]
    paper.table("perplexity", head, rows)


def _figure_1(paper: Paper) -> None:
    found = {
        (layer, text): _counts(paper.results, layer, text)
        for layer in LAYERS
        for text in FIGURE_1_TEXTS
    }

    def draw(canvas: Canvas) -> None:
        panels = canvas.panels(2, len(FIGURE_1_TEXTS), size=(2.6, 2.0))
        for panel, ((layer, text), one) in zip(panels, found.items(), strict=True):
            assert one is not None
            counts = one.more["counts"]
            panel.bar(range(len(counts)), [100 * n / sum(counts) for n in counts], color="0.3")
            panel.set(title=f"layer {layer}, {text}", xlabel="expert", ylabel="% of assignments")

    paper.figure("figure 1", draw, list(found.values()))


def _figure_4(paper: Paper) -> None:
    found: dict[tuple[str, str], list[Found | None]] = {}
    for pair, (name, series) in itertools.product(PAIRS, CHOICES.items()):
        points = [("uniform", "0"), *((series, x) for x in LOW_SHARES), ("uniform", "1")]
        found[pair, name] = [
            perplexity(paper.results, pair, "wikitext-2", *point) for point in points
        ]
    shares = [0.0, *map(float, LOW_SHARES), 1.0]

    def draw(canvas: Canvas) -> None:
        for panel, pair in zip(canvas.panels(1, 2), PAIRS, strict=True):
            curves = {
                name: (shares, [one.figure for one in found[pair, name] if one]) for name in CHOICES
            }
            lines(panel, curves, title=f"{pair}, WikiText-2", ylabel="perplexity",
                  xlabel="share of experts in low precision",
                  yscale="log")  # fmt: skip

    paper.figure("figure 4", draw, [one for part in found.values() for one in part])


def _figure_5(paper: Paper) -> None:
    """Latency and throughput: decode, resident models, and two precisions under budgets."""
    found = {
        name: [paper.results.get(f"{said.format(b)}, {SPEED}") for b in BATCHES]
        for name, said in SPEEDS.items()
    }
    rows = []
    for name, ones in found.items():
        cells = [(paper.shown(one), paper.shown(one, "{:.0f}", "tokens_per_s")) for one in ones]
        differs = f"{QWEN3}'s shape, {CARD}"
        if "resident" not in name:
            differs += f"; {routing_of(ones[0], QWEN3)}"
        rows.append([name, *itertools.chain(*cells), differs])
    head = [f"batch {b}, {part}" for b in BATCHES for part in ("TPOT, ms", "tokens/s")]
    paper.table("decode", [f"{QWEN3}, ours, decode", *head], rows)
    rows = [
        [
            f"{model}, uniform {bits}, attention {bits}",
            paper.shown(resident(paper.results, "TTFT", model, bits, 1), "{:.0f}"),
            paper.shown(resident(paper.results, "prefill", model, bits, 1), "{:.0f}"),
            paper.shown(resident(paper.results, "TPOT", model, bits, 1)),
            f"{model}'s shape, {CARD}, resident, no policy",
        ]
        for model, bits in ((QWEN3, "INT4"), (QWEN3, "INT3"), (WIDE, "INT4"))
    ]
    head = ["ours, batch 1", "TTFT of 2048 tokens, ms", "prefill, tokens/s", "TPOT, ms"]
    paper.table("resident", head, rows)
    pairs = ((QWEN3, "bf16/int4"), (WIDE, "int4/int2"))
    kinds = ("steady", "shifting")
    paper.table(
        "budgets",
        [
            "ours, batch 1", "TTFT, ms", "prefill, tokens/s", "TPOT, ms",
            "uniform low, ms: resident, pool", "throughput over them",
            "gate mass of the hot tier", "time over the bytes'",
        ],
        [
            _under(paper, model, pair, gib, kind)
            for (model, pair), gib, kind in itertools.product(pairs, GIBS, kinds)
        ],
    )  # fmt: skip
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
             title=f"{QWEN3}, {device}")  # fmt: skip

    paper.figure("figure 5", draw, list(itertools.chain(*complete.values())) or [None])


def _under(paper: Paper, model: str, pair: str, gib: int, kind: str) -> list[str]:
    """Two precisions under a budget."""
    base = rf"dynaexq {pair}, {gib} GiB, \d+ hot of \d+, {kind}"
    about = re.escape(f"dynaexq_wide, {model}, 48 layers, attention bf16")
    low = pair.split("/")[1]

    def get(said: str) -> Found | None:
        return paper.results.latest(f"{said}, {about}")

    prefill = ["", ""]  # a prompt's time does not depend on what comes after it
    if kind == "steady":
        first = get(f"{base}, TTFT")
        rate = paper.derived("{:.0f}", lambda ms: 1e3 * PROMPT / ms, first)
        prefill = [paper.shown(first, "{:.0f}"), rate]
    ends = [get(f"uniform {low}, {e}, TPOT") for e in ("resident model", "a pool of all experts")]
    over = [
        get(f"{base}: throughput over {end}")
        for end in (f"the resident {low} model", f"uniform {low}")
    ]
    return [
        f"{model}, {pair.upper()}, {gib} GiB, {kind}", *prefill, paper.shown(get(f"{base}, TPOT")),
        ", ".join(map(paper.shown, ends)),
        ", ".join(paper.shown(one, "{:.0f} %") for one in over),
        paper.shown(get(f"{base}: gate mass of the hot tier"), "{:.0f} %"),
        paper.shown(get(f"{base}: time over that of the bytes")),
        f"{model}'s shape, {CARD}; {routing_of(get(f'{base}, TPOT'), model)}",
    ]  # fmt: skip
