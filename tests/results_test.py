"""RESULTS.md and what it is made from: the papers' numbers, our rows, what is missing."""

import dataclasses
import functools
import json
import re
import tempfile
from pathlib import Path

import pytest
from absl.testing import absltest, parameterized
from matplotlib.figure import Figure

from scripts.studies.dymoe import accelerate_section as accelerate
from scripts.studies.dymoe.accelerate_section import MIXTRAL
from scripts.studies.tables import results as whole
from scripts.studies.tables.drawing import Canvas
from scripts.studies.tables.paper import (
    NOT_MEASURED,
    OTHER_DEVICE,
    OURS,
    Paper,
)
from scripts.studies.tables.published import Published
from scripts.studies.tables.resident import resident
from scripts.studies.tables.rows import BrokenRowError, Results, read_checked
from tests import slow

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "scripts" / "studies"
MOST_IMAGE_BYTES = 1_500_000
GOOD = {
    "what": "cache, 4/0, prefetch over load on demand, 24 GiB, TPOT, dymoe, Mixtral-8x7B, "
    "32 layers, attention bf16",
    "figure": 4.5,
    "unit": "x",
    "baseline": {"paper": 4.26},
    "device": "A card",
    "versions": {"jax": "0.0"},
    "date": "2100-01-01",
    "command": "python x.py",
}  # fmt: skip

COMMITTED = Results(ROWS)


@functools.cache
def committed_papers() -> dict[str, Paper]:
    """The pages of the committed rows."""
    return whole.papers(COMMITTED)


def with_more(*rows: dict) -> Results:
    """The committed rows and others."""
    with tempfile.TemporaryDirectory() as folder:
        for path in ROWS.rglob("*.jsonl"):
            (Path(folder) / path.name).write_bytes(path.read_bytes())
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (Path(folder) / "zz_newer.jsonl").write_text(lines)
        return Results(Path(folder))


def text_of(paper: Paper) -> str:
    """All regions of a paper."""
    return "\n".join(paper.regions.values())


def without_runs(text: str) -> str:
    """A text without [n]."""
    return re.sub(r" \[[\d, ]+\]", "", text)


class PublishedTest(parameterized.TestCase):
    @parameterized.parameters(
        ("dynaexq", "Table 1", "Qwen3-MoE-80B, DynaExq(5090)", "MMLU-ProX", "72.73", "4.3"),
        ("dynaexq", "Table 1", "Qwen3-MoE-30B, FP16", "GPQA", "54.55", "4.3"),
        ("dymoe", "Table 1", "GSM8K, Mixtral-8x7B", "Int2", "0.0781", "6.2"),
        ("dymoe", "Table 2", "CMMLU, Qwen3-30B-A3B, 4 / 2", "r = 0.9", "0.8015", "6.3"),
        ("dymoe", "Table 3", "4. Cache+Dyquant(4/2)", "24 GB TTFT", "0.2423", "6.4"),
        ("dymoe", "Figure 10", "Fiddler, Mixtral-8x7B, 24 GB", "TTFT", "22.7", "6.2"),
        ("buddymoe", "Table 2", "BuddyMoE tau 0.95, B 16, rho 4", "t/s", "38.50", "5.2"),
        ("buddymoe", "Table 4", "Random", "t/s", "–", "5.2"),
        ("milo", "Table 1", "DeepSeek-MoE, GPTQ", "Quant-time", "3355", "1"),
        ("milo", "Table 2", "Kurtosis", "Mixtral-8x7B, E(S)", "-0.53", "3.1.1"),
        ("milo", "Table 3", "DeepSeek-MoE, MiLo-s2", "TriQA", "0.5998", "4.1"),
        ("milo", "Table 6", "MARLIN", "batch 16", "0.135", "4.3"),
        ("milo", "Table 7", "DeepSeek-MoE, Kurtosis-16", "on Dense-512", "6.3030", "4.2"),
    )
    def test_cell(self, paper, place, row, column, value, section):
        cell = Published(paper).cells[place, row, column]
        self.assertEqual((cell.value, cell.section), (value, section))

    @parameterized.parameters(
        ("dynaexq", {"Table 1": 8 * 7}),
        ("dymoe", {"Table 1": 6 * 3, "Table 2": 12 * 3, "Table 3": 6 * 4}),
        ("buddymoe", {"Table 1": 5 * 2, "Table 2": 6 * 4, "Table 3": 22, "Table 4": 18}),
        ("milo", {"Table 1": 16, "Table 2": 10, "Table 3": 80, "Table 5": 12, "Table 6": 12}),
    )
    def test_tables_are_whole(self, paper, sizes):
        cells = Published(paper).cells
        found = {place: sum(key[0] == place for key in cells) for place in sizes}
        self.assertEqual(found, sizes)

    def test_averages_agree_with_their_rows(self):
        """All of DynaExq's but one; that one is the paper's own error."""
        paper = Published("dynaexq")
        *tasks, average = paper.columns("Table 1")
        wrong = [
            row
            for row in paper.rows("Table 1")
            if abs(
                sum(paper.number("Table 1", row, t) for t in tasks) / len(tasks)
                - paper.number("Table 1", row, average)
            )
            > 0.01
        ]
        self.assertEqual(wrong, ["Qwen3-MoE-30B, DynaExq(5090)"])

    @parameterized.parameters(
        ("place,row,column,value,unit\n", "header"),
        ("place,row,column,value,unit,section\na,b,c,,e,f\n", "published.csv:2"),
        ("place,row,column,value,unit,section\na,b,c,1,e\n", "published.csv:2"),
        (
            "place,row,column,value,unit,section\na,b,c,1,e,f\na,b,c,2,e,f\n",
            "published.csv:3.*twice",
        ),
    )
    def test_a_broken_file_is_refused(self, text, said):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x/published.csv"
            path.parent.mkdir()
            path.write_text(text)
            with self.assertRaisesRegex(ValueError, said):
                Published("x", Path(folder))


class RowsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory()))

    def write(self, name, *rows):
        path = self.folder / name
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
        return path

    @parameterized.named_parameters(
        ("no_command", {"command": None}, "command"),
        ("empty_device", {"device": ""}, "device"),
        ("text_for_a_figure", {"figure": "4.5"}, "figure"),
        ("no_number", {"figure": float("nan")}, "figure"),
        ("a_flag", {"figure": True}, "figure"),
        ("a_list", {"baseline": [1]}, "baseline"),
        ("versions_of_numbers", {"versions": {"jax": 0.1}}, "versions"),
        ("no_date", {"date": "yesterday"}, "date"),
        ("another_field", {"note": "x"}, "fields"),
    )
    def test_a_broken_row_is_refused(self, change, said):
        path = self.write("new.jsonl", GOOD, GOOD | change)
        with self.assertRaisesRegex(BrokenRowError, rf"new\.jsonl:2: .*{said}"):
            list(read_checked(path))

    def test_a_missing_field_and_no_json_are_refused(self):
        short = {name: value for name, value in GOOD.items() if name != "date"}
        with self.assertRaisesRegex(BrokenRowError, r"new\.jsonl:1: .*fields"):
            list(read_checked(self.write("new.jsonl", short)))
        (self.folder / "new.jsonl").write_text(json.dumps(GOOD) + "\n{\n")
        with self.assertRaisesRegex(BrokenRowError, r"new\.jsonl:2: is no JSON"):
            Results(self.folder)

    def test_the_latest_row_counts(self):
        self.write("a.jsonl", GOOD | {"figure": 3.0}, GOOD | {"figure": 1.0, "date": "2099-12-31"})
        found = Results(self.folder).get(GOOD["what"])
        self.assertEqual((found.figure, found.line), (3.0, 1))
        self.write("b.jsonl", GOOD | {"figure": 2.0})  # the same day: a later file
        self.assertEqual(Results(self.folder).get(GOOD["what"]).figure, 2.0)

    def test_first_runs_of_a_day_do_not_count(self):
        self.write("policies_h200.jsonl", GOOD | {"figure": 1.0})
        self.write("policies_gpu.jsonl", GOOD | {"figure": 2.0})
        self.assertEqual(Results(self.folder).get(GOOD["what"]).figure, 2.0)

    def test_no_ratio_over_two_devices(self):
        other = GOOD | {"what": "x", "device": "Another card"}
        self.write("a.jsonl", GOOD, other, GOOD | {"what": "y", "figure": 9.0})
        results = Results(self.folder)
        page = Paper("milo", results)
        mine, foreign, second = (results.get(what) for what in (GOOD["what"], "x", "y"))
        ratio = lambda a, b: a / b  # noqa: E731
        self.assertEqual(page.derived("{:.1f}", ratio, second, mine), "2.0 [1]")
        self.assertEqual(page.derived("{:.1f}", ratio, second, foreign), OTHER_DEVICE)
        self.assertEqual(page.derived("{:.1f}", ratio, second, None), NOT_MEASURED)

    def test_a_pattern_is_of_the_whole(self):
        self.write("a.jsonl", GOOD)
        results = Results(self.folder)
        self.assertIsNone(results.latest("cache"))
        self.assertIsNotNone(results.latest(r"cache, .*, attention bf16"))


