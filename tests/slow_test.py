"""Marks of slow cases: whichever of a parameterized test's parameters say so."""

import re
from pathlib import Path

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
    @parameterized.parameters((1, 2), {"a": 3, "b": 4}, (5, 6))
    def test_where(self, a, b):
        pass

    @slow.repeats(lambda kind: kind)
    @parameterized.named_parameters(("first", "k"), ("second", "k"), ("third", "m"))
    def test_repeats(self, kind, more=False):
        pass

    @slow.repeats()
    @parameterized.product(name=("one", "two"))
    def test_all(self, name):
        pass


class MarksTest(absltest.TestCase):
    def test_cases_are_marked_by_their_parameters(self):
        self.assertEqual(
            marked(Cases), {"test_where1", "test_where2", "test_repeats_second", "test_all1"}
        )

    def test_no_mark_stands_where_it_marks_nothing(self):
        for path in Path(__file__).parent.glob("*.py"):
            with self.subTest(path.name):
                lost = re.findall(
                    r"^ *@pytest\.mark\.\w+\n *@parameterized.*", path.read_text(), re.M
                )
                self.assertEmpty(lost)
