"""Every policy under the contract; policies by name; what their settings refuse."""

import dataclasses
import functools

import numpy as np
import pytest
from absl.testing import parameterized

from moejax.errors import MoejaxError
from moejax.policies.base import PolicySpec
from moejax.policies.make import POLICIES, make_policy, parts_of, settings_of, with_kernels
from tests import policies_contract as contract
from tests import slow
from tests.policies_cases import CASES, LISTS, SPEC, random_trace

EVERY = [(name, phase) for name in CASES for phase in CASES[name].phases]


@functools.cache
def trace_of(name: str, phase: str, steps: int = 6):
    tokens = {"decode": 1, "prefill": 5}[phase]
    return random_trace(CASES[name].spec, steps, tokens, prefill=phase == "prefill", seed=len(name))


class ContractTest(parameterized.TestCase):
    def test_every_policy_has_a_case(self):
        self.assertEqual({case.name for case in CASES.values()}, set(POLICIES))

    @slow.repeats(lambda name: CASES[name].name)
    @parameterized.parameters(*EVERY)
    def test_form(self, name, phase):
        contract.check_form(CASES[name], trace_of(name, phase))

    @slow.repeats(lambda name: CASES[name].name)
    @parameterized.parameters(*EVERY)
    def test_values(self, name, phase):
        contract.check_values(CASES[name], trace_of(name, phase))

    @parameterized.parameters(*EVERY)
    @pytest.mark.slow
    def test_forms_agree(self, name, phase):
        contract.check_forms_agree(CASES[name], trace_of(name, phase))

    @slow.repeats(lambda name: CASES[name].name)
    @parameterized.parameters(*EVERY)
    def test_layers_apart(self, name, phase):
        contract.check_layers_apart(CASES[name], trace_of(name, phase))

    @slow.repeats(lambda name: CASES[name].name)
    @parameterized.parameters(*CASES)
    def test_rule(self, name):
        none = ("compose_buddies", "compose_skips", "dymoe_random")
        checked = contract.check_rules(CASES[name], trace_of(name, "decode"))
        self.assertEqual(checked > 0, name not in none)

    def test_several_sequences_of_decode_share_what_is_critical(self):
        trace = random_trace(SPEC, 4, 4, prefill=False, seed=6)
        for name in ("dymoe_4_2", "dynaexq"):
            self.assertGreater(contract.check_rules(CASES[name], trace), 0)

    # Drawing random numbers takes what it takes.
    @slow.repeats(lambda name: CASES[name].name)
    @parameterized.parameters(*[name for name in CASES if name != "dymoe_random"])
    def test_cost(self, name):
        contract.check_cost(CASES[name], trace_of(name, "decode"))

    @slow.repeats(lambda name: CASES[name].name)
    @parameterized.parameters(*EVERY)
    def test_padding(self, name, phase):
        contract.check_padding(CASES[name], trace_of(name, phase))

    @slow.repeats(lambda name: CASES[name].name)
    @parameterized.parameters(*EVERY)
    def test_nothing_active(self, name, phase):
        contract.check_nothing_active(CASES[name], trace_of(name, phase))

    @slow.repeats(lambda name: CASES[name].name)
    @parameterized.parameters(*CASES)
    def test_transfers(self, name):
        case, trace = CASES[name], trace_of(name, "decode", 40)
        for setting in range(len(case.settings) if case.name == "dynaexq" else 1):
            moves = contract.check_transfers(case, trace, setting)
            swaps = "dynaexq" in parts_of(case.name, case.settings[setting])
            self.assertEqual(moves.promotions > 0, swaps)

    # Policies with hotness rest between updates; buddies save up between calls.
    @parameterized.parameters(*CASES)
    @pytest.mark.slow
    def test_rest(self, name):
        case, trace = CASES[name], trace_of(name, "decode", 40)
        for setting in range(len(case.settings) if case.name == "dynaexq" else 1):
            parts = parts_of(case.name, case.settings[setting])
            left_out = contract.check_rest(case, trace, setting)
            self.assertEqual(left_out > 0, "dynaexq" in parts and "buddymoe" not in parts)

    def test_several_sequences_decode_at_once(self):
        trace = random_trace(SPEC, 4, 4, prefill=False, seed=5)
        for name in ("on_demand", "dymoe_4_2"):
            contract.check_padding(CASES[name], trace)


