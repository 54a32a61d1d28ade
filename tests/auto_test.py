"""`auto`: what is recommended for which facts, by which rows; engines that ask for it; sweeps."""

import contextlib
import io
import json
import re
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from moejax import Engine, cli, plan, sweep
from moejax.config import MemoryConfig, PlanConfig
from moejax.errors import MoejaxError
from moejax.memory.budget import BudgetError, Limits, TieredBudget
from moejax.planning import tiered_budget
from moejax.policies import auto
from moejax.policies.auto import Facts, Option, hot_gate_mass, recommended
from moejax.policies.make import make_policy
from moejax.policy_config import PolicyConfig
from moejax.results import read_rows
from moejax.simulation import recommending
from moejax.simulation.costs import GIB, Machine
from moejax.simulation.sweeping import Tiers
from moejax.tiering import Tiering
from moejax.traces import write_trace
from tests import slow, tiny_engine
from tests.simulated_traces import random_trace

RESULTS = Path(__file__).parents[1] / "scripts" / "results" / "policy_quality.jsonl"
ONE = Option(tiers=("int4",), slots=(64,), low="int4")


def facts(*options: Option, width: int = 8, all_fit: bool = False) -> Facts:
    return Facts(num_experts=128, width=width, all_fit=all_fit, options=options)


def slots_said(budget: TieredBudget) -> str:
    tiers = zip(budget.names, budget.tiers, strict=True)
    return ", ".join(f"{tier.slots} in {name}" for name, tier in tiers)


class RecommendedTest(parameterized.TestCase):
    def test_everything_fits(self):
        found = recommended(facts(all_fit=True))
        self.assertEqual((found.policy, found.tiers), ("", ()))
        whole = Option(tiers=("int4",), slots=(128,), low="int4")
        both = Option(tiers=("int4", "int2"), slots=(128, 128), low="int2")
        for options in ((whole,), (both, ONE), (ONE, whole)):
            found = recommended(facts(*options))
            self.assertEqual((found.policy, found.tiers), ("resident", ("int4",)))

    def test_a_low_tier_that_fits_whole(self):
        good = Option(tiers=("stored", "int4"), slots=(20, 128), low="int4")
        found = recommended(facts(good, ONE))
        self.assertEqual((found.policy, found.tiers), ("dynaexq", ("stored", "int4")))
        self.assertIn("int4 fits whole, and experts in stored serve about 32 %", found.why)
        few = Option(tiers=("stored", "int4"), slots=(7, 128), low="int4")
        self.assertNotEqual(recommended(facts(few, ONE)).policy, "dynaexq")

    def test_int2_must_be_for_little_of_the_gate_mass(self):
        for hot, policy in ((64, "dymoe"), (100, "dymoe"), (120, "dynaexq")):
            option = Option(tiers=("int4", "int2"), slots=(hot, 128), low="int2")
            self.assertEqual(recommended(facts(option, ONE)).policy, policy, hot)

    @parameterized.parameters((2, 32), (8, 32), (16, 32), (32, 8), (60, 8))
    def test_else_what_sweeps_found(self, width, of_experts):
        found = recommended(facts(ONE, width=width))
        self.assertEqual(found, recommended(facts(ONE, width=width)))
        row = auto.nearest(width / 128, 0.5)
        self.assertEqual((row["share"], row["num_experts"]), (0.5, of_experts))
        self.assertEqual(found.policy, row["policy"])
        self.assertEqual(found.settings, row["settings"])
        self.assertEndsWith(found.why, " experts a token, 50 % of them there, at 50 GiB/s")
        self.assertNotIn(" ms", found.why)  # times of a sweep are of the trace's layers
        make_policy(found.policy, **found.settings)

    def test_the_table_is_of_the_fastest(self):
        self.assertEqual(auto.table()["floor"], auto.FLOOR)
        for row in auto.table()["rows"]:
            times = row["link_ms"]
            self.assertEqual(next(iter(times)).split()[0], row["policy"])
            self.assertEqual(min(times.values()), next(iter(times.values())))

    def test_hot_gate_mass_is_that_of_the_rows(self):
        measured: dict[float, float] = {}
        for row in read_rows(RESULTS):
            parts = row.what.split(" | ")
            if parts[:2] == ["dynaexq", "dynaexq int4/int2"] and parts[3] == "hot":
                share = 1 - float(parts[4])
                mass = row.baseline["gate int4"]
                measured[share] = min(mass, measured.get(share, 1.0))
        self.assertLen(measured, len(auto.HOT_GATE_MASS) - 2)
        for share, mass in measured.items():
            self.assertAlmostEqual(hot_gate_mass(share), mass, delta=5e-4)


class EngineTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory())) / "model"
        cls.plain = tiny_engine.load_tiny_engine(cls.folder)

    def engine(self, limits: Limits | None = None):
        how = Tiering(policy="auto", quantizer="rtn", group_size=16)
        with self.assertLogs(level="WARNING") as logs:
            engine = tiny_engine.load_tiny_engine(self.folder, limits=limits, policy=how)
        said = [line for line in logs.output if "policy auto: " in line]
        self.assertLen(said, 1)
        return engine, said[0]

    def test_without_a_limit_there_is_no_policy(self):
        engine, said = self.engine()
        self.assertIn("policy auto: none; all experts fit", said)
        self.assertIsNone(engine.ledger)
        tokens = np.asarray([list(range(40, 52))])
        np.testing.assert_array_equal(engine.logits(tokens), self.plain.logits(tokens))

    def test_under_limits_it_runs_what_it_says(self):
        less = Tiering(policy="on_demand", tiers=("int4",), slots=(4,), quantizer="rtn",
                       group_size=16)  # fmt: skip
        least = tiny_engine.load_tiny_engine(self.folder, limits=Limits(), policy=less)
        engine, said = self.engine(Limits(device_gib=least.budget.total_device / 2**30))
        self.assertIn("policy auto: dymoe int4", said)
        self.assertIn("; of 8 experts a layer fit 4 in int4; ", said)
        self.assertEqual([tier.slots for tier in engine.budget.tiers], [4])
        answer = engine.generate(list(range(40, 52)), max_new_tokens=4, ignore_eos=True)
        self.assertTrue(answer)

    def test_the_demo_model_opens_in_what_it_says(self):
        for gib, expected in ((0.145, "dymoe int4"), (0.175, "dynaexq stored/int4")):
            with self.assertLogs(level="WARNING") as logs:
                engine = Engine.from_pretrained(
                    "demo", platform="cpu", limits=Limits(device_gib=gib), compilation_cache="",
                    policy=Tiering(policy="auto", quantizer="rtn"),
                )  # fmt: skip
            (said,) = (line for line in logs.output if "policy auto: " in line)
            self.assertIn(f"policy auto: {expected}", said)
            self.assertIn(f"; of 32 experts a layer fit {slots_said(engine.budget)}; ", said)

    def test_too_little(self):
        with self.assertRaisesRegex(MoejaxError, "is too little"):
            tiny_engine.load_tiny_engine(
                self.folder, limits=Limits(device_gib=1e-6),
                policy=Tiering(policy="auto", quantizer="rtn", group_size=16),
            )  # fmt: skip

    def test_a_plan(self):
        config = PlanConfig(
            checkpoint=str(self.folder),
            platform="cpu",
            policy=PolicyConfig(name="auto", quantizer="rtn", group_size=16),
        )
        tiering = config.policy.tiering()
        assert tiering is not None
        self.assertIsNone(tiered_budget(config, tiering))  # all fit
        # Nothing of host memory is used, so any limit of it will do, as in the run.
        words = [
            f"--config.checkpoint={self.folder}", "--config.platform=cpu",
            "--config.policy.name=auto", "--config.memory.host_gib=1e-5",
        ]  # fmt: skip
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(cli.exit_status(plan.COMMAND, ["plan", *words]), 0)
        self.assertIn("experts stay on the device", out.getvalue())

    def test_settings_are_refused(self):
        for given, said in (({"retention": "0.9"}, "retention"), ({"slots": ("3",)}, "slots")):
            with self.assertRaisesRegex(MoejaxError, f"{said} is for auto to choose"):
                PolicyConfig(name="auto", **given).tiering()


