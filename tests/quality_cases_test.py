"""Cases, bars and verdicts of the studies of quality, and what they are compared with."""

import re
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.evaluation.fidelity import Sample, compare, predictions
from moejax.inference.runner import Runner
from moejax.policies.buddy_lists import BuddyLists
from scripts.studies.quality import buddymoe as quality_buddymoe
from scripts.studies.quality import cases, dymoe, dynaexq, exact
from scripts.studies.quality.bench import Model, Windows
from scripts.studies.quality.cases import MET, NOT_MEASURED, NOT_MET, NOT_SHOWN, Claim, Comparison
from scripts.studies.quality.subject import Subject

QUALITY = Path(__file__).parents[1] / "scripts" / "studies" / "quality"


class VerdictTest(parameterized.TestCase):
    nats: ClassVar = {
        "a": [1.0, 2.0, 3.0, 4.0], "better": [0.9, 1.91, 2.89, 3.9], "noisy": [1.2, 1.7, 3.2, 3.8],
        "short": [1.0],
    }  # fmt: skip

    @parameterized.parameters(
        ("better", "a", MET), ("a", "better", NOT_MET), ("noisy", "a", NOT_SHOWN)
    )
    def test_windows_are_compared_in_pairs(self, own, null, expected):
        found = cases.judge(Comparison(((1.0, own), (-1.0, null))), self.nats)
        assert found is not None
        self.assertEqual(found.verdict, expected)
        lost = np.array(self.nats[own]) - np.array(self.nats[null])
        self.assertAlmostEqual(found.mean, lost.mean())
        self.assertAlmostEqual(found.error, np.std(lost, ddof=1) / 2)

    def test_a_claim_needs_all_of_its_parts(self):
        def claim(*pairs: tuple[str, str]) -> Claim:
            tests = tuple(Comparison(((1.0, own), (-1.0, null))) for own, null in pairs)
            return Claim("p", "said", "1", "bar", tests)

        for pairs, expected in (
            ([("better", "a")], MET),
            ([("better", "a"), ("noisy", "a")], NOT_SHOWN),
            ([("better", "a"), ("noisy", "a"), ("a", "better")], NOT_MET),
            ([("better", "none")], NOT_MEASURED),
            ([("short", "a")], NOT_MEASURED),
            ([], NOT_MEASURED),
        ):
            self.assertEqual(cases.verdict(claim(*pairs), self.nats)[0], expected)

    def test_reordered_lists_hold_the_same_buddies(self):
        lists = BuddyLists(
            np.array([[[3, 1, -1], [2, -1, -1]]]), np.array([[[0.6, 0.4, 0], [1, 0, 0]]])
        )
        found = quality_buddymoe.reordered(lists, np.array([[[5.0, 2, 1], [0, 7, 0]]]))
        np.testing.assert_array_equal(found.ids, [[[1, 3, -1], [2, -1, -1]]])
        np.testing.assert_array_equal(found.q, lists.q)

    def test_each_measured_case_is_in_one_program_of_the_whole(self):
        asked = [
            line.split("|", 1)
            for line in (QUALITY / "all.sh").read_text().splitlines()
            if re.match(r"[a-z]+\|", line)
        ]
        rows = cases.rows_of(QUALITY / "study3_quality.jsonl")
        found = {(b["section"], b["case"]) for row in rows if "case" in (b := row["baseline"])}
        self.assertLen({section for section, _ in found}, 8)
        for section, case in found:
            own = [which for of, which in asked if of == section and re.search(which, case)]
            self.assertLen(own, 1, f"{section}: {case}")

    def test_every_bar_names_rows_of_its_sections(self):
        claims = (*dynaexq.CLAIMS, *dymoe.claims(7), *quality_buddymoe.CLAIMS, *exact.CLAIMS)
        for claim in claims:
            self.assertNotEmpty(claim.tests)
            for test in claim.tests:
                for _, row in test.terms:
                    self.assertLen(row.split(" | "), 4, row)
                self.assertAlmostEqual(sum(factor for factor, _ in test.terms), 0.0)


class BesideTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_runs_beside_the_exact_model(self):
        model = Model("demo", jax.devices("cpu")[0], "rtn")
        tokens = np.random.default_rng(0).integers(3, 4000, (2, 33), np.int32)
        texts = [Windows(name, tokens, ("x", "x")) for name in ("wikitext-2", "mixed")]
        others = {text.name: text for text in texts}
        subject = Subject(model, None, *texts, texts[0], others)
        points = {}
        for section in (exact.fidelity, exact.layers):
            for case in section(subject):
                if case.name == "uniform int2":
                    found = {f"{section.__name__} {p.series}": p for p in case.measure()}
                    points |= found
        plain = subject.uniform("int2", texts[1])
        kl = points["fidelity uniform int2"]
        self.assertAlmostEqual(kl.more["perplexity"] / plain.perplexity, 1, delta=1e-5)
        sample = Sample(tokens[:, :-1], np.tile(np.arange(32, dtype=np.int32), (2, 1)))
        coarse = dict(zip(("moe.gate_up", "moe.down"), model.experts("int2"), strict=True))
        coarse = {n: rows.reshape(model.weights[n].shape) for n, rows in coarse.items()}
        own, reference = (
            predictions(Runner(model.config, weights, model.device).logits, sample)
            for weights in (model.weights | coarse, model.weights)
        )
        expected = compare(reference, own)
        self.assertAlmostEqual(kl.figure / 1e3, expected.mean_kl, delta=1e-4 * expected.mean_kl)
        same = points["fidelity uniform int2, same likeliest token"].figure
        self.assertAlmostEqual(same, 100 * expected.same_choice, delta=1e-4)
        errors = [points[f"layers uniform int2, {name}"].figure for name in ("measured", "bound")]
        self.assertBetween(errors[0], 20, errors[1])
