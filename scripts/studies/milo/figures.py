"""MiLo's Figures 2 to 5 and 8 to 11 from our rows."""

from scripts.studies.milo.claims import FULL, HQQ, PASSES, curve, demo, kernel, of_weights
from scripts.studies.tables.drawing import BARS, STYLES, Canvas, heat, lines
from scripts.studies.tables.page import NOT_MEASURED, OURS, Page
from scripts.studies.tables.rows import Found

LAYERS = 7
KINDS = ("attention", "experts")
MATRICES = ("attention, q", "experts, gate")
STORED = ("INT3", "INT4", "INT3 and rank 32")
RANKS = ("2", "4", "8", "16", "32")
TIMED = (
    "INT3 rtn", "INT3 hqq", "INT3 gptq", "INT3 autoround", "INT3 least_squares",
    "INT3 milo, Dense-25%, INT3 factors", "INT3 milo, Dense-50% + Sparse-16, INT3 factors",
    "INT3 milo+, symmetric zero, Dense-25% + Sparse-4, INT3 factors",
)  # fmt: skip
SHAPES = ("4096x14336", "14336x4096")
ROWS = (1, 16, 64)
# What stands where MiLo, its own unpacking, MARLIN and the unquantized product stand in Figure 9.
KERNELS = {
    "ours, INT3": ("int3g64 float", "mosaic"),
    "INT3 unpacked, then a product": ("int3g64 float", "unpack"),
    "ours, INT4": ("int4g64 float", "mosaic"),
    "Humming, INT3": ("int3g64 float", "humming"),
    "cuBLAS, bf16": ("bfloat16", "cublas"),
}


def write(page: Page) -> None:
    """All figures."""
    _figures_2_and_4(page)
    _figure_3(page)
    _figure_5(page)
    _figure_8(page)
    _figure_9(page)
    _figure_10(page)
    _figure_11(page)


def spectra(page: Page) -> None:
    """Singular values of what INT3 leaves, which Table 2 counts."""
    what = "spectrum of the INT3 residual, first quarter | {} | layer 1"
    found = {matrix: of_weights(page.results, what.format(matrix)) for matrix in MATRICES}

    def draw(canvas: Canvas) -> None:
        (panel,) = canvas.panels(1, 1)
        curves = {}
        for matrix, one in found.items():
            assert one is not None
            values = one.more["spectrum"]
            curves[matrix] = ([100 * i / len(values) for i in range(len(values))], values)
        lines(panel, curves, xlabel="% of the singular values", ylabel="of the largest")

    page.figure(
        "milo_figure_spectrum",
        "Ours: singular values of the residual of INT3 HQQ, mean over the matrices of layer 1 of "
        "the demo model; of a query projection few are large, so a low rank serves it better.",
        draw, list(found.values()),
    )  # fmt: skip
    rows = [
        [matrix, OURS, page.shown(one, "{:.0f} %"), "demo model on a CPU"]
        for matrix, one in found.items()
    ]
    head = ["energy of the residual in the first quarter", "whose", "share", "what differs"]
    page.table(head, rows)


def _figures_2_and_4(page: Page) -> None:
    found = {
        (matrix, stored): of_weights(
            page.results, f"overlap of histograms, {stored} | {matrix} | layer 1"
        )
        for matrix in MATRICES
        for stored in STORED
    }

    def draw(canvas: Canvas) -> None:
        panels = canvas.panels(len(MATRICES), len(STORED), size=(3.3, 2.3))
        for panel, ((matrix, stored), one) in zip(panels, found.items(), strict=True):
            assert one is not None
            plain, limit = one.more["plain"], one.more["limit"]
            step = 2 * limit / len(plain)
            x = [-limit + (i + 0.5) * step for i in range(len(plain))]
            panel.fill_between(x, [100 * y for y in one.more["stored"]], color="0.75", label=stored)
            panel.plot(x, [100 * y for y in plain], color="black", linewidth=1, label="as trained")
            panel.set(title=matrix, xlabel="weight", ylabel="% of weights")
            panel.legend(fontsize=7)

    page.heading("Figures 2 and 4: weights as trained and as stored")
    page.figure(
        "milo_figure_2",
        "Figures 2 and 4, ours: a query projection and an expert's gate of layer 1 of the demo "
        "model, groups of 64 (the paper: Mixtral). Rank 32 is an eighth of the width, its factors "
        "in INT3.",
        draw, list(found.values()),
    )  # fmt: skip
    rows = [
        [
            matrix, OURS, *(page.shown(found[matrix, stored], "{:.1f} %") for stored in STORED),
            "demo model on a CPU; the paper: pictures of Mixtral",
        ]
        for matrix in MATRICES
    ]  # fmt: skip
    page.table(["overlap of the two histograms", "whose", *STORED, "what differs"], rows)


