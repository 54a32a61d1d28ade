"""The plan of a layer by one kernel: equal to the reference, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import cache_plan
from pallas_kernels.cache_plan.operands import COLUMNS, EVENTS
from pallas_kernels.target import Target
from tests import cache_plan_contract as contract
from tests import slow
from tests.cache_plan_contract import CASES


class ContractTest(parameterized.TestCase):
    # Other rules are the first one's with another flag.
    @slow.where(
        lambda case, seed: (
            seed or case not in ("decode", "decode_beside_the_host", "critical", "shared")
        )
    )
    @parameterized.product(case=tuple(CASES), seed=(0, 1))
    def test_the_kernel_decides_as_the_reference(self, case, seed):
        tables, _, made = contract.check(CASES[case], seed, implementation="triton", interpret=True)
        events = [np.asarray(one.events).sum((0, 1)) for one in tables]
        names = dict(zip(EVENTS, np.sum(events, axis=0), strict=True))
        if not CASES[case].policy:
            self.assertGreater(names["misses"], 0)
            is_known = names["admitted"] + names["streamed"] + names["unserved"]
            on_host = 0 if made.hosted is None else np.sum(np.asarray(made.hosted) >= 0)
            # Of predictions `events` has no misses, and they have no plan of their own.
            self.assertEqual(bool(CASES[case].host), names["misses"] > is_known)
            self.assertEqual(bool(CASES[case].host), on_host > 0)
            return
        self.assertGreater(names["hits"], 0)
        still = case in ("one_of_all", "fixed") or CASES[case].rule == "held"
        if not still:  # something moves within a step
            self.assertGreater(min(names["admitted"], names["evictions"]), 0)
        unasked = {0} if case == "held_in_the_second" else set()
        every = set(range(-1, len(tables)))
        self.assertEqual(set(np.unique(made.tier)), every - unasked)

    @parameterized.parameters(*(name for name, case in CASES.items() if case.rule))
    @pytest.mark.slow
    def test_a_rule_of_the_reference_is_its_wishes(self, case):
        contract.check(CASES[case], 3, implementation="reference")


class WavesTest(parameterized.TestCase):
    """From whatever tables, waves serve all that is needed, and one wave fewer would not."""

    STATES = 400

    def plans(self, sizes, seed):
        """Served pairs, waves and places of random states: tiers of (C, B), E experts."""
        num_experts, *tiers = sizes
        forms = [
            cache_plan.TierShape(
                slots=slots, transient=transient,
                waves=cache_plan.num_waves(num_experts, num_experts, slots, transient),
            )
            for slots, transient in tiers
        ]  # fmt: skip
        rng = np.random.default_rng(seed)

        def table(slots):
            owners = np.array([rng.permutation(num_experts)[:slots] for _ in range(self.STATES)])
            owners = np.where(rng.random(owners.shape) < rng.random((self.STATES, 1)), owners, -1)
            slot_of = np.full((self.STATES, num_experts + 1), -1)
            np.put_along_axis(slot_of, owners, np.arange(slots)[None], 1)
            rest = rng.integers(0, 3, (self.STATES, 2 * slots))
            return np.concatenate((slot_of[:, :-1], owners, rest), 1, dtype=np.int32)[:, None]

        ids = jnp.arange(num_experts, dtype=jnp.int32)[:, None]
        rows = jnp.zeros((1, num_experts), jnp.int32)

        def one(tables, tier, active):
            operands = [
                cache_plan.TierOperands(
                    cache_plan.Tables(
                        of, jnp.int32(9), jnp.zeros((1, len(EVENTS)), jnp.int32), jnp.zeros((1, 3))
                    ),
                    rows,
                )
                for of in tables
            ]
            wishes = cache_plan.Wishes(tier, tier > 9)
            asked = cache_plan.Asked(ids, jnp.ones((num_experts, 1)), wishes)
            after, _, made = cache_plan.plan(
                operands, jnp.zeros((1, len(tables) + 3)), 0, asked, active, forms=forms,
                implementation="reference",
            )  # fmt: skip
            wave = jnp.zeros_like(tier) if made.wave is None else made.wave
            events = [of.events[0, COLUMNS["unserved"]] for of in after]
            return jnp.stack(events), made.tier[:, 0], made.slot[:, 0], wave[:, 0]

        shape = (self.STATES, num_experts, 1)
        # From a few experts in some tier to all of them in one.
        tier = (rng.random(shape) < rng.choice((0, 0.2, 1), (self.STATES, 1, 1))).astype(np.int32)
        active = rng.random(shape[:2]) < rng.choice((0.3, 0.9, 1), (self.STATES, 1))
        given = [table(slots) for slots, _ in tiers], np.minimum(tier, len(tiers) - 1), active
        return forms, active, jax.device_get(jax.jit(jax.vmap(one))(*given))

    @parameterized.parameters((9, (3, 2)), (9, (6, 4)), (8, (3, 2), (5, 1)), (7, (4, 4), (0, 3)))
    def test_every_needed_expert_is_served(self, *sizes):
        forms, active, (unserved, tier, slot, wave) = self.plans(sizes, seed=len(str(sizes)))
        np.testing.assert_array_equal(unserved, 0)
        np.testing.assert_array_equal((slot >= 0) & (tier >= 0), active)
        for i, form in enumerate(forms):
            mine = tier == i
            most = np.max(np.where(mine, wave, 0))
            self.assertEqual(most, form.later_waves)
            if form.at_once:
                self.assertTrue((slot[mine] >= form.slots).any())
            for places, waves, here in zip(slot, wave, mine, strict=True):
                taken = list(zip(waves[here], places[here], strict=True))
                self.assertLen(set(taken), len(taken))


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    @parameterized.parameters(*CASES)
    def test_the_compiled_kernel_decides_as_the_reference(self, case):
        for seed in range(2):
            contract.check(CASES[case], seed, implementation="triton")


class ApiTest(parameterized.TestCase):
    def operands(self, gate: int = 4, slots: int = 3):
        tables = cache_plan.Tables(
            jnp.full((2, 8 + 3 * slots), -1, jnp.int32), jnp.int32(1),
            jnp.zeros((2, len(EVENTS)), jnp.int32), jnp.zeros((2, 2)),
        )  # fmt: skip
        tier = cache_plan.TierOperands(tables, jnp.zeros((2, 8), jnp.int32))
        pairs, weights = jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2))
        asked = cache_plan.Asked(pairs, weights, cache_plan.Wishes(pairs, pairs > 0))
        return [tier], jnp.zeros((2, gate)), 0, asked, jnp.ones(1, bool)

    def plan(self, *operands, form=None, **how):
        form = form or cache_plan.TierShape(slots=3)
        return cache_plan.plan(*operands, forms=[form], **how)

    def test_operands_that_do_not_fit_are_named(self):
        with self.assertRaisesRegex(ValueError, r"gate of 1 tiers: .*, not float32\[2, 4\]"):
            self.plan(*self.operands(gate=5))
        with self.assertRaisesRegex(ValueError, "tier 0 is not full: it has 3 slots"):
            self.plan(*self.operands(), form=cache_plan.TierShape(slots=3, is_full=True))
        (tier,), *rest = self.operands(gate=5)
        with self.assertRaisesRegex(ValueError, "tier 1 is fixed: the first one may be"):
            forms = [
                cache_plan.TierShape(slots=3),
                cache_plan.TierShape(slots=3, static_in_step=True),
            ]
            cache_plan.plan([tier, tier], *rest, forms=forms)
        with self.assertRaisesRegex(ValueError, "table of tier 0, 2 slots: "):
            self.plan(*self.operands(), form=cache_plan.TierShape(slots=2))
        with self.assertRaisesRegex(ValueError, "0 slots, 0 waves of 1"):
            self.plan(*self.operands(slots=0), form=cache_plan.TierShape(slots=0))
        tiers, gate, layer, asked, active = self.operands(gate=5)
        with self.assertRaisesRegex(ValueError, "2 tiers, and nobody says which"):
            forms = [cache_plan.TierShape(slots=3)] * 2
            given = (tiers * 2, gate, layer, asked._replace(by=None), active)
            cache_plan.plan(*given, forms=forms)
        with self.assertRaisesRegex(ValueError, "none of triton, reference"):
            self.plan(*self.operands(), implementation="mosaic")
        with self.assertRaisesRegex(ValueError, "there are no slots"):
            cache_plan.predict(
                self.operands(slots=0)[0], 0, jnp.zeros(2, jnp.int32), active,
                forms=[cache_plan.TierShape(slots=0, waves=1)],
            )  # fmt: skip
        with self.assertRaisesRegex(ValueError, "no tiers share slots"):
            forms = [cache_plan.TierShape(slots=3)] * 2
            cache_plan.predict(tiers * 2, 0, jnp.zeros(2, jnp.int32), active, forms=forms)

    def test_refusals(self):
        refusal, gpu = cache_plan.PLAN.refusal, Target("gpu", (9, 0))
        self.assertIsNone(refusal("triton", 128, 8, 2, target=gpu))
        self.assertRegex(refusal("triton", 128, 8, 5, target=gpu), "5 tiers")
        self.assertRegex(refusal("triton", 1024, 300, 1, target=gpu), "1024 experts.*300")
        self.assertIsNotNone(refusal("triton", 8, 8, 1, target=Target("cpu", None)))
        self.assertIsNone(refusal("reference", 1024, 300, 9, target=gpu))
