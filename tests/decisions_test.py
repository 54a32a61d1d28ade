"""The picture of a shape: rows that the test makes, joined; what is missing is named."""

import dataclasses
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest
from absl.testing import absltest

from moejax.files.result_rows import ResultRow, append_rows
from scripts.studies.quality.task_cases import TASKS
from scripts.studies.speed.configurations import has_rows
from scripts.studies.tables import decisions

SHAPE = "Qwen3-30B-A3B"


def row(what: str, figure: float, unit: str, **beside: Any) -> ResultRow:
    return ResultRow(
        what=what, figure=figure, unit=unit, baseline=beside, device="NVIDIA H100",
        versions={"jax": "0.11"}, date="2026-11-25", command="x",
    )  # fmt: skip


def timed(method: str, gib: float, ms: float, share: float, shape: str = SHAPE) -> list[ResultRow]:
    end = f"{decisions.about(shape, method)}, batch 1, {gib:g} GiB, 1 prompts of 512 random tokens"
    end += "; routing decode: made up, as asked; prefill: near uniform"
    return [
        row(f"TTFT median, {end}", 100 * ms, "ms"),
        row(f"{decisions.PEAK}, {end}", 7.7 if method == "INT3" else gib - 0.5, "GiB"),
        row(f"TPOT median, {end}", ms, "ms"),
        row(f"{decisions.SHARE}, {end}", 100 * share, "%"),
    ]


def scored(method: str, share: float, figure: float, label: str = "demo") -> ResultRow:
    what = f"{label} | decide | wikitext-2 | {method} | {share:g}"
    return row(what, figure, "perplexity")


SPEED = [
    *timed("INT4", 6, 9.0, 0.25),
    *timed("INT4", 6, 8.0, 0.25),  # measured again
    *timed("INT4", 8, 4.0, 0.5),
    *timed("INT4", 12, 2.5, 0.7),
    *timed("INT2", 6, 4.0, 0.5),
    *timed("INT3", 6, 10.0, 0.3),
    *timed("BuddyMoE", 6, 5.0, 0.29),
    *timed("BuddyMoE", 12, 2.0, 0.7),
    *timed("INT4", 8, 1.0, 0.7, shape="Mixtral-8x7B"),
    row(f"refused, {decisions.about(SHAPE, 'DynaExq 4/2')}, batch 1, 6 GiB: 6 GiB hold none", 6,
        "GiB, refused"),
]  # fmt: skip
QUALITY = [
    scored("bf16", 0, 20.0),
    scored("INT4", 0, 20.5),
    scored("INT3", 0, 22.0),
    scored("INT2", 0, 30.0),
    scored("BuddyMoE", 0.25, 25.0),
    scored("BuddyMoE", 0.5, 23.0),
    scored("BuddyMoE", 0.75, 22.0),
]


