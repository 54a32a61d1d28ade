"""Policies as users ask for them: tiers made at load or from checkpoints, errors in one line."""

import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized

from moejax import evaluate, generate
from moejax.errors import MoejaxError
from moejax.evaluation import fidelity
from moejax.experts import cache
from moejax.experts.budget import (
    BudgetError,
    Limits,
    PolicyDemands,
    RunSizes,
    TierSize,
    make_budget,
)
from moejax.experts.tiering import Tiering
from moejax.policies import buddymoe
from moejax.policies.buddy_lists import buddy_lists, conditional_coactivation
from moejax.policies.make import make_policy
from moejax.routing.simulate.replay import EVENTS
from moejax.routing.simulate.runs import Run, run_policies
from moejax.routing.trace import read_trace
from moejax.text.windows import Windowing
from tests import commands, tiny_engine
from tests.tiny_engine import CONFIG
from tests.transfers_case import prompt_transfers

PROMPT = list(range(40, 52))
LISTS = buddy_lists(
    conditional_coactivation(
        np.random.default_rng(1).integers(0, 9, (2, CONFIG.num_experts, CONFIG.num_experts))
    ),
    0.9, 5,
)  # fmt: skip
MADE = {"tiers": ("int4", "int2"), "quantizer": "rtn", "group_size": 16}


class EngineTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    def engine(self, limits: Limits | None = None, **tiering):
        return tiny_engine.load_tiny_engine(
            self.folder / "model", limits=limits, policy=Tiering(**tiering)
        )

    def test_slots_for_all_experts_are_filled_at_load(self):
        limits = Limits(slots=CONFIG.num_experts)
        engine = tiny_engine.load_tiny_engine(self.folder / "model", limits=limits)
        engine.generate([PROMPT], max_new_tokens=4, ignore_eos=True)
        self.assertGreater(engine.ledger.total("hits"), 0)
        self.assertEqual(engine.ledger.total("misses"), 0)

    @pytest.mark.slow
    def test_promotions_arrive_between_steps(self):
        engine = self.engine(
            policy="dynaexq", settings={"period": 8, "warmup": 8}, slots=(3, 8), **MADE
        )
        self.assertEqual([tier.slots for tier in engine.budget.tiers], [3, 8])
        for _ in range(12):
            engine.generate([PROMPT], max_new_tokens=24, ignore_eos=True)
            if engine.ledger.total("bulk") >= 6:
                break
        ledger = engine.ledger
        self.assertGreaterEqual(ledger.total("bulk"), 6)
        self.assertGreater(ledger.shares["int4"], 0)
        self.assertEqual(ledger.tiers["int4"].total("misses"), 0)
        self.assertEqual(ledger.tiers["int2"].total("misses"), 0)
        self.assertEqual(ledger.total("evictions"), ledger.tiers["int4"].total("evictions"))
        lines = "\n".join([*ledger.describe(), *ledger.describe_layers()])
        self.assertIn("gate mass: int4", lines)
        moved = ledger.total("bulk"), ledger.total("evictions")  # of the second tier none
        self.assertIn("promotions to int4 {}, demotions {}\n".format(*moved), lines)
        self.assertIn("layer 1: int4", lines)

    @parameterized.parameters(
        ("on_demand", (4,), 2), ("dymoe", (3, 8), 0), ("dymoe", (3, 4), 2), ("dymoe", (3, 5), -1)
    )  # fmt: skip
    @pytest.mark.slow
    def test_a_trace_through_the_policy_gives_the_counts_of_the_engine(
        self, policy, slots, prefetch
    ):
        settings = {"prefetch": prefetch}
        if policy == "dymoe":
            # A prompt has more critical experts in the next layer than a layer prefetches.
            settings |= {"selection": "load", "retention": 0.5 if prefetch >= 0 else 0.75}
        tiers = MADE["tiers"][: len(slots)]
        engine, tallied = self.emulated(policy, settings, slots, tiers)
        events = tallied.events.sum(axis=0)
        counted = ("needed", "hits", "misses", "admitted", "streamed", "prefetched",
                   "prefetch_hits")  # fmt: skip
        for i, ledger in enumerate(engine.ledger.tiers.values()):
            # A copy that leaves for a better one is an eviction to the engine alone.
            for name in (*counted, *("evictions",) * (slots in ((4,), (3, 8)))):
                self.assertEqual(ledger.total(name), events[EVENTS.index(name), i], name)
        self.assertGreater(engine.ledger.total("misses"), 10)
        self.assertEqual(engine.ledger.total("prefetched") > 0, prefetch != 0)

    @parameterized.parameters(
        ("dynaexq", {"period": 8, "max_requests": 8}, (3, 4)),
        ("dymoe", {"selection": "load", "prefetch": 0, "retention": 0.75}, (3, 4)),
        ("compose", {"selection": "load", "prefetch": 0, "period": 8}, (3, 8)),
        ("buddymoe", {"lists": LISTS, "rho": 1, "form": "ranks", "max_requests": 2}, (4,)),
    )
    @pytest.mark.slow
    def test_hit_rates_of_a_trace_are_those_of_the_engine(self, policy, settings, slots):
        engine, tallied = self.emulated(policy, settings, slots, MADE["tiers"][: len(slots)])
        events = dict(zip(EVENTS, tallied.events.sum(axis=0), strict=True))
        rate = events["hits"].sum() / events["needed"].sum()
        self.assertBetween(rate, 0.3, 0.99)
        self.assertAlmostEqual(rate, engine.ledger.hit_rate, delta=0.01)
        gate, place = tallied.gate.sum(axis=0), -2 if policy == "buddymoe" else 0
        share = engine.ledger.shares["substituted" if policy == "buddymoe" else "int4"]
        self.assertGreater(share, 0.02)
        self.assertAlmostEqual(gate[place] / gate[-1], share, delta=0.01)

    def test_buddies_are_not_searched_where_nothing_is_missing(self):
        how = {"tiers": MADE["tiers"][:1], "quantizer": "rtn", "group_size": 16}
        plain = self.engine(policy="on_demand", slots=(8,), **how)
        settings = {"lists": LISTS, "rho": 1}
        fewer = self.engine(policy="buddymoe", settings=settings, slots=(7,), **how)
        every = self.engine(policy="buddymoe", settings=settings, slots=(8,), **how)
        searched = mock.patch.object(buddymoe.buddy_search, "search_pairs", side_effect=KeyError)
        with searched:
            with self.assertRaises(KeyError):
                fewer.generate(PROMPT, max_new_tokens=2)
            found, expected = (
                engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True)[0].tokens
                for engine in (every, plain)
            )
        self.assertEqual(found, expected)

    @pytest.mark.slow
    def test_transfers_are_replayed_as_they_come(self):
        settings = {"period": 8, "alpha": 0.9}
        with prompt_transfers():
            engine, trace = self.recorded("dynaexq", settings, (3, 8), MADE["tiers"])
        self.assertEqual(engine.budget.tiers[0].limits.bulk, 8)
        run = Run(
            policy=make_policy("dynaexq", **settings), tiers=MADE["tiers"], expert_bytes=(2, 1),
            slots=(3, 8),
        )  # fmt: skip
        served, at_once = (run_policies(trace, [run], **how)[0] for how in ({}, {"delay": 0}))
        moved = served.events.sum(axis=0)[EVENTS.index("bulk"), 0]
        self.assertGreater(moved, 30)
        self.assertEqual(moved, engine.ledger.total("bulk"))
        gate, sooner = (of.gate.sum(axis=0) for of in (served, at_once))
        self.assertAlmostEqual(gate[0] / gate[-1], engine.ledger.shares["int4"], delta=1e-3)
        self.assertGreater(sooner[0], 1.02 * gate[0])

    def emulated(self, policy, settings, slots, tiers):
        """An engine under a policy in emulated slots, and what the replay of its trace tallies."""
        engine, trace = self.recorded(policy, settings, slots, tiers, emulate=True)
        run = Run(
            policy=make_policy(policy, **settings), tiers=tiers, expert_bytes=(2, 1)[: len(tiers)],
            slots=slots, bulk=64,
        )  # fmt: skip
        (tallied,) = run_policies(trace, [run], delay=0)
        return engine, tallied

    def recorded(self, policy, settings, slots, tiers, **how):
        """An engine under a policy, and the trace of what it generated."""
        made = MADE | {"tiers": tiers} | how
        engine = self.engine(policy=policy, settings=settings, slots=slots, **made)
        path, rng = self.folder / f"trace of {policy} {slots} {how}", np.random.default_rng(0)
        with engine.recording(path, probabilities=True, foreseen=CONFIG.num_experts):
            for _ in range(6):
                prompt = rng.integers(3, CONFIG.vocab_size, 6).tolist()
                engine.generate(prompt, max_new_tokens=120, temperature=1.0, ignore_eos=True)
        return engine, read_trace(path)

    @pytest.mark.slow
    def test_the_clock_has_no_part_in_emulated_slots(self):
        # Emulated slots are exact: a policy is not polled while its last request is in flight.
        how = {"policy": "dynaexq", "settings": {"period": 8}, "slots": (3, 8), **MADE}
        said, moved = [], []
        for ready in (False, True):
            engine = self.engine(emulate=True, **how)
            with mock.patch.object(cache, "is_ready", return_value=ready):
                for prompt in (PROMPT, PROMPT[::-1]):
                    said += engine.generate(prompt, max_new_tokens=60, ignore_eos=True)
            moved.append(engine.ledger.total("bulk"))
        self.assertGreater(moved[0], 3)
        self.assertEqual(moved[0], moved[1])
        tokens = [answer.tokens for answer in said]
        self.assertEqual(tokens[:2], tokens[2:])

    @pytest.mark.slow
    def test_a_tier_of_another_checkpoint(self):
        other = self.folder / "other"
        tiny_engine.load_tiny_engine(other)
        with self.assertRaisesRegex(MoejaxError, "must be of falling fidelity"):
            self.engine(policy="resident", tiers=("int2", f"high={other}"), group_size=16)
        engine = self.engine(policy="resident", tiers=(f"high={other}",))
        plain = tiny_engine.load_tiny_engine(self.folder / "model")
        tokens = np.asarray([PROMPT])
        np.testing.assert_array_equal(engine.logits(tokens), plain.logits(tokens))

    @parameterized.parameters(
        ({"policy": "dymoe"}, "high=stored must be of higher fidelity than low=stored"),
        ({"policy": "dynaexq", "tiers": ("int4", "int2")}, "groups of 64 are longer"),
        ({"policy": "dynaexq", **MADE, "slots": (3,)}, "policy.slots has 1 numbers"),
        ({"policy": "dynaexq", **MADE, "slots": (3, 9)}, "policy.slots=3, 9 must be from 0 to"),
        (
            {"policy": "dynaexq", **MADE, "slots": (3, 8), "limits": Limits(slots=3)},
            "memory.slots=3 and policy.slots=(3, 8) both say how many experts are cached",
        ),
        ({"policy": "dynaexq", **MADE, "settings": {"n_hot": 9}}, "n_hot=9, but"),
        ({"policy": "buddymoe"}, "there is no profile of experts"),
        ({"policy": "dymo"}, "there is no policy 'dymo'; did you mean 'dymoe'"),
        ({"tiers": ("int4", "int5")}, "'int5' cannot be made at load: int8, int4"),
        ({"tiers": ("int4,int2",)}, "'int4,int2' cannot be made at load"),
        ({"tiers": ("bf16", "itn2")}, "bf16, itn2 all mean the checkpoint as it is"),
        ({"tiers": ("mxfp4", "int2"), "group_size": 16}, "has no experts in MXFP4: give them"),
        ({"tiers": ("a=",)}, "'a=' is neither NAME=CHECKPOINT nor one of int8"),
        ({"tiers": ("int4", "int4")}, "has a name twice"),
        ({"emulate": True, "limits": Limits(device_gib=1)}, "policy.emulate keeps every expert"),
        ({"quantizer": "gptq"}, "policy.quantizer='gptq' must be one of rtn"),
        ({"tiers": ("int4=/nowhere",)}, "/nowhere"),
    )
    def test_what_is_refused(self, tiering, said):
        with self.assertRaises(MoejaxError) as caught:
            self.engine(**tiering)
        self.assertIn(said, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))


