"""The regions of RESULTS.md: what the study model shows, counts of verdicts, what ran on a GPU.

Everything else in RESULTS.md was made once from rows that no script makes any more, and stands as
it was made; its runs are numbered without an s.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.studies.quality import buddymoe, dymoe, dynaexq, exact, task_cases
from scripts.studies.quality.cases import MET, NOT_MEASURED, NOT_MET, Claim
from scripts.studies.quantizers import recipes
from scripts.studies.tables import subjects
from scripts.studies.tables.paper import Runs, markdown_table
from scripts.studies.tables.rows import Found, Results

ROWS = Path(__file__).parents[1]
TITLES = {"dynaexq": "DynaExq", "dymoe": "DyMoE", "buddymoe": "BuddyMoE", "milo": "MiLo"}
VERDICTS = ("met", "met in part", "not met", "not shown", "not comparable", "not measured")
STUDY_LAYERS = 30
_CLAIMS: Mapping[str, Sequence[Claim]] = {
    "dynaexq": dynaexq.CLAIMS, "dymoe": dymoe.claims(STUDY_LAYERS), "buddymoe": buddymoe.CLAIMS,
}  # fmt: skip
_SECTIONS = {"dynaexq": ("dynaexq", "shift"), "dymoe": ("dymoe",),
             "buddymoe": ("buddymoe",), "exact": ("fidelity", "layers", "heavy"),
             "milo": ("table", "ranks", "policies")}  # fmt: skip
_DOUBTS = {
    "choosing experts by use is better than at random, int4/int2": (
        MET, "the lowest ids, the replica that was made for WikiText-2, are within 0.014 nats "
        "there, and on mixed text within the spread"),
    "adapts better than a choice by all of the workload": (
        MET, "that choice has 12 % of prose's gate mass in INT4 (43 % of code's, 56 % of maths'), "
        "so that the margin in prose is wide"),
    "24 % of the gap between INT4 and INT2 comes back": (
        MET, "experts at random recover 25 % and 31 %, so that any choice passes this bar"),
    "of the gap between INT4 and INT2, 24 % comes back": (
        MET, "on the fifth ARC-E alone carries it (86 ± 10, 22 ± 23, 33 ± 30 % by task); random "
        "experts pass this bar in perplexity, on tasks they miss it (-6 ± 12 %, sixth model)"),
    "buddies are better than leaving the expert out": (
        MET, "random experts for the same pairs are, too, by 0.104 nats or more, so that any "
        "choice passes this bar"),
    "c = 0.75, rho 3 is nearer to the exact model than uniform int4": (
        MET, "random experts for the same pairs are, too, by 0.077 ± 0.003 and 0.014 ± 0.009, so "
        "that on WikiText-2 any choice passes this bar"),
    "buddies of the same origin are not what it rests on": (
        NOT_MET, "some random experts are of the same origin (a quarter on the first model), "
        "which these buddies are not, so that the null has what was taken from them"),
}  # fmt: skip
_MADE = re.compile(r"<!-- made: .*?<!-- end -->", re.DOTALL)


def regions(results: Results, page: str) -> dict[str, str]:
    """All regions by name, such as "dymoe claims".

    Args:
      page: RESULTS.md, whose verdicts are counted.
    """
    made: dict[str, str] = {}
    last = re.compile(rf"\| ({'|'.join(VERDICTS)}) \|$", re.MULTILINE)  # cell of a table
    written = sections(_MADE.sub("", page))
    counts = {name: Counter(last.findall(text)) for name, text in written.items()}
    windows = [subjects.by_window(results, of) for of in (subjects.STUDY, subjects.FIRST)]
    documents = [subjects.by_document(results, of) for of in subjects.OF_TASKS]
    quantized = [
        subjects.by_window(results, of, " | perplexity") for of in (subjects.SIXTH, subjects.FIRST)
    ]
    kilobytes = [int(n) for name in quantized[0] for n in re.findall(r"within (\d+) KB", name)]
    milo = recipes.claims(next(iter(kilobytes), recipes.DEMO_KB))
    for name, title in TITLES.items():
        runs, label = Runs(), subjects.FIRST if name == "milo" else subjects.STUDY
        claims: list[list[str]] = []
        missing: list[str] = []
        distances = [bar for bar in exact.CLAIMS if bar.paper == name]
        of_tasks = [bar for bar in task_cases.CLAIMS if bar.paper == title]
        for found, bars, unit in (
            (windows, [*_CLAIMS.get(name, ()), *distances], "Nats a token"),
            (documents, of_tasks, "Share of wrong answers"),
            (quantized, milo if name == "milo" else (), "Nats a token"),
        ):
            judged, without = subjects.claims(found, runs, bars, unit, _DOUBTS)
            claims, missing = claims + judged, missing + without
        counts[name].update([claim[-1] for claim in claims] + [NOT_MEASURED] * len(missing))
        head = ["claim", "section", "what we find", "verdict"]
        made[f"{name} claims"] = markdown_table(head, claims)
        said = f" {len(missing)} of {len(claims) + len(missing)} bars, {NOT_MEASURED}: "
        made[f"{name} missing"] = f"{said}{'; '.join(missing) or 'none'}."
        labels = (label, subjects.FIFTH, subjects.SIXTH) if name == "milo" else (label,)
        made[f"{name} study"] = "\n\n".join(
            subjects.tables(results, runs, _SECTIONS[name], of) for of in labels
        )
        made[f"{name} runs"] = runs.table()
    runs = Runs()
    made["tasks"] = subjects.tasks(results, runs)
    made["tasks runs"] = runs.table()
    runs = Runs()
    made["exact"] = subjects.tables(results, runs, _SECTIONS["exact"])
    made["exact runs"] = runs.table()
    rows = [
        [TITLES[name], *(str(of[verdict]) for verdict in VERDICTS)] for name, of in counts.items()
    ]
    made["verdicts"] = markdown_table(["paper", *VERDICTS], rows)
    made["gpu files"] = _gpu_runs(results)
    return made


def sections(page: str) -> dict[str, str]:
    """The text of each paper's part of RESULTS.md."""
    parts = re.split(r"^## ", page, flags=re.MULTILINE)
    return {name: next((part for part in parts if part.startswith(f"{title}: ")), "")
            for name, title in TITLES.items()}  # fmt: skip


def _gpu_runs(results: Results) -> str:
    """A table of the files whose rows a GPU measured."""
    files: dict[str, list[Found]] = {}
    for one in results.measured:
        if one.row.device.startswith(("NVIDIA", "AMD Instinct")):
            files.setdefault(one.file, []).append(one)
    rows = []
    for name, found in files.items():
        of = [one.row for one in found]
        versions = {f"{of} {number}" for row in of for of, number in row.versions.items()}
        kinds = {row.date for row in of}, {row.device for row in of}, versions
        said = [", ".join(sorted(values)) for values in kinds]
        rows.append([f"`{name}`", str(len(of)), *said, str(len({row.command for row in of}))])
    head = ["rows of", "rows", "dates", "device", "versions", "commands"]
    return markdown_table(head, rows)