def _figure_3(page: Page) -> None:
    found = [
        page.results.get(f"routing | counts | wikitext-2 | layer {layer} | demo")
        for layer in range(LAYERS)
    ]

    def draw(canvas: Canvas) -> None:
        (panel,) = canvas.panels(1, 1, size=(6.0, 2.6))
        shares = [
            [100 * n / sum(one.more["counts"]) for n in one.more["counts"]] for one in found if one
        ]
        heat(canvas, panel, shares, "% of assignments", xlabel="expert", ylabel="layer")

    page.heading("Figure 3: how often experts are activated")
    page.figure(
        "milo_figure_3",
        "Figure 3, ours: demo model, 10,240 tokens of WikiText-2 (the paper: Mixtral-8x7B, nearly "
        "even, and DeepSeek-MoE, the most used expert of a layer 11.7 times the least "
        "used).", draw, found,
    )  # fmt: skip


def _figure_5(page: Page) -> None:
    found = {
        kind: of_weights(page.results, f"kurtosis and error, correlation | {kind} | layer 1")
        for kind in KINDS
    }

    def draw(canvas: Canvas) -> None:
        (panel,) = canvas.panels(1, 1)
        for (kind, one), style in zip(found.items(), STYLES, strict=False):
            assert one is not None
            shown = {"marker": style["marker"], "color": style["color"], "linestyle": ""}
            panel.plot(one.more["kurtosis"], one.more["error"], label=kind, markersize=4, **shown)
        panel.set(xlabel="excess kurtosis", ylabel="|W - W'|_F / |W|_F by INT3 HQQ")
        panel.legend(fontsize=7)

    page.heading("Figure 5: kurtosis and error")
    page.figure(
        "milo_figure_5",
        "Figure 5, ours: each matrix of layer 1 of the demo model (the paper: of layer 1 of "
        "DeepSeek-MoE).", draw, list(found.values()),
    )  # fmt: skip


def _figure_8(page: Page) -> None:
    found = {
        label: [demo(page.results, label, quantity) for quantity in ("quantizing", "perplexity")]
        for label in TIMED
    }

    def draw(canvas: Canvas) -> None:
        (panel,) = canvas.panels(1, 1, size=(5.5, 3.6))
        for label, (seconds, perplexity) in found.items():
            assert seconds is not None and perplexity is not None
            x, y = seconds.figure, perplexity.figure
            panel.plot(x, y, marker="o", color="black", linestyle="", markersize=4)
            name = (
                label.removeprefix("INT3 ")
                .replace(", INT3 factors", "")
                .replace("symmetric zero, ", "")
            )
            below = label == "INT3 autoround"  # as fast and as good as the row beside it
            offset = (4, -10 if below else 4)
            panel.annotate(name, (x, y), textcoords="offset points", xytext=offset, fontsize=7)
        panel.margins(x=0.5)
        panel.set(xscale="log", xlabel="seconds of quantizing", ylabel="perplexity, WikiText-2")

    page.heading("Figure 8: time of quantizing")
    page.figure(
        "milo_figure_8",
        "Figure 8, ours: the demo model in INT3 on an H200, without compiling and without the "
        "forward passes of calibrated methods (the paper: Mixtral, time against MMLU).", draw,
        [one for pair in found.values() for one in pair],
    )  # fmt: skip


def _tflops(found: Found) -> float:
    return float(found.more["operations"]) / found.figure / 1e6


