"""Predictions of hot experts, against loops; and their reads ahead from the disk."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.errors import MoejaxError
from moejax.experts.budget import Limits
from moejax.experts.tiering import Tiering
from moejax.policies import dynaexq
from moejax.policies.baselines import OnDemand
from moejax.policies.compose import Compose
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from moejax.routing import profile_file
from moejax.routing.profile_file import FILE_NAME, save_buddies
from tests import slow, tiny_engine
from tests.buddy_profiles import random_profile
from tests.folder_case import FolderTestCase
from tests.policies_cases import SPEC, E, M

EXPERTS, LAYERS = tiny_engine.CONFIG.num_experts, len(tiny_engine.CONFIG.moe_layers)


class FunctionsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.rng = np.random.default_rng(0)
        self.following = self.rng.integers(0, 9, (M, E, E)).astype(np.float32)
        self.following[0, 2] = 0  # never chosen

    def test_links_are_shares_of_those_that_follow(self):
        links = profile_file._links_of(self.following)
        self.assertEqual((links.dtype, links.shape), (np.float32, (M, E, E)))
        np.testing.assert_array_equal(links[0], 0)
        for layer, i, j in np.ndindex(M - 1, E, E):
            total = self.following[layer, i].sum()
            share = self.following[layer, i, j] / total if total else 0
            np.testing.assert_allclose(links[layer + 1, i, j], share, rtol=1e-6)

    def test_hotness_is_carried_over_from_the_layer_before(self):
        links, scores = (
            profile_file._links_of(self.following),
            self.rng.random((M, E), np.float32),
        )
        found = jax.jit(dynaexq._expected)(scores, links)
        np.testing.assert_array_equal(found[0], scores[0])
        for layer, j in np.ndindex(M - 1, E):
            mean = sum(float(scores[layer, i]) * links[layer + 1, i, j] for i in range(E))
            np.testing.assert_allclose(found[layer + 1, j], mean, rtol=1e-5)

    @slow.repeats()
    @parameterized.parameters(1, 3, E)
    def test_the_best_of_those_that_are_not_settled(self, count):
        worth = self.rng.random((M, E), np.float32)
        worth[0, 1] = 0
        settled = self.rng.random((M, E)) < 0.5
        found = dynaexq._nearly_hot(
            jnp.asarray(worth), jnp.asarray(settled), jnp.int32(1), count, jnp.bool_(True)
        )
        rows = np.stack([np.asarray(field) for field in found], axis=1).reshape(count, M, 3)
        for layer in range(M):
            wanted = [e for e in np.argsort(-worth[layer]) if not settled[layer, e]]
            wanted = [e for e in wanted if worth[layer, e] > 0][:count]
            expected = [[layer, e, 1] for e in wanted]
            expected += [[-1, -1, -1]] * (count - len(wanted))
            self.assertEqual(rows[:, layer].tolist(), expected)


class PolicyTest(parameterized.TestCase):
    def state(self, policy, scores, tokens=1):
        state = policy.init(SPEC)
        return state._replace(scores=jnp.asarray(scores), tokens=jnp.int32(tokens))

    def asked(self, policy, state, resident):
        rows = np.stack([np.asarray(f) for f in policy.disk_prefetch(state, resident)], axis=1)
        return [tuple(row) for row in rows.tolist() if row[0] >= 0]

    @parameterized.parameters("scores", "links")
    @pytest.mark.slow
    def test_asks_once_when_the_hot_set_was_chosen(self, by):
        rng = np.random.default_rng(1)
        scores = rng.random((M, E), np.float32)
        links = profile_file._links_of(rng.random((M, E, E)).astype(np.float32) ** 8)
        policy = DynaExq(period=4, foresight=2, foresee_by=by, links=links)
        resident = np.zeros((M, 2, E), bool)
        resident[:, 0, 7] = resident[:, 1] = True
        resident = jnp.asarray(resident)
        for tokens, is_due in ((3, False), (4, True), (0, False)):
            _, state = policy.transfers(self.state(policy, scores, tokens), resident)
            found = self.asked(policy, state, resident)
            self.assertEqual(bool(found), is_due)
            if not is_due:
                continue
            worth = np.asarray(dynaexq._expected(scores, links)) if by == "links" else scores
            high = np.asarray(state.high)
            for layer in range(M):
                rest = [e for e in np.argsort(-worth[layer]) if not high[layer, e]]
                mine = [(e, tier) for of, e, tier in found if of == layer]
                self.assertEqual(mine, [(e, 0) for e in rest[:2]])
        again = policy.transfers(state._replace(tokens=jnp.int32(0)), resident)[1]
        self.assertEqual(self.asked(policy, again, resident), [])

    def test_who_foresees_nothing(self):
        resident = jnp.zeros((M, 2, E), bool)
        for policy in (
            DynaExq(period=1), OnDemand(),
            Compose(importance=DyMoE(), hotness=DynaExq(period=1)),
        ):  # fmt: skip
            _, state = jax.jit(policy.transfers)(policy.init(SPEC), resident)
            self.assertEqual(policy.disk_prefetch(state, resident).layer.shape, (0,))

    @parameterized.parameters(
        ({"foresight": -1}, "foresight=-1 must be an integer"),
        ({"foresight": E + 1}, f"foresight={E + 1}, but a layer has {E}"),
        ({"foresee_by": "links"}, "foresee_by=links is for foresight above 0"),
        ({"foresight": 2, "choice": "first"}, "foresight=2 is for choice=hot: first stays"),
        ({"foresee_by": "luck"}, "foresee_by='luck' must be one of scores, links"),
        ({"foresight": 1, "foresee_by": "links"}, "needs a profile"),
        (
            {"foresight": 1, "foresee_by": "links", "links": np.zeros((1, E, E))},
            r"links are \[1, 8, 8\], the model needs \[3, 8, 8\]",
        ),
        ({"links": np.full((M, E, E), np.nan)}, "must be finite numbers"),
    )
    def test_what_cannot_be(self, settings, said):
        with self.assertRaisesRegex(MoejaxError, said):
            DynaExq(**settings).init(SPEC)

    def test_policies_of_other_links_are_others(self):
        links = np.zeros((M, E, E), np.float32)
        self.assertEqual(DynaExq(links=links), DynaExq(links=links.copy()))
        self.assertNotEqual(DynaExq(links=links), DynaExq(links=links + 1))
        self.assertNotEqual(DynaExq(), DynaExq(period=3))


class EngineTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = cls.class_folder() / "model"

    def engine(self, host_gib, **settings):
        tiering = Tiering(
            policy="dynaexq", settings={"period": 8, "warmup": 8, **settings}, slots=(2, EXPERTS),
            tiers=(f"high={self.folder}", f"low={self.folder}"),
        )  # fmt: skip
        return tiny_engine.load_tiny_engine(
            self.folder, limits=Limits(host_gib=host_gib, bulk=2, transient=1), policy=tiering
        )

    @parameterized.parameters("scores", "links")
    @pytest.mark.slow
    def test_the_disk_is_read_ahead(self, by):
        profile = random_profile(LAYERS, EXPERTS)
        following = np.random.default_rng(3).random((LAYERS, EXPERTS, EXPERTS)).astype(np.float32)
        activity = dataclasses.replace(profile.activity, following=following)
        whole = self.engine(0)
        save_buddies(self.folder / FILE_NAME, dataclasses.replace(profile, activity=activity))
        # Even shares leave all rows to the tier whose experts all have slots; the other
        # one has transfers, too, and room for what a step may wait for.
        experts = whole.budget.total_host - whole.budget.host["embeddings"]
        engine = self.engine(1.05 * experts / 2**30, foresight=2, foresee_by=by)
        self.assertIsNotNone(engine._runner.memory.tiers[0].disk)
        # Texts that differ: experts become hot and cold again. The disk is read ahead only while no
        # transfer waits for it, so how many texts it takes is up to the machine.
        for number in range(500):
            prompt = [(37 * number + 5 * i) % tiny_engine.VOCAB_SIZE for i in range(8)]
            engine.generate([prompt], max_new_tokens=16, ignore_eos=True)
            hot = engine.ledger.tiers["high"]
            if hot.disk["ahead_used"]:
                break
        self.assertGreater(hot.disk["ahead"], 0)
        self.assertGreater(hot.disk["ahead_used"], 0)
        self.assertLessEqual(hot.disk["ahead_used"], hot.disk["ahead"])
        self.assertEqual(engine.ledger.tiers["low"].disk["ahead"], 0)
        self.assertIn(f"foreseen: {hot.disk['ahead']} experts read", "".join(hot.describe()))

    def test_profiles_that_do_not_say_it(self):
        profile = random_profile(LAYERS, EXPERTS)
        tiny_engine.load_tiny_engine(self.folder)
        save_buddies(self.folder / FILE_NAME, profile)
        with self.assertRaisesRegex(MoejaxError, "does not say which experts follow which"):
            self.engine(0, foresight=2, foresee_by="links")
        with self.assertRaisesRegex(MoejaxError, "links=.* is for foresight above 0"):
            self.engine(0, links=".")
