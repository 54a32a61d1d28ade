"""Quality against tokens a second of a shape's methods: rows joined, the picture and its table."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from moejax.files.result_rows import ResultRow, read_rows
from scripts.studies.quality.task_cases import IN_PICTURE, TASKS
from scripts.studies.speed.configurations import BUDGETS
from scripts.studies.speed.configurations import DECIDE as METHODS
from scripts.studies.tables.drawing import STYLES, Canvas
from scripts.studies.tables.paper import markdown_table
from scripts.studies.tables.subjects import NAMES

UNQUANTIZED = "bf16"
NEAR = 1 / 16  # of the experts, between the share that was timed and the one that was scored
NOT_TIMED, NOT_SCORED = "not timed", "not scored"
SHARE = "experts in slots"  # a figure of the benchmark, percent
OF_TASKS, RIGHT = "mean of the tasks", "% right"
Scores = Mapping[tuple[str, str], Sequence["Scored"]]  # by text and method
_AT = r", batch 1, (?P<gib>[\d.]+) GiB"
_WHY = r": (?P<why>.*)"
_ROUTING = r", .*; routing (?:decode: )?(?P<routing>[^;]*).*"


@dataclasses.dataclass(frozen=True)
class Timed:
    """Speed of a method under a budget, or why there is none."""

    tokens_per_s: float
    share: float  # of a layer's experts in slots; nan: not known
    device: str
    routing: str
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class Scored:
    """Quality of a method on a text or task."""

    figure: float
    unit: str
    share: float  # of a layer's experts in slots; 0: the quality depends on none

    @property
    def goodness(self) -> float:
        """Larger is better: minus a perplexity."""
        return -self.figure if self.unit == "perplexity" else self.figure


@dataclasses.dataclass(frozen=True)
class Joined:
    """A point of the picture."""

    method: str
    gib: float
    timed: Timed
    scored: Mapping[str, Scored]  # by text


def about(shape: str, method: str) -> str:
    """Description of a method's model in rows of `moejax.benchmark`."""
    given = dict(word.removeprefix("--config.").split("=", 1) for word in METHODS[method])
    bits, rank = given.get("bits", "4"), given.get("expert_rank")
    ranks = f", compensators of rank 0, of experts {rank}" if rank else ""
    found = f"{shape}, random weights, INT{bits} g64 float, attention INT4, head bf16{ranks}"
    if "policy.name" not in given:
        return found
    tiers = given["policy.tiers"].replace(",", "/")
    return f"{found}, policy {given['policy.name']} ({tiers}, {given['policy.settings']})"


def speeds(rows: Iterable[ResultRow], shape: str) -> dict[tuple[str, float], Timed]:
    """Speeds by method and GiB; a later row replaces an earlier one."""
    found: dict[tuple[str, float], Timed] = {}
    patterns = {}
    for method in METHODS:
        what = rf"(TPOT median|{SHARE}|refused), {re.escape(about(shape, method))}{_AT}"
        patterns[method] = re.compile(f"{what}(?:{_WHY}|{_ROUTING})")
    for row in rows:
        for method, pattern in patterns.items():
            if not (match := pattern.fullmatch(row.what)):
                continue
            key = method, float(match["gib"])
            old = found.get(key, Timed(math.nan, math.nan, row.device, match["routing"] or ""))
            if match[1] == SHARE:
                found[key] = dataclasses.replace(old, share=row.figure / 100)
            elif match["why"]:
                found[key] = dataclasses.replace(old, refusal=match["why"])
            else:
                found[key] = Timed(1e3 / row.figure, old.share, row.device, match["routing"])
    return found


