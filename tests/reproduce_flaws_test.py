"""Rows with a known flaw: their numbers are marked, and no verdict of "met" rests on them."""

import dataclasses
import json
import re
import tempfile
from pathlib import Path

from absl.testing import absltest, parameterized

from moejax.files.result_rows import ResultRow, append_rows, read_rows
from scripts.studies.tables import document
from scripts.studies.tables.page import (
    IN_PART,
    MARKS,
    MET,
    NOT_MET,
    NOT_SHOWN,
    Page,
    borne_out,
)
from scripts.studies.tables.published import Published
from scripts.studies.tables.rows import BrokenRowError, Results, read_checked

ROWS = Path(__file__).parents[1] / "scripts" / "studies"
FLAW = "its replay left the routers out: 0.1 to 0.2 ms a step of 48 layers too fast"
ROW = ResultRow(
    what="a", figure=2.0, unit="ms", baseline={"megabytes_a_step": 3.0, "low_ms": 1.9},
    device="A card", versions={"jax": "0.0"}, date="2100-01-01", command="python x.py", flaw=FLAW,
)  # fmt: skip


class RowsTest(absltest.TestCase):
    def test_what_was_measured_again_has_none(self):
        flawed = [one for one in Results(ROWS).measured if one.row.flaw]
        self.assertEmpty(flawed)

    def test_a_row_keeps_its_flaw(self):
        sound = dataclasses.replace(ROW, flaw="")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.jsonl"
            append_rows(path, [ROW, sound])
            self.assertEqual(read_rows(path), [ROW, sound])
            self.assertEqual([one.row for one in read_checked(path)], [ROW, sound])
            self.assertNotIn("flaw", path.read_text().splitlines()[1])
            path.write_text(json.dumps(dataclasses.asdict(sound)) + "\n")
            with self.assertRaisesRegex(BrokenRowError, "flaw"):
                list(read_checked(path))


class MarksTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        append_rows(folder / "a.jsonl", [ROW, dataclasses.replace(ROW, what="b", flaw="")])
        self.page = Page("A", Results(folder), Published("milo"), "figures")

    def test_every_number_of_such_a_row_has_a_mark(self):
        page, results = self.page, self.page.results
        self.assertEqual(page.ours("a"), f"2.00 [1]{MARKS[0]}")
        self.assertEqual(page.ours("b"), "2.00 [1]")
        both = results.get("a"), results.get("b")
        self.assertEqual(page.derived("{:.1f}", lambda a, b: a / b, *both), f"1.0 [1]{MARKS[0]}")
        self.assertEqual(page.ours("a", key="low_ms"), f"1.90 [1]{MARKS[0]}")
        self.assertEqual(page.ours("a", key="megabytes_a_step"), "3.00 [1]")
        self.assertIn(f"{MARKS[0]} Known to be wrong: {FLAW}.", page.markdown())

    @parameterized.parameters((MET, NOT_SHOWN), (IN_PART, NOT_SHOWN), (NOT_MET, NOT_MET))
    def test_verdict(self, before, after):
        flawed, sound = (self.page.results.get(what) for what in "ab")
        self.assertEqual(borne_out(before, sound, None), before)
        self.assertEqual(borne_out(before, sound, flawed), after)


class DocumentTest(absltest.TestCase):
    def test_no_claim_is_met_by_such_rows(self):
        for name, page in document.build(Results(ROWS)).items():
            for claim, _, finding, verdict in page.claims:
                if verdict in (MET, IN_PART):
                    self.assertFalse(set(MARKS) & set(finding), f"{name}: {claim}")

    def test_verdicts_of_speed(self):
        pages = document.build(Results(ROWS))
        (own,) = (c for c in pages["BuddyMoE"].claims if c[0].startswith("throughput"))
        self.assertEqual(own[3], MET)
        self.assertRegex(own[2], r"DeepSeek-V2-Lite's shape at batch 1: 7\.8 % ")
        self.assertRegex(own[2], r"Qwen3-30B-A3B's shape at batch 1: 11\.6 % ")
        (kept,) = (c for c in pages["DynaExq"].claims if c[0].startswith("retains"))
        self.assertEqual(kept[3], IN_PART)  # 83 % at batch 16 beside a pool
        self.assertRegex(kept[2], r"of INT2 in a pool.* 83 % \[\d+\] at batch 16")
        self.assertRegex(kept[2], r"Qwen3-Next-80B-A3B 87 % \[\d+\] under 32 GiB")

    def test_what_ran_is_whole(self):
        """Every row of a GPU is counted, and every command is there."""
        results = Results(ROWS)
        text = document.document(document.build(results))
        runs = text[text.index("## What ran on a GPU") :]
        rows = [one.row for one in results.measured if one.row.device.startswith("NVIDIA")]
        counted = [int(n) for n in re.findall(r"^- [-\d]+, (\d+) rows?: `", runs, re.MULTILINE)]
        self.assertEqual(sum(counted), len(rows))
        for command in {row.command for row in rows}:
            self.assertIn(f"`{command}`", runs)


if __name__ == "__main__":
    absltest.main()