class MakeTest(parameterized.TestCase):
    @parameterized.parameters(*POLICIES)
    def test_defaults_make_a_frozen_policy_of_that_name(self, name):
        policy = make_policy(name)
        self.assertEqual(policy.name, name)
        known = settings_of(name, parts_of(name, {}))
        self.assertEqual(hash(policy), hash(make_policy(name, **known)))
        with self.assertRaises(dataclasses.FrozenInstanceError):
            policy.tier = "int4"

    @parameterized.parameters(
        ("dynaex", {}, "no policy 'dynaex'; did you mean 'dynaexq'"),
        ("", {}, "known: resident, on_demand"),
        ("dymoe", {"retenton": 0.9}, "no setting 'retenton'; did you mean 'retention'"),
        ("dymoe", {"retention": 0.4}, "retention=0.4 must be a number, from 0.5 to 1"),
        ("dymoe", {"retention": float("nan")}, "retention=nan must be"),
        ("dymoe", {"schedule": "sine"}, "schedule='sine' must be one of cosine, linear"),
        ("compose", {"rho": 1}, "rho is of no part of parts=dynaexq+dymoe"),
        ("compose", {"parts": "dymoe+buddymoe", "period": 9}, "period is of no part of parts="),
        ("dymoe", {"sensitivity": (1.0,)}, "sensitivity is of schedule='sensitivity', not of"),
        ("dymoe", {"aggregation": "max"}, "aggregation='max' must be one of mean, sum, last_query"),
        ("dymoe", {"sensitivity": [1.0, -1.0]}, "sensitivity=-1.0 must be a number, 0 or more"),
        ("dymoe", {"renormalise": 1}, "renormalise=1 must be True or False"),
        ("dymoe", {"prefetch": -2}, "prefetch=-2 must be an integer, from -1"),
        ("dynaexq", {"alpha": 1.0}, "alpha=1.0 must be a number, from 0 to less than 1"),
        ("dynaexq", {"period": 0}, "period=0 must be an integer, from 1"),
        ("dynaexq", {"n_hot": (1, 2.5)}, "n_hot=2.5 must be an integer, 0 or more"),
        ("dynaexq", {"choice": "cold"}, "choice='cold' must be one of hot, random, first"),
        ("dynaexq", {"max_requests": 7}, "max_requests=7 must be even"),
        ("buddymoe", {"prefetch": -2}, "prefetch=-2 must be an integer, from -1"),
        ("compose", {"parts": "dymoe"}, "compose takes two parts or three"),
        ("compose", {"parts": "dymoe+lru"}, "parts: 'lru' is none of dynaexq, dymoe, buddymoe"),
        ("compose", {"parts": "dymoe+dynaexq", "period": 0}, "period=0 must be an integer"),
    )
    def test_what_is_refused(self, name, settings, said):
        with self.assertRaises(MoejaxError) as caught:
            make_policy(name, **settings)
        self.assertIn(said, str(caught.exception))

    @parameterized.parameters(
        ("resident", {"tier": "int8"}, "tier 'int8' is not stored; there are int4, int2"),
        ("dynaexq", {"hot": "int2"}, "hot=int2 must be of higher fidelity than cold=int2"),
        ("dynaexq", {"n_hot": 4}, "n_hot=4, but the hot tier has 3 slots"),
        ("dynaexq", {"n_hot": (1, 2)}, "n_hot has 2 numbers, but the model has 3"),
        ("dymoe", {"high": "int2"}, "low='skip' leaves experts out"),
        ("dymoe", {"schedule": "sensitivity"}, "sensitivity has 0 numbers, but the model has 3"),
        (
            "dymoe",
            {"schedule": "sensitivity", "sensitivity": (1.0, 0.0, 0.0)},
            "0 in more than half",
        ),
    )
    def test_what_does_not_suit_the_model(self, name, settings, said):
        with self.assertRaises(MoejaxError) as caught:
            make_policy(name, **settings).init(SPEC)
        self.assertIn(said, str(caught.exception))

    def test_kernels_search_for_buddies_on_a_gpu(self):
        buddies = make_policy("buddymoe", lists=LISTS)
        for policy in (buddies, make_policy("compose", parts="dymoe+buddymoe", lists=LISTS)):
            self.assertIs(with_kernels(policy, "cpu"), policy)
            found = with_kernels(policy, "gpu")
            self.assertEqual(getattr(found, "buddies", found).form, "kernel")

    def test_what_the_engine_must_compute(self):
        needs = {name: make_policy(name).needs for name in POLICIES}
        users = {"dymoe", "compose"}
        self.assertEqual({name for name, of in needs.items() if of.importance}, users)
        self.assertEqual({name for name, of in needs.items() if of.predicted}, users)
        self.assertTrue(make_policy("on_demand", prefetch=2).needs.predicted)
        self.assertFalse(make_policy("dymoe", prefetch=0).needs.predicted)

    def test_one_tier_is_enough_to_skip(self):
        spec = PolicySpec(
            num_layers=2, num_experts=4, width=2, tiers=("int4",), expert_bytes=(9,), slots=(2,)
        )
        state = make_policy("dymoe", low="skip").init(spec)
        self.assertEqual((int(state.high), int(state.low)), (0, -1))
        with self.assertRaisesRegex(MoejaxError, "high=int4"):
            make_policy("dymoe").init(spec)
        np.testing.assert_array_equal(make_policy("on_demand", prefetch=9).init(spec).limit, [2, 0])
