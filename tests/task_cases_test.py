"""Task scores by method: how answers are kept, and weighed against each other."""

import numpy as np
from absl.testing import absltest

from scripts.studies.quality import task_cases
from scripts.studies.quality.cases import MET, NOT_MEASURED, verdict


def row(task: str, method: str, right: np.ndarray) -> dict[str, object]:
    return {
        "what": f"tasks | {task} | {method} | study",
        "baseline": {"right": task_cases.packed(right), "documents": len(right)},
    }


class TaskScoresTest(absltest.TestCase):
    def test_answers_are_kept(self):
        for count in (1, 8, 13, 1000):
            right = np.random.default_rng(count).random(count) < 0.5
            np.testing.assert_array_equal(
                task_cases.unpacked(task_cases.packed(right), count), right
            )

    def test_tasks_count_equally(self):
        rows = [
            row("piqa", "exact", np.array([True, False])),
            row("arc_easy", "exact", np.array([False] * 3 + [True] * 5)),
        ]
        wrong = task_cases.wrong_of(rows, "study")
        self.assertAlmostEqual(np.mean(wrong["piqa | exact"]), 0.5)
        self.assertAlmostEqual(np.mean(wrong["mean of the tasks | exact"]), (0.5 + 0.375) / 2)
        self.assertEmpty(task_cases.wrong_of(rows, "demo"))

    def test_claims_are_judged_by_documents(self):
        answers = np.random.default_rng(0).random((2, 1000)) < np.array([[0.5], [0.7]])
        worse, better = answers[0] & answers[1], answers[1]
        rows = [
            row("piqa", "DyMoE 4/0, r = 0.75", worse),
            row("piqa", "DyMoE 4/2, r = 0.75", better),
        ]
        (claim,) = (c for c in task_cases.CLAIMS if "in place of skipping" in c.said)
        self.assertEqual(verdict(claim, task_cases.wrong_of(rows, "study"))[0], MET)
        self.assertEqual(verdict(claim, task_cases.wrong_of(rows[:1], "study"))[0], NOT_MEASURED)

    def test_methods_of_claims_exist(self):
        named = {key for c in task_cases.CLAIMS for t in c.tests for _, key in t.terms}
        known = {f"{task_cases.ALL} | {name}" for name in task_cases.METHODS}
        self.assertEmpty(named - known)