def _figure_9(page: Page) -> None:
    rows = []
    found: dict[str, list[Found | None]] = {name: [] for name in KERNELS}
    for shape in SHAPES:
        for name, (weights, serves) in KERNELS.items():
            ones = [kernel(page.results, shape, weights, count, serves) for count in ROWS]
            cells = [
                NOT_MEASURED if one is None else f"{_tflops(one):.1f} {page.cite(one)}"
                for one in ones
            ]
            rows.append([f"{shape}, {name}", OURS, *cells, "H200; the paper: A100"])
            if shape == SHAPES[0]:
                found[name] = ones
    page.heading(
        "Figure 9: TFLOPS of products",
        "The paper's picture prints no numbers; GPTQ3bit and MARLIN do not run here, our INT4 "
        "kernel and Humming's stand in their place. Ours need no compensator here. Mixtral's "
        "matrices, H200. What is not measured was not run with that matrix and number of rows.",
    )
    head = [f"{count} row{'s' * (count > 1)}" for count in ROWS]
    page.table(["matrix, kernel", "whose", *head, "what differs"], rows)

    def draw(canvas: Canvas) -> None:
        (panel,) = canvas.panels(1, 1, size=(6.0, 3.2))
        width = 0.8 / len(found)
        for i, ((name, ones), style) in enumerate(zip(found.items(), BARS, strict=True)):
            places = [
                (j + (i + 0.5) * width - 0.4, _tflops(one)) for j, one in enumerate(ones) if one
            ]
            panel.bar(*zip(*places, strict=True), width, label=name, linewidth=0.5, **style)
        panel.set_xticks(range(len(ROWS)), head)
        panel.set(yscale="log", ylabel="TFLOP/s", title=SHAPES[0])
        panel.legend(fontsize=7)

    caption = "Figure 9, ours: one matrix of the table; what is missing there is missing here."
    drawn = [one for ones in found.values() for one in ones if one]
    page.figure("milo_figure_9", caption, draw, drawn or [None])


def _figure_10(page: Page) -> None:
    found = {kind: curve(page.results, kind) for kind in KINDS}

    def draw(canvas: Canvas) -> None:
        for panel, (kind, ones) in zip(canvas.panels(1, 2), found.items(), strict=True):
            y = [one.figure for one in ones if one]
            lines(panel, {kind: (list(range(1, PASSES + 1)), y)}, xlabel="iteration",
                  ylabel="mean of |W - UV - W'|_F / |W|_F")  # fmt: skip

    page.heading("Figure 10: error by iteration")
    caption = "Figure 10, ours: the demo model on an H200, Uniform ranks of an eighth of the width."
    page.figure("milo_figure_10", caption, draw, [one for ones in found.values() for one in ones])


def _figure_11(page: Page) -> None:
    series = {
        f"{method}, INT{bits} factors": f"INT3 {method}, Uniform-{{}}, INT{bits} factors"
        for method, bits in (("milo", 8), ("milo", 3), ("milo+, symmetric zero", 3))
    }
    found = {
        name: [
            (demo(page.results, label.format(rank), "bits per weight", "ranks"),
             demo(page.results, label.format(rank), "perplexity", "ranks"))
            for rank in RANKS
        ]
        for name, label in series.items()
    }  # fmt: skip
    ends = [demo(page.results, label) for label in (HQQ, FULL)]

    def draw(canvas: Canvas) -> None:
        (panel,) = canvas.panels(1, 1, size=(5.5, 3.6))
        curves = {
            name: ([x.figure for x, _ in pairs if x], [y.figure for _, y in pairs if y])
            for name, pairs in found.items()
        }
        for one, label in zip(ends, ("INT3 HQQ", "unquantized"), strict=True):
            assert one is not None
            panel.axhline(one.figure, color="0.6", linewidth=0.8)
            panel.annotate(label, (5.2, one.figure), fontsize=7, va="bottom")
        lines(
            panel, curves, xlabel="bits a weight, factors counted", ylabel="perplexity, WikiText-2"
        )

    page.heading("Figure 11: rank, memory, perplexity")
    page.figure(
        "milo_figure_11",
        f"Figure 11, ours: the demo model on an H200, Uniform ranks of {', '.join(RANKS)} (the "
        "paper: memory of the compensators against perplexity, Mixtral).", draw,
        [one for pairs in found.values() for pair in pairs for one in pair] + ends,
    )  # fmt: skip
