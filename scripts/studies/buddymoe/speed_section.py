"""BuddyMoE's throughput and bytes beside ours: of its own model's shape, and of Qwen3-30B's."""

import dataclasses
import math
import re

from scripts.studies.tables.drawing import Canvas, bars
from scripts.studies.tables.page import MET, NOT_MEASURED, NOT_MET, OURS, PAPER, Page, borne_out
from scripts.studies.tables.rows import Found, Results

QWEN3 = "Qwen3-30B-A3B, 48 layers, attention bf16"
PUBLISHED = "DeepSeek-V2-Lite, A100, published, not run"
RATES = {"Table 2": ("0.75", "0.75"), "Table 3": ("0.50", "0.5"), "Table 4": ("0.375", "0.375")}
PRINTED = "BuddyMoE tau 0.95, B 16, rho 3"
BEST = "co-activation, 16 places, rho 3"
SPEEDS = (
    "random", "co-activation", BEST, "co-activation, rho 1",
    "co-activation, gains, rho 1 on the last",
)  # fmt: skip
FIGURE_8 = {"original": "original", "random": "random", "BuddyMoE, rho 3": BEST}
FEWER_BYTES = 16.7  # percent: what Figure 8's 20 % more is of the larger one


@dataclasses.dataclass(frozen=True)
class Shape:
    """Model and batch that rows of speed belong to.

    Attributes:
      name: of the model.
      about: the end of a row's `what`.
      batch: sequences.
    """

    name: str
    about: str
    batch: int

    @property
    def differs(self) -> str:
        """For the last column."""
        return f"{self.name}'s shape, batch {self.batch}, INT4, random weights, H200"

    def get(self, results: Results, said: str, rate: str, what: str) -> Found | None:
        """A row of a method at a cache rate."""
        slots = rf"\d+ slots of \d+ in int4, batch {self.batch}"
        about = re.escape(f"buddymoe, {self.about}")
        return results.latest(rf"{re.escape(said)}, c {rate}, {slots}{what}, {about}")

    def gain(self, results: Results, said: str, rate: str) -> Found | None:
        """Throughput over the original, in percent."""
        return self.get(results, said, rate, ": throughput over original")


LITE = "DeepSeek-V2-Lite, 27 layers, attention bf16"
OWN = Shape("DeepSeek-V2-Lite", LITE, 1)  # the paper's model; it does not say its batch
SHAPES = (OWN, Shape("DeepSeek-V2-Lite", LITE, 8), Shape("Qwen3-30B-A3B", QWEN3, 1))


def throughput_claim(page: Page) -> None:
    """The rows of the paper's own model decide."""
    number, results = page.published.number, page.results
    printed = [
        100 * (number(table, PRINTED, "t/s") / number(table, "Original", "t/s") - 1)
        for table in RATES
    ]
    gains = {
        shape: [shape.gain(results, BEST, rate) for _, rate in RATES.values()] for shape in SHAPES
    }
    reached = [one.figure >= least for one, least in zip(gains[OWN], printed, strict=True) if one]
    verdict = MET if len(reached) == len(RATES) else NOT_MEASURED
    said = [
        f"{shape.name}'s shape at batch {shape.batch}: "
        f"{', '.join(page.shown(one, '{:.1f} %') for one in found)}"
        for shape, found in gains.items()
    ]
    page.claim(
        f"throughput over the original by {', '.join(f'{gain:.1f}' for gain in printed)} % at c = "
        "0.75, 0.5, 0.375 (best setting)", "5.2, Tables 2 to 4",
        f"H200, list of 16, rho 3; {'; '.join(said)}; {OWN.name} at batch {OWN.batch} decides",
        borne_out(NOT_MET if False in reached else verdict, *gains[OWN]),
    )  # fmt: skip


def bytes_claim(page: Page) -> None:
    """Counted, not timed: both models' rows are right."""
    found = {
        shape: [
            shape.get(page.results, BEST, rate, ": fewer bytes over the link")
            for _, rate in RATES.values()
        ]
        for shape in SHAPES
    }
    said = [
        f"{of.name} at batch {of.batch} {', '.join(page.shown(one, '{:.1f} %') for one in ones)}"
        for of, ones in found.items()
    ]
    values = [one.figure for ones in found.values() for one in ones if one]
    is_whole = len(values) == len(SHAPES) * len(RATES)
    verdict = MET if is_whole and min(values) >= FEWER_BYTES else NOT_MET
    page.claim(
        "the original moves about 20 % more over PCIe: 16.7 % fewer bytes for BuddyMoE",
        "5.3, Figure 8", f"fewer bytes at c = 0.75, 0.5, 0.375: {'; '.join(said)}",
        verdict if is_whole else NOT_MEASURED,
    )  # fmt: skip


def table_rows(page: Page, rate: str) -> list[list[str]]:
    """Ours of Tables 2 to 4: tokens/s, and how many percent more than the original."""
    rows = []
    for shape in SHAPES:
        for said in ("original", *SPEEDS):
            found = shape.get(page.results, said, rate, ", TPOT")
            gain = page.shown(shape.gain(page.results, said, rate), "{:+.1f} %")
            speed = page.shown(found, "{:.1f}", "tokens_per_s")
            speed = f"{speed}, {gain}" if found and said != "original" else speed
            rows.append([said, OURS, "", "", "", speed, shape.differs])
    return rows


def figure_8(page: Page) -> None:
    """Bytes over the link, and throughput."""
    rates = [rate for _, rate in RATES.values()]
    speeds = {
        (shape, name): [shape.get(page.results, one, rate, ", TPOT") for rate in rates]
        for shape in SHAPES
        for name, one in FIGURE_8.items()
    }
    rows = [
        [name, OURS, *(page.shown(one, "{:.1f}", "megabytes_a_step") for one in ones), of.differs]
        for (of, name), ones in speeds.items()
    ]
    printed = page.published("Figure 8", "Base over BuddyMoE", "PCIe bandwidth, about")
    rows.append(["Base over BuddyMoE", PAPER, f"{printed} % more", "", "", PUBLISHED])
    page.heading("Figure 8: bytes over the link")
    head = ["MB a step", "whose", *(f"c = {rate}" for rate in rates), "what differs"]
    page.table(head, rows)
    drawn = {name: ones for (shape, name), ones in speeds.items() if shape == OWN}

    def draw(canvas: Canvas) -> None:
        parts = (("tokens_per_s", "decode, tokens/s"), ("megabytes_a_step", "MB a step"))
        for panel, (key, unit) in zip(canvas.panels(1, 2), parts, strict=True):
            series = {
                name: [one.more[key] if one else math.nan for one in ones]
                for name, ones in drawn.items()
                if any(ones)
            }
            bars(panel, [f"c = {rate}" for rate in rates], series, ylabel=unit)

    caption = (
        f"Figure 8, ours: throughput and bytes over the link, {OWN.differs} (the paper: bytes "
        "alone). What was not measured has no bar."
    )
    shown = [one for ones in drawn.values() for one in ones if one]
    page.figure("buddymoe_figure_8", caption, draw, shown)