def qualities(rows: Iterable[ResultRow]) -> tuple[str, dict[tuple[str, str], list[Scored]]]:
    """The label of the model that counts, and its quality by text and method."""
    by_label: dict[str, dict[tuple[str, str], list[Scored]]] = {}
    for row in rows:
        parts = row.what.split(" | ")
        if len(parts) == 5 and parts[1] == "decide":
            label, _, text, method, share = parts
            one = Scored(row.figure, row.unit, float(share))
            of = by_label.setdefault(label, {}).setdefault((text, method), [])
            of[:] = [*(old for old in of if old.share != one.share), one]
    label = next((name for name in NAMES if name in by_label), "")
    return label, by_label.get(label, {})


def task_scores(rows: Iterable[ResultRow]) -> tuple[str, dict[tuple[str, str], list[Scored]]]:
    """The label of the model that has most of the methods, and their mean scores, like a text's."""
    by_label: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        section, *parts = row.what.split(" | ")
        if section == "tasks" and parts[1] in IN_PICTURE:
            task, method, label = parts
            by_label.setdefault(label, {}).setdefault(method, {})[task] = row.figure
    whole = {
        label: {method: of for method, of in methods.items() if {*TASKS} <= of.keys()}
        for label, methods in by_label.items()
    }
    label = max(whole, key=lambda label: len(whole[label]), default="")
    found: dict[tuple[str, str], list[Scored]] = {}
    for name, of in whole.get(label, {}).items():
        method, share = IN_PICTURE[name]
        mean = 100 * sum(of[task] for task in TASKS) / len(TASKS)
        found.setdefault((OF_TASKS, method), []).append(Scored(mean, RIGHT, share))
    return label, found


def nearest(scored: Sequence[Scored], share: float) -> Scored | None:
    """The quality at a share; None where none is near."""
    if any(one.share == 0 for one in scored):
        return next(one for one in scored if one.share == 0)
    near = [one for one in scored if abs(one.share - share) <= NEAR]
    return min(near, key=lambda one: abs(one.share - share), default=None)


def join(
    timed: Mapping[tuple[str, float], Timed], scored: Scores
) -> tuple[list[Joined], list[str]]:
    """Points by method and budget, and what is missing, in words."""
    points, missing = [], []
    texts = list(dict.fromkeys(text for text, _ in scored))
    gibs = sorted({*BUDGETS, *(gib for _, gib in timed)})
    for method in METHODS:
        for gib in gibs:
            one = timed.get((method, gib))
            if one is None:
                missing += [f"{method}, {gib:g} GiB: {NOT_TIMED}"] if gib in BUDGETS else []
                continue
            if one.refusal:
                continue
            of = {text: nearest(scored.get((text, method), ()), one.share) for text in texts}
            known = {text: quality for text, quality in of.items() if quality is not None}
            if lacking := ", ".join(text for text in texts if text not in known):
                at = "" if math.isnan(one.share) else f" at a share of {one.share:.2f}"
                missing.append(f"{method}, {gib:g} GiB: {NOT_SCORED}{at}: {lacking}")
            points.append(Joined(method, gib, one, known))
    return points, missing


def best(points: Sequence[Joined], text: str) -> set[tuple[str, float]]:
    """Points of a text that no other one of their budget beats in speed and in quality."""
    found = set()
    for one in points:
        if text not in one.scored:
            continue
        own, *others = (
            (p.timed.tokens_per_s, p.scored[text].goodness)
            for p in [one, *points]
            if p.gib == one.gib and text in p.scored
        )
        if not any(o != own and o[0] >= own[0] and o[1] >= own[1] for o in others):
            found.add((one.method, one.gib))
    return found


def caption(shape: str, label: str, of_tasks: str, points: Sequence[Joined]) -> str:
    """Says where both axes are from; `of_tasks` is the label of the model whose tasks count."""
    devices, routing = (
        " and ".join(sorted({getattr(point.timed, name) for point in points})) or "no rows"
        for name in ("device", "routing")
    )
    other = f" (tasks: {NAMES.get(of_tasks, of_tasks)})" if of_tasks not in ("", label) else ""
    return (
        f"Tokens a second: {shape}, random weights, attention in INT4, a sequence at a time; "
        f"routing {routing}; {devices}. Quality: {NAMES.get(label, 'no model yet')}{other} under "
        "the same methods, experts in INT4 where a method says nothing else. Points have GiB."
    )


