"""Predicted beside measured TPOT, of a made-up benchmark on a machine that is known."""

import json
import tempfile
from pathlib import Path

import numpy as np
from absl.testing import absltest

from moejax.files.result_rows import read_rows
from moejax.routing.simulate.costs import GIB
from moejax.routing.trace import trace_of_replay, write_trace
from tests.script_runs import run_module

BASE_MS, GIB_PER_S, EXPERT_BYTES, STEPS = 3.0, 50.0, 2_000_000, 240


def lru_misses(ids: np.ndarray, slots: int) -> int:
    """Counts misses of all layers in the second half of the steps [S, M, A], with LRU slots."""
    missed = 0
    for layer in range(ids.shape[1]):
        held: list[int] = []
        for i, step in enumerate(ids[:, layer].tolist()):
            missed += len(set(step) - set(held)) * (2 * i >= len(ids))
            held = [e for e in held if e not in step] + sorted(step)
            held = held[-slots:]
    return missed


class ComparePredictedTest(absltest.TestCase):
    def test_budgets_between_are_predicted_by_the_ends(self):
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        rng = np.random.default_rng(0)
        chance = np.arange(1, 17) ** -1.2
        chance /= chance.sum()
        ids = np.stack([
            [rng.choice(16, 2, replace=False, p=chance) for _ in range(3)] for _ in range(80)
        ]).astype(np.int32)  # fmt: skip
        write_trace(folder / "x.trace", trace_of_replay(ids, 16))
        replayed = np.resize(ids, (2 * STEPS, 3, 2))
        points = []
        for slots in (3, 5, 8, 11):
            missed = lru_misses(replayed, slots)
            moved = missed * EXPERT_BYTES / STEPS
            slower = 1.1 if slots == 8 else 1.0
            figures = {
                "TPOT median": slower * (BASE_MS + 1e3 * moved / (GIB_PER_S * GIB)),
                "link bytes of a decode step": moved / 1e6,
                "hit rate of decode": 100 * (1 - 2 * missed / replayed.size),
            }
            points.append({
                "status": "measured", "batch": 1,
                "placement": [f"memory: {slots} of 16 experts of a layer cached, 4 transient"],
                "figures": {name: {"value": value} for name, value in figures.items()},
                "ledger": {"decode": {"expert_bytes": EXPERT_BYTES}},
                "runs": [{"batches": [{"new_tokens": [STEPS + 1]}]}],
            })  # fmt: skip
        record = {
            "benchmark": {"model": "m"}, "points": points,
            "rows": [{"device": "d", "versions": {"jax": "1"}, "command": "c"}],
        }  # fmt: skip
        (folder / "x.json").write_text(json.dumps(record))
        done = run_module(
            "scripts.studies.speed.compare_predicted", str(folder / "x.json"),
            f"--trace={folder / 'x.trace'}", f"--output={folder / 'rows.jsonl'}",
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("3.000 ms a step and 50.0 GiB/s", done.stdout)
        rows = read_rows(folder / "rows.jsonl")
        np.testing.assert_allclose([row.figure for row in rows], [1, 1, 1 / 1.1, 1], rtol=2e-3)
        for row in rows:
            beside = row.baseline
            self.assertAlmostEqual(beside["hit_rate"], beside["predicted_hit_rate"], delta=2e-3)
        record["points"] = points[:2]
        (folder / "x.json").write_text(json.dumps(record))
        done = run_module(
            "scripts.studies.speed.compare_predicted", str(folder / "x.json"), "--trace=x"
        )
        self.assertIn("has 2 budgets with cached experts at batch 1: give three", done.stderr)
