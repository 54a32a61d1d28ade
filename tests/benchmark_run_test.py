"""The benchmark command on tiny models: what it counts, writes, replays and refuses."""

import csv
import json
import math
import pathlib
import re
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from moejax import benchmark
from moejax.benchmarking import models, running
from moejax.benchmarking.random_weights import expert_terms_nbytes
from moejax.config.benchmark import BenchmarkConfig
from moejax.config.commands import MemoryConfig
from moejax.experts.budget.planned import EMBEDDINGS_LEAF
from moejax.files import result_rows as results
from moejax.routing.trace import trace_of_replay, write_trace
from tests import commands, tiny_engine
from tests.folder_case import FolderTestCase


def run(*flags: str, **fields: Any) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command, run here."""
    given = {"platform": "cpu", "runs": 2, "new_tokens": 9, "steps_per_call": 4, **fields}
    return commands.run(benchmark.COMMAND, *flags, **given)


class Case(FolderTestCase):
    def record(self, *flags: str, **fields: Any) -> tuple[dict[str, Any], str]:
        """The JSON file and stdout of a run that succeeds."""
        output = self.directory / "x.json"
        status, out, err = run(*flags, output=output, **fields)
        self.assertEqual(status, 0, err)
        return json.loads(output.read_text()), out


class CheckpointTest(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.home = cls.class_folder()
        cls.checkpoint = cls.home / "tiny"
        tiny_engine.load_tiny_engine(cls.checkpoint)

    @parameterized.parameters(("dynaexq", "('int4','int2')", 0.001), ("on_demand", "()", 0))
    @pytest.mark.slow
    def test_a_policy_is_compared_with_the_exact_model(self, name, tiers, least):
        policy = {"policy.name": name, "policy.tiers": tiers, "policy.group_size": 16}
        record, out = self.record(
            checkpoint=self.checkpoint, prompt_tokens=24, fidelity_share=0.5, batches="(1,2)",
            runs=1, **policy, **({"policy.slots": "('2','8')"} if tiers != "()" else {}),
        )  # fmt: skip
        self.assertIn("KL", out)
        for point in record["points"]:
            figures = point["figures"]
            kl, same = figures["KL of the exact model"], figures["same likeliest token"]
            self.assertRegex(same["unit"], r"% of (12|24) tokens")
            if least:
                self.assertGreater(kl["value"], least)
                self.assertLess(kl["value"], 5)
            else:
                self.assertLess(abs(kl["value"]), 1e-6)
                self.assertEqual(same["value"], 100)

    @pytest.mark.slow
    def test_counts_and_times_of_prompts_of_a_file(self):
        lengths = [3, 40, 5, 17, 20]
        prompts = self.home / "prompts.txt"
        prompts.write_text("\n".join("!" * n for n in lengths))
        files = [self.directory / name for name in ("y.json", "y.csv", "y.jsonl")]
        status, out, err = run(
            checkpoint=self.checkpoint, prompts=prompts, batches="(2,)",
            output=",".join(map(str, files)),
        )  # fmt: skip
        self.assertEqual(status, 0, err)
        record = json.loads(files[0].read_text())
        for point, size in zip(record["points"], (2,), strict=True):
            self.assertEqual(point["batch"], size)
            self.assertEqual(point["requests_a_run"], 5)
            self.assertEqual(point["new_tokens"], 2 * 5 * 9)
            self.assertEqual(point["prompt_tokens"], 2 * sum(lengths))
            self.assertEqual(point["compile_s_inside_runs"], 0)  # the warm-up had every program
            for of_run in point["runs"]:
                self.assertLen(of_run["batches"], math.ceil(5 / size))
                inside = 0.0
                for batch in of_run["batches"]:
                    self.assertEqual(sum(steps for _, steps in batch["calls"]), 8)
                    self.assertEqual(batch["new_tokens"], [9] * len(batch["prompt_tokens"]))
                    inside += batch["ttft_s"] + batch["decode_s"]
                self.assertLess(inside, of_run["wall_s"])
                self.assertGreater(inside, 0.5 * of_run["wall_s"])
            tpots = [b["decode_s"] / 8 for r in point["runs"] for b in r["batches"]]
            found = point["figures"]["TPOT median"]
            self.assertBetween(found["value"], 1e3 * min(tpots), 1e3 * max(tpots))
            self.assertIn(f"\n{size:5d}", out)
        self._check_rows(record, *files[1:])

    def _check_rows(self, record: Any, as_csv: pathlib.Path, as_lines: pathlib.Path) -> None:
        with as_csv.open(newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertLen(rows, len(record["rows"]))
        for row, expected in zip(rows, record["rows"], strict=True):
            self.assertEqual(float(row["figure"]), expected["figure"])
            self.assertEqual(json.loads(row["baseline"]), expected["baseline"])
            for name in ("what", "unit", "device", "date", "command"):
                self.assertEqual(row[name], expected[name])
        self.assertEmpty(list(self.directory.glob("*.part")))
        lines = results.read_rows(as_lines)
        self.assertEqual([row.what for row in lines], [row["what"] for row in record["rows"]])
        ttft = next(row for row in record["rows"] if row["what"].startswith("TTFT median"))
        self.assertEqual(ttft["figure"], record["points"][0]["figures"]["TTFT median"]["value"])

    @pytest.mark.slow
    def test_what_moves_is_told_by_phase(self):
        record, out = self.record(
            "--stats", checkpoint=self.checkpoint, prompt_tokens=16, batches="(2,)",
            **{"memory.slots": 3},
        )  # fmt: skip
        [point] = record["points"]
        self.assertEqual(point["routing"], "the model's own")
        decode, prefill = point["ledger"]["decode"], point["ledger"]["prefill"]
        # One prefill chunk and 8 steps a run of 2 layers, of 2 to 4 experts for two tokens.
        self.assertBetween(prefill["totals"]["needed"], 2 * 2 * 2, 2 * 2 * 8)
        needed = decode["totals"]["needed"]
        self.assertBetween(needed, 2 * 8 * 2 * 2, 2 * 8 * 2 * 4)
        figures = point["figures"]
        read = figures["experts of a layer that a decode step reads"]["value"]
        self.assertAlmostEqual(read, needed / 16 / 2)
        moved = sum(decode["bytes"].values())
        self.assertAlmostEqual(figures["link bytes of a decode step"]["value"], moved / 16 / 1e6)
        self.assertAlmostEqual(figures["hit rate of decode"]["value"], 100 * decode["hit_rate"])
        self.assertEqual(out.count("decode: layer "), 2)

    def test_an_answer_may_end(self):
        ends = self.home / "ends"
        tiny_engine.load_tiny_engine(ends, eos_ids=tuple(range(160)))
        record, out = self.record("--stats", checkpoint=ends, prompt_tokens=16, ignore_eos=False)
        self.assertIn("--stats: nothing to count, as all experts are on the device", out)
        [point] = record["points"]
        self.assertEqual(point["new_tokens"], 2)  # two runs of a token, which ends the answer
        self.assertNotIn("TPOT median", point["figures"])

    def test_errors(self):
        bad = self.home / "bad.json"
        bad.write_text('[{"id": "q7", "conversations": [{"from": "human"}]}]')
        rows = self.home / "foreign.jsonl"
        rows.write_text('{"prompt": "mine"}\n')
        cases: list[tuple[dict[str, Any], str]] = [
            ({"prompts": bad}, r"bad.json, entry 0 \(id q7\): turn 0 needs"),
            ({"fidelity_share": 0.5}, "fidelity_share=0.5 has no effect without policy.name"),
            ({"prompt_tokens": 250}, "250 prompt tokens and new_tokens=9 do not fit .* 256"),
            ({"shape": "tiny", "trace": self.home / "none.trace"}, "there is no trace"),
            ({"output": self.home / "no" / "x.json"}, "output .* lies in"),
            ({"shape": "tiny", "planes": "2,4"}, "planes=2,4 is read by a policy's tiers"),
            ({"shift_every": 8}, "shift_every=8 has no effect without shape"),
            ({"bits": 2}, "bits=2 has no effect without shape"),
            ({"split": "paragraphs"}, "split='paragraphs' has no effect without prompts"),
            ({"output": bad}, "bad.json is there and holds no earlier result"),
            ({"output": rows}, "foreign.jsonl is there and holds no rows of results"),
            ({"checkpoint": self.home / "nothing"}, "nothing"),
        ]
        for fields, said in cases:
            status, _, err = run(**{"checkpoint": self.checkpoint, **fields})
            self.assertEqual(status, 1)
            self.assertRegex(err, said)
            self.assertLen(re.findall("^error: ", err, re.MULTILINE), 1)


class ShapeTest(Case):
    @parameterized.parameters(([0, 0, 0], 100.0), ([0, 1, 2], 0.0))
    @pytest.mark.slow
    def test_decode_takes_the_experts_of_the_trace(self, turns, hit_rate):
        pairs = np.array([[0, 1], [2, 3], [4, 5]])[np.resize(turns, 30)]
        trace = self.directory / "x.trace"
        write_trace(trace, trace_of_replay(pairs[:, None].repeat(2, axis=1), 8))
        record, out = self.record(
            shape="tiny", trace=trace, prompt_tokens=16, **{"memory.slots": 2}
        )
        [point] = record["points"]
        figures = point["figures"]
        self.assertEqual(figures["hit rate of decode"]["value"], hit_rate)
        self.assertEqual(figures["experts of a layer that a decode step reads"]["value"], 2)
        self.assertIn("trace x.trace, its own gates", out)
        self.assertIn(", memory slots=2, batch 1, ", record["rows"][0]["what"])

    @pytest.mark.slow
    def test_a_refused_budget_is_a_row_and_the_least_will_do(self):
        sizes = {"shape": "tiny", "prompt_tokens": 16}
        lines = self.directory / "rows.jsonl"
        with mock.patch.object(running, "print_stderr") as said:
            # The file has a point as soon as it is known.
            said.side_effect = lambda *_, **__: seen.append(lines.exists())
            seen: list[bool] = []
            json_name = self.directory / "x.json"
            status, out, err = run(budgets="(0.0001, 1)", output=f"{json_name},{lines}", **sizes)
        self.assertEqual((status, seen), (0, [False, True]), err)
        record = json.loads(json_name.read_text())
        appended = [row.what for row in results.read_rows(lines)]
        self.assertEqual(appended, [row["what"] for row in record["rows"]])
        refused, whole = record["points"]
        self.assertEqual((refused["status"], whole["status"]), ("refused", "measured"))
        self.assertIn("refused: memory.device_gib=0.0001 is too little", out)
        first = record["rows"][0]
        self.assertEqual((first["figure"], first["unit"]), (0.0001, "GiB, refused"))
        least = re.search(r"the smallest that would do is (\S+) GiB", refused["reason"])
        self.assertIsNotNone(least)
        found, _ = self.record(budgets=f"({least[1]},)", **sizes)
        [point] = found["points"]
        self.assertEqual(point["status"], "measured")
        planned = point["figures"]["planned device memory"]["value"]
        self.assertLessEqual(planned, float(least[1]))
        status, _, err = run(**sizes, **{"memory.device_gib": 0.0001})
        self.assertEqual(status, 1)
        self.assertRegex(err, f"error: .* the smallest that would do is {least[1]} GiB")

    def test_embeddings_come_back_from_host_memory(self):
        """They do for a larger budget; `device_put` from pinned memory needs a place's kind."""
        device = jax.devices("cpu")[0]
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        made: Any = models.models_of(BenchmarkConfig(shape="tiny", platform="cpu"))
        with mock.patch.object(models, "host_place", return_value=pinned):
            for on_host, kind in ((True, "pinned_host"), (False, "device")):
                made._place_embeddings(on_host=on_host)
                self.assertEqual(made._dense[EMBEDDINGS_LEAF].sharding.memory_kind, kind)

    @pytest.mark.slow
    def test_experts_that_move_have_compensators_on_the_device(self):
        memory = MemoryConfig(slots=4)
        for rank in (0, 8):
            config = BenchmarkConfig(
                shape="tiny", bits=3, expert_rank=rank, platform="cpu", memory=memory
            )
            made: Any = models.models_of(config)
            loaded = made.load(1, 0.0, 64)
            [tier] = loaded.runner.memory.tiers
            held = sum(leaf.nbytes for leaf in jax.tree.leaves(tier.store.terms))
            self.assertEqual(held, expert_terms_nbytes(made._own, made._packing))
            self.assertEqual(held > 0, rank > 0)
            self.assertEqual(loaded.budget.device.get("low-rank factors of experts", 0), held)
        sizes = {"shape": "tiny", "bits": 3, "memory.slots": 4, "prompt_tokens": 16, "runs": 1}
        self.assertEqual(self.record(expert_rank=8, **sizes)[0]["points"][0]["status"], "measured")
        status, _, err = run(expert_rank=8, **sizes, **{"policy.name": "on_demand"})
        self.assertEqual(status, 1)
        self.assertIn("expert_rank=8 is for experts without a policy, on one device", err)

    @pytest.mark.slow
    def test_a_policy_tells_its_gate_mass(self):
        record, out = self.record(
            "--stats", shape="tiny", prompt_tokens=16, new_tokens=65, skew="zipf:1.5",
            **{"policy.name": "dynaexq", "policy.tiers": "('int4','int2')",
               "policy.slots": "('2','8')", "policy.settings": "period=16"},
        )  # fmt: skip
        [point] = record["points"]
        shares = {
            name: figure["value"]
            for name, figure in point["figures"].items()
            if name.startswith("gate mass of decode")
        }
        self.assertAlmostEqual(
            shares["gate mass of decode, int4"] + shares["gate mass of decode, int2"], 100, places=2
        )
        self.assertGreater(shares["gate mass of decode, int4"], 40)  # 2 of 8, but the hottest
        said = ", policy dynaexq (int4/int2, slots 2/8, period=16), batch 1, "
        self.assertTrue(all(said in row["what"] for row in record["rows"]))
        self.assertEqual(point["figures"]["experts in slots"]["value"], 25)
        self.assertIn("r^-1.5", point["routing"])
        self.assertIn("decode: gate mass: int4", out)
        self.assertEqual(out.count("decode: layer "), 2)

    @pytest.mark.gpu(gib=8)
    def test_real_shapes_run_on_their_kernels(self):
        record, _ = self.record(
            shape="Qwen3-30B-A3B", layers=2, prompt_tokens=64, batches="(1, 4)", platform="gpu",
            **{"memory.slots": 32, "memory.prefetch": 8},
        )  # fmt: skip
        self.assertLen(record["points"], 2)
        for point in record["points"]:
            self.assertRegex(point["kernels"]["decode experts"], "^(mosaic|triton)")
            self.assertEqual(point["compile_s_inside_runs"], 0)
            figures = point["figures"]
            self.assertIn("device memory peak", figures)
            self.assertGreater(figures["link bytes of a decode step"]["value"], 0)
            self.assertBetween(figures["share of the byte floor"]["value"], 0.1, 100)
