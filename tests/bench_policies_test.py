"""The benchmark of policies: its workloads are what they say, and its sections run on a CPU."""

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.benchmarking.random_weights import Packing, random_weights
from moejax.benchmarking.routing import EXPONENTS, QWEN3_HIT_RATES, make_workload
from moejax.benchmarking.shape_memory import TierPlan
from moejax.errors import MoejaxError
from moejax.files.result_rows import read_rows
from moejax.models.shapes import SHAPES, TINY
from moejax.policies.dymoe import DyMoE
from scripts.studies.measuring import Report
from scripts.studies.speed import cost, harness
from scripts.studies.speed.harness import Lab, Options, Run, Sizes
from scripts.studies.speed.sections import SECTIONS
from tests.made_up_routing_test import lru_hit_rate
from tests.script_runs import run_module

FEW_LAYERS = {
    name: dataclasses.replace(config, num_layers=3, moe_layers=(0, 1, 2))
    for name, config in SHAPES.items()
    if name in ("Qwen3-30B-A3B", "Mixtral-8x7B")
}
SKEW = EXPONENTS["Qwen3-30B-A3B"]
QWEN3, MIXTRAL = FEW_LAYERS["Qwen3-30B-A3B"], FEW_LAYERS["Mixtral-8x7B"]
OPTIONS = Options(
    batches=(1,), cache_rates=(0.5,), n_hot=2, period=2, bulk=4, requests=4, shift_every=4,
    shift_share=0.5, ttft=False,
)  # fmt: skip


class WorkloadTest(parameterized.TestCase):
    @parameterized.parameters((QWEN3, 1), (QWEN3, 3), (MIXTRAL, 2))
    def test_the_chosen_are_the_likeliest(self, config, batch):
        made = make_workload(config, num_steps=40, batch=batch, exponent=SKEW, shift_every=16)
        width = config.experts_per_token
        self.assertEqual(made.ids.shape, (40, 3, batch, width))
        self.assertEqual(made.probabilities.shape, (40, 3, batch, config.num_experts))
        np.testing.assert_allclose(made.probabilities.sum(-1), 1, rtol=1e-5)
        chosen = np.take_along_axis(made.probabilities, made.ids, axis=-1)
        np.testing.assert_array_equal(chosen, -np.sort(-made.probabilities, axis=-1)[..., :width])
        self.assertTrue((np.sort(made.ids, axis=-1)[..., 1:] > np.sort(made.ids)[..., :-1]).all())

    @parameterized.parameters((QWEN3, 0.25), (MIXTRAL, 0.65))
    def test_weights_are_those_of_a_trained_router(self, config, top):
        skew = SKEW if config is QWEN3 else 0.0
        made = make_workload(config, num_steps=200, batch=1, exponent=skew)
        chosen = np.take_along_axis(made.probabilities, made.ids, axis=-1)
        weights = chosen / chosen.sum(axis=-1, keepdims=True)
        self.assertAlmostEqual(float(weights[..., 0].mean()), top, delta=0.02)

    def test_caches_hit_as_often_as_published(self):
        made = make_workload(QWEN3, num_steps=300, batch=1, exponent=SKEW)
        for slots, share in QWEN3_HIT_RATES.items():
            self.assertAlmostEqual(lru_hit_rate(made.ids[:, :, 0], slots, 128), share, delta=0.03)
        even = make_workload(MIXTRAL, num_steps=300, batch=1)
        self.assertAlmostEqual(lru_hit_rate(even.ids[:, :, 0], 4, 8), 0.5, delta=0.04)

    def test_the_hottest_quarter_carries_most_and_shifts(self):
        how = {"num_steps": 400, "batch": 1, "exponent": SKEW}
        steady = make_workload(QWEN3, **how)
        shifting = make_workload(QWEN3, **how, shift_every=100, shift_share=1.0)
        self.assertEqual(steady.num_shifts, 0)
        # Each layer at a time of its own: after 100, 133 and 166 steps, and then every 100.
        self.assertEqual(shifting.num_shifts, 9)
        early, late = slice(0, 100), slice(300, 400)
        for made, least, most in ((steady, 0.75, 1.0), (shifting, 0.1, 0.5)):
            first = made.hottest(32, early)
            share = [np.isin(made.ids[late, layer], first[layer]).mean() for layer in range(3)]
            self.assertBetween(float(np.mean(share)), least, most)

    @parameterized.parameters(0.0, 0.85, 1.0)
    def test_needed_experts_are_expected_with_the_recall(self, recall):
        made = make_workload(QWEN3, num_steps=100, batch=1, exponent=SKEW, recall=recall)
        expected = made.expected(8)
        needed = (expected[:, :, None] == made.ids[:, :, 0, :, None]).any(axis=-1)
        self.assertAlmostEqual(float(needed.mean()), recall, delta=0.03)
        np.testing.assert_allclose(
            np.sort(made.predicted, axis=-1), np.sort(made.probabilities, axis=-1)
        )

    def test_coactivations_are_counts_of_tokens(self):
        made = make_workload(TINY, num_steps=30, batch=2)
        counts = made.coactivations()
        both = np.zeros_like(counts)
        for step, layer, row in np.ndindex(made.ids.shape[:3]):
            first, second = made.ids[step, layer, row]
            both[layer, first, second] += 1
            both[layer, second, first] += 1
        np.testing.assert_array_equal(counts, both)