class DecisionsTest(absltest.TestCase):
    def joined(self, speed=SPEED, quality=QUALITY):
        label, found = decisions.qualities(quality)
        points, missing = decisions.join(decisions.speeds(speed, SHAPE), found)
        return label, {(p.method, p.gib): p for p in points}, missing

    def test_rows_join_by_method_and_nearest_share(self):
        label, points, _ = self.joined()
        self.assertEqual(label, "demo")
        self.assertCountEqual(
            points,
            [("INT4", 6), ("INT4", 8), ("INT4", 12), ("INT3", 6), ("INT2", 6), ("BuddyMoE", 6),
             ("BuddyMoE", 12)],
        )  # fmt: skip
        self.assertEqual(points["INT4", 6].timed.tokens_per_s, 125)
        self.assertEqual(points["INT4", 8].timed.tokens_per_s, 250)
        quality = {key: point.scored["wikitext-2"].figure for key, point in points.items()}
        self.assertEqual(quality["INT4", 12], 20.5)
        self.assertEqual(quality["BuddyMoE", 6], 25.0)
        self.assertEqual(quality["BuddyMoE", 12], 22.0)

    def test_what_has_no_row_is_named_and_not_drawn(self):
        _, points, missing = self.joined(quality=QUALITY[:-1])  # no share near 0.7
        self.assertEqual(points["BuddyMoE", 12].scored, {})
        why = "BuddyMoE, not scored at a share of 0.70: wikitext-2"
        self.assertEqual(missing[why], [12])
        self.assertNotIn(6, missing["DynaExq 4/2, not timed"])
        self.assertEqual(missing["MiLo INT3, not timed"], [6, 8, 12, 16, 24])
        self.assertEqual(missing["DynaExq 4/2, refused: 6 GiB hold none"], [6])

    def test_tasks_are_of_the_model_that_has_most_methods(self):
        def of(method, label, *right):
            return [
                row(f"tasks | {task} | {method} | {label}", figure, "acc_norm")
                for task, figure in zip(TASKS, right, strict=False)
            ]

        rows = [
            *of("INT4", "study3", 0.3, 0.3, 0.3), *of("INT4", "study4", 0.4, 0.5, 0.6),
            *of("DynaExq 4/2, a half hot", "study4", 0, 0, 1), *of("INT4", "other", 0.1),
            *of("DynaExq 4/2, a quarter hot", "study4", 0.9),
            *of("random c = 0.5, rho 3", "study4", 0, 0, 0),
            *of("DynaExq 4/2, a quarter hot", "study5", 0.3, 0.2, 0.1),
        ]  # fmt: skip
        label, found = decisions.task_scores(rows)
        self.assertEqual(label, "study4")
        text = decisions.OF_TASKS
        self.assertEqual(found.keys(), {(text, "INT4"), (text, "DynaExq 4/2")})
        [one], shares = found[text, "INT4"], found[text, "DynaExq 4/2"]
        self.assertAlmostEqual(one.figure, 50)
        self.assertEqual(one.share, 0)
        # Of another model what that one lacks.
        figures = {of.share: round(of.figure) for of in shares}
        self.assertEqual(figures, {0.5: 33, 0.25: 20})
        self.assertAlmostEqual(one.goodness, 50)

    def test_the_best_of_a_budget_are_beaten_by_none(self):
        _, points, _ = self.joined()
        found = decisions.best(list(points.values()), "wikitext-2")
        # INT3 is slower and worse than INT4.
        self.assertEqual(
            found,
            # BuddyMoE, better in one too, was scored in another state than it was timed in.
            {("INT4", 6), ("INT2", 6), ("INT4", 8), ("INT4", 12)},
        )

    def test_routing_makes_no_difference_where_all_experts_fit(self):
        for share, best in ((1.0, {("INT3", 8)}), (0.9, {("INT4", 8)})):
            other = [
                dataclasses.replace(one, what=one.what.replace("routing", "routing another"))
                for one in timed("INT3", 8, 1.0, share)
            ]
            quality = [scored("INT4", 0, 22.0), scored("INT3", 0, 21.0)]
            _, points, _ = self.joined([*timed("INT4", 8, 4.0, 0.5), *other], quality)
            self.assertEqual(decisions.best(list(points.values()), "wikitext-2"), best)

    def test_a_method_is_timed_again_unless_every_budget_has_a_row(self):
        """A run that ends early has rows of some."""
        output = Path(self.enterContext(tempfile.TemporaryDirectory())) / "rows.jsonl"
        command = ["x", "--config.budgets=(6,8,)"]
        rows = [dataclasses.replace(one, command=shlex.join(command)) for one in SPEED]
        append_rows(output, rows[:4])
        self.assertFalse(has_rows(output, command))
        append_rows(output, rows[8:12])
        self.assertTrue(has_rows(output, command))
        self.assertFalse(has_rows(output, ["y"]))
        for more in ("--config.batches=(1,4)", "--config.budgets=(0,6.0,)"):
            self.assertFalse(has_rows(output, [*command, more]))
        resident = [row(f"TPOT median, x, batch {n}, {n} prompts of 512", 1, "ms") for n in (1, 4)]
        asked = ["z", "--config.batches=(1,4)"]
        resident = [dataclasses.replace(one, command=shlex.join(asked)) for one in resident]
        append_rows(output, resident[:1])
        self.assertFalse(has_rows(output, asked))
        append_rows(output, resident[1:])
        self.assertTrue(has_rows(output, asked))

    def test_a_text_without_a_score_keeps_its_place(self):
        """The figures after it would else stand under its name; and no INT4, no best one."""
        tasks = [
            row(f"tasks | {task} | DynaExq 4/2, a half hot | demo", 0.5, "acc_norm")
            for task in TASKS
        ]
        speed = [*timed("INT4", 8, 4.0, 0.5), *timed("DynaExq 4/2", 8, 3.0, 0.5)]
        text = decisions.Picture(SHAPE, speed, [*QUALITY, *tasks]).text()
        self.assertIn("| DynaExq 4/2 | not timed | 333, 300 ms: – / ~50.0 |", text)

    @pytest.mark.slow
    def test_the_table_and_the_picture(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        picture = decisions.Picture(SHAPE, SPEED, QUALITY)
        self.assertTrue(picture.save(folder).read_bytes().startswith(b"\x89PNG"))
        text = picture.text()
        self.assertIn("the demo model", text)
        self.assertIn("| INT3 | 100, 1000 ms (7.7 GiB): 22.0 |", text)
        self.assertIn("| 200, 500 ms: ~25.0 |", text)
        self.assertIn("| 500, 200 ms: ~22.0 |", text)
        self.assertIn("| DynaExq 4/2 | refused |", text)
        self.assertIn("- MiLo INT3, not timed: under 6, 8, 12, 16, 24 GiB", text)
