"""Quality against tokens a second of a shape's methods: rows joined, the picture and its table."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.files.result_rows import ResultRow
from scripts.studies.quality.task_cases import IN_PICTURE, TASKS
from scripts.studies.speed.configurations import BUDGETS
from scripts.studies.speed.configurations import DECIDE as METHODS
from scripts.studies.tables.drawing import STYLES, Canvas
from scripts.studies.tables.paper import markdown_table
from scripts.studies.tables.subjects import NAMES

UNQUANTIZED = "bf16"
# Between the share of the experts that was timed and the one that was scored: of the experts, and
# of the share.
NEAR, NEAR_PART = 1 / 16, 1 / 4
NOT_TIMED, NOT_SCORED = "not timed", "not scored"
SHARE = "experts in slots"  # a figure of the benchmark, percent
FIRST_TOKEN, PEAK = "TTFT median", "device memory peak"  # figures of the benchmark, ms and GiB
BASE = "INT4"  # beside which a method must stand before it can be called the best of its budget
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
    first_token_ms: float = math.nan  # after a prompt
    peak_gib: float = math.nan


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
        figure = f"TPOT median|{FIRST_TOKEN}|{PEAK}|{SHARE}|refused"
        what = f"({figure}), {re.escape(about(shape, method))}{_AT}"
        patterns[method] = re.compile(f"{what}(?:{_WHY}|{_ROUTING})")
    for row in rows:
        for method, pattern in patterns.items():
            if not (match := pattern.fullmatch(row.what)):
                continue
            key = method, float(match["gib"])
            old = found.get(key, Timed(math.nan, math.nan, row.device, match["routing"] or ""))
            new: dict[str, Any] = {"device": row.device, "routing": match["routing"] or ""}
            if match["why"]:
                new |= {"refusal": match["why"]}
            elif match[1] == SHARE:
                new |= {"share": row.figure / 100}
            elif match[1] == FIRST_TOKEN:
                new |= {"first_token_ms": row.figure}
            elif match[1] == PEAK:
                new |= {"peak_gib": row.figure}
            else:
                new |= {"tokens_per_s": 1e3 / row.figure, "refusal": ""}
            found[key] = dataclasses.replace(old, **new)
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
    """The label of the model that has most of the methods, and mean scores, like a text's.

    What that model lacks is of others.
    """
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
    labels = sorted(whole, key=lambda label: -len(whole[label]))
    scored = {name: of for label in reversed(labels) for name, of in whole[label].items()}
    found: dict[tuple[str, str], list[Scored]] = {}
    for name, of in scored.items():
        method, share = IN_PICTURE[name]
        mean = 100 * sum(of[task] for task in TASKS) / len(TASKS)
        found.setdefault((OF_TASKS, method), []).append(Scored(mean, RIGHT, share))
    return next(iter(labels), ""), found


def nearest(scored: Sequence[Scored], share: float) -> Scored | None:
    """The quality at a share; None where none is near."""
    if any(one.share == 0 for one in scored):
        return next(one for one in scored if one.share == 0)
    near = [one for one in scored if abs(one.share - share) <= min(NEAR, NEAR_PART * share)]
    return min(near, key=lambda one: abs(one.share - share), default=None)


def join(
    timed: Mapping[tuple[str, float], Timed], scored: Scores
) -> tuple[list[Joined], dict[str, list[float]]]:
    """Points by method and budget; and by what is missing or refused, in words, the budgets."""
    points: list[Joined] = []
    missing: dict[str, list[float]] = {}
    texts = list(dict.fromkeys(text for text, _ in scored))
    for method in METHODS:
        for gib in sorted({*BUDGETS, *(gib for _, gib in timed)}):
            one = timed.get((method, gib))
            if one is None or one.refusal:
                why = NOT_TIMED if one is None else f"refused: {one.refusal}"
                missing.setdefault(f"{method}, {why}", []).append(gib)
                continue
            of = {text: nearest(scored.get((text, method), ()), one.share) for text in texts}
            known = {text: quality for text, quality in of.items() if quality is not None}
            if lacking := ", ".join(text for text in texts if text not in known):
                has_share = any(
                    one.share for (_, of), many in scored.items() for one in many if of == method
                )
                at = f" at a share of {one.share:.2f}" if has_share else ""
                missing.setdefault(f"{method}, {NOT_SCORED}{at}: {lacking}", []).append(gib)
            points.append(Joined(method, gib, one, known))
    return points, missing


def best(points: Sequence[Joined], text: str) -> set[tuple[str, float]]:
    """Points of a text that no other one of their budget beats in speed and in quality.

    They are compared under the routing of `BASE`, which makes no difference where all experts are
    in slots; they took no more than their budget, and were scored as they were timed.
    """
    routings = {point.gib: point.timed.routing for point in points if point.method == BASE}
    fair = [
        point
        for point in points
        if text in point.scored
        and not point.scored[text].share
        and point.gib in routings
        and (point.timed.share == 1 or point.timed.routing == routings[point.gib])
        and not point.timed.peak_gib > point.gib
    ]
    found = set()
    for one in fair:
        own, *others = (
            (p.timed.tokens_per_s, p.scored[text].goodness)
            for p in [one, *fair]
            if p.gib == one.gib
        )
        if not any(o != own and o[0] >= own[0] and o[1] >= own[1] for o in others):
            found.add((one.method, one.gib))
    return found


def caption(label: str, of_tasks: str, shape: str, points: Sequence[Joined]) -> str:
    """Says where both axes are from; the labels are of the models that were scored."""
    devices = " and ".join(sorted({point.timed.device for point in points})) or "no rows"
    routings = dict.fromkeys(point.timed.routing.partition(" (all")[0] for point in points)
    other = (
        f" (tasks: {NAMES.get(of_tasks, of_tasks)}, or another)"
        if of_tasks not in ("", label)
        else ""
    )
    return (
        f"Speed: {shape}, random weights, attention in INT4, a sequence at a time, on {devices}; "
        f"routing {'; or '.join(routings)}. Quality: {NAMES.get(label, 'no model yet')}{other}, "
        "experts in INT4 where a method says nothing else, attention as it is."
    )


def draw(canvas: Canvas, shape: str, label: str, points: Sequence[Joined], scored: Scores) -> None:
    """A panel a text, a line a method; the label is of the model of texts."""
    texts = list(dict.fromkeys(text for text, _ in scored)) or [""]
    for panel, text in zip(canvas.panels(1, len(texts), size=(6.0, 4.5)), texts, strict=True):
        for method, style in zip(METHODS, STYLES, strict=True):
            own = [p for p in points if p.method == method and text in p.scored]
            x, y = [p.timed.tokens_per_s for p in own], [p.scored[text].figure for p in own]
            if own:
                is_other = any(point.scored[text].share for point in own)
                face = {"markerfacecolor": "none"} if is_other else {}
                panel.plot(x, y, label=method, markersize=4, **style, **face)
            for point, *at in zip(own, x, y, strict=True):
                panel.annotate(
                    f"{point.gib:g}", at, fontsize=6, xytext=(2, 2), textcoords="offset points"
                )
        units = {one.unit for (of, _), many in scored.items() if of == text for one in many}
        plain = scored.get((text, UNQUANTIZED), ())
        model = "two study models" if text == OF_TASKS else NAMES.get(label, "")
        for one in plain:
            panel.axhline(one.figure, color="0.6", linewidth=0.8, label=UNQUANTIZED)
        panel.set(
            title=text, xlabel=f"tokens/s of {shape}; numbers are GiB", xscale="log",
            ylabel=f"{', '.join(sorted(units))} of {model}",
            yscale="linear" if text == OF_TASKS else "log",
        )  # fmt: skip
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(fontsize=6)


def page(
    timed: Mapping[tuple[str, float], Timed], points: Sequence[Joined],
    missing: Mapping[str, Sequence[float]],
) -> str:  # fmt: skip
    """A table by method and budget, and what is missing."""
    gibs = sorted({*BUDGETS, *(gib for _, gib in timed)})
    texts = list(dict.fromkeys(text for point in points for text in point.scored))
    lead = best(points, texts[0]) if texts else set()
    by_key = {(point.method, point.gib): point for point in points}
    rows = []
    for method in METHODS:
        cells = [method]
        for gib in gibs:
            point = by_key.get((method, gib))
            if point is None:
                cells.append("refused" if (method, gib) in timed else NOT_TIMED)
                continue
            figures = [
                "~" * (one.share > 0) + f"{one.figure:.1f}" if one else "–"
                for one in map(point.scored.get, texts)
            ]
            one = point.timed
            above = f" ({one.peak_gib:.1f} GiB)" if one.peak_gib > gib else ""
            cell = f"{one.tokens_per_s:.0f}, {one.first_token_ms:.0f} ms{above}"
            cell += f": {' / '.join(figures) or NOT_SCORED}"
            cells.append(f"**{cell}**" if (method, gib) in lead else cell)
        rows.append(cells)
    head = ["method", *(f"{gib:g} GiB" for gib in gibs)]
    meaning = (
        f"A cell is tokens a second, the time to the first token (a peak above the budget): "
        f"{' / '.join(texts) or 'quality'}. ~: scored in another state than was timed."
    )
    lines = [
        f"- {what}: under {', '.join(f'{gib:g}' for gib in under)} GiB"
        for what, under in missing.items()
    ]
    return "\n\n".join([meaning, markdown_table(head, rows), "\n".join(lines)]).strip()


class Picture:
    """Quality against tokens a second of a shape's methods, of these rows."""

    def __init__(self, shape: str, speed: Sequence[ResultRow], quality: Sequence[ResultRow]):
        """Joins the rows."""
        self._shape, self._timed = shape, speeds(speed, shape)
        (self._label, scored), (self._of_tasks, tasks) = qualities(quality), task_scores(quality)
        self._scored = scored | tasks
        self._points, self._missing = join(self._timed, self._scored)

    def text(self) -> str:
        """The table, with where it is from and what is missing."""
        source = caption(self._label, self._of_tasks, self._shape, self._points)
        return f"{source}\n\n{page(self._timed, self._points, self._missing)}"

    def beside(self, other: "Picture", *methods: str) -> str:
        """A table of some methods' speeds under each budget, of this shape and another."""
        of = [(one, name) for one in (self, other) for name in methods]
        rows = []
        for gib in BUDGETS:
            rows.append([f"{gib:g} GiB"])
            for one, name in of:
                timed = one._timed.get((name, gib))
                fits = " (all fits)" * (timed is not None and timed.share == 1)
                cell = (
                    f"{timed.tokens_per_s:.0f}, {timed.first_token_ms:.0f} ms"
                    if timed
                    else NOT_TIMED
                )
                rows[-1].append(cell + fits)
        return markdown_table(["memory", *(f"{one._shape}, {name}" for one, name in of)], rows)

    def save(self, folder: Path) -> Path:
        """Draws the picture to a file named by the shape."""
        return Canvas.save(
            lambda canvas: draw(canvas, self._shape, self._label, self._points, self._scored),
            folder / f"what_to_run_{self._shape}.png",
        )