class CommandTest(parameterized.TestCase):
    @parameterized.parameters(
        (["--config.policy.settings=retention=0.9"], "policy.settings='retention=0.9' is of a pol"),
        (["--config.policy.retention=0.9"], "is now written --config.policy.settings=retention=VA"),
        (["--config.policy.name=dymo"], "policy.name='dymo' must be one of resident"),
        (
            ["--config.policy.name=dymoe", "--config.policy.settings=hot=int4"],
            "policy dymoe has no setting 'hot'",
        ),
        (["--config.policy.name=dymoe", "--config.policy.slots=('x',)"], "policy.slots: 'x' is"),
        (
            ["--config.policy.name=dymoe", "--config.policy.settings=retention=2"],
            "retention=2 must be a number, from 0.5 to 1",
        ),
        (["--config.fidelity_share=2"], "fidelity_share=2.0 must be from 0 to 1"),
    )
    def test_mistakes_are_one_line(self, arguments, said):
        is_evaluation = "fidelity" in arguments[0]
        command = evaluate.COMMAND if is_evaluation else generate.COMMAND
        prompt = [] if is_evaluation else ["--prompt=Hi"]
        status, _, err = commands.run(command, *prompt, *arguments)
        self.assertEqual(status, 2 if "is now written" in said else 1)  # 2: no such flag
        self.assertIn(said, err)
        self.assertLen(err.strip().splitlines(), 1)


