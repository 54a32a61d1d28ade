"""Sweeps: grids, the model of time, the front, and the main from a trace to rows and a picture."""

import dataclasses
import itertools
import json
from unittest import mock

from absl.testing import absltest, parameterized

from moejax import sweep
from moejax.config.grid import _axis, described, eighths, settings
from moejax.errors import MoejaxError
from moejax.files.result_rows import ResultRow, append_rows, read_rows
from moejax.policies.baselines import OnDemand
from moejax.routing.profile_file import save_buddies
from moejax.routing.simulate import recommend, sweeping, table
from moejax.routing.simulate.costs import GIB, Machine, measured_rows
from moejax.routing.simulate.sweeping import Tiers
from moejax.routing.simulate.sweeping import sweep as sweep_over
from moejax.routing.trace import write_trace
from tests import commands, slow
from tests.buddy_profiles import random_profile
from tests.folder_case import FolderTestCase
from tests.simulated_traces import random_trace

FORMER = ResultRow(
    what="TPOT", figure=1.0, unit="ms", baseline={}, device="x", versions={}, date="x", command="x"
)
MACHINE = Machine(base_ms=1.0, link_gib_per_s=10.0)


class GridTest(parameterized.TestCase):
    @parameterized.parameters(
        ("slots=8:24:8", ("slots", [8, 16, 24])),
        ("slots=3:5", ("slots", [3, 4, 5])),
        ("slots=8,24", ("slots", [8, 24])),
        ("retention=0.5:0.7:0.1", ("retention", [0.5, 0.6, 0.7])),
        ("slots=24/104,32/96", ("slots", [(24, 104), (32, 96)])),
        ("low=int2,skip", ("low", ["int2", "skip"])),
        ("n_hot=none,4", ("n_hot", [None, 4])),
        ("renormalise=true,false", ("renormalise", [True, False])),
        ("a=1,5:6,2.5", ("a", [1, 5, 6, 2.5])),
        ("parts=dynaexq+dymoe", ("parts", ["dynaexq+dymoe"])),
        ("lists=../a-b/c_1.safetensors", ("lists", ["../a-b/c_1.safetensors"])),
    )
    def test_axes(self, text, expected):
        self.assertEqual(_axis(text), expected)

    @parameterized.parameters(
        ("slots", "is not NAME=VALUES"),
        ("slots=", "is not NAME=VALUES"),
        ("slots=8:4", "holds no number"),
        ("slots=1:9:0", "holds no number"),
        ("slots=nan:8:1", "holds no number"),
        ("slots=1:inf:1", "holds no number"),
        ("slots=a:b", "is not FIRST:LAST:STEP"),
        ("slots=$", "is no value"),
    )
    def test_what_cannot_be_read(self, text, said):
        with self.assertRaisesRegex(MoejaxError, said):
            _axis(text)

    def test_every_combination(self):
        found = settings(["slots=4,8", "prefetch=0:2"])
        self.assertLen(found, 6)
        self.assertEqual(found[1], {"slots": 4, "prefetch": 1})
        self.assertEqual(described({"slots": (2, 3), "r": 0.5}), "slots=2/3 r=0.5")
        with self.assertRaisesRegex(MoejaxError, "stands twice"):
            settings(["slots=1", "slots=2"])
        with self.assertRaisesRegex(MoejaxError, "at most"):
            settings(["a=1:1000", "b=1:1000"])
        with self.assertRaisesRegex(MoejaxError, "10000000000 settings; at most"):
            settings([f"{name}=1:100000" for name in "ab"])
        self.assertEqual(
            settings(["slots=4", "8", "prefetch=0", "2"]), settings(["slots=4,8", "prefetch=0,2"])
        )


