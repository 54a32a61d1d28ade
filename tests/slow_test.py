"""Marks of slow cases: whichever of a parameterized test's parameters say so."""

import re
from pathlib import Path

from absl.testing import absltest


class MarksTest(absltest.TestCase):
    def test_no_mark_stands_where_it_marks_nothing(self):
        for path in Path(__file__).parent.glob("*.py"):
            with self.subTest(path.name):
                lost = re.findall(
                    r"^ *@pytest\.mark\.\w+\n *@parameterized.*", path.read_text(), re.M
                )
                self.assertEmpty(lost)