class DocumentTest(absltest.TestCase):
    def test_its_figures_are_there(self):
        text = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
        shown = {ROOT / path for path in re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)}
        self.assertEqual(shown, set((ROOT / "docs" / "figures").glob("*_figure_*.png")))
        self.assertLess(sum(path.stat().st_size for path in shown), MOST_IMAGE_BYTES)

    def test_every_region_is_shown(self):
        text = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
        shown = re.findall(r"<!-- made: ([\w ]+) -->", text)
        self.assertCountEqual(shown, whole.regions(COMMITTED))

    def test_the_summary_is_of_these_claims(self):
        """Each decimal of the summary stands in a claim of its paper."""
        papers = committed_papers()
        head, _, _ = (ROOT / "RESULTS.md").read_text("utf-8").partition("Claims of each paper")
        count = 0
        for name, title in whole.TITLES.items():
            (summary,) = re.findall(rf"^\| {title} \| (.*) \|$", head, re.MULTILINE)
            claims = " ".join(" ".join(claim[:3]) for claim in papers[name].claims)
            for number in re.findall(r"\d+\.\d+", summary):
                self.assertRegex(claims, rf"(?<![\d.]){re.escape(number)}0?(?!\d)", name)
                count += 1
        self.assertGreater(count, 20)

    def test_a_bar_that_was_not_measured_is_left_out(self):
        """Figure 8 of two rates; no bar reaches up to the legend."""
        about = "buddymoe, DeepSeek-V2-Lite, 27 layers, attention bf16"
        more = {"tokens_per_s": 300.0, "megabytes_a_step": 10.0}
        with tempfile.TemporaryDirectory() as folder:
            for name, rate in (("original", "0.75, 48"), ("random", "0.5, 32")):
                what = f"{name}, c {rate} slots of 64 in int4, batch 1, TPOT, {about}"
                line = json.dumps(GOOD | {"what": what, "baseline": more})
                with (Path(folder) / "a.jsonl").open("a") as file:
                    file.write(f"{line}\n")
            page = whole.papers(Results(Path(folder)))["buddymoe"]
        figure = Figure()
        page.drawings["buddymoe_figure_8"](Canvas(figure))
        for panel, key in zip(figure.axes, more, strict=True):
            heights = [bar.get_height() for bar in panel.patches]
            self.assertLen(heights, 6)
            self.assertEqual([h for h in heights if h == h], [more[key]] * 2)
            self.assertLess(more[key], 0.85 * panel.get_ylim()[1])
            shown = [text.get_text() for text in panel.get_legend().get_texts()]
            self.assertEqual(shown, ["original", "random"])

    @pytest.mark.slow
    def test_pictures_are_drawn(self):
        pages = committed_papers()
        with tempfile.TemporaryDirectory() as folder:
            old = Path(folder) / "milo_figure_99.png"
            old.write_bytes(b"")
            drawn = whole.draw(pages, Path(folder))
            self.assertLen(drawn, sum(len(page.drawings) for page in pages.values()))
            self.assertGreater(len(drawn), 15)
            for path in drawn:
                self.assertEqual(path.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
            self.assertFalse(old.exists())

    def test_without_rows_nothing_is_made_up(self):
        with tempfile.TemporaryDirectory() as folder:
            pages = whole.papers(Results(Path(folder)))
        for name, page in pages.items():
            text = text_of(page)
            self.assertEmpty(page.drawings, name)
            self.assertNotRegex(text, r"\[\d+\]")
            self.assertNotIn("met", page.verdicts)
            self.assertNotIn("not met", page.verdicts)
            self.assertIn(NOT_MEASURED, text)
            for line in text.splitlines():
                cells = [cell.strip() for cell in line.strip("|").split("|")]
                if OURS in cells:
                    # Labels stand before the mark, and what differs is the last column.
                    for cell in cells[cells.index(OURS) + 1 : -1]:
                        self.assertIn(cell, WITHOUT_ROWS, f"{name}: {line}")

    def test_every_number_of_ours_has_its_run(self):
        for name, page in committed_papers().items():
            runs = set(re.findall(r"^\| \[(\d+)\] \|", page.regions["runs"], re.MULTILINE))
            body = "\n".join(text for name, text in page.regions.items() if name != "runs")
            cited = {
                n for group in re.findall(r"\[(\d+(?:, \d+)*)\]", body) for n in group.split(", ")
            }
            self.assertEqual(cited, runs, name)
            self.assertGreater(len(runs), 3)

    def test_a_new_row_appears(self):
        rows = [
            GOOD | {"what": f"{name}, {gib} GiB, TPOT, {MIXTRAL}", "figure": ms, "unit": "ms"}
            for gib, ratio in ((16, 2.8), (24, 4.5))
            for name, ms in (("load on demand", 10 * ratio), ("cache, 4/0, prefetch", 10.0))
        ]
        after = text_of(whole.papers(with_more(*rows))["dymoe"])
        claim = next(line for line in after.splitlines() if "all of it (4/0)" in line)
        self.assertRegex(claim, r"2\.80 \[\d+\] and 4\.50 \[\d+\] \| met \|")
        row = next(line for line in after.splitlines() if line.startswith("| 6. ") and OURS in line)
        self.assertIn("2.80 [", row)
        self.assertIn("| A card | jax 0.0 | 2100-01-01 | `python x.py` |", after)

    def test_a_resident_model_measured_by_the_benchmark_counts(self):
        what = (
            "TPOT median, Mixtral-8x7B, random weights, INT3 g64 float, attention INT3, head bf16, "
            "batch 1, 1 prompts of 512 random tokens; routing the random routers' own"
        )
        row = GOOD | {"what": what, "figure": 9.0, "unit": "ms"}
        asked = ("TPOT", "Mixtral-8x7B")
        self.assertNotEqual(resident(COMMITTED, *asked, "INT3", 1).figure, 9.0)
        self.assertEqual(resident(with_more(row), *asked, "INT3", 1).figure, 9.0)
        self.assertNotEqual(resident(with_more(row), *asked, "INT4", 1).figure, 9.0)

    def test_what_ran_on_a_gpu_is_whole(self):
        """Every row of a GPU is counted, and every command is there."""
        runs = whole.regions(COMMITTED)["gpu commands"]
        rows = [one.row for one in COMMITTED.measured if one.row.device.startswith("NVIDIA")]
        counted = [int(n) for n in re.findall(r"^- [-\d]+, (\d+) rows?: `", runs, re.MULTILINE)]
        self.assertEqual(sum(counted), len(rows))
        for command in {row.command for row in rows}:
            self.assertIn(f"`{command}`", runs)


def raw(file: str, begins: str, ends: str = "") -> float:
    """A figure as the file has it, of the one row whose name begins and ends so."""
    [path] = ROWS.rglob(file)
    rows = map(json.loads, path.read_text().splitlines())
    (found,) = (
        row["figure"]
        for row in rows
        if row["what"].startswith(begins) and row["what"].endswith(ends)
    )
    return found


CLAIM = "times as fast as accelerate (Mixtral-8x7B)"


class AccelerateTest(parameterized.TestCase):
    def test_a_newer_row_of_another_form_is_not_taken(self):
        """bf16, other group sizes, a part of the layers and another share of the memory."""
        rows = [one.row for one in read_checked(ROWS / "dymoe" / "accelerate_h200.jsonl")]
        int4 = [row for row in rows if "32 layers, INT4 g128" in row.what]
        self.assertNotEmpty(int4)
        changes = (
            ("32 layers, INT4 g128, experts are modules, attention INT4, head bf16",
             "scaled from 8 of 32 layers, bf16, experts are modules"),
            ("32 layers, INT4 g128", "scaled from 8 of 32 layers, INT4 g128"),
            ("INT4 g128", "INT4 g64"),
            ("attention INT4", "attention bf16"),
            ("% for weights", "9% for weights"),
        )  # fmt: skip
        newer = [
            dataclasses.asdict(
                dataclasses.replace(row, what=row.what.replace(*change), figure=1.0,
                                    date="2100-01-01")
            )
            for row in int4
            for change in changes
        ]  # fmt: skip
        before, after = (
            [
                line
                for line in text_of(whole.papers(with_more(*more))["dymoe"]).splitlines()
                if CLAIM in line or "our INT4 cache" in line
            ]
            for more in ((), newer)
        )
        # Two claims; two models, settings and hostings; look-ahead in prompts of one model.
        self.assertLen(before, 2 + 8 + 4)
        self.assertEqual(list(map(without_runs, before)), list(map(without_runs, after)))

    @slow.repeats()
    @parameterized.product(share=(90, 97), hosting=("pageable", "pinned, cache kept"))
    def test_printed_ratios_are_those_of_the_rows(self, share, hosting):
        about = "Mixtral-8x7B, 32 layers, INT4 g128, experts are modules, attention INT4"
        end = f"head bf16, batch 1, 24 GiB, {share}% for weights, random router"
        theirs = f"transformers and accelerate, {hosting}"
        times = [
            raw("accelerate_h200.jsonl", f"{theirs}, {part}, {about}", end)
            for part in ("prompt of 512, TTFT", "TPOT")
        ]
        text = without_runs(text_of(committed_papers()["dymoe"]))
        ours = "Mixtral-8x7B, 32 layers, INT4 g64 float, attention INT4, head bf16, 24 GiB, batch 1"
        policy = "dymoe, Mixtral-8x7B, 32 layers, attention bf16"
        for name, file, own in (
            ("our INT4 cache", "memory_h200.jsonl",
             (("cache, prompt of 512, TTFT", ours), ("cache, 7 slots of 8, ahead 0, TPOT", ours))),
            ("our DyMoE 4/0", "policies_h200.jsonl",
             tuple((f"cache, 4/0, prefetch, 24 GiB, {part}", policy) for part in ("TTFT", "TPOT"))),
        ):  # fmt: skip
            ratios = [t / raw(file, *row) for t, row in zip(times, own, strict=True)]
            where = f"{name} over accelerate, {hosting}, {share} % for weights, Mixtral-8x7B, 24"
            (line,) = (one for one in text.splitlines() if where in one)
            self.assertIn(f"| {OURS} | {ratios[0]:.2f} | {ratios[1]:.2f} |", line)

    def test_both_times_are_of_one_run(self):
        pair = accelerate.accelerate(COMMITTED, "Mixtral-8x7B", 24, "pageable", 97)
        again = dataclasses.replace(pair[1].row, date="2100-01-01", command="another")
        newer = dataclasses.replace(pair[1], row=again)
        self.assertEqual(accelerate.of_one_run(*pair), pair)
        self.assertEqual(accelerate.of_one_run(pair[0], newer), (None, newer))


# Text of our cells without rows: settings, and that there is none.
WITHOUT_ROWS = {
    NOT_MEASURED, "", "not run", "1.00", "16 bits", "650 KB", "on Dense-25%", "baseline",
    f"{NOT_MEASURED} bits", "Dense-25% + Kurtosis-8", "Dense-50% + Sparse-16",
}  # fmt: skip