class TableTest(absltest.TestCase):
    def test_the_front(self):
        def point(tpot: float, gib: float, gate: float) -> dict[str, float]:
            return {"tpot_ms": tpot, "device_gib": gib, "gate_a": gate, "gate_substituted": 0.0}

        points = [point(2, 1, 1), point(1, 2, 1), point(2, 2, 1), point(2, 2, 0.5), point(2, 1, 1),
                  point(1.5, 1, 0.5)]  # fmt: skip
        self.assertEqual(table.pareto(points), [0, 1, 5])
        self.assertEqual(table.spread(points, [0, 1, 5], 2), [1, 0])


class RecommendedTest(parameterized.TestCase):
    @parameterized.parameters(
        (1.005, 0.9, "on_demand"),  # within a percent the exact one
        (1.05, 0.9, "dymoe"),
        (1.05, 0.99, "on_demand"),  # the other one is below the floor
    )
    def test_precision_is_given_up_for_time_alone(self, exact_ms, floor, expected):
        tiers = Tiers(names=("int4",), expert_bytes=(1000,))
        chosen = [
            recommend._Candidate(policy="dymoe", tiers=tiers, setting={"slots": 4, "low": "skip"}),
            recommend._Candidate(policy="on_demand", tiers=tiers, setting={"slots": 4}),
        ]
        swept = [
            mock.Mock(figures=lambda _, ms=ms, share=share: {
                "tpot_ms": ms, "gate_int4": share, "gate_substituted": 0.0,
            })
            for ms, share in ((1.0, 0.96), (exact_ms, 1.0))
        ]  # fmt: skip
        found, why = recommend._recommend(chosen, swept, MACHINE, floor)
        self.assertEqual(found.policy, expected)
        self.assertIn(f"{expected} ", why)


class OwnPolicyTest(absltest.TestCase):
    def test_a_class_serves_as_its_name(self):
        trace = random_trace(step_sizes=[1] * 20, num_layers=3, num_experts=8, width=2, foreseen=2)
        tiers = Tiers(names=("int4",), expert_bytes=(1000,))
        grid = [{"slots": slots, "prefetch": ahead} for slots in (2, 4) for ahead in (0, 1)]
        own, named = (sweep_over(trace, p, grid, tiers) for p in (OnDemand, "on_demand"))
        self.assertEqual([one.figures(MACHINE) for one in own], [o.figures(MACHINE) for o in named])
        self.assertLen({one.hit_rate for one in own}, 4)
        with self.assertRaisesRegex(MoejaxError, "slots=2 prefetch=-1: .*prefetch=-1 must be"):
            sweep_over(trace, OnDemand, [{"slots": 2, "prefetch": -1}], tiers)

    def test_what_the_host_multiplies_is_not_fetched(self):
        trace = random_trace(step_sizes=[1] * 40, num_layers=2, num_experts=16, width=2)
        tiers = Tiers(names=("int4",), expert_bytes=(100,))
        grid = [{"slots": 4}, {"slots": 4, "host": (0, 1, 1)}, {"slots": 4, "host": (0, 1, 2)}]
        all_fetched, some, none = (
            one.traffic.bytes_by_cause["demand"] for one in sweep_over(trace, "lru", grid, tiers)
        )
        self.assertBetween(some, 1, all_fetched - 1)
        self.assertEqual(none, 0)
        for host, policy, said in (
            ((0, 2, 0), "lru", "of 0, 1, ... 2 misses"), ((0, 1), "lru", "of 0, 1, ... 2 misses"),
            ((0, 1, 1), "dymoe", "without a policy"),
        ):  # fmt: skip
            with self.assertRaisesRegex(MoejaxError, said):
                sweep_over(trace, policy, [{"slots": 4, "host": host}], tiers)


