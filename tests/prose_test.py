"""Docstrings are plain English: the first line has a subject or an imperative verb."""

import ast
from collections.abc import Iterator

from absl.testing import parameterized

from tests.source_files import source_files, statements

# A genitive or a relative clause in place of a subject makes a riddle of a first line.
FORBIDDEN = (
    "Of", "As", "What", "That", "Those", "Its", "Who", "Around", "Likewise", "The same", "See",
)  # fmt: skip
STARTS = tuple(word + mark for word in FORBIDDEN for mark in (" ", ",", ".", ":", ";", "\n"))


def riddles(path: str, tree: ast.Module) -> Iterator[str]:
    """Yields a line for each docstring that begins with a forbidden word."""
    for node in statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node, clean=False) or "").lstrip()
            if text in FORBIDDEN or text.startswith(STARTS):
                yield f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


class ProseTest(parameterized.TestCase):
    def test_docstrings_begin_with_a_subject_or_a_verb(self):
        files = source_files().items()
        found = [line for path, (_, tree) in files for line in riddles(path, tree)]
        self.assertEmpty(found, "\n".join(found))

    @parameterized.parameters(*FORBIDDEN)
    def test_planted_riddle_is_caught(self, word):
        for text in (f"{word} a layer.", f"{word}: a layer.", f"{word}."):
            for source in (f'"""{text}"""', f'class C:\n    def f(self):\n        """{text}"""'):
                self.assertLen(list(riddles("x.py", ast.parse(source))), 1, source)

    @parameterized.parameters("Offsets of a row.", "Assigns slots.", "Whose slot it is.", "")
    def test_plain_first_line_passes(self, text):
        tree = ast.parse(f'def f():\n    """{text}"""')
        self.assertEmpty(list(riddles("x.py", tree)))