def draw(canvas: Canvas, shape: str, points: Sequence[Joined], scored: Scores) -> None:
    """A panel a text, a line a method."""
    texts = list(dict.fromkeys(text for text, _ in scored)) or [""]
    for panel, text in zip(canvas.panels(1, len(texts), size=(6.0, 4.5)), texts, strict=True):
        for method, style in zip(METHODS, STYLES, strict=True):
            own = [p for p in points if p.method == method and text in p.scored]
            x, y = [p.timed.tokens_per_s for p in own], [p.scored[text].figure for p in own]
            if own:
                panel.plot(x, y, label=method, markersize=4, **style)
            for point, *at in zip(own, x, y, strict=True):
                panel.annotate(
                    f"{point.gib:g}", at, fontsize=6, xytext=(2, 2), textcoords="offset points"
                )
        units = {one.unit for (of, _), many in scored.items() if of == text for one in many}
        plain = scored.get((text, UNQUANTIZED), ())
        for one in plain:
            panel.axhline(one.figure, color="0.6", linewidth=0.8, label=UNQUANTIZED)
        panel.set(
            title=f"{shape}, {text}", xlabel="tokens/s", ylabel=", ".join(sorted(units)),
            xscale="log",
        )  # fmt: skip
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(fontsize=6)


def page(
    said: str, timed: Mapping[tuple[str, float], Timed], points: Sequence[Joined],
    missing: Sequence[str],
) -> str:  # fmt: skip
    """The caption that is `said`, a table by method and budget, and what is missing."""
    gibs = sorted({*BUDGETS, *(gib for _, gib in timed)})
    texts = list(dict.fromkeys(text for point in points for text in point.scored))
    lead = best(points, texts[0]) if texts else set()
    by_key = {(point.method, point.gib): point for point in points}
    rows = []
    for method in METHODS:
        cells = [method]
        for gib in gibs:
            point, one = by_key.get((method, gib)), timed.get((method, gib))
            if point is None:
                cells.append(one.refusal if one else NOT_TIMED)
                continue
            quality = [f"{point.scored[text].figure:.2f}" for text in texts if text in point.scored]
            cell = f"{point.timed.tokens_per_s:.0f}: {' / '.join(quality) or NOT_SCORED}"
            cells.append(f"**{cell}**" if (method, gib) in lead else cell)
        rows.append(cells)
    head = ["method", *(f"{gib:g} GiB" for gib in gibs)]
    meaning = f"A cell is tokens a second: {' / '.join(texts) or 'quality'}."
    parts = [said, meaning, markdown_table(head, rows)]
    if missing:
        parts.append("\n".join(["Missing:", "", *(f"- {line}" for line in missing)]))
    return "\n\n".join(parts) + "\n"


def make(
    shape: str, speed: Sequence[Path], quality: Sequence[Path], output: Path
) -> tuple[Path, Path]:
    """Writes the table, and the picture where there is a point that has both axes."""
    timed = speeds((row for path in speed for row in read_rows(path)), shape)
    rows = [row for path in quality for row in read_rows(path)]
    (label, scored), (of_tasks, by_tasks) = qualities(rows), task_scores(rows)
    scored |= by_tasks
    points, missing = join(timed, scored)
    table, picture = output / f"decide_{shape}.md", output / f"decide_{shape}.png"
    output.mkdir(parents=True, exist_ok=True)
    said = caption(shape, label, of_tasks, points)
    table.write_text(page(said, timed, points, missing))
    if any(point.scored for point in points):
        Canvas.save(lambda canvas: draw(canvas, shape, points, scored), picture)
    else:
        picture.unlink(missing_ok=True)  # of other rows
    return table, picture
