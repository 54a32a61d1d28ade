"""MiLo's Figures 2 to 5 and 8 to 11 from our rows."""

from scripts.studies.milo.rows import FULL, HQQ, KINDS, PASSES, curve, demo, kernel, of_weights
from scripts.studies.tables.drawing import BARS, STYLES, Canvas, heat, lines
from scripts.studies.tables.paper import NOT_MEASURED, OURS, Paper
from scripts.studies.tables.rows import Found

LAYERS = 7
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


def write(paper: Paper) -> None:
    """All figures."""
    _figures_2_and_4(paper)
    _figure_3(paper)
    _figure_5(paper)
    _figure_8(paper)
    _figure_9(paper)
    _figure_10(paper)
    _figure_11(paper)


def spectra(paper: Paper) -> None:
    """Singular values of what INT3 leaves, which Table 2 counts."""
    what = "spectrum of the INT3 residual, first quarter | {} | layer 1"
    found = {matrix: of_weights(paper.results, what.format(matrix)) for matrix in MATRICES}

    def draw(canvas: Canvas) -> None:
        (panel,) = canvas.panels(1, 1)
        curves = {}
        for matrix, one in found.items():
            assert one is not None
            values = one.more["spectrum"]
            curves[matrix] = ([100 * i / len(values) for i in range(len(values))], values)
        lines(panel, curves, xlabel="% of the singular values", ylabel="of the largest")

    paper.figure("figure spectrum", draw, list(found.values()))
    rows = [
        [matrix, OURS, paper.shown(one, "{:.0f} %"), "demo model on a CPU"]
        for matrix, one in found.items()
    ]
    head = ["energy of the residual in the first quarter", "whose", "share"]
    paper.table("spectra", head, rows)


def _figures_2_and_4(paper: Paper) -> None:
    found = {
        (matrix, stored): of_weights(
            paper.results, f"overlap of histograms, {stored} | {matrix} | layer 1"
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

    paper.figure("figure 2", draw, list(found.values()))
    rows = [
        [
            matrix, OURS, *(paper.shown(found[matrix, stored], "{:.1f} %") for stored in STORED),
            "demo model on a CPU; the paper: pictures of Mixtral",
        ]
        for matrix in MATRICES
    ]  # fmt: skip
    paper.table("overlap", ["overlap of the two histograms", "whose", *STORED], rows)


def _figure_3(paper: Paper) -> None:
    found = [
        paper.results.get(f"routing | counts | wikitext-2 | layer {layer} | demo")
        for layer in range(LAYERS)
    ]

    def draw(canvas: Canvas) -> None:
        (panel,) = canvas.panels(1, 1, size=(6.0, 2.6))
        shares = [
            [100 * n / sum(one.more["counts"]) for n in one.more["counts"]] for one in found if one
        ]
        heat(canvas, panel, shares, "% of assignments", xlabel="expert", ylabel="layer")

    paper.figure("figure 3", draw, found)


def _figure_5(paper: Paper) -> None:
    found = {
        kind: of_weights(paper.results, f"kurtosis and error, correlation | {kind} | layer 1")
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

    paper.figure("figure 5", draw, list(found.values()))


def _figure_8(paper: Paper) -> None:
    found = {
        label: [demo(paper.results, label, quantity) for quantity in ("quantizing", "perplexity")]
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

    paper.figure("figure 8", draw, [one for pair in found.values() for one in pair])


def _tflops(found: Found) -> float:
    return float(found.more["operations"]) / found.figure / 1e6


def _figure_9(paper: Paper) -> None:
    rows = []
    found: dict[str, list[Found | None]] = {name: [] for name in KERNELS}
    for shape in SHAPES:
        for name, (weights, serves) in KERNELS.items():
            ones = [kernel(paper.results, shape, weights, count, serves) for count in ROWS]
            cells = [
                NOT_MEASURED if one is None else f"{_tflops(one):.1f} {paper.cite(one)}"
                for one in ones
            ]
            rows.append([f"{shape}, {name}", OURS, *cells, "H200; the paper: A100"])
            if shape == SHAPES[0]:
                found[name] = ones
    head = [f"{count} row{'s' * (count > 1)}" for count in ROWS]
    paper.table("tflops", ["matrix, kernel", "whose", *head], rows)

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

    drawn = [one for ones in found.values() for one in ones if one]
    paper.figure("figure 9", draw, drawn or [None])


def _figure_10(paper: Paper) -> None:
    found = {kind: curve(paper.results, kind) for kind in KINDS}

    def draw(canvas: Canvas) -> None:
        for panel, (kind, ones) in zip(canvas.panels(1, 2), found.items(), strict=True):
            y = [one.figure for one in ones if one]
            lines(panel, {kind: (list(range(1, PASSES + 1)), y)}, xlabel="iteration",
                  ylabel="mean of |W - UV - W'|_F / |W|_F")  # fmt: skip

    paper.figure("figure 10", draw, [one for ones in found.values() for one in ones])


def _figure_11(paper: Paper) -> None:
    series = {
        f"{method}, INT{bits} factors": f"INT3 {method}, Uniform-{{}}, INT{bits} factors"
        for method, bits in (("milo", 8), ("milo", 3), ("milo+, symmetric zero", 3))
    }
    found = {
        name: [
            (demo(paper.results, label.format(rank), "bits per weight", "ranks"),
             demo(paper.results, label.format(rank), "perplexity", "ranks"))
            for rank in RANKS
        ]
        for name, label in series.items()
    }  # fmt: skip
    ends = [demo(paper.results, label) for label in (HQQ, FULL)]

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

    drawn = [one for pairs in found.values() for pair in pairs for one in pair]
    paper.figure("figure 11", draw, [*drawn, *ends])
