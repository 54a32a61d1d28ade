"""Marks of slow cases: whichever of a parameterized test's parameters say so."""

import re
from pathlib import Path

import pytest
from absl.testing import absltest, parameterized

from tests import slow


def marked(of: type) -> set[str]:
    """Names of the tests of a class that carry the mark."""
    tests = {name: getattr(of, name) for name in dir(of) if name.startswith("test_")}
    return {
        name
        for name, test in tests.items()
        if any(mark.name == "slow" for mark in getattr(test, "pytestmark", ()))
    }


class Cases(parameterized.TestCase):
    __test__ = False  # looked at, not run

    @slow.where(lambda b: b > 3)
    @parameterized.parameters((1, 2), (3, 4), (5, 6))
    def test_tuples(self, a, b):
        pass

    @slow.where(lambda a: a == "y")
    @parameterized.product(a=("x", "y"), b=(1, 2))
    def test_products(self, a, b):
        pass

    @slow.repeats(lambda kind: kind)
    @parameterized.named_parameters(("first", "k", 1), ("second", "k", 2), ("third", "m", 3))
    def test_names(self, kind, value):
        pass

    @slow.repeats()
    @parameterized.parameters("one", "two")
    def test_single(self, name):
        pass

    @parameterized.parameters(1, 2)
    @pytest.mark.slow
    def test_whole(self, value):
        pass

    @slow.where(lambda more: more)
    @parameterized.parameters({"value": 1}, {"value": 2, "more": True})
    def test_defaults(self, value, more=False):
        pass


class MarksTest(absltest.TestCase):
    def test_cases_are_marked_by_their_parameters(self):
        self.assertEqual(
            marked(Cases),
            {
                "test_tuples1", "test_tuples2", "test_products2", "test_products3",
                "test_names_second", "test_single1", "test_whole0", "test_whole1",
                "test_defaults1",
            },
        )  # fmt: skip

    def test_no_mark_stands_where_it_marks_nothing(self):
        for path in Path(__file__).parent.glob("*.py"):
            with self.subTest(path.name):
                lost = re.findall(
                    r"^ *@pytest\.mark\.\w+\n *@parameterized.*", path.read_text(), re.M
                )
                self.assertEmpty(lost)
