"""A policy by its name and a profile; profiles that are refused."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from absl.testing import parameterized

from moejax.errors import MoejaxError
from moejax.experts.tiering import Tiering, choose
from moejax.policies.baselines import OnDemand
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.compose import Compose
from moejax.policies.dynaexq import DynaExq
from moejax.routing.profile_file import BuddyProfile, load_buddies, save_buddies
from scripts.studies.buddymoe.controls import RandomExpert
from tests import tiny_engine
from tests.buddy_profiles import random_profile

M, E = 2, 8
CONFIG = tiny_engine.CONFIG


def chosen(policy: str, settings: dict[str, Any]) -> Any:
    return choose(Tiering(policy=policy, settings=settings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Foreseeing(DynaExq):
    """DynaExq by another name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other(OnDemand):
    """Has settings by the names of other policies'."""

    lists: str = ""
    links: str = ""


def profile(**how: Any) -> BuddyProfile:
    return random_profile(M, E, **how)


class ProfileTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.path = self.folder / "buddies.safetensors"

    def chosen(self, written: Any, **settings: Any) -> Any:
        save_buddies(self.path, written)
        return choose(Tiering(policy="buddymoe", settings=settings), self.folder, CONFIG)

    def test_of_another_family(self):
        with self.assertRaisesRegex(MoejaxError, "is of x/y, a mixtral model, and this is a qwen3"):
            self.chosen(profile(family="mixtral", checkpoint="x/y"))
        self.chosen(profile(family=CONFIG.family))

    def test_of_another_config(self):
        (self.folder / "config.json").write_text("{}")
        with self.assertLogs("absl", "WARNING") as said:
            self.chosen(profile(family=CONFIG.family, checkpoint="x/y", config_sha256="0"))
        self.assertIn("is of x/y, whose config.json is not this model's", said.output[0])

    def test_the_temperature_goes_with_tau(self):
        counted = profile(counting={"temperature": 0.5})
        policy = self.chosen(counted, tae_tau="profile").policy
        self.assertEqual(policy.tae_temperature, 0.5)
        np.testing.assert_array_equal(policy.tae_tau, counted.tau)
        self.assertEqual(self.chosen(counted, tae_tau=0.3).policy.tae_temperature, 1.0)
        self.chosen(counted, tae_tau="profile", tae_temperature=0.5)
        with self.assertRaisesRegex(MoejaxError, "tae_temperature=1.0, but .* of temperature 0.5"):
            self.chosen(counted, tae_tau="profile", tae_temperature=1.0)

    @parameterized.parameters(
        ("tau", np.float32([0.5, np.nan]), "tau holds numbers that are not finite"),
        ("q", np.float32(np.inf), "q holds numbers that are not finite"),
        ("q", np.float32(-1), "q holds numbers below 0"),
        ("q", np.float32([0, 0, 0, 0.5]), "q rises along a list"),
        ("buddies", (3, 3, -1, -1), "buddies lists an expert twice"),
        ("buddies", (0, 3, -1, -1), "buddies lists an expert as its own"),
    )
    def test_values_that_are_refused(self, name, value, said):
        good = profile()
        if name == "tau":
            bad = dataclasses.replace(good, tau=value)
        else:
            ids, q = good.lists.ids.copy(), good.lists.q.copy()
            {"buddies": ids, "q": q}[name][0, 0] = value
            bad = dataclasses.replace(good, lists=good.lists._replace(ids=ids, q=q))
        save_buddies(self.path, bad)
        with self.assertRaisesRegex(MoejaxError, said):
            load_buddies(self.path)

    def test_nobody_knows_who_is_like_an_expert_that_was_never_chosen(self):
        found = profile(never=2)
        self.assertEqual(found.lists.sizes()[:, :2].max(), 0)
        self.assertGreater(found.lists.sizes()[:, 2:].min(), 0)

    def test_a_class_of_ones_own_gets_what_the_policy_gets_that_it_derives_from(self):
        save_buddies(self.path, profile())
        own = chosen(f"{RandomExpert.__module__}:RandomExpert", {"lists": str(self.path)}).policy
        assert isinstance(own, RandomExpert)
        self.assertEqual(own.lists.ids.shape, (M, E, 4))
        with self.assertRaisesRegex(MoejaxError, "links=x is for foresight above 0"):
            chosen(f"{__name__}:Foreseeing", {"links": "x"})
        for settings in ({}, {"lists": "x", "links": "y"}):  # words of its own
            other = chosen(f"{__name__}:Other", settings).policy
            self.assertEqual((other.lists, other.links), tuple(settings.values()) or ("", ""))

    def test_by_name_alone(self):
        save_buddies(self.path, profile())
        policy = chosen("compose", {"parts": "dymoe+buddymoe", "lists": str(self.path)}).policy
        assert isinstance(policy, Compose)
        assert isinstance(policy.buddies, BuddyMoe)
        self.assertEqual(policy.buddies.lists.ids.shape, (M, E, 4))
        with self.assertRaisesRegex(MoejaxError, "needs a profile: lists=FILE"):
            chosen("buddymoe", {})
        with self.assertRaisesRegex(MoejaxError, "lists=None must be those of a profile"):
            chosen("buddymoe", {"lists": None})
        for gains in (0.5, (1, 2)):
            with self.assertRaisesRegex(MoejaxError, "gains=.* must be an array, as a profile"):
                chosen("buddymoe", {"lists": str(self.path), "gains": gains})
        with self.assertRaisesRegex(MoejaxError, "links=5 must be an array, as a profile"):
            chosen("dynaexq", {"foresight": 2, "foresee_by": "links", "links": 5})

    def test_what_a_profile_counted(self):
        policy = {"tae_tau": "profile"}
        with self.assertRaisesRegex(MoejaxError, "does not say where it comes from"):
            self.chosen(profile(counting="x"), **policy)
        with self.assertRaisesRegex(MoejaxError, "the profile's temperature='x' must be a number"):
            self.chosen(profile(counting={"temperature": "x"}), **policy)
        good = profile()
        none = np.full((M, E), np.nan, np.float32)
        bad = dataclasses.replace(good.activity, activations=none)
        save_buddies(self.path, dataclasses.replace(good, activity=bad))
        with self.assertRaisesRegex(MoejaxError, "activations holds numbers that are not finite"):
            load_buddies(self.path)