# GiB; the fine steps are where some of the demo model's INT4 experts fit.
BUDGETS = {
    "cpu": (*np.arange(0.1, 0.4, 0.02), *np.arange(0.1415, 0.153, 0.001)),
    "gpu": (*np.arange(0.1, 0.4, 0.02), *np.arange(0.2025, 0.231, 0.001)),
}


class PlannedTest(parameterized.TestCase):
    """Of the demo model, whose buffers are small beside its experts; nothing is loaded."""

    def planned(self, name: str, gib: float, platform: str = "cpu", chunk: int = 0, **policy):
        config = PlanConfig(
            platform=platform, context=2048, chunk=chunk, memory=MemoryConfig(device_gib=gib),
            policy=PolicyConfig(name=name, **policy),
        )  # fmt: skip
        tiering = config.policy.tiering()
        assert tiering is not None
        return tiered_budget(config, tiering)

    def auto(self, gib: float, platform: str = "cpu", chunk: int = 0, **policy):
        """A budget, None for no policy, and the line."""
        with self.assertLogs(level="WARNING") as logs:
            budget = self.planned("auto", gib, platform, chunk, **policy)
        (said,) = logs.output
        self.assertNotIn("\n", said)
        return budget, said.removeprefix("WARNING:absl:policy auto: ")

    @parameterized.product(platform=("cpu", "gpu"), tiers=((), ("int4", "int2")))
    def test_it_refuses_nothing_that_on_demand_can_run(self, platform, tiers):
        seen = set()
        for gib in map(float, BUDGETS[platform]):
            try:
                least = self.planned("on_demand", gib, platform, tiers=tiers[:1] or ("int4",))
            except MoejaxError:
                with self.assertRaises(MoejaxError):
                    self.planned("auto", gib, platform, tiers=tiers)
                continue
            budget, said = self.auto(gib, platform, tiers=tiers)
            policy = said.split()[0].strip(";")
            seen.add(policy)
            if budget is None:
                self.assertEqual(policy, "none")
                continue
            self.assertLessEqual(budget.total_device, gib * GIB)
            self.assertIn(f"; of 32 experts a layer fit {slots_said(budget)}; ", said)
            if policy == "dynaexq":
                self.assertLess(budget.tiers[0].slots, 32)
                self.assertEqual(budget.tiers[1].slots, 32)
            else:
                self.assertLen(budget.tiers, 1)
                self.assertGreaterEqual(budget.tiers[0].slots, least.tiers[0].slots * (not tiers))
        self.assertEqual(seen, {"dymoe", "resident"} | (set() if tiers else {"none", "dynaexq"}))

    def test_too_little_names_the_mend(self):
        for name, policy, part in (
            ("auto", {}, r"\(batch 1, context 2048\);"),
            (
                "dymoe",
                {"tiers": ("int4",), "low": "skip"},
                "of which importance of tokens 0.0[0-9]+ GiB;",
            ),
        ):
            said = (
                "device_gib=0.1 is too little for experts in int4, even with no slots to cache "
                rf"them: the smallest that would do is .* GiB .*{part} raise memory.device_gib to "
                "that, or lower batch or context$"
            )
            with self.assertRaisesRegex(BudgetError, said) as caught:
                self.planned(name, 0.1, **policy)
            least = re.search("would do is ([0-9.]+) GiB", str(caught.exception))
            assert least is not None
            self.assertIsNotNone(self.planned(name, float(least[1]), **policy))

    def test_the_settings_of_the_row_are_all_there(self):
        budget, said = self.auto(0.145)
        self.assertStartsWith(
            said, "dymoe int4 retention=0.9 low=skip prefetch=0 selection=load; of 32 experts "
        )  # fmt: skip
        self.assertNotIn("importance of tokens", budget.device)

    def test_experts_that_all_fit_in_the_first_tier_are_in_no_other(self):
        budget, said = self.auto(0.23, "gpu")
        self.assertEqual(budget.names, ("stored",))
        self.assertEqual(said, "resident stored; of 32 experts a layer fit 32 in stored; nothing "
                         "is waited for")  # fmt: skip

    def test_on_demand_where_the_policy_takes_memory_from_slots(self):
        rows = [row | {"settings": {"low": "skip"}} for row in auto.table()["rows"]]
        attention = {**auto.table(), "rows": rows}
        with mock.patch.object(auto, "table", return_value=attention):
            refused, said = self.auto(0.145)
            self.assertStartsWith(said, "on_demand int4; of 32 experts")
            self.assertEndsWith(said, ", does not fit")
            fewer, said_fewer = self.auto(0.044, chunk=16)
        plain = {"tiers": ("int4",)}
        self.assertEqual(refused, self.planned("on_demand", 0.145, **plain))
        self.assertEqual(fewer, self.planned("on_demand", 0.044, chunk=16, **plain))
        slots = self.planned("dymoe", 0.044, chunk=16, low="skip", **plain).tiers[0].slots
        self.assertEndsWith(said_fewer, f", leaves {slots} slots a layer")


