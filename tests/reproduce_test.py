"""RESULTS.md and what it is made from: the papers' numbers, our rows, and what is missing."""

import json
import re
import tempfile
from pathlib import Path

import pytest
from absl.testing import absltest, parameterized
from matplotlib.figure import Figure

from scripts.studies.dymoe.accelerate_section import MIXTRAL
from scripts.studies.tables import document as whole
from scripts.studies.tables.drawing import Canvas
from scripts.studies.tables.page import NOT_MEASURED, OTHER_DEVICE, OURS, Page
from scripts.studies.tables.published import FOLDER, Published
from scripts.studies.tables.rows import BrokenRowError, Results, read_checked

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "scripts" / "studies"
PAPERS = ("dynaexq", "dymoe", "buddymoe", "milo")
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


def built(*folders: Path) -> dict[str, Page]:
    """The sections from the rows of folders, as if they were one."""
    with tempfile.TemporaryDirectory() as folder:
        for i, one in enumerate(folders):
            for path in one.rglob("*.jsonl"):
                (Path(folder) / f"{i}_{path.name}").write_bytes(path.read_bytes())
        return whole.build(Results(Path(folder)))


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
        page = Page("A", results, Published("milo"), "figures")
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
    def test_it_is_current(self):
        pages = whole.build(Results(ROWS))
        text = whole.document(pages)
        self.assertEqual(text, whole.document(whole.build(Results(ROWS))))
        committed = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
        self.assertTrue(text == committed, "run python -m scripts.make_results, and commit")
        shown = {ROOT / path for path in re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)}
        self.assertEqual(shown, set((ROOT / "docs" / "figures").glob("*_figure_*.png")))
        self.assertLess(sum(path.stat().st_size for path in shown), MOST_IMAGE_BYTES)

    def test_the_summary_is_of_these_claims(self):
        """Each decimal of the summary stands in a claim of its paper."""
        pages = whole.build(Results(ROWS))
        self.assertEqual(set(whole.SUMMARY), set(pages))
        for name, cells in whole.SUMMARY.items():
            claims = " ".join(" ".join(claim[:3]) for claim in pages[name].claims)
            for number in re.findall(r"\d+\.\d+", " ".join(cells)):
                self.assertRegex(claims, rf"(?<![\d.]){re.escape(number)}0?(?!\d)", name)

    def test_tables_of_ours_say_what_differs(self):
        text = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
        found = re.findall(r"^(\|.*\|)\n\| --- ", text, re.MULTILINE)
        heads = [[cell.strip() for cell in head.strip("|").split("|")] for head in found]
        ours = [head for head in heads if "whose" in head or "ours" in " ".join(head)]
        self.assertGreater(len(ours), 20)
        for head in ours:
            self.assertEqual(head[-1], "what differs", head)

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
            page = whole.build(Results(Path(folder)))["BuddyMoE"]
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
        pages = whole.build(Results(ROWS))
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
            pages = whole.build(Results(Path(folder)))
        for name, page in pages.items():
            text = page.markdown()
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
        for name, page in built(ROWS).items():
            text = page.markdown()
            runs = set(re.findall(r"^\| \[(\d+)\] \|", text, re.MULTILINE))
            body = text[: text.index("### Runs of this section")]
            cited = {
                n for group in re.findall(r"\[(\d+(?:, \d+)*)\]", body) for n in group.split(", ")
            }
            self.assertEqual(cited, runs, name)
            self.assertGreater(len(runs), 3)

    def test_a_new_row_appears(self):
        before = built(ROWS)["DyMoE"].markdown()
        with tempfile.TemporaryDirectory() as folder:
            rows = [
                GOOD | {"what": f"{name}, {gib} GiB, TPOT, {MIXTRAL}", "figure": ms, "unit": "ms"}
                for gib, ratio in ((16, 2.7), (24, 4.5))
                for name, ms in (("load on demand", 10 * ratio), ("cache, 4/0, prefetch", 10.0))
            ]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (Path(folder) / "policies_gpu.jsonl").write_text(lines)
            page = built(ROWS, Path(folder))["DyMoE"]
        after = page.markdown()
        self.assertNotEqual(before, after)
        claim = next(line for line in after.splitlines() if "all of it (4/0)" in line)
        self.assertRegex(claim, r"2\.70 \[\d+\] and 4\.50 \[\d+\] \| met \|")
        row = next(line for line in after.splitlines() if line.startswith("| 6. ") and OURS in line)
        self.assertIn("2.70 [", row)
        self.assertIn("| A card | jax 0.0 | 2100-01-01 | `python x.py` |", after)

    def test_published_files_are_small_and_ours(self):
        self.assertEqual(
            sorted(path.parent.name for path in FOLDER.glob("*/published.csv")), sorted(PAPERS)
        )
        data = [*FOLDER.glob("*/published.csv"), ROWS / "quality" / "reproduce.jsonl"]
        self.assertLess(sum(path.stat().st_size for path in data), 200_000)


# Text of our cells without rows: settings, and that there is none.
WITHOUT_ROWS = {
    NOT_MEASURED, "", "not run", "1.00", "16 bits", "650 KB", "on Dense-25%", "baseline",
    f"{NOT_MEASURED} bits", "Dense-25% + Kurtosis-8", "Dense-50% + Sparse-16",
}  # fmt: skip


if __name__ == "__main__":
    absltest.main()