class CeilingTest(parameterized.TestCase):
    @slow.where(lambda name: name != "dynaexq")
    @parameterized.parameters(
        ("resident", {}, ("int4",), 16),
        ("dynaexq", {"period": 8}, ("int4", "int2"), (6, 12)),  # all experts in one or the other
        (
            "dymoe",
            {"low": "skip", "schedule": "equal", "retention": 0.5, "prefetch": 0},
            ("int4",),
            8,
        ),
    )
    def test_nothing_beats_it(self, name, fields, names, slots):
        trace = random_trace(step_sizes=[1] * 32, num_layers=1, num_experts=16, width=2)
        tiers = Tiers(names=names, expert_bytes=(1800, 1000)[: len(names)])
        (found,) = sweep_over(trace, name, [{"slots": slots, **fields}], tiers)
        figures = found.figures(MACHINE)
        self.assertEqual("best_hit_rate" in figures, "low" not in fields)
        if "low" in fields:
            self.assertIn("| - |", table.table(["x"], [figures], [0])[-1])
        else:
            self.assertGreater(found.best_hit_rate, 0)
            self.assertGreaterEqual(found.best_hit_rate, found.hit_rate)
            self.assertLessEqual(figures["bound_ms"], figures["tpot_ms"])


class MainTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.trace = self.directory / "x.trace"
        self.write_trace([1] * 40)  # without a prompt: one program fewer for each policy

    def write_trace(self, step_sizes: list[int]) -> None:
        trace = random_trace(
            step_sizes=step_sizes, num_layers=2, num_experts=16, width=2, foreseen=2
        )
        write_trace(self.trace, dataclasses.replace(trace, facts={"tiers": "int4=1000000"}))

    def run_main(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        got, *said = commands.run(sweep.COMMAND, f"--config.trace={self.trace}", *arguments)
        self.assertEqual(got, status, said)
        return tuple(said)

    def test_the_grid_follows_the_trace_where_none_is_given(self):
        with mock.patch.object(sweeping, "sweep", side_effect=MoejaxError("enough")) as swept:
            self.run_main("--links=50", status=1)
            tiers = "--tiers=int4=1800,int2=1000"
            self.run_main("--policy=dynaexq", tiers, status=1)
        grids = [call.args[2] for call in swept.call_args_list]
        self.assertEqual(grids, [eighths(16, 1), eighths(16, 2)])
        self.assertEqual(eighths(5, 2)[0], {"slots": (1, 1)})
        self.assertEqual([of["slots"] for of in eighths(32, 1)], [4, 8, 12, 16, 20, 24, 28, 32])

    def test_from_a_trace_to_rows_and_a_picture(self):
        rows, plot = self.directory / "rows.jsonl", self.directory / "plot.png"
        self.write_trace([9, *[1] * 40])
        append_rows(rows, [FORMER])
        plot.write_bytes(b"\x89PNG of a former sweep")
        out, err = self.run_main(
            "--config.grid=('slots=0,2,4,8,16', 'prefetch=0,2')",
            "--config.tiers=('int4=1000000',)", "--config.base_ms=1.5",
            f"--config.output={rows}",
            f"--config.plot={plot}",
        )  # fmt: skip
        self.assertIn("lru: 10 settings over 40 decoded steps of 2 layers of 16 experts", err)
        self.assertIn("50 GiB/s", out)
        self.assertIn("| slots=16 prefetch=", out)
        self.assertGreater(plot.stat().st_size, 10_000)
        found = read_rows(rows)
        self.assertEqual(found.pop(0), FORMER)
        self.assertLen(found, 20)
        self.assertRegex(out, r"\| 3\.81 MiB \| 3\.0 \|")  # 2 layers of 2 slots of 1 MB
        by_name = {row.what: row for row in found}
        none = by_name["sweep, lru, slots=0 prefetch=0, 12 GiB/s, TPOT"]
        # Every token of 2 layers fetches 2 experts of 1 MB.
        self.assertAlmostEqual(none.figure, 1.5 + 4e6 / (12 * GIB) * 1e3)
        self.assertAlmostEqual(none.baseline["demand_mb"], 4.0)
        self.assertEqual((none.baseline["hit_rate"], none.baseline["best_hit_rate"]), (0.0, 0.0))
        rates = [
            by_name[f"sweep, lru, slots={slots} prefetch=0, 50 GiB/s, TPOT"].baseline
            for slots in (2, 4, 8, 16)
        ]
        for smaller, larger in itertools.pairwise(rates):
            self.assertLess(smaller["hit_rate"], larger["hit_rate"])
        for row in found:
            if "prefetch=0" in row.what:  # look-ahead turns misses into hits, at the same bytes
                self.assertLessEqual(row.baseline["hit_rate"], row.baseline["best_hit_rate"])
            self.assertLessEqual(row.baseline["bound_ms"], row.figure)

    def test_two_links_carry_half_of_an_expert_each(self):
        output = self.directory / "mesh.jsonl"
        for more in ([], ["--config.mesh=2"]):
            self.run_main(
                "--config.grid=('slots=0', 'prefetch=0')", "--config.tiers=('int4=1000000',)",
                "--config.base_ms=1.5", "--config.links=('50',)", f"--config.output={output}",
                *more,
            )  # fmt: skip
        one, two = read_rows(output)[-2:]
        self.assertAlmostEqual(two.figure - 1.5, (one.figure - 1.5) / 2)
        self.assertAlmostEqual(two.baseline["demand_mb"], one.baseline["demand_mb"] / 2)

    def test_a_policy(self):
        out, _ = self.run_main(
            "--config.policy=dymoe", "--config.tiers=('int4=2000000', 'int2=1000000')",
            "--config.grid=('slots=2/4', 'retention=0.5,1.0', 'selection=load', 'prefetch=0')",
            "--config.links=('25',)",
        )  # fmt: skip
        self.assertIn("| slots=2/4 retention=1.0 selection=load prefetch=0 |", out)
        (full,) = (line for line in out.splitlines() if "retention=1.0" in line)
        self.assertIn("| 100.0 | 0.0 | 0.0 | 0.0 |", full)

    def test_tiers_by_planes(self):
        output, moved = self.directory / "planes.jsonl", {}
        for planes in (False, True):
            self.run_main(
                "--config.policy=dymoe", "--config.tiers=('int4=1800000', 'int2=1000000')",
                "--config.grid=('slots=4/6,3/16', 'selection=load', 'prefetch=0')",
                f"--config.planes={planes}", "--config.links=('25',)", f"--config.output={output}",
            )  # fmt: skip
            for row in read_rows(output)[-2:]:
                moved[planes, "3/16" in row.what] = row.baseline
        # Slots of both tiers are one pool of base planes' size; over every base plane, one of
        # refinements' size.
        of = 2 * 1e6 / GIB
        self.assertAlmostEqual(moved[True, False]["device_gib"], 10 * of, places=6)
        self.assertAlmostEqual(moved[True, True]["device_gib"], (3 * 0.8 + 16) * of, places=6)
        self.assertLess(moved[True, True]["demand_mb"], moved[False, True]["demand_mb"])

    def test_buddies_of_a_profile(self):
        file = self.directory / "x.safetensors"
        save_buddies(file, random_profile(2, 16))
        output = self.directory / "buddies.jsonl"
        grid = f"('slots=4', 'lists={file}', 'tae_tau=profile', 'prefetch=0,2', 'max_requests=0')"
        out, _ = self.run_main(
            "--config.policy=buddymoe", "--config.links=('25',)", f"--config.output={output}",
            f"--config.grid={grid}",
        )  # fmt: skip
        self.assertIn(f"slots=4 lists={file} tae_tau=profile prefetch=0 max_requests=0 |", out)
        moved = [row.baseline["prefetch_mb"] for row in read_rows(output)]
        self.assertEqual([amount > 0 for amount in moved], [False, True])

    def test_a_calibration(self):
        rows = self.directory / "measured.jsonl"
        facts = {"unit": "ms", "device": "x", "versions": {}, "date": "x", "command": "x"}
        what = "Qwen3, {} slots of 128, ahead {}, TPOT"
        append_rows(rows, [
            ResultRow(what=what.format(slots, ahead), figure=3 + 20 * gib,
                      baseline={"megabytes_a_token": gib * GIB / 1e6}, **facts)
            for slots, ahead, gib in ((8, 0, 0.5), (24, 0, 0.2), (48, 0, 0.1), (48, 2, 7.0))
        ])  # fmt: skip
        self.assertLen(measured_rows(rows), 3)
        with mock.patch.object(sweeping, "sweep", side_effect=MoejaxError("enough")):
            _, err = self.run_main(f"--config.calibration={rows}", status=1)
        self.assertIn("calibrated by 3 measurements: 3.000 ms a step, 50.0 GiB/s", err)

    def test_a_trace_that_says_no_forms(self):
        write_trace(self.trace, random_trace(step_sizes=[1], num_layers=2, num_experts=4, width=2))
        _, err = self.run_main(status=1)
        self.assertIn("does not say in which forms its model's experts are stored: give", err)

    def test_a_trace_of_prompts_alone(self):
        prompts = random_trace(step_sizes=[9, 7], num_layers=2, num_experts=16, width=2)
        write_trace(self.trace, dataclasses.replace(prompts, facts={"tiers": "int4=1000"}))
        for more in ([], ["--config.recommend=True", "--config.device_gib=1"]):
            _, err = self.run_main(*more, status=1)
            self.assertRegex(err, "^error: the trace holds no decoded token, .*moejax.generate\n")

    @parameterized.parameters(
        ("--config.trace=", "trace='' must be a file"),
        ("--config.trace=/no/such", "there is no trace /no/such"),
        ("--config.grid=('slots=17',)", "slots=17 must be from 0 to 16, the experts of a layer"),
        ("--config.grid=('slots=2/2',)", "a whole number for each tier (int4), such as slots=4"),
        ("--config.grid=('slots=true',)", "a whole number for each tier (int4), such as slots=4"),
        ("--config.grid=('slots=4', 'prefetch=true')", "prefetch=True must be"),
        ("--config.tiers=('a=1', 'a=2')", "tiers: 'a' stands twice"),
        ("--config.plot=x.foo", "plot='x.foo' must end in .png"),
        ("--config.grid=('prefetch=1',)", "no slots, but slots is a whole number for each tier"),
        ("--config.grid=slots=1:1000000000:1", "1000000000 settings; at most 100000: take larger"),
        ("--config.planes=True", "planes are of two tiers"),
        ("--config.tiers=('int4=8', 'int2=10')", "as bit planes have: add --config.planes=True"),
        ("--config.recommend", "recommend needs --config.device_gib=GIB"),
        ("--config.device_gib=inf", "device_gib=inf must be from 0 to 1000000.0 and finite"),
        ("--config.device_gib=1e300", "device_gib=1e+300 must be from 0 to 1000000.0"),
        ("--config.device_gib=1", "device_gib=1.0 has no effect without recommend"),
        ("--config.grid=('slots=4', 'prefetch=3')", "the trace foresees 2"),
        ("--config.grid=('slots=4', 'alpha=3')", "lru has no setting alpha"),
        ("--config.tiers=('int4',)", "is not NAME=BYTES"),
        ("--config.tiers=int4=²", "'int4=²' is not NAME=BYTES"),
        ("--config.bulk=2147483648", "bulk=2147483648 must be from -1 to 2147483647"),
        ("--config.links=('0',)", "must be a speed"),
        ("--config.overlap=1.5", "overlap=1.5 must be"),
        ("--config.policy=dymo", "no policy 'dymo' to sweep over; known: lru, resident, on_demand"),
        ("--config.policy=auto", "no policy 'auto' to sweep over"),
        ("--config.policy=buddymoe", "needs a profile: lists=FILE"),
        ("--config.calibration=/no/such", "cannot be read"),
        ("--config.grid=('slots=4', 'prefetch=3')", "record it with --config.record_foreseen=3"),
    )
    def test_what_is_wrong_is_said(self, argument, said):
        arguments = [argument]
        if "buddymoe" in argument:
            arguments.append("--config.grid=('slots=4',)")
        _, err = self.run_main(*arguments, status=1)
        self.assertIn(said, err)
        self.assertLen(err.strip().splitlines(), 1)

    def test_a_recommendation_has_no_grid(self):
        asked = ("--config.recommend=True", "--config.device_gib=1")
        for field in ("policy=dymoe", "grid=slots=4", "output=x.jsonl", "plot=x.png"):
            _, err = self.run_main(*asked, f"--config.{field}", status=1)
            self.assertIn(f"{field.partition('=')[0]} is of a grid, which recommend has not", err)

    def test_files_of_another_kind_are_kept(self):
        row = json.dumps(dataclasses.asdict(FORMER))
        for name, field, content, said in (
            ("x.trace", "output", None, "holds no rows of results"),
            ("a.jsonl", "output", b'{"prompt": "mine"}\n', "holds no rows of results"),
            ("b.jsonl", "output", f"{row}\n{row}".encode(), "the last row is not whole"),
            ("c.jsonl", "output", b"\xff\xfe", "holds no rows of results"),
            ("", "output", None, "is a directory"),
            ("no/x.jsonl", "output", None, "lies in "),
            ("a.png", "plot", b"%PDF-1.4", r"is no picture \(.png\)"),
            ("a.pdf", "plot", b"mine", r"is no picture \(.pdf\)"),
            ("a.svg", "plot", b"<html>", r"is no picture \(.svg\)"),
            ("no/x.png", "plot", None, "lies in "),
            ("d.png", "plot", "folder", "is a directory"),
        ):
            path = self.directory / name
            if content == "folder":
                path.mkdir()
            elif content is not None:
                path.write_bytes(content)
            before = path.read_bytes() if path.is_file() else sorted(self.directory.iterdir())
            with mock.patch.object(sweeping, "sweep") as never:
                _, err = self.run_main(f"--config.{field}={path}", status=1)
            self.assertRegex(err, rf"^error: {field} \S+ .*{said}.*\n\Z")
            self.assertFalse(never.called)
            after = path.read_bytes() if path.is_file() else sorted(self.directory.iterdir())
            self.assertEqual(after, before)
        both = self.directory / "both.png"
        _, err = self.run_main(f"--config.output={both}", f"--config.plot={both}", status=1)
        self.assertIn("name two files", err)

    def test_a_calibration_by_a_benchmark(self):
        rows = self.directory / "benchmark.jsonl"
        facts = {"baseline": {}, "device": "x", "versions": {}, "date": "x", "command": "x"}

        def add(model, batch, gib, moved):
            about = f"{model}, random weights, batch {batch}, {gib:g} GiB, 1 prompts; routing x"
            for name, figure, unit in (
                ("TPOT median", 3 + 20 * moved, "ms"), ("TPOT p99", 99.0, "ms"),
                ("link bytes of a decode step", moved * GIB / 1e6, "MB"),
            ):  # fmt: skip
                append_rows(
                    rows, [ResultRow(what=f"{name}, {about}", figure=figure, unit=unit, **facts)]
                )

        add("Qwen3", 1, 8, 0.5)
        add("Qwen3", 1, 8.5, 0.25)
        add("Qwen3", 4, 8, 2.0)  # one of its kind tells no speed
        with mock.patch.object(sweeping, "sweep", side_effect=MoejaxError("enough")):
            _, err = self.run_main(f"--config.calibration={rows}", status=1)
        self.assertIn("calibrated by 2 measurements: 3.000 ms a step, 50.0 GiB/s", err)
        add("Qwen3", 4, 12, 1.0)
        with self.assertRaisesRegex(MoejaxError, "has rows of 2 runs.*batch 1.*batch 4"):
            measured_rows(rows)
