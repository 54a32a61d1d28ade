"""Ratios of RESULTS.md: of one form of weights, of one run, and equal to those of the rows."""

import dataclasses
import json
import re
import tempfile
from pathlib import Path

from absl.testing import absltest, parameterized

from moejax.files.result_rows import row_fields
from scripts.studies.dymoe import accelerate_section as accelerate
from scripts.studies.dymoe import claims as dymoe_claims
from scripts.studies.dymoe import section as reproduce_dymoe
from scripts.studies.tables.page import OURS
from scripts.studies.tables.rows import Results, read_checked
from tests import slow

ROWS = Path(__file__).parents[1] / "scripts" / "studies"
CLAIM = "times as fast as accelerate (Mixtral-8x7B)"


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


def section(*more: dict) -> str:
    """DyMoE's section from the committed rows and others."""
    with tempfile.TemporaryDirectory() as folder:
        for path in ROWS.rglob("*.jsonl"):
            (Path(folder) / path.name).write_bytes(path.read_bytes())
        lines = "".join(json.dumps(row) + "\n" for row in more)
        (Path(folder) / "zz_newer.jsonl").write_text(lines)
        return reproduce_dymoe.build(Results(Path(folder)), "figures").markdown()


def without_runs(text: str) -> str:
    """A text without [n]."""
    return re.sub(r" \[[\d, ]+\]", "", text)


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
            row_fields(
                dataclasses.replace(row, what=row.what.replace(*change), figure=1.0,
                                    date="2100-01-01")
            )
            for row in int4
            for change in changes
        ]  # fmt: skip
        before, after = (
            [
                line
                for line in section(*more).splitlines()
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
        text = without_runs(section())
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

    def test_the_claim_is_not_met_by_int4(self):
        (line,) = (one for one in section().splitlines() if CLAIM in one)
        self.assertRegex(without_runs(line), r"DyMoE 4/0 at 24 GiB 7\.2 \(90 %\) and 5\.4 \(97 %\)")
        self.assertEndsWith(line, "| not met |")

    def test_both_times_are_of_one_run(self):
        results = Results(ROWS)
        pair = accelerate.accelerate(results, "Mixtral-8x7B", 24, "pageable", 97)
        again = dataclasses.replace(pair[1].row, date="2100-01-01", command="another")
        newer = dataclasses.replace(pair[1], row=again)
        self.assertEqual(accelerate.of_one_run(*pair), pair)
        self.assertEqual(accelerate.of_one_run(pair[0], newer), (None, newer))


class RatioTest(parameterized.TestCase):
    @parameterized.parameters(
        ("cache, 4/0, prefetch", "load on demand"),
        ("cache, 4/2", "cache"),
        ("cache, prefetch", "cache"),
        ("cache", "load on demand"),
    )
    def test_the_row_of_the_run_itself_counts(self, row, base):
        """Not a ratio of two rows, either of which a later run may have replaced."""
        (found,) = dymoe_claims.ratio(Results(ROWS), row, base, 16)
        self.assertEqual(found.file, "policies_h200.jsonl")
        self.assertStartsWith(found.row.what, f"{row} over {base}, 16 GiB, TPOT")
        self.assertIn(
            f" {found.figure:.2f} [", (Path(__file__).parents[1] / "RESULTS.md").read_text()
        )


if __name__ == "__main__":
    absltest.main()