class RecommendTest(absltest.TestCase):
    TRACE = random_trace(step_sizes=[9, *[1] * 60], num_layers=2, num_experts=16, width=4)
    TIERS = Tiers(names=("int4", "int2"), expert_bytes=(1800, 1000))
    ROOM, BULK = 2 * 8 * 1800 / GIB + 1e-9, None

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not slow.asked():  # of each kind, fewer
            fewer = mock.patch.multiple(recommending, RETENTIONS=(0.75,), PERIODS=(64,))
            cls.enterClassContext(fewer)
        cls.found = list(recommending.candidates(cls.TRACE, cls.TIERS, cls.ROOM))
        cls.swept = recommending.replayed(cls.TRACE, cls.found, cls.BULK)

    def test_the_fastest_that_keeps_the_floor(self):
        found, swept = self.found, self.swept
        for one in found:
            slots = np.atleast_1d(one.setting["slots"])
            self.assertLessEqual(int(slots @ one.tiers.expert_bytes), 8 * 1800)
        machine = Machine(base_ms=0.001, link_gib_per_s=0.01)
        last = 0.0
        for floor in (1.0, 0.9, 0.7, 0.0):
            best = recommending.recommend(found, swept, machine, floor)
            enough = [
                one.figures(machine)["tpot_ms"]
                for one in swept
                if one.figures(machine)["gate_int4"] >= floor
            ]
            self.assertEqual(best.figures["tpot_ms"], min(enough))
            self.assertGreaterEqual(last or 1e9, best.figures["tpot_ms"])
            last = best.figures["tpot_ms"]
        exact = recommending.recommend(found, swept, machine, 1.0)
        self.assertEqual(exact.candidate.policy, "on_demand")
        with self.assertRaisesRegex(MoejaxError, "does not hold an expert of each layer"):
            list(recommending.candidates(self.TRACE, self.TIERS, 1e-9))
        with self.assertRaisesRegex(MoejaxError, r"each layer: 2 of 1\.76 KiB$"):
            list(recommending.candidates(self.TRACE, self.TIERS, 1e-9))

    def test_the_command(self):
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        write_trace(folder / "x.trace", self.TRACE)
        arguments = [
            "sweep", f"--config.trace={folder / 'x.trace'}", "--config.recommend=True",
            "--config.tiers=('int4=1800', 'int2=1000')", "--config.floor=0.8",
        ]  # fmt: skip

        def replayed(trace, chosen, bulk):  # what the class has replayed, for the same arguments
            np.testing.assert_array_equal(trace.ids, self.TRACE.ids)
            self.assertEqual((list(chosen), bulk), (self.found, self.BULK))
            return self.swept

        known = mock.patch.object(recommending, "replayed", replayed)
        for more, status in (([], 1), ([f"--config.device_gib={self.ROOM}"], 0)):
            out, err = io.StringIO(), io.StringIO()
            with known, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                got = cli.exit_status(sweep.COMMAND, [*arguments, *more])
            self.assertEqual(got, status, err.getvalue())
        lines = out.getvalue().splitlines()
        self.assertLen(lines, 4)
        self.assertIn("ms a token at 50 GiB/s", lines[0])
        self.assertIn("--config.policy.name=", lines[1])

    def test_the_table_can_be_read(self):
        self.assertEqual(json.loads(json.dumps(auto.table())), auto.table())


if __name__ == "__main__":
    absltest.main()
