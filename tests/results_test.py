"""RESULTS.md and what it is made from: our rows, what is missing, what stands as it was made."""

import json
import re
import tempfile
from pathlib import Path

from absl.testing import absltest, parameterized

from scripts.studies.tables import results as whole
from scripts.studies.tables.rows import BrokenRowError, Results, read_checked

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
PAGE = (ROOT / "RESULTS.md").read_text(encoding="utf-8")


def regions(*more: dict) -> dict[str, str]:
    """The regions of the committed rows and others."""
    with tempfile.TemporaryDirectory() as folder:
        for path in ROWS.rglob("*.jsonl") if more else ():
            (Path(folder) / path.name).write_bytes(path.read_bytes())
        lines = "".join(json.dumps(row) + "\n" for row in more)
        (Path(folder) / "zz_newer.jsonl").write_text(lines)
        return whole.regions(Results(Path(folder)) if more else COMMITTED, PAGE)


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

    def test_the_latest_row_counts(self):
        self.write("a.jsonl", GOOD | {"figure": 3.0}, GOOD | {"figure": 1.0, "date": "2099-12-31"})
        found = Results(self.folder).get(GOOD["what"])
        self.assertEqual((found.figure, found.line), (3.0, 1))
        self.write("b.jsonl", GOOD | {"figure": 2.0})  # the same day: a later file
        self.assertEqual(Results(self.folder).get(GOOD["what"]).figure, 2.0)


class DocumentTest(absltest.TestCase):
    def test_its_figures_are_there(self):
        shown = {ROOT / path for path in re.findall(r"!\[[^]]*\]\(([^)]*)\)", PAGE)}
        self.assertEqual(shown, set((ROOT / "docs" / "figures").glob("*_figure_*.png")))
        self.assertLess(sum(path.stat().st_size for path in shown), MOST_IMAGE_BYTES)

    def test_every_region_is_shown(self):
        shown = re.findall(r"<!-- made: ([\w ]+) -->", PAGE)
        self.assertCountEqual(shown, regions())

    def test_the_summary_is_of_these_claims(self):
        """Each decimal of the first screen and of what was found stands in a claim of its paper."""
        head, _, _ = PAGE.partition("Claims of each paper")
        self.assertLess(len(head.splitlines()), 25)
        verdicts = "|".join(whole.VERDICTS)
        count = 0
        for name, text in whole.sections(PAGE).items():
            title = whole.TITLES[name]
            (short,) = re.findall(rf"^\| {title} \(\S*\) \| (.*) \|$", head, re.MULTILINE)
            self.assertLess(len(short), 900)
            found, _, _ = text.partition(f"\n### {title}: claims and verdicts\n")
            self.assertIn(f"### What was found of {title}\n", found)
            summary = f"{short} {found}"
            claims = " ".join(re.findall(rf"^.*\| (?:{verdicts}) \|$", text, re.MULTILINE))
            for number in re.findall(r"\d+\.\d+", summary):
                self.assertRegex(claims, rf"(?<![\d.]){re.escape(number)}0?(?!\d)", name)
                count += 1
        self.assertGreater(count, 80)

    def test_without_rows_nothing_is_made_up(self):
        for name, text in whole.regions(Results(ROWS / "none"), "").items():
            self.assertNotRegex(text, r"\[s\d+\]|\| met \|$", name)
            if name.endswith(("missing", "study")):
                self.assertIn("not measured", text)
            if name.endswith("study"):
                self.assertNotRegex(text, r"\d", name)

    def test_every_number_of_ours_has_its_run(self):
        for name, text in whole.sections(PAGE).items():
            runs = set(re.findall(r"^\| \[(s?\d+)\] \|", text, re.MULTILINE))
            body = re.sub(r"^\| \[s?\d+\] .*$", "", text, flags=re.MULTILINE)
            cited = {
                n
                for group in re.findall(r"\[(s?\d+(?:, s?\d+)*)\]", body)
                for n in group.split(", ")
            }
            self.assertEqual(cited, runs, name)
            self.assertGreater(len(runs), 3)

    def test_what_ran_on_a_gpu_is_whole(self):
        """Every row of a GPU is counted."""
        rows = [one.row for one in COMMITTED.measured if one.row.device.startswith("NVIDIA")]
        counted = re.findall(r"^\| `[^|]*\| (\d+) \|", regions()["gpu files"], re.MULTILINE)
        self.assertEqual(sum(map(int, counted)), len(rows))
