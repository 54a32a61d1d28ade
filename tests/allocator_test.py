"""Plans meet what a device's allocator gives: figures of fake devices, and engines under them."""

import tempfile
import types
from pathlib import Path
from unittest import mock

import jax
import pytest
from absl.testing import parameterized

from moejax import Engine, MoejaxError, Tiering
from moejax.experts import machine
from moejax.experts.budget import GIB, BudgetError, Limits
from tests.tiny_engine import load_tiny_engine

PROMPT = [5, 6, 7]


def fake_device(**stats):
    """A device that reports these; of no stats None, as a CPU does."""
    return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats or None)


class RoomTest(parameterized.TestCase):
    @parameterized.parameters(
        ({}, 0, None),
        ({"bytes_in_use": 5}, 0, None),
        ({"bytes_limit": 100}, 0, 100),
        ({"bytes_limit": 100, "bytes_in_use": 30}, 0, 70),
        ({"bytes_limit": 100, "bytes_in_use": 30}, 20, 90),  # 20 of them are in the plan
        ({"bytes_limit": 100, "bytes_in_use": 30}, 50, 100),
    )
    def test_what_is_left(self, stats, planned, room):
        self.assertEqual(machine.room_nbytes(fake_device(**stats), planned), room)

    def test_a_cpu_says_nothing(self):
        self.assertIsNone(machine.room_nbytes(jax.devices("cpu")[0]))

    @parameterized.parameters(
        (0, 5 * GIB, 0),  # no limit stays none
        (16, None, 16),
        (16, 16 * GIB, 16),
        (16, 20 * GIB, 16),
        (16, 16 * GIB - 7, 16 - 7 / GIB),
        (16, -3, 1 / GIB),  # not 0, which is no limit
    )
    def test_the_tighter_of_both_limits(self, stated, room, found):
        limits = Limits(device_gib=stated, slots=3)
        device = fake_device() if room is None else fake_device(bytes_limit=room)
        self.assertEqual(machine.device_limits(device, limits), Limits(device_gib=found, slots=3))

    def test_what_cannot_fit_is_refused_without_a_limit_too(self):
        parts = {
            "weights embed": 3 * GIB, "expert slots": 2 * GIB, "KV cache": GIB,
            "activations and workspace": GIB, "reserve of the allocator": GIB,
            "experts gathered in a prefill step": GIB,
        }  # fmt: skip
        machine.check_room(parts, None)
        machine.check_room(parts, 5 * GIB)
        with self.assertRaises(BudgetError) as caught:
            machine.check_room(parts, 5 * GIB - 1)
        said = str(caught.exception)
        self.assertIn("weights take 5.00 GiB, but the device's allocator has 4.999 GiB left", said)
        self.assertIn("memory.device_gib", said)
        self.assertNotIn("\n", said)


class EngineTest(parameterized.TestCase):
    """`Engine.from_pretrained` of a model of 0.27 MiB, half of it experts."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.directory = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        engine = load_tiny_engine(cls.directory)
        cls.whole = engine.weights_nbytes
        cls.embeddings = engine.weights["embed"].nbytes  # in host memory where experts have slots
        cls.answer = engine.generate(PROMPT, max_new_tokens=5)[0].tokens

    def load(self, room, limits=None, policy=None):
        with (
            mock.patch.object(machine, "room_nbytes", lambda device, planned_nbytes=0: room),
            mock.patch("moejax.experts.load.room_nbytes", lambda device: room),
        ):
            return Engine.from_pretrained(
                self.directory, dtype="float32", platform="cpu", progress=False, context=64,
                limits=limits, policy=policy,
            )  # fmt: skip

    @parameterized.parameters(
        (None, None, False), (Limits(), None, False), (None, Tiering(policy="on_demand"), True),
        (Limits(slots=8), None, True),
    )  # fmt: skip
    @pytest.mark.slow
    def test_a_model_that_cannot_fit_is_one_line_before_it_is_loaded(self, limits, policy, moves):
        never = mock.patch("moejax.checkpoints.open.Checkpoint.load", side_effect=AssertionError)
        with never, self.assertRaises(MoejaxError) as caught:
            self.load(self.whole - self.embeddings * moves - 1, limits, policy)
        said = str(caught.exception)
        self.assertStartsWith(said, "the weights take ")
        self.assertIn("state memory.device_gib", said)
        self.assertNotIn("\n", said)

    @pytest.mark.slow
    def test_a_model_that_fits_is_loaded(self):
        self.assertEqual(self.load(self.whole).weights_nbytes, self.whole)
