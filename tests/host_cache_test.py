"""Host memory as a cache of the disk, against lists."""

import numpy as np
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.experts.disk_cache import _HostCache


class ModelCache:
    """The cache as lists: the one that was used longest ago first."""

    def __init__(self, experts, num_rows):
        self.held, self.free = list(experts), num_rows - len(experts)
        self.reserved, self.pinned = [], set()
        self.evictions = 0

    def touch(self, expert):
        if expert in self.held:
            self.held.remove(expert)
            self.held.append(expert)

    def reserve(self, expert):
        if not self.free:
            allowed = [held for held in self.held if held not in self.pinned]
            if not allowed:
                return False
            self.held.remove(allowed[0])
            self.evictions += 1
        else:
            self.free -= 1
        self.reserved.append(expert)
        return True


ACTIONS = ("use", "use", "use", "publish", "publish", "cancel", "pin", "unpin")


class HostCacheTest(parameterized.TestCase):
    def cache(self, num_rows, experts=()):
        row_of = np.full((3, 4), -1, np.int32)
        for row, expert in enumerate(experts):
            row_of[expert] = row
        return _HostCache(row_of, num_rows)

    def fetch(self, cache, expert):
        self.assertIsNotNone(cache.reserve(expert))
        cache.publish(expert)

    def test_pins_and_reservations_are_no_victims(self):
        cache = self.cache(2, [(0, 0), (0, 1)])
        cache.pin((0, 0))
        self.assertEqual(cache.reserve((1, 0)), 1)
        self.assertIsNone(cache.reserve((1, 1)))
        cache.touch((0, 0))
        cache.cancel((1, 0))
        self.assertEqual(cache.reserve((1, 1)), 1)
        cache.unpin((0, 0))
        self.assertEqual(cache.reserve((1, 0)), 0)

    def test_misuse(self):
        cache = self.cache(2, [(0, 0)])
        with self.assertRaisesRegex(ValueError, "has a row already"):
            cache.reserve((0, 0))
        cache.reserve((0, 1))
        with self.assertRaisesRegex(ValueError, "has a row already"):
            cache.reserve((0, 1))

    @settings(max_examples=150, deadline=None)
    @given(
        num_rows=st.integers(1, 8),
        num_held=st.integers(0, 8),
        actions=st.lists(
            st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2), st.integers(0, 3)), max_size=120
        ),
    )
    def test_against_lists(self, num_rows, num_held, actions):
        experts = [(0, 3), (2, 1), (1, 1), (0, 0), (2, 2), (1, 0), (0, 1), (2, 0)]
        experts = experts[: min(num_held, num_rows)]
        cache = self.cache(num_rows, experts)
        model = ModelCache(experts, num_rows)
        for action, *expert in actions:
            expert = tuple(expert)
            if action == "use":
                if expert in model.reserved:
                    continue
                cache.touch(expert)
                model.touch(expert)
                if expert not in model.held:
                    row = cache.reserve(expert)
                    self.assertEqual(row is not None, model.reserve(expert))
            elif action in ("publish", "cancel"):
                if not model.reserved:
                    continue
                oldest = model.reserved.pop(0)
                getattr(cache, action)(oldest)
                if action == "publish":
                    model.held.append(oldest)
                else:
                    model.free += 1
            else:
                getattr(cache, action)(expert)
                (model.pinned.add if action == "pin" else model.pinned.discard)(expert)
            self.assert_equal(cache, model, num_rows)

    def assert_equal(self, cache, model, num_rows):
        held = {tuple(index) for index in np.argwhere(cache.row_of >= 0).tolist()}
        self.assertEqual(held, set(model.held))
        rows = cache.row_of[cache.row_of >= 0]
        self.assertLen(set(rows.tolist()), len(rows))
        self.assertTrue((rows < num_rows).all())
        self.assertEqual(cache.evictions, model.evictions)