class SectionTest(absltest.TestCase):
    """Each on the tiny shape: rows with finite figures, and baselines that are what they say."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        sizes = Sizes(context=64, prompt=16, steps=16, per_call=4)
        cls.lab = Lab(TINY, "tiny", jax.devices("cpu")[0], sizes)

    def run_section(self, name: str, **options: Any) -> dict[str, Any]:
        report = Report(self.lab.device, name, "")
        run = Run(self.lab, report, dataclasses.replace(OPTIONS, **options))
        SECTIONS[name][0](run)
        self.assertEqual(run.failed, [])
        rows = {row.what.removesuffix(f", {name}"): row for row in report.rows}
        for row in report.rows:
            beside = {name: value for name, value in row.baseline.items() if name != "routing"}
            for figure in (row.figure, *beside.values()):
                self.assertTrue(math.isfinite(figure), f"{row.what}: {row.baseline}")
            if "TPOT" in row.what and row.unit == "ms":
                self.assertGreater(row.figure, 0)
        return rows

    def ends(self, rows: dict[str, Any], ending: str) -> list[Any]:
        return [row for what, row in rows.items() if what.endswith(ending)]

    @pytest.mark.slow
    def test_products_on_no_kernel_are_not_timed(self):
        report = Report(self.lab.device, "x", "")
        run = Run(self.lab, report, OPTIONS)
        refused = mock.Mock(side_effect=MoejaxError("they run on no kernel"))
        weights = random_weights(self.lab.config, Packing(bits=4), self.lab.device)
        runner = self.lab.runner(None, weights)
        with mock.patch.object(harness, "refuse_dequantized", refused):
            found = run.attempt("x", lambda: self.lab.timed(runner, run.workload()))
        self.assertIsNone(found)
        self.assertNotEmpty(run.failed)
        self.assertEmpty(report.rows)

    @pytest.mark.slow
    def test_the_command_writes_rows(self):
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "rows.jsonl"
        done = run_module(
            "scripts.studies.speed.bench_policies", "--model=tiny", "--device=cpu",
            "--section=buddymoe", "--cache_rate=0.5", "--only=original", "--nottft", "--context=64",
            "--prompt=16", "--steps=16", "--per_call=4", f"--out={path}",
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotEmpty(read_rows(path))

    @pytest.mark.slow
    def test_dynaexq(self):
        rows = self.run_section("dynaexq")
        resident, pool, found = self.ends(rows, "TPOT")
        self.assertEqual(pool.baseline["hit_rate"], 1)
        self.assertEqual(found.baseline["uniform_pool_ms"], pool.figure)
        self.assertEqual(found.baseline["uniform_resident_ms"], resident.figure)
        self.assertGreater(found.baseline["promotions_a_token"], 0)
        (hot,) = self.ends(rows, "gate mass of the hot tier")
        self.assertBetween(hot.figure, 1, 99)
        self.assertAlmostEqual(
            found.baseline["gate_int4"] + found.baseline["gate_int2"], 1, places=3
        )
        (over, _) = [row for what, row in rows.items() if "throughput over" in what]
        self.assertAlmostEqual(over.figure, 100 * pool.figure / found.figure)

    @pytest.mark.slow
    def test_dynaexq_wide(self):
        rows = self.run_section(
            "dynaexq_wide", gibs=(0.01,), split="2,8", only=("uniform", "GiB"), ttft=True
        )
        low, narrow, steady, _, wide, high = self.ends(rows, "TPOT")
        for resident, name in ((low, "int4"), (high, "bf16")):
            self.assertIn(f"uniform {name}, resident model, TTFT", rows)
            over, _ = self.ends(rows, f"throughput over the resident {name} model")
            self.assertAlmostEqual(over.figure, 100 * resident.figure / steady.figure)
        ratio, _ = self.ends(rows, "time over that of the bytes")
        share = ratio.baseline["hot_share"]
        self.assertBetween(share, 0.01, 0.99)
        model = narrow.figure + share * (wide.figure - narrow.figure)
        self.assertAlmostEqual(ratio.figure, steady.figure / model)
        over, _ = self.ends(rows, "throughput over uniform int4")
        self.assertAlmostEqual(over.figure, 100 * narrow.figure / steady.figure)
        hot, _ = self.ends(rows, "gate mass of the hot tier")
        self.assertBetween(hot.figure, 1, 99)

    def check_table(self, gib: float, only: Sequence[str], ttft: bool = False) -> dict[str, Any]:
        return self.run_section("dymoe", gibs=(gib,), only=only, ttft=ttft)

    @pytest.mark.slow
    def test_dymoe_loads_and_caches(self):
        rows = self.check_table(0.00395, ("load on demand", "cache, 0"), ttft=True)
        on_demand, cache = self.ends(rows, "TPOT")[:2]
        self.assertEqual(on_demand.baseline["hit_rate"], 0)
        self.assertGreater(cache.baseline["hit_rate"], 0)
        self.assertLess(cache.baseline["megabytes_a_step"], on_demand.baseline["megabytes_a_step"])
        ratio = rows["cache over load on demand, 0.00395 GiB, TPOT"]
        self.assertAlmostEqual(ratio.figure, on_demand.figure / cache.figure)
        self.assertIn("cache over load on demand, 0.00395 GiB, TTFT", rows)

    @pytest.mark.slow
    def test_dymoe_quantizes_and_leaves_out(self):
        rows = self.check_table(0.00168, ("4/2, prefetch, ", "4/0, prefetch, "))
        low, skips = self.ends(rows, "TPOT")
        for name, row in (("gate_int2", low), ("gate_skipped", skips)):
            self.assertBetween(row.baseline[name], 0.01, 0.5)
        self.assertGreater(low.baseline["prefetched_a_step"], 0)

    @pytest.mark.slow
    def test_dymoe_by_planes_that_share_slots(self):
        shared = {"slots": 6, "transient": 4, "planes": 2}
        plans = [TierPlan(bits=4, refines=2, **shared), TierPlan(bits=2, **shared)]
        memory = self.lab.tiered(DyMoE(retention=0.75, prefetch=0), plans)
        run = Run(self.lab, Report(self.lab.device, "dymoe", ""), OPTIONS)
        found = self.lab.timed(self.lab.runner(memory), run.workload())
        self.assertBetween(found.facts["gate_int2"], 0.01, 0.5)
        self.assertGreater(found.facts["misses_a_step"], 0)

    @pytest.mark.slow
    def test_dymoe_spends_slots_best_on_high_precision(self):
        sizes, moved = Sizes(context=256, prompt=16, steps=64, per_call=4), []
        with mock.patch.object(self.lab, "sizes", sizes):
            for split in ("4,0", "3,2"):
                rows = self.run_section(
                    "dymoe", gibs=(0.012,), only=("4/2, 0",), split=split, exponent=0.0
                )
                moved.append(self.ends(rows, "TPOT")[0].baseline["megabytes_a_step"])
        self.assertAlmostEqual(moved[0] / moved[1], 0.81, delta=0.05)

    @pytest.mark.slow
    def test_buddymoe(self):
        rows = self.run_section(
            "buddymoe", only=("original", "co-activation, c"), batches=(2,),
            ttft=True,
        )  # fmt: skip
        prompted = [row.what.split(",")[0] for row in self.ends(rows, "TTFT")]
        self.assertEqual(prompted, ["original", "co-activation"])
        original, found = self.ends(rows, "TPOT")[:2]
        self.assertAlmostEqual(original.baseline["tokens_per_s"], 2e3 / original.figure)
        self.assertEqual(found.baseline["original_ms"], original.figure)
        self.assertGreater(found.baseline["replaced_share"], 0)
        self.assertGreater(found.baseline["gate_substituted"], 0)
        fewer = self.ends(rows, "fewer bytes over the link")[0]
        moved = found.baseline["megabytes_a_step"], original.baseline["megabytes_a_step"]
        self.assertAlmostEqual(fewer.figure, 100 * (1 - moved[0] / moved[1]))

    @pytest.mark.slow
    def test_cost(self):
        self.enterContext(mock.patch.object(cost, "ROUNDS", 2))
        for rate, only in ((1.0, ("4/0", "rho 0", "INT8")), (0.5, ("4/2", "useless"))):
            rows = self.run_section("cost", cache_rates=(rate,), only=only)
            costs = self.ends(rows, "cost of a step")
            self.assertLen(costs, len(only))
            self.assertLen(self.ends(rows, "TPOT"), len(only))
            for row in costs:
                facts = row.baseline
                self.assertBetween(row.figure, facts["lowest_round"], facts["highest_round"])
                self.assertEqual(facts["misses_a_step"], facts["pool_misses_a_step"], row.what)
                self.assertEqual(facts["misses_a_step"] > 0, rate < 1, row.what)

    def test_what_fails_is_named(self):
        run = Run(self.lab, Report(self.lab.device, "x", ""), OPTIONS)
        self.assertIsNone(run.attempt("division", lambda: 1 // 0))
        self.assertEqual(run.failed, ["division"])