class BudgetTest(parameterized.TestCase):
    def budget(self, gib: float, slots=(), names=("int4", "int2"), nbytes=(2**26, 2**25)):
        tiers = [TierSize(name=n, expert_nbytes=b) for n, b in zip(names, nbytes, strict=True)]
        run = RunSizes(
            config=CONFIG, weights_nbytes={"embed": 1000}, batch=1, context=64, chunk=16,
            platform="cpu",
        )  # fmt: skip
        demands = PolicyDemands(slots=slots, bulk=2)
        return make_budget(run, tiers, Limits(device_gib=gib), demands)

    def test_the_low_tier_is_whole_where_the_first_has_what_a_token_needs(self):
        whole = self.budget(0)
        self.assertEqual([tier.slots for tier in whole.tiers], [8, 8])
        for first in (4, 2):
            limit = self.budget(0, slots=(first, 8)).total_device
            some = self.budget(limit / 2**30)
            self.assertEqual([tier.slots for tier in some.tiers], [first, 8])
            self.assertEqual(some.total_device, limit)
            parts = {p for p in some.device if not p.endswith((", int4", ", int2"))}
            shared = {"weights embed", "KV cache", "activations and workspace"}
            self.assertEqual(parts, shared)

    def test_else_all_tiers_have_the_same_number(self):
        least = self.budget(0, slots=(1, 1)).total_device
        found = self.budget(least / 2**30)
        self.assertEqual([tier.slots for tier in found.tiers], [1, 1])

    def test_too_little_names_what_would_do(self):
        with self.assertRaisesRegex(BudgetError, "the smallest that would do is"):
            self.budget(1e-6)
        with self.assertRaisesRegex(BudgetError, "is too little for 8, 8 slots a layer"):
            self.budget(1e-6, slots=(8, 8))


class FidelityTest(parameterized.TestCase):
    def test_kl_by_hand(self):
        rng = np.random.default_rng(0)
        logits = {name: rng.standard_normal((1, 6, 5)).astype(np.float32) for name in "pq"}
        windowing = Windowing(6, 6)
        chosen = fidelity.sample(range(13), windowing, 0.5)
        self.assertEqual(chosen.tokens.shape, (1, 6))
        exact, other = (
            fidelity.predictions(lambda _, name=name: logits[name], chosen) for name in "pq"
        )
        found = fidelity.compare(exact, other)
        total = 0.0
        for t in chosen.positions[0]:
            p, q = (np.exp(logits[n][0, t]) / np.exp(logits[n][0, t]).sum() for n in "pq")
            total += sum(a * np.log(a / b) for a, b in zip(p, q, strict=True))
        self.assertAlmostEqual(found.mean_kl, total / 6, places=5)
        self.assertEqual(fidelity.compare(exact, exact).mean_kl, 0.0)
        self.assertEqual(found.num_tokens, 6)
