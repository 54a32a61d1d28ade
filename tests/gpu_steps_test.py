"""Steps of cached experts leave the pool where it is, as XLA compiles them for a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl.testing import absltest

from tests.gpu_steps import CASES, CHUNKS, LAYERS, MOST_BYTES, NO_POLICY, POLICIES, SMALL

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


class CompilingTest(absltest.TestCase):
    """In a process of its own, by JAX's CUDA plugin, without a GPU."""

    def printed(self, what):
        if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
            self.skipTest("JAX's CUDA plugin is not installed")
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu_steps", what], cwd=ROOT, env=os.environ,
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr[-4000:])
        return done.stdout

    def test_no_slots_of_tiers_are_copied(self):
        lines = [line.split() for line in self.printed("tiers").splitlines()]
        found = {line[0]: line[1:] for line in lines if line and line[0].endswith("ed")}
        self.assertLen(found, 2 * (1 + len(POLICIES)))
        for label, (temporary, _) in found.items():
            self.assertLess(int(temporary), MOST_BYTES, label)
        (alone, hosted) = (
            [*map(int, of[1:])] for of in lines if of[0] in ("alone", "beside_the_host")
        )
        self.assertLess(hosted[0], MOST_BYTES)
        # Jobs are posted and waited for in each layer, and the sum of both is cast.
        self.assertBetween(hosted[1] - alone[1], 2 * LAYERS, 3 * LAYERS + 2)
        # A replay is one launch a layer, whoever decides; a policy at most two.
        for way in ("routed", "replayed"):
            alone = int(found[f"{NO_POLICY}_{way}"][1])
            for name in POLICIES:
                with self.subTest(name, way=way):
                    launches = int(found[f"{name}_{way}"][1])
                    self.assertBetween(launches, alone, alone + 2 * LAYERS)
                    more = int(found[f"{name}_replayed"][1]) - int(found[f"{name}_routed"][1])
                    self.assertBetween(more, LAYERS, LAYERS + 2)  # and two a step

    def test_a_prompt_with_compensators_takes_no_more_than_planned(self):
        """Tokens are copied once, and not for each wave."""
        [line] = [of.split() for of in self.printed("terms").splitlines() if "terms" in of]
        self.assertLess(int(line[1]), int(line[2]))

    def test_two_gpus_run_the_step_of_one(self):
        """One kernel a layer more, which sums; no collective of XLA; pools stay where they are."""
        lines = [line.split() for line in self.printed("mesh").splitlines()]
        found = {line[0]: list(map(int, line[1:])) for line in lines if len(line) == 7}
        self.assertLen(found, 8)
        for name in ("resident", "slots"):
            one, two = found[f"{name}_1"], found[f"{name}_2"]
            temporary, aliased, donated, launches, by_xla, sums = two
            self.assertLess(temporary, one[0] + MOST_BYTES)
            self.assertGreaterEqual(aliased, donated)
            self.assertEqual((one[4:], by_xla, sums), ([0, 0], 0, 2))  # of two layers
            self.assertLessEqual(launches, one[3] + 2 * sums)
        for name, one in (("handed_out", "resident"), ("handed_out_slots", "slots")):
            temporary, aliased, donated, launches, by_xla, sums = found[f"{name}_2"]
            self.assertLess(temporary, found[f"{one}_2"][0] + MOST_BYTES)
            self.assertGreaterEqual(aliased, donated)
            self.assertEqual((by_xla, sums), (0, 2))
            self.assertLessEqual(launches, found[f"{one}_2"][3] + 2 * 2)  # which pairs run here
        heads, whole = found["heads_2"], found["resident_2"]
        self.assertLess(heads[0], whole[0] + MOST_BYTES)
        self.assertLess(heads[1], 0.51 * whole[1])  # the cache, donated
        self.assertEqual(heads[4:], [0, 4])  # one more a layer
        self.assertLessEqual(heads[3], whole[3] + 2 * 2)
        self.assertEqual(found["without_mailboxes_2"][4:], [2, 0])

    def test_pages_cost_no_launch_and_a_chunk_copies_its_row_alone(self):
        lines = [line.split() for line in self.printed("pages").splitlines()]
        found = {line[0]: list(map(int, line[1:])) for line in lines if len(line) in (3, 4)}
        (temporary, launches), (more, as_many) = found["one_piece"], found["pages"]
        self.assertEqual(as_many, launches)
        self.assertLess(more, temporary + MOST_BYTES)
        (few, aliased, cache), (many, *_) = found["chunk_8"], found["chunk_64"]
        self.assertGreaterEqual(aliased, cache)
        self.assertLess(many, few + MOST_BYTES)

    def test_no_bank_is_copied(self):
        printed = self.printed("pools")
        lines = [line.split() for line in printed.splitlines() if "_slots_" in line]
        self.assertLen(lines, (len(CASES) + len(CHUNKS)) * len(SMALL), printed[-4000:])
        for label, temporary, bound, aliased, donated in lines:
            with self.subTest(label):
                self.assertGreaterEqual(int(aliased), int(donated))
                self.assertLess(int(temporary), int(bound))
